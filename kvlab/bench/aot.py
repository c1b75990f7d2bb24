"""Every Triton kernel compiled ahead of time, with what the machine code takes: registers, shared memory, spills.

No GPU and no driver. Triton's functions are bound to the interpreter or the compiler when it is imported, so the
compiling is done in processes of their own, without TRITON_INTERPRET; one that dies, as LLVM can make it, costs one
row and not the table. What is measured is the cubin or the amdgcn assembly, not what the compiler says of it.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from kvlab.bench.text import columns
from kvlab.bench.workers import cores, last_line, spread
from kvlab.kernels.aot import AotVariant

SCHEMA = "kvlab.bench.aot/1"
KIB = 1024
_SASS_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
_LOCAL_ACCESS = re.compile(r"\b(?:LDL|STL)((?:\.\w+)*)\s")
_MEASURED = ("registers", "shared_bytes", "spill_bytes", "stack_bytes")


class Target(NamedTuple):
    """A GPU to compile for, and the most one block may take there."""

    backend: str
    arch: int | str
    shared_limit: int
    register_limit: int = 255

    @property
    def warp(self) -> int:
        return 64 if self.backend == "hip" else 32


# Shared memory one block may ask for: CUDA C++ Programming Guide, table of technical specifications per compute
# capability; LDS of CDNA 3. A gfx942 lane addresses 512 vector registers, accumulators included.
TARGETS: dict[str, Target] = {
    "sm_80": Target("cuda", 80, 163 * KIB),
    "sm_86": Target("cuda", 86, 99 * KIB),
    "sm_89": Target("cuda", 89, 99 * KIB),
    "sm_90": Target("cuda", 90, 227 * KIB),
    "sm_100": Target("cuda", 100, 227 * KIB),
    "sm_120": Target("cuda", 120, 99 * KIB),
    "gfx942": Target("hip", "gfx942", 64 * KIB, 512),
}
DEFAULT_TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


class AotError(RuntimeError):
    """The table could not be made at all, as opposed to a row that breaks a rule."""


# --- the parent: hands out work, judges rows ---


def run(
    say: Callable[[str], None],
    targets: Sequence[str] = DEFAULT_TARGETS,
    only: str = "",
    command: Sequence[str] = (sys.executable, "-m", "kvlab.bench.aot"),
) -> dict[str, Any]:
    """The whole document. `only` is a regular expression for "kernel variant". Raises AotError where nothing can be
    compiled; a single variant that does not compile is a row with an "error".
    """
    if find_spec("triton") is None:
        raise AotError("triton is not installed: pip install 'kvlab[gpu]'")
    names = [(i, *name) for i, name in enumerate(_listed(command)) if re.search(only, " ".join(name))]
    if not names:
        raise AotError(f"no variant matches {only!r}: leave it out to compile all")
    work = [(index, kernel, variant, target) for index, kernel, variant in names for target in targets]
    say(f"{len(work)} compilations: {len(names)} variants for {', '.join(targets)}")
    rows = list(_compile_all(work, command, say))
    rows.sort(key=lambda row: (row["kernel"], row["variant"], targets.index(row["target"])))
    problems = [problem for row in rows for problem in judged(row)]
    return {"schema": SCHEMA, "triton": version("triton"), "rows": rows, "ok": not problems, "problems": problems}


def judged(row: Mapping[str, Any]) -> list[str]:
    """What is wrong with a row: one line for each rule it breaks."""
    name, target = f"{row['kernel']} {row['variant']} on {row['target']}", TARGETS[row["target"]]
    if "error" in row:
        return [f"{name}: does not compile: {row['error']}"]
    rules = (
        (row["spill_bytes"] > 0, f"spills registers: {row['spill_bytes']} bytes go through local memory"),
        (row["stack_bytes"] > 0, f"local memory: {row['stack_bytes']} bytes of stack a thread, where 0 are allowed"),
        (row["shared_bytes"] > target.shared_limit, f"{row['shared_bytes']} bytes shared of {target.shared_limit}"),
        (row["registers"] > target.register_limit, f"{row['registers']} registers of {target.register_limit}"),
    )
    return [f"{name}: {text}" for broken, text in rules if broken]


def table(document: Mapping[str, Any]) -> str:
    """The rows for people, and what is wrong with them."""
    head = ("kernel variant", "target", "registers", "shared", "spill", "stack")
    rows: list[tuple[str, ...]] = [head]
    for row in document["rows"]:
        figures = ("error",) * 4 if "error" in row else tuple(f"{row[name]:,}" for name in _MEASURED)
        rows.append((f"{row['kernel']} {row['variant']}", row["target"], *figures))
    lines = [f"triton {document['triton']}", *columns(rows)]
    return "\n".join([*lines, *(f"PROBLEM {text}" for text in document["problems"]), f"ok: {document['ok']}"])


def _environment() -> dict[str, str]:
    """Ours without the interpreter, and with the contraction of a*b+c that 3.10 makes its default said aloud."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"TRITON_DEFAULT_FP_FUSION": "1"}


def _listed(command: Sequence[str]) -> list[tuple[str, str]]:
    """(kernel, variant) of everything there is, as a compiling process sees it."""
    done = subprocess.run([*command, "list"], capture_output=True, text=True, env=_environment(), check=False)
    if done.returncode:
        raise AotError(f"the Triton kernels cannot be imported: {last_line(done.stderr)}")
    return [tuple(name) for name in json.loads(done.stdout)]


def _compile_all(
    work: Sequence[tuple[int, str, str, str]], command: Sequence[str], say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Rows as they come, from as many processes as there are cores for."""
    answers = spread(work, [*command, "compile"], _environment(), cores())
    for done, answer in enumerate(answers, start=1):
        _, kernel, variant, target = answer.job
        what = dict.fromkeys(_MEASURED) | {"error": answer.error} if answer.result is None else answer.result
        row = {"kernel": kernel, "variant": variant, "target": target} | what
        say(f"[{done}/{len(work)}] {kernel} {variant} {target}: {_said(row)}")
        yield row


def _said(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return row["error"]
    return f"{row['registers']} registers, {row['shared_bytes']} shared" + (" NOT OK" if judged(row) else "")


# --- the child: compiles, measures ---


def variants(backend: str) -> list[AotVariant]:
    """Every variant of every Triton kernel, as it is launched on this backend. Needs triton, bound to the compiler."""
    from kvlab.kernels import chunks_triton, compact_triton, encode_triton, paged_triton

    same = (module.aot_variants() for module in (encode_triton, compact_triton, chunks_triton))
    return [*paged_triton.aot_variants(backend), *(variant for some in same for variant in some)]


def measured(variant: AotVariant, target: Target) -> dict[str, Any]:
    """Compile one variant and read its machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(variant.jit, variant.signature, variant.constexprs, variant.attrs)
    chip = GPUTarget(target.backend, target.arch, target.warp)
    binary = triton.compile(source, target=chip, options=dict(variant.options))
    if target.backend == "hip":
        taken = from_amdgcn(binary.asm["amdgcn"])
    else:
        taken = from_cubin(binary.asm["cubin"], Path(triton.__file__).parent / "backends/nvidia/bin")
    return {"shared_bytes": binary.metadata.shared, **taken}


def from_cubin(cubin: bytes, tools: Path) -> dict[str, int]:
    """Registers, stack and local-memory traffic of the worst function in a cubin, by the disassembler in `tools`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool(tools / "cuobjdump", "-res-usage", file.name)
        found = {name: [int(x) for x in re.findall(rf"\b{name}:(\d+)", usage)] for name in ("REG", "STACK", "LOCAL")}
        if not found["REG"]:
            raise AotError(f"cuobjdump names no function: {usage[:200]!r}")
        frame = max(a + b for a, b in zip(found["STACK"], found["LOCAL"], strict=True))
        # Loads and stores of local memory need a frame to go to.
        spilled = local_bytes(_tool(tools / "nvdisasm", "-c", file.name)) if frame else 0
    return {"registers": max(found["REG"]), "spill_bytes": spilled, "stack_bytes": frame}


def _tool(program: Path, *arguments: str) -> str:
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, check=True).stdout


def local_bytes(sass: str) -> int:
    """Bytes that the local loads and stores of a listing move, each instruction once, for one thread."""
    accesses = (match.group(1).split(".") for match in _LOCAL_ACCESS.finditer(sass))
    return sum(next((_SASS_BYTES[part] for part in parts if part in _SASS_BYTES), 4) for parts in accesses)


def from_amdgcn(assembly: str) -> dict[str, int]:
    """The same from the metadata at the end of an assembly listing.

    Scalar registers spill to lanes of a vector register and touch no memory; they are told apart and break no rule.
    """
    fields = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    values = {name: [int(x) for x in re.findall(rf"^\s+\.{name}:\s+(\d+)\s*$", assembly, re.M)] for name in fields}
    if not all(values.values()):
        raise AotError(f"amdgcn metadata lacks {[name for name, found in values.items() if not found]}")
    return {
        "registers": max(values["vgpr_count"]),
        "spill_bytes": 4 * max(values["vgpr_spill_count"]),
        "stack_bytes": max(values["private_segment_fixed_size"]),
        "sgpr_spills": max(values["sgpr_spill_count"]),
    }


def child(arguments: Sequence[str], known: Callable[[str], Sequence[AotVariant]] = variants) -> None:
    """`list` prints all names, the same for each backend; `compile` one line of JSON for each job on stdin. What fails
    ends the process, and the parent takes the missing line for the one that failed.
    """
    every = {backend: known(backend) for backend in ("cuda", "hip")}
    if arguments[0] == "list":
        names, others = ([(v.kernel, v.variant) for v in every[backend]] for backend in every)
        if names != others or len(set(names)) < len(names):
            raise AotError(f"variants need one name each, on every backend: {sorted(names)} and {sorted(others)}")
        print(json.dumps(names))
        return
    for index, _, _, target in json.load(sys.stdin):
        print(json.dumps(measured(every[TARGETS[target].backend][index], TARGETS[target])), flush=True)


if __name__ == "__main__":
    child(sys.argv[1:])
