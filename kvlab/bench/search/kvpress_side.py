"""kvpress's side of the search bench: a script for an interpreter of its own, where kvlab is not installed.

Imports nothing but torch, transformers, kvpress and the standard library. Reads one JSON document a line on stdin and
answers each with one on stdout: first what to load, then pairs of config and item to time. Every pair is done as
kvpress is meant to be used: a fresh cache, the context prefilled without the head inside the press's context manager,
then one forward over question and answer on what is left, at the positions it would have had.
"""

import json
import os
import sys
import time
from typing import Any

PRESSES = {
    "key_norm": "KnormPress",
    "snapkv": "SnapKVPress",
    "expected_attention": "ExpectedAttentionPress",
    "streaming": "StreamingLLMPress",
}


def versions() -> dict[str, str]:
    """What is installed here. Raises ImportError where something is missing."""
    from importlib.metadata import version

    import kvpress  # type: ignore[import-not-found]  # noqa: F401 - what this script is about
    import torch
    import transformers

    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kvpress": version("kvpress"),
    }


def compression(tokens: int, kept: int) -> float:
    """The compression ratio under which kvpress keeps exactly `kept` of `tokens`, half a token above: it truncates."""
    return 0.0 if kept >= tokens else 1 - (kept + 0.5) / tokens


class Side:
    """A loaded model and the pairs it is asked for."""

    def __init__(self, request: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(request["threads"])
        self.model = AutoModelForCausalLM.from_pretrained(
            request["model"], dtype=getattr(torch, request["dtype"]), attn_implementation="sdpa", local_files_only=True
        ).eval()
        self.configs, self.items = request["configs"], request["items"]
        # Its name in the versions of transformers that kvpress runs on; newer ones call it `cache`.
        self.cache_argument = "past_key_values"

    def pair(self, config: dict[str, Any] | None, item: dict[str, Any]) -> dict[str, Any]:
        """Seconds, bytes held after the context, and negative log-likelihood per answer token; no config, no press."""
        import torch
        from transformers import DynamicCache

        tokens, kept = len(item["context"]), None if config is None else item["kept"][config["id"]]
        press = None if config is None or kept is None else self.press(config, compression(tokens, kept))
        context, fed = torch.tensor([item["context"]]), torch.tensor([(item["question"] + item["answer"])[:-1]])
        answer = torch.tensor(item["answer"])
        before, cpu = time.perf_counter(), time.process_time()
        cache = DynamicCache()
        with torch.no_grad():
            if press is None:
                self.model.model(input_ids=context, **{self.cache_argument: cache})
            else:
                with press(self.model):
                    self.model.model(input_ids=context, **{self.cache_argument: cache})
            prefilled, held = time.perf_counter() - before, {len(layer.keys[0, 0]) for layer in cache.layers}  # type: ignore
            at = torch.arange(tokens, tokens + fed.shape[1]).unsqueeze(0)
            logits = self.model(
                input_ids=fed, position_ids=at, logits_to_keep=len(answer), **{self.cache_argument: cache}
            ).logits[0]
            logp = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
            nll = -float(logp.gather(1, answer.unsqueeze(1)).mean())
        return {
            "seconds": time.perf_counter() - before,
            "cpu_seconds": time.process_time() - cpu,
            "prefill_seconds": prefilled,
            "kept": sorted(held),
            "nll": nll,
        }

    def press(self, config: dict[str, Any], ratio: float) -> Any:
        """A new press for every call: nothing one call leaves behind can reach the next."""
        import kvpress  # type: ignore[import-not-found]

        return getattr(kvpress, PRESSES[config["method"]])(compression_ratio=ratio, **config["settings"])


def high_water() -> int | None:
    """Most memory this process has held since `forget_high_water`, in bytes; None where the system does not say."""
    try:
        with open("/proc/self/status") as file:
            fields = dict(line.split(":", 1) for line in file)
    except OSError:
        return None
    return int(fields["VmHWM"].split()[0]) * 1024


def forget_high_water() -> bool:
    """Start `high_water` anew. False where the system does not allow it: it then counts from the process's start."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def answer(side: Side, request: dict[str, Any]) -> dict[str, Any]:
    """Results of the pairs asked for, in order, and the most memory held meanwhile."""
    reset = forget_high_water()
    found = [side.pair(None if c is None else side.configs[c], side.items[i]) for c, i in request["pairs"]]
    return {"pairs": found, "peak_bytes": high_water(), "peak_of_these_alone": reset}


def main() -> int:
    """Serve until stdin ends."""
    # What libraries print belongs on stderr; stdout carries answers and nothing else.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    sys.stdout = sys.stderr
    side: Side | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if side is None:
            try:
                reply: dict[str, Any] = {"versions": versions()}
            except ImportError as error:
                reply = {"missing": error.name or str(error), "python": sys.version.split()[0]}
            else:
                side = Side(request)
        else:
            reply = answer(side, request)
        print(json.dumps(reply), file=out, flush=True)
        if "missing" in reply:
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
