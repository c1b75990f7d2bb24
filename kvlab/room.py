"""Room: memory that is free on a device, what a process holds of it, and what a forward takes. Numbers only; what to do
with them is not decided here.
"""

import os
import resource
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def available(device: torch.device) -> int:
    """Bytes that could be taken on `device` now: of a GPU those free there or held by torch's own allocator unused,
    else of the host.
    """
    if device.type != "cuda":
        return host_available()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def host_available(root: Path = Path("/")) -> int:
    """Bytes of memory free on this host within the limits of the process's control group, as Linux says under `root`.

    Where the system does not say what is free, half of what is built in.
    """
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return max(0, min([int(fields["MemAvailable"].split()[0]) * 1024, *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
    """What each control group of the process, and each above it, leaves of its limit. Files it would drop count."""
    listed = root / "proc/self/cgroup"
    for line in listed.read_text().splitlines() if listed.exists() else []:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, limit, used, idle = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, idle = root / "sys/fs/cgroup/memory", "total_inactive_file"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(top) and (group / limit).exists():
                most = (group / limit).read_text().strip()
                stat = dict(x.split() for x in (group / "memory.stat").read_text().splitlines())
                if most != "max":
                    yield int(most) - int((group / used).read_text()) + int(stat.get(idle, 0))


class Taken(NamedTuple):
    """Bytes of memory a process holds: of the host, resident; of GPUs, in tensors, None where it uses none."""

    host_bytes: int
    device_bytes: int | None


def taken(root: Path = Path("/")) -> Taken:
    """What this process holds now, as Linux says under `root`; elsewhere the most it ever held of the host."""
    statm = root / "proc/self/statm"
    if statm.exists():
        host = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    else:
        # Bytes on macOS, where there is no statm.
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if not torch.cuda.is_initialized():
        return Taken(host, None)
    return Taken(host, sum(torch.cuda.memory_allocated(n) for n in range(torch.cuda.device_count())))


def peak(run: Callable[[], Any]) -> int:
    """Most bytes of tensors that torch operations in `run` had made and not yet let go, at any time.

    The same on every device and in every run. What operations take for themselves inside is not seen.
    """
    with _Watching() as watch:
        run()
    return watch.most


class _Watching(TorchDispatchMode):
    """Counts storages as operations make them and as they go."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._held: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and id(x.untyped_storage()) not in given:
                self._made(x.untyped_storage())
        return out

    def _made(self, storage: Any) -> None:
        name = id(storage)
        if name not in self._held:
            self._held[name] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, name)

    def _gone(self, name: int) -> None:
        self.now -= self._held.pop(name, 0)
