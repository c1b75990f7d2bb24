"""The filter of system calls, run here as the kernel would run it."""

import errno
import struct

import pytest

from kvlab.sandbox import seccomp

ALLOWED, KILLED, REFUSED = "allowed", "killed", "refused"
MARKS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Calls that Python needs: name -> numbers.
NEEDED = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "mmap": (9, 222), "brk": (12, 214), "futex": (202, 98),
    "openat": (257, 56), "newfstatat": (262, 79), "getrandom": (318, 278), "exit_group": (231, 94), "lseek": (8, 62),
    "rt_sigaction": (13, 134), "clock_gettime": (228, 113), "pipe2": (293, 59), "wait4": (61, 260), "getpid": (39, 172),
}  # fmt: skip


def decide(machine: str, number: int, first: int = 0, *, own: int = 2, mark: int | None = None) -> str:
    """What the filter says to call `number` with `first` as its first argument."""
    code = seccomp.compiled(machine, own)
    shown = struct.pack("<IIQQ", number, MARKS[machine] if mark is None else mark, 0, first) + bytes(40)
    place, register = 0, 0
    while True:
        kind, yes, no, value = struct.unpack_from("<HBBI", code, 8 * place)
        place += 1
        if kind == 0x20:
            (register,) = struct.unpack_from("<I", shown, value)
        elif kind == 0x06:
            if value == 0x7FFF0000:
                return ALLOWED
            return KILLED if value == 0x80000000 else f"{REFUSED} {errno.errorcode[value & 0xFFFF]}"
        else:
            true = {0x15: register == value, 0x35: register >= value, 0x45: bool(register & value)}[kind]
            place += yes if true else no


@pytest.mark.parametrize(("column", "machine"), [*enumerate(MARKS)])
def test_each_call_meets_its_fate(column: int, machine: str) -> None:
    for name, numbers in seccomp.REFUSED.items():
        number = numbers[column]
        if number is not None:
            assert decide(machine, number) == "refused EPERM", name
    for name, needed in NEEDED.items():
        assert decide(machine, needed[column], 3) == ALLOWED, name
    assert decide(machine, 435) == "refused ENOSYS"  # clone3


@pytest.mark.parametrize(("machine", "clone", "prlimit"), [("x86_64", 56, 302), ("aarch64", 220, 261)])
def test_threads_yes_processes_no_own_limits_yes_others_no(machine: str, clone: int, prlimit: int) -> None:
    thread = 0x3D0F00  # what pthread_create asks for
    assert decide(machine, clone, thread) == ALLOWED
    assert decide(machine, clone, thread & ~0x10000) == "refused EPERM"
    assert decide(machine, clone, 17) == "refused EPERM"  # fork
    assert decide(machine, prlimit, 0) == ALLOWED
    assert decide(machine, prlimit, 1) == "refused EPERM"


@pytest.mark.parametrize(("column", "machine"), [*enumerate(MARKS)])
def test_signals_reach_oneself_only(column: int, machine: str) -> None:
    everyone, group, init = 0xFFFF_FFFF_FFFF_FFFF, 0, 1
    for name, numbers in seccomp.OWN_ONLY.items():
        for own in (1, 2):
            assert decide(machine, numbers[column], own, own=own) == ALLOWED, name
            for other in {everyone, group, init, 2, 3} - {own}:
                assert decide(machine, numbers[column], other, own=own) == "refused EPERM", (name, other)


def test_another_machine_s_calls_are_no_way_around() -> None:
    for machine, other in (("x86_64", "aarch64"), ("aarch64", "x86_64")):
        assert decide(machine, 0, mark=MARKS[other]) == KILLED
    assert decide("x86_64", 0, mark=0x40000003) == KILLED  # 32 bit
    assert decide("x86_64", 0x40000000 | 57) == KILLED  # x32's fork
    assert decide("aarch64", 1 << 20) == ALLOWED  # no such call there; the kernel says so


def test_no_number_stands_for_two_calls() -> None:
    for column in (0, 1):
        numbers = [row[column] for row in (*seccomp.REFUSED.values(), *seccomp.OWN_ONLY.values())]
        known = [number for number in numbers if number is not None]
        assert len(set(known)) == len(known)


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(ValueError, match="riscv64"):
        seccomp.compiled("riscv64", 1)
    assert len(seccomp.compiled("x86_64", 1)) // 8 < 4096  # the kernel's limit
