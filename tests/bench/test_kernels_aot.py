"""Ahead-of-time compilation: what is read from machine code, what breaks a rule, and processes that die."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.bench import aot
from kvlab.bench.aot import TARGETS, AotError, from_amdgcn, judged, local_bytes

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

# A kernel file of its own: the compiler reads the source of what it compiles. `dies` stands for an abort inside LLVM.
TOY = """
import os, sys
import triton
import triton.language as tl
from kvlab.bench.aot import child
from kvlab.kernels.aot import AotVariant

@triton.jit
def square(x, y, TILE: tl.constexpr):
    a = tl.reshape(tl.load(x + tl.arange(0, TILE)), (16, TILE // 16))
    tl.store(y + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :], tl.dot(a, tl.trans(a)))

@triton.jit
def wrong(x, y, TILE: tl.constexpr):
    tl.store(y, tl.dot(tl.load(x + tl.arange(0, TILE)), 1.0))

def variant(name, jit, tile):
    types = {"x": "*fp16", "y": "*fp32", "TILE": "constexpr"}
    return AotVariant("toy", name, jit, types, {"TILE": tile}, {"num_warps": 4, "num_stages": 2}, ("x", "y"))

def known(backend):
    if os.environ.get("TWICE"):
        return [variant("same", square, 1024), variant("same", square, 2048)]
    names = [variant("small", square, 2048), variant("wrong", wrong, 16), variant("large", square, LARGE)]
    return Dies([*names, variant("after", square, 1024)])

class Dies(list):
    def __getitem__(self, index):
        found = super().__getitem__(index)
        if found.variant == os.environ.get("DIES"):
            os.abort()
        return found

assert "TRITON_INTERPRET" not in os.environ
child(sys.argv[1:], known)
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch):
    """The command of a child that knows four variants: `large` needs far too many registers for one block."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    file = tmp_path / "toy.py"

    def command(large: int = 4096) -> list[str]:
        file.write_text(TOY.replace("LARGE", str(large)))
        return [sys.executable, str(file)]

    return command


@needs_triton
def test_every_variant_gives_a_row_and_the_broken_ones_are_named(toy, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    said: list[str] = []
    document = aot.run(said.append, targets=("sm_90", "gfx942"), command=toy(large=65536), only="small|wrong|large")
    rows = {(r["variant"], r["target"]): r for r in document["rows"]}
    assert document["schema"] == "kvlab.bench.aot/1"
    assert list(rows) == [(v, t) for v in ("large", "small", "wrong") for t in ("sm_90", "gfx942")]
    small = rows["small", "sm_90"]
    assert set(small) == {"kernel", "variant", "target", "registers", "shared_bytes", "spill_bytes", "stack_bytes"}
    assert 16 <= small["registers"] <= 255
    assert small["spill_bytes"] == small["stack_bytes"] == 0
    assert small["shared_bytes"] == 2048 * 2
    # 65536 fp16 numbers a block, 1 KiB for each of 128 threads: they cannot all stay in registers.
    assert rows["large", "sm_90"]["stack_bytes"] > 1024
    assert rows["large", "sm_90"]["spill_bytes"] >= rows["large", "sm_90"]["stack_bytes"]
    assert rows["large", "gfx942"]["shared_bytes"] == 2 * 65536
    assert "rror" in rows["wrong", "sm_90"]["error"]
    assert rows["wrong", "sm_90"]["registers"] is None
    assert not document["ok"]
    for start in ("toy wrong on sm_90: does not compile", "toy large on sm_90: spills", "toy large on gfx942: 131072"):
        assert any(problem.startswith(start) for problem in document["problems"]), start
    assert not any("small" in problem for problem in document["problems"])
    assert len(said) == 7


@needs_triton
def test_a_process_that_dies_costs_one_row(toy, monkeypatch) -> None:
    monkeypatch.setenv("DIES", "wrong")
    document = aot.run(lambda _: None, targets=("sm_80",), command=toy())
    errors = {r["variant"]: r["error"] for r in document["rows"] if "error" in r}
    assert set(errors) == {"wrong"}
    assert "exit -6" in errors["wrong"]
    assert {r["variant"] for r in document["rows"] if r["registers"]} == {"small", "large", "after"}
    assert document["problems"] == [f"toy wrong on sm_80: does not compile: {errors['wrong']}"]


@needs_triton
def test_kernels_that_cannot_be_imported_are_no_empty_table(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("raise ValueError('no such kernel')")
    with pytest.raises(AotError, match="ValueError: no such kernel"):
        aot.run(lambda _: None, command=[sys.executable, str(file)])


@needs_triton
def test_two_variants_of_one_name_are_refused(toy, monkeypatch) -> None:
    monkeypatch.setenv("TWICE", "1")
    with pytest.raises(AotError, match="one name each"):
        aot.run(lambda _: None, command=toy())


@needs_triton
def test_nothing_that_matches_is_an_error(toy) -> None:
    with pytest.raises(AotError, match="no variant matches 'big'"):
        aot.run(lambda _: None, only="big", command=toy())


def test_without_triton_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setattr(aot, "find_spec", lambda name: None)
    with pytest.raises(AotError, match=r"pip install 'kvlab\[gpu\]'"):
        aot.run(lambda _: None)


def row(target: str = "sm_90", **values) -> dict:
    right = {"registers": 255, "shared_bytes": TARGETS[target].shared_limit, "spill_bytes": 0, "stack_bytes": 0}
    return {"kernel": "k", "variant": "v", "target": target} | right | values


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"spill_bytes": 4}, "spills"),
        ({"stack_bytes": 8}, "stack"),
        ({"shared_bytes": 227 * 1024 + 1}, "of 232448"),
        ({"target": "sm_80", "shared_bytes": 163 * 1024 + 1}, "of 166912"),
        ({"target": "gfx942", "shared_bytes": 64 * 1024 + 1}, "of 65536"),
        ({"registers": 256}, "256 registers of 255"),
        ({"target": "gfx942", "registers": 513}, "513 registers of 512"),
        ({"error": "PTXASError: no"}, "does not compile: PTXASError: no"),
    ],
    ids=str,
)
def test_each_rule_is_named_when_broken(values, word) -> None:
    (problem,) = judged(row(**values))
    assert problem.startswith(f"k v on {values.get('target', 'sm_90')}: ")
    assert word in problem


@pytest.mark.parametrize("target", TARGETS)
def test_what_just_fits_breaks_no_rule(target) -> None:
    assert judged(row(target)) == []


def test_local_accesses_are_counted_by_their_width() -> None:
    lines = (
        "STL [R1+0xd6c], R27 ;",
        "LDL.64 R2, [R1] ;",
        "@P0 STL.128 [R1], R4 ;",
        "LDL.LU R4, [R1+8] ;",
        "STL.U8 [R1], R2 ;",
    )
    others = ("LDG.E.128 R4, [R2] ;", "STS.128 [R1], R4 ;", "LDS.64 R2, [R1] ;", "LDLX.64 R2, [R1] ;")
    listing = "\n".join(f"        /*05b0*/                   {line}" for line in (*lines, *others))
    assert local_bytes(listing) == 4 + 8 + 16 + 4 + 1


def test_amdgcn_metadata() -> None:
    text = (
        "\t\t.amdhsa_private_segment_fixed_size 16\n  - .agpr_count:     4\n    .private_segment_fixed_size: 16\n"
        "    .sgpr_count:     19\n    .sgpr_spill_count: 3\n    .vgpr_count:     140\n    .vgpr_spill_count: 2\n"
    )
    assert from_amdgcn(text) == {"registers": 140, "spill_bytes": 8, "stack_bytes": 16, "sgpr_spills": 3}
    with pytest.raises(AotError, match="vgpr_spill_count"):
        from_amdgcn(text.replace(".vgpr_spill_count", ".something"))


def test_the_parent_needs_no_torch() -> None:
    code = "import sys, kvlab.bench.aot\nassert not {'torch', 'triton', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=dict(os.environ))
