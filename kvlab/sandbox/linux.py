"""Linux calls that Python 3.11 has no function for, through ctypes. Each names itself when the kernel refuses it.

Knows no sandbox: which calls are made, and in which order, is decided elsewhere.
"""

import ctypes
import os
import resource

CLONE_NEWNS = 0x0002_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 1, 2, 4, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
_SECCOMP_MODE_FILTER = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4

# Numbers that differ between the two supported machines: x86_64, aarch64.
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_MOUNT_SETATTR = 442  # the same everywhere

_libc = ctypes.CDLL(None, use_errno=True)


class RefusedError(OSError):
    """The kernel refused a call that the sandbox cannot do without; `primitive` names it."""

    def __init__(self, primitive: str, number: int) -> None:
        super().__init__(number, f"{primitive}: {os.strerror(number)}")
        self.primitive = primitive


def _call(primitive: str, result: int) -> int:
    if result < 0:
        raise RefusedError(primitive, ctypes.get_errno())
    return result


def _path(path: str | None) -> bytes | None:
    return None if path is None else os.fsencode(path)


def unshare(flags: int, primitive: str) -> None:
    """Leave the shared namespaces named by `flags`; a new PID namespace begins with the next child."""
    _call(primitive, _libc.unshare(ctypes.c_int(flags)))


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    call = _libc.mount(_path(source), _path(target), _path(kind), ctypes.c_ulong(flags), options.encode() or None)
    _call("mount", call)


def unmount(target: str) -> None:
    _call("umount2", _libc.umount2(_path(target), MNT_DETACH))


def mount_read_only(path: str) -> None:
    """Make the mount at `path` and all below it read-only, without set-uid and device files."""
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0, 0, 0)
    _call(
        "mount_setattr",
        _libc.syscall(
            ctypes.c_long(_MOUNT_SETATTR),
            ctypes.c_int(_AT_FDCWD),
            ctypes.c_char_p(_path(path)),
            ctypes.c_uint(_AT_RECURSIVE),
            ctypes.byref(attributes),
            ctypes.c_size_t(ctypes.sizeof(attributes)),
        ),
    )


def pivot_root(new: str, old: str) -> None:
    number = ctypes.c_long(_PIVOT_ROOT[os.uname().machine])
    _call("pivot_root", _libc.syscall(number, ctypes.c_char_p(_path(new)), ctypes.c_char_p(_path(old))))


def _prctl(primitive: str, *arguments: int) -> None:
    padded = [*arguments, 0, 0, 0, 0][:5]
    _call(primitive, _libc.prctl(*(ctypes.c_ulong(value) for value in padded)))


def die_with_parent(signal: int) -> None:
    """Be sent `signal` when the parent ends. A change of user takes this back."""
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, signal)


def hide_memory() -> None:
    """No process without privilege over this one may look into its memory."""
    _prctl("PR_SET_DUMPABLE", _PR_SET_DUMPABLE, 0)


def drop_privileges(user: int) -> None:
    """Become `user` for good: no capability now, none by running a file, none from a parent."""
    last = 0
    while _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(last), 0, 0, 0) == 0:
        last += 1
    if last == 0:
        raise RefusedError("PR_CAPBSET_DROP", ctypes.get_errno())
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(0x2008_0522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    number = ctypes.c_long(_CAPSET[os.uname().machine])
    _call("capset", _libc.syscall(number, ctypes.byref(header), ctypes.byref(nothing)))
    _prctl("PR_CAP_AMBIENT", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    _prctl("PR_SET_NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def filter_calls(code: bytes) -> None:
    """Install a seccomp filter, compiled by `kvlab.sandbox.seccomp`. It can not be taken back."""
    program = _Program(len(code) // 8, code)
    call = _libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(program), 0, 0)
    _call("seccomp", call)


def limit(which: int, soft: int, hard: int | None = None) -> None:
    """Set a resource limit, as far as the one in force allows."""
    _, ceiling = resource.getrlimit(which)
    wanted = soft if hard is None else hard
    if ceiling != resource.RLIM_INFINITY:
        soft, wanted = min(soft, ceiling), min(wanted, ceiling)
    resource.setrlimit(which, (soft, wanted))
