"""Free memory, as a made-up host says it; and the most that a computation holds, counted by hand."""

import mmap
import os
from pathlib import Path

import pytest
import torch

from kvlab import room

GIB = 1 << 30


def _host(root: Path, groups: str = "", **files: str) -> Path:
    """A host with 10 GiB free, and control groups as given: folders under sys/fs/cgroup with `__` for `/`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {10 * GIB // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_control_groups_it_is_what_the_host_has(tmp_path) -> None:
    assert room.host_available(_host(tmp_path)) == 10 * GIB


@pytest.mark.parametrize(
    ("limit", "used", "free"),
    [(f"{4 * GIB}", 1 * GIB, 3 * GIB + 5), ("max", 1 * GIB, 10 * GIB), (f"{64 * GIB}", 1 * GIB, 10 * GIB), ("7", 9, 3)],
)
def test_a_control_group_may_leave_less(tmp_path, limit, used, free) -> None:
    """Also one above the process's own, and never less than nothing; file pages it can drop are free."""
    files = {"memory_dot_max": limit, "memory_dot_current": f"{used}", "memory_dot_stat": "anon 1\ninactive_file 5"}
    above = {f"a__{name}": text for name, text in files.items()}
    own = {"a__b__memory_dot_max": "max", "a__b__memory_dot_current": "1", "a__b__memory_dot_stat": "inactive_file 0"}
    assert room.host_available(_host(tmp_path / "own", "0::/a\n", **above)) == free
    assert room.host_available(_host(tmp_path / "above", "0::/a/b\n", **above, **own)) == free
    assert room.host_available(_host(tmp_path / "other", "0::/c\n", **above)) == 10 * GIB


def test_the_older_kind_of_control_group(tmp_path) -> None:
    files = {
        "memory__x__memory_dot_limit_in_bytes": f"{2 * GIB}",
        "memory__x__memory_dot_usage_in_bytes": f"{GIB}",
        "memory__x__memory_dot_stat": "inactive_file 7\ntotal_inactive_file 3",
    }
    assert room.host_available(_host(tmp_path, "5:cpu:/x\n4:memory,hugetlb:/x\n", **files)) == GIB + 3


def test_where_nothing_says_what_is_free_it_is_half_of_the_memory(tmp_path) -> None:
    assert 0 < room.host_available(tmp_path) < 1 << 45


def test_here_some_memory_is_free() -> None:
    assert 1 << 20 < room.available(torch.device("cpu")) < 1 << 45


def test_what_a_process_holds(tmp_path) -> None:
    before = room.taken()
    with mmap.mmap(-1, 32 << 20) as fresh:  # an allocator might have had as much left over
        fresh.write(b"x" * (32 << 20))
        after = room.taken()
    assert after.host_bytes - before.host_bytes > 24 << 20
    assert after.device_bytes is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/statm").write_text("900 7 3 1 0 5 0\n")
    assert room.taken(tmp_path).host_bytes == 7 * os.sysconf("SC_PAGE_SIZE")


def test_where_nothing_says_what_a_process_holds_it_is_the_most_it_ever_did(tmp_path) -> None:
    assert room.taken(tmp_path).host_bytes >= 1 << 10


def test_the_peak_counts_what_is_held_at_the_same_time() -> None:
    base = torch.zeros(1000)

    def run() -> torch.Tensor:
        a = base + 1  # 4000 bytes
        b = a * 2  # and 4000
        del a
        c = b.view(10, 100)[:5]  # a view takes nothing
        b += 1  # nor does writing in place
        return c.to(torch.float64)  # 4000 more

    assert room.peak(run) == 8000
    assert room.peak(lambda: torch.stack([base + 1, base + 2])) == 16000
    assert room.peak(lambda: base.view(10, 100)) == 0
