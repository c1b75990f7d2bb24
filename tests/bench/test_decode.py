"""The decode bench: its rows, what is absent, the document and the figure."""

import json
import subprocess
import sys
from typing import Any

import pytest
from tiny import tiny_model

from kvlab.bench import decode
from kvlab.bench.__main__ import main


def _silent(line: str) -> None:
    return None


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    import torch

    model = tiny_model("llama_9_3", torch.float32)
    names = ("dynamic", *decode.CONFIGS)
    return decode.run(_silent, model, range(3, 90), (128, 256, 512), turns=2, names=names)


def rows_of(document: dict[str, Any], name: str) -> dict[int, dict[str, Any]]:
    return {r["context"]: r for r in document["rows"] if r["name"] == name}


def test_every_cache_has_a_row_at_every_context(document) -> None:
    assert document["schema"] == "kvlab.bench.decode/1"
    assert [(r["name"], r["context"]) for r in document["rows"]] == [
        (name, context) for context in (128, 256, 512) for name in ("dynamic", *decode.CONFIGS)
    ]
    for row in document["rows"]:
        assert 0 < row["ms_least"] <= row["ms_per_token"] <= row["ms_most"]
        assert row["implementation"] == ("transformers" if row["name"] == "dynamic" else "numba")
    json.dumps(document, allow_nan=False)


def test_bytes_are_those_held_when_timing_starts(document) -> None:
    """2 layers, 3 KV heads of 64: 1,536 bytes a token in 16 bit, twice that as float32."""
    dynamic, raw, int4 = (rows_of(document, name) for name in ("dynamic", "raw", "int4"))
    for context in (128, 256, 512):
        assert dynamic[context]["bytes"] == 2 * dynamic[context]["bytes_16bit"] == 2 * 1536 * context
        assert raw[context]["bytes"] >= 1536 * context
        assert raw[context]["bytes"] - 1536 * context < 2 * 6 * 15 * 256  # a page that is not full
        # 68 raw tokens, the rest 36 bytes a stream, in whole pages.
        pages = -(-(context - 68) // 16)
        assert int4[context]["bytes"] == 2 * 3 * (68 * 256 + pages * 16 * 72)
    evicted, sparse = (rows_of(document, name)[512] for name in ("int4_evict50", "int4_sparse25"))
    assert evicted["bytes"] < 0.7 * int4[512]["bytes"]
    assert sparse["bytes"] == int4[512]["bytes"]  # both layers of this model are read whole
    assert all(r["read_bytes"] <= r["bytes"] for r in document["rows"])


def test_fits_follow_the_bytes(document) -> None:
    by_name = {f["name"]: f for f in document["fits"]}
    assert set(by_name) == {"dynamic", *decode.CONFIGS}
    assert by_name["dynamic"]["read_bytes_per_context_token"] == pytest.approx(3072)
    assert by_name["int4"]["read_bytes_per_context_token"] == pytest.approx(2 * 3 * 72, rel=0.02)
    assert by_name["int4_evict50"]["read_bytes_per_context_token"] < by_name["int4"]["read_bytes_per_context_token"]


def test_fits_find_a_line() -> None:
    rows = [{"name": "x", "context": n, "ms_per_token": 5 + n / 100, "read_bytes": 40 * n + 7} for n in (100, 200, 400)]
    (fit,) = decode._fits(rows)
    assert fit["ms_at_zero"] == pytest.approx(5)
    assert fit["us_per_context_token"] == pytest.approx(10)
    assert fit["read_bytes_per_context_token"] == pytest.approx(40)
    assert fit["gb_per_s"] == pytest.approx(40 / 10e-6 / 1e9)
    assert fit["r_squared"] == pytest.approx(1)
    assert decode._fits(rows[:2]) == []


def test_targets_are_ratios_at_one_context() -> None:
    def row(name: str, ms: float, held: int, context: int = 4096) -> dict[str, Any]:
        return {"name": name, "context": context, "ms_per_token": ms, "bytes": held, "bytes_16bit": 100}

    rows = [row("dynamic", 10, 200), row("hf_hqq4", 30, 40), row("int4", 10.5, 31), row("int4_evict50", 9, 20)]
    rows.append(row("int4", 99, 99, context=512))
    found = {t["name"]: (t["of"], t["value"], t["ok"]) for t in decode._targets(rows) if t["of"] != "bytes"}
    assert found == {
        "int4 / dynamic": ("ms_per_token", 1.05, True),
        "int4 / hf_hqq4": ("ms_per_token", 0.35, True),
        "int4_evict50 / dynamic": ("ms_per_token", 0.9, True),
    }
    (held,) = [t for t in decode._targets(rows) if t["of"] == "bytes"]
    assert (held["value"], held["ok"]) == (0.31, False)


def test_a_package_that_is_not_there_is_a_row_that_says_so(monkeypatch) -> None:
    import torch

    monkeypatch.setattr(decode, "PEERS", {"hf_quanto4": ("quanto", "no_such_module", "no-such")})
    document = decode.run(
        _silent, tiny_model("llama_9_3", torch.float32), range(3, 90), (96,), turns=1, names=("dynamic", "hf_quanto4")
    )
    row = document["rows"][1]
    assert (row["name"], row["ms_per_token"], row["bytes"]) == ("hf_quanto4", None, None)
    assert row["note"] == "needs no-such, which is not installed"
    assert "needs no-such" in decode.table(document)


def test_files_and_exit_codes(document, tmp_path, monkeypatch, capsys) -> None:
    import kvlab.models

    loaded: Any = type("Loaded", (), {"model": None, "name": "tiny", "tokenizer": lambda self, text: self})()
    loaded.input_ids = [1, 2]
    monkeypatch.setattr(kvlab.models, "load", lambda name: loaded)
    monkeypatch.setattr(decode, "run", lambda say, model, ids, contexts, turns, names: document)
    assert main(["decode", "--json", "--out", str(tmp_path / "a/b")]) == 0
    printed = capsys.readouterr()
    assert (
        json.loads(printed.out)
        == document | {"model": "tiny"}
        == json.loads((tmp_path / "a/b/decode.json").read_text())
    )
    assert "int4_evict50" in printed.err
    assert (tmp_path / "a/b/decode.png").read_bytes()[:4] == b"\x89PNG"
    assert b"</svg>" in (tmp_path / "a/b/decode.svg").read_bytes()
    monkeypatch.setattr(decode, "run", lambda *args: document | {"ok": False})
    assert main(["decode"]) == 1
    assert main(["decode", "--only", "nothing"]) == 2
    assert "dynamic" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--context", "0"], ["--contexts", "512,x"], ["--contexts", "1", "--context", "2"]])
def test_wrong_usage(wrong, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["decode", *wrong])
    assert stop.value.code == 2


def test_help_is_quick() -> None:
    code = (
        "import sys\nfrom kvlab.bench.__main__ import main\n"
        "try:\n    main(['decode', '--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "assert not {'torch', 'numpy', 'numba'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--contexts" in done.stdout
