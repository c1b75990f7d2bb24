"""The search bench: a small run end to end, its arithmetic, the peer's script, and what is said without a peer."""

import importlib.util
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_folder import save_tiny

from kvlab import models
from kvlab.bench.__main__ import main
from kvlab.bench.search import run as bench
from kvlab.bench.search.items import Asked, make
from kvlab.bench.search.kvpress_side import PRESSES, Side, compression
from kvlab.bench.search.limit import Limit, Spent
from kvlab.bench.search.methods import arms, methods
from kvlab.bench.search.peer import Peer, PeerError
from kvlab.bench.search.text import table
from kvlab.cache import cache_kwarg
from kvlab.models import Loaded

SMALL: dict[str, Any] = {
    "configs": 4, "answer_tokens": 5, "items": 2, "context_tokens": 200, "pairs": 4, "repeats": 2,
}  # fmt: skip

# The peer's script as it is, in this environment: what kvpress would do is left out, and transformers' name for a cache
# is the one of this version.
STAND_IN = """
    import importlib.util, sys
    spec = importlib.util.spec_from_file_location("side", {script!r})
    side = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(side)
    side.versions = lambda: {{"kvpress": "0", "python": sys.version.split()[0]}}
    load = side.Side.__init__
    def begin(self, request):
        load(self, request)
        self.cache_argument = {cache!r}
    side.Side.__init__ = begin

    class Nothing:
        def __enter__(self):
            return None
        def __exit__(self, *error):
            return None

    side.Side.press = lambda self, config, ratio: lambda model: Nothing()
    sys.exit(side.main())
"""


def _silent(line: str) -> None:
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loaded(folder) -> Loaded:
    return models.load(str(folder), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory) -> Path:
    """A command that is this interpreter on the peer's script without kvpress: every press leaves the cache whole."""
    at = tmp_path_factory.mktemp("peer")
    script = Path(bench.__file__).with_name("kvpress_side.py")
    (at / "side.py").write_text(textwrap.dedent(STAND_IN.format(script=str(script), cache=cache_kwarg())))
    command = at / "python"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} "{at / "side.py"}"\n')
    command.chmod(0o755)
    return command


@pytest.fixture(scope="module")
def document(loaded, stand_in) -> dict[str, Any]:
    return bench.run(_silent, loaded, bench.Request(peer_python=stand_in, **SMALL))


# -- items and configs ---------------------------------------------------------------------------------------------


def test_items_have_the_tokens_asked_for_and_can_be_copied(loaded) -> None:
    asked = make(loaded.tokenizer, 3, 200, 7, seed=1)
    assert len({one.item.context for one in asked}) == 3
    for one in asked:
        assert 130 <= len(one.context) <= 200
        assert len(one.answer) == 7
        assert one.item.question + one.item.answers[0] in " " + one.item.context
        assert one.fed == len(one.question) + 6
    assert make(loaded.tokenizer, 3, 200, 7, seed=1) == asked


def test_items_that_cannot_be_made_are_an_error(loaded) -> None:
    with pytest.raises(ValueError, match=r"9 context and 50 answer tokens.*longer context or a shorter answer"):
        make(loaded.tokenizer, 1, 9, 50, seed=0)


@pytest.mark.parametrize("count", [1, 4, 6, 16, 64])
def test_arms_are_different_configs_dealt_evenly_to_the_methods(count) -> None:
    found = arms(count, 400)
    assert len({arm.config.id for arm in found}) == count
    per_method = [sum(arm.method.name == m.name for arm in found) for m in methods(400)]
    assert max(per_method) - min(per_method) <= 1
    assert sum(per_method) == count
    assert {m.name for m in methods(400)} == set(PRESSES)


def test_the_peer_truncates_to_the_number_of_tokens_that_kvlab_keeps() -> None:
    for tokens in (7, 97, 400, 4096):
        for kept in range(1, tokens + 1):
            ratio = compression(tokens, kept)
            assert (tokens if ratio == 0 else int(tokens * (1 - ratio))) == kept
    assert [arm.kept(400) for arm in arms(8, 400)] == [80, 320] * 4


def test_pairs_are_spread_over_configs_and_items() -> None:
    assert bench.sample(16, 8, 16) == [(n, n % 8) for n in range(16)]
    assert [c for c, _ in bench.sample(64, 8, 16)] == list(range(0, 64, 4))
    assert bench.sample(2, 2, 9) == [(0, 0), (0, 1), (1, 0), (1, 1)]


# -- a run -------------------------------------------------------------------------------------------------------------


def test_prefills_equal_items_and_not_configs_times_items(document) -> None:
    assert document["kvlab"]["prefills"] == 2
    assert document["kvpress"]["prefills"] == 8
    assert document["kvlab"]["pairs"] == 8


def test_ratios_are_those_of_the_seconds_printed(document) -> None:
    ours, theirs, limit = document["kvlab"], document["kvpress"], document["limit"]
    for clock, speedup, ratio in (("s", "speedup", "limit_ratio"), ("cpu_s", "cpu_speedup", "cpu_limit_ratio")):
        name = f"{clock}_per_config_item"
        assert document[speedup] == pytest.approx(theirs[name] / ours[name])
        assert document[ratio] == pytest.approx(ours[name] / limit[name])
    least = limit["prefill_s"] / 4 + limit["row_s"]
    assert limit["s_per_config_item"] == pytest.approx(least)
    assert limit["row_s"] == min(limit["row_s_by_rows"].values())


def test_the_document_is_json_and_reads_as_a_table(document) -> None:
    assert document["schema"] == "kvlab.bench.search/1"
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["kvlab"]["peak_bytes"] > 0
    assert document["kvpress"]["peak_bytes"] > 0
    text = table(document)
    assert "limit_ratio" in text
    assert all(m.difference in text for m in methods(200))


def test_uncompressed_scores_of_both_sides_are_equal(document) -> None:
    assert document["agreement"]["uncompressed_nll_max_abs_diff"] < 1e-4
    # The stand-in compresses nothing: kept counts are not ours, and that is seen.
    assert not any(m["kept_equal"] for m in document["agreement"]["methods"])


def test_targets_of_time_are_set_at_their_sizes_only(document) -> None:
    assert not any("speedup" in t["name"] or "limit_ratio" in t["name"] for t in document["targets"])
    figures = dict(document) | {"speedup": 7.9, "limit_ratio": 1.6, "agreement": None}
    targets = {t["name"]: t for t in bench._targets(bench.Request(), 2, figures)}
    assert not targets["speedup, at least"]["ok"]
    assert not targets["limit_ratio, at most"]["ok"]
    assert targets["kvlab prefills = items"]["ok"]


def test_agreement_is_ours_less_theirs() -> None:
    found = bench._compared([(2.0, 1.0, True), (3.0, 3.5, True), (1.0, 1.0, False)])
    assert found["mean_diff"] == pytest.approx(0.5 / 3)
    assert found["max_abs_diff"] == 1.0
    assert found["standard_error"] == pytest.approx(0.7637626 / 3**0.5)
    assert not found["kept_equal"]


def test_of_each_turn_the_least_counts() -> None:
    limit = Limit(Spent(2.0, 1.0), {8: Spent(0.5, 0.2), 16: Spent(0.25, 0.3)})
    assert limit.rows == 16
    assert limit.per_pair(items=2, configs=4) == (2 / 8 + 0.25, 1 / 8 + 0.2)
    pair = {"seconds": 2.0, "cpu_seconds": 1.0, "prefill_seconds": 1.5, "nll": 1.0}
    assert bench._least(pair, pair | {"seconds": 1.0, "cpu_seconds": 3.0})["seconds"] == 1.0
    assert bench._least(pair, pair | {"seconds": 1.0, "cpu_seconds": 3.0})["cpu_seconds"] == 1.0


def test_the_peer_forces_the_answer_on_the_cache_of_the_context(loaded) -> None:
    """One forward over everything gives the same likelihood as the peer's two."""
    one: Asked = make(loaded.tokenizer, 1, 120, 6, seed=3)[0]
    with torch.no_grad():
        logits = loaded.model(torch.tensor([one.context + one.question + one.answer])).logits[0, -7:-1]
    expected = float(torch.nn.functional.cross_entropy(logits, torch.tensor(one.answer)))
    side = Side.__new__(Side)
    side.model, side.cache_argument = loaded.model, cache_kwarg()
    item = {"context": list(one.context), "question": list(one.question), "answer": list(one.answer)}
    found = side.pair(None, item)
    assert found["nll"] == pytest.approx(expected, abs=1e-5)
    assert found["kept"] == [len(one.context)]


# -- what can be wrong ---------------------------------------------------------------------------------------------


def test_without_a_peer_kvlab_and_the_limit_are_measured(folder, capsys) -> None:
    few = ["--configs", "2", "--items", "1", "--context", "120", "--answer-tokens", "4", "--repeats", "1"]
    assert main(["search", "--model", str(folder), "--json", *few]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["kvpress"] is None
    assert document["speedup"] is None
    assert document["agreement"] is None
    assert document["limit_ratio"] > 0
    assert any("Without --peer-python" in note for note in document["notes"])


def test_a_missing_interpreter_is_named_with_what_to_do(folder, tmp_path, capsys) -> None:
    gone = tmp_path / "nowhere" / "python"
    assert main(["search", "--model", str(folder), "--peer-python", str(gone), "--context", "120"]) == 2
    said = capsys.readouterr().err
    assert str(gone) in said
    assert "pip install kvpress==" in said


@pytest.mark.skipif(importlib.util.find_spec("kvpress") is not None, reason="kvpress is installed here")
def test_an_interpreter_without_kvpress_is_named_with_what_to_do(loaded) -> None:
    with pytest.raises(PeerError, match=r"has no kvpress: install it there with .* -m pip install kvpress==") as error:
        bench.run(_silent, loaded, bench.Request(peer_python=Path(sys.executable), **SMALL))
    assert sys.executable in str(error.value)


@pytest.mark.skipif(importlib.util.find_spec("kvpress") is None, reason="kvpress needs an environment of its own")
def test_kvpress_itself_keeps_as_many_tokens(loaded) -> None:
    document = bench.run(_silent, loaded, bench.Request(peer_python=Path(sys.executable), **SMALL))
    assert all(m["kept_equal"] for m in document["agreement"]["methods"])


def test_a_peer_that_ends_is_an_error_with_its_last_words(tmp_path) -> None:
    command = tmp_path / "python"
    command.write_text("#!/bin/sh\necho first >&2\necho out of order >&2\nexit 7\n")
    command.chmod(0o755)
    with Peer(command) as peer, pytest.raises(PeerError, match="code 7: out of order"):
        peer.ask({})
