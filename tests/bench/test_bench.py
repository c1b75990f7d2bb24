"""The benches: documents by their schema, and exit codes that follow what was found."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from tiny import MODELS, tiny_model

from kvlab.attach import make_plan
from kvlab.bench import bytes as held
from kvlab.bench import identity
from kvlab.bench.__main__ import main
from kvlab.config import KVConfig
from kvlab.models import NotFetchedError


def _silent(line: str) -> None:
    return None


def test_help_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\nfrom kvlab.bench.__main__ import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "identity" in done.stdout


@pytest.mark.parametrize("arguments", [[], ["bite"], ["identity", "--tokens", "0"], ["bytes", "--model", "x"]], ids=str)
def test_wrong_usage_exits_with_2(arguments, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().out == ""


def test_an_unknown_model_exits_with_2_and_the_nearest_name(capsys) -> None:
    assert main(["identity", "--model", "smolm2-135m"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "smollm2-135m" in printed.err


def test_at_least_twenty_composed_configs_hold_what_is_predicted() -> None:
    document = held.run(_silent, prompts=(33,))
    rows: list[dict[str, Any]] = document["rows"]
    assert document["schema"] == "kvlab.bench.bytes/1"
    assert len({r["config_id"] for r in rows if r["model"] == "llama_9_3"}) >= 20
    assert {r["decoded"] for r in rows} == {0, 40}
    for row in rows:
        assert row["predicted_bytes"] == row["measured_bytes"] == row["storage_bytes"] > 0
        assert row["slack_bytes"] >= 0
        assert row["tokens"] == 33 + row["decoded"]
    raw16 = {r["tokens"]: r["raw16_bytes"] for r in rows if r["model"] == "llama_9_3"}
    assert raw16 == {n: 2 * 3 * 2 * 64 * 2 * n for n in (33, 73)}
    assert all(c["ok"] for c in document["checks"])
    assert document["ok"]


def test_configs_of_the_bytes_bench_cover_what_there_is() -> None:
    """Every codec kind, axis, bit width, scorer and budget, so that a new one is measured or the bench says so."""
    from kvlab.codecs import CODECS
    from kvlab.policies import BUDGETS, READERS, SCORERS

    codecs = [c for config in held.CONFIGS for c in (config.key, config.value)]
    assert {c.kind for c in codecs} == set(CODECS)
    assert {c.bits for c in codecs if c.kind == "affine"} == {8, 4, 3, 2}
    assert {c.axis for c in codecs if c.kind == "affine"} == {"token", "channel"}
    assert {config.scorer.kind for config in held.CONFIGS} == set(SCORERS)
    assert {config.budget.kind for config in held.CONFIGS} == set(BUDGETS)
    assert {config.reader.kind for config in held.CONFIGS} == set(READERS)


def test_a_group_of_32_costs_40_bytes_per_token_and_head() -> None:
    """4 heads, two streams, 33 tokens: 10,560 of 33,792 bytes, as a prompt and step by step."""
    check = held.group_of_32()
    assert (check["measured"], check["measured_stepwise"], check["nbytes"], check["raw16_bytes"]) == (
        40,
        40,
        10560,
        33792,
    )


def test_half_a_budget_is_half_the_bytes() -> None:
    check = held.half_budget()
    assert check["kept_per_head"] == [512]
    assert check["measured"] <= 0.5 * check["raw16_bytes"] + check["overhead_bytes"]
    assert check["overhead_bytes"] < 0.07 * check["raw16_bytes"]
    assert 0.5 < check["ratio"] < 0.53


def test_a_wrong_prediction_fails_the_bench(monkeypatch, capsys) -> None:
    right = KVConfig.predicted_bytes
    monkeypatch.setattr(KVConfig, "predicted_bytes", lambda self, *a: right(self, *a) + (self == held.CONFIGS[3]))
    monkeypatch.setattr(held, "PROMPTS", (1,))
    document = held.run(_silent, configs=held.CONFIGS[2:4], sliding=(), prompts=(1,))
    assert not document["ok"]
    monkeypatch.setattr(held, "run", lambda say: document)
    assert main(["bytes", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == document


def test_identity_document_and_table(monkeypatch, capsys) -> None:
    run = identity.run
    monkeypatch.setattr(identity, "run", lambda say, model, tokens: run(say, model, tokens, identity.ARCHITECTURES[:2]))
    assert main(["identity", "--tiny-only", "--json"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["schema"] == "kvlab.bench.identity/1"
    assert document["default_model"] is None
    assert [row["name"] for row in document["architectures"]] == ["llama", "qwen2_large_key_bias"]
    assert all(row["mode"] == "packed" and row["max_abs_logit_diff"] <= 1e-9 for row in document["architectures"])
    assert document["ok"] is True
    assert "llama: packed" in printed.err
    assert main(["identity", "--tiny-only"]) == 0
    assert capsys.readouterr().out.endswith("ok: True\n")


def test_identity_notices_a_difference(monkeypatch) -> None:
    """One bit in the last page is enough."""
    monkeypatch.setattr(identity, "CONFIG", KVConfig(raw_dtype="bfloat16", recent_tokens=4, page_tokens=4))
    document = identity.run(_silent, model=None, rows=identity.ARCHITECTURES[:1])
    assert document["architectures"][0]["max_abs_logit_diff"] > 1e-4
    assert document["ok"] is False


def test_every_tiny_model_is_the_same_each_time_and_has_a_plan() -> None:
    modes = {name: make_plan(tiny_model(name)).mode for name in MODELS}
    assert {name for name, mode in modes.items() if mode != "packed"} == {"mistral_sliding", "falcon"}
    assert (modes["mistral_sliding"], modes["falcon"]) == ("refuse", "dense")
    a, b = tiny_model("llama1"), tiny_model("llama1")
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.slow
def test_the_default_model_gives_its_own_tokens() -> None:
    """Alone and in a left-padded batch of four, out of pages."""
    try:
        row = identity.compare_tokens("smollm2-135m", 16, _silent)
    except NotFetchedError as error:
        pytest.skip(str(error))
    assert row["tokens_equal"] == row["tokens"] == 16
    assert [batch["rows"] for batch in row["batches"]] == [1, 4]
    assert all(count > 0 for batch in row["batches"] for count in batch["tokens_in_pages"])
