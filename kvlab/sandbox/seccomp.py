"""A seccomp filter for generated code: which system calls the kernel refuses it.

No new process, no other program, no socket of any family, no signal to and no memory of another, no namespaces, mounts
or keys, and nothing that works outside what the resource limits count. Namespaces make most of these harmless already;
the filter also bounds processes to none, which no resource limit does for root, and closes what namespaces leave open
(vsock, keyrings, io_uring). Calls are refused with "Operation not permitted", so that a program can say what it tried.
Knows numbers only: it is installed by `kvlab.sandbox.linux.filter_calls`.
"""

import errno
import struct

# System call -> its number on x86_64 and aarch64 (None: that machine has no such call).
REFUSED: dict[str, tuple[int, int | None]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "memfd_create": (319, 279),  # memory that no limit on the address space counts
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "io_uring_setup": (425, 425),  # its work passes no filter
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "fanotify_init": (300, 262),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "syslog": (103, 116),
    "tkill": (200, 130),
    "pidfd_send_signal": (424, 424),
}
# Calls let through when their first argument names the process itself. Its own group is not that: it may reach further.
OWN_ONLY: dict[str, tuple[int, int]] = {
    "kill": (62, 129),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
# By machine: the word the kernel marks its calls with, and the numbers of the calls that are let through in part.
_MARK = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
_CLONE3 = 435
_CLONE_THREAD = 0x0001_0000
_X32 = 0x4000_0000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _MACHINE, _FIRST_LOW = 0, 4, 16  # offsets in what the kernel shows a filter
_ALLOW, _KILL, _ERROR = 0x7FFF_0000, 0x8000_0000, 0x0005_0000


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("<HBBI", code, yes, no, value)


def compiled(machine: str, own: int) -> bytes:
    """The filter for `machine` and a process that is number `own` in its namespace, as the kernel reads it.

    Raises ValueError for a machine whose call numbers are not written down here.
    """
    if machine not in _MARK:
        raise ValueError(f"no system call numbers for {machine!r}: the sandbox runs on {' and '.join(_MARK)}")
    column = list(_MARK).index(machine)
    refuse = _step(_RETURN, _ERROR | errno.EPERM)
    out = [_step(_LOAD, _MACHINE), _step(_EQUAL, _MARK[machine], 1, 0), _step(_RETURN, _KILL), _step(_LOAD, _NUMBER)]
    if machine == "x86_64":  # the same numbers plus one bit would pass the list below
        out += [_step(_AT_LEAST, _X32, 0, 1), _step(_RETURN, _KILL)]
    for numbers in REFUSED.values():
        number = numbers[column]
        if number is not None:
            out += [_step(_EQUAL, number, 0, 1), refuse]
    # Its arguments lie in memory that a filter cannot read; the C library then takes clone.
    out += [_step(_EQUAL, _CLONE3, 0, 1), _step(_RETURN, _ERROR | errno.ENOSYS)]
    # A thread, yes; a process, no.
    out += [
        _step(_EQUAL, _CLONE[machine], 0, 3),
        _step(_LOAD, _FIRST_LOW),
        _step(_ANY_BIT, _CLONE_THREAD, 1, 0),
        refuse,
    ]
    out.append(_step(_LOAD, _NUMBER))
    # These first arguments are 32 bits wide: the kernel drops the rest. For limits 0 is the process itself.
    for number, itself in ((_PRLIMIT[machine], 0), *((numbers[column], own) for numbers in OWN_ONLY.values())):
        out += [_step(_EQUAL, number, 0, 4), _step(_LOAD, _FIRST_LOW), _step(_EQUAL, itself, 1, 0), refuse]
        out.append(_step(_RETURN, _ALLOW))
    out.append(_step(_RETURN, _ALLOW))
    return b"".join(out)
