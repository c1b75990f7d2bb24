"""What to do where the kernel refuses a part of the sandbox."""

import os

_NAMESPACES = (
    "allow them: on Debian `sysctl kernel.unprivileged_userns_clone=1`, on Ubuntu "
    "`sysctl kernel.apparmor_restrict_unprivileged_userns=0` or an AppArmor profile, anywhere "
    "`sysctl user.max_user_namespaces=15000`; in a container `--security-opt seccomp=unconfined` with "
    "`--security-opt apparmor=unconfined` (or a seccomp profile that lets unshare and mount through)"
)
FIXES: dict[str, str] = {
    **{f"{kind} namespaces": _NAMESPACES for kind in ("user", "mount", "PID", "network", "IPC", "UTS")},
    "uid_map": f"run as an ordinary user, or as a root that has CAP_SETUID and CAP_SETGID; {_NAMESPACES}",
    "mount": f"the profile of the container or AppArmor forbids mounts inside a user namespace; {_NAMESPACES}",
    "pivot_root": f"the profile of the container forbids it; {_NAMESPACES}",
    "mount_setattr": "use Linux 5.12 or newer, under a container profile that lets the call through",
    "seccomp": "use a kernel with CONFIG_SECCOMP_FILTER",
}


class SandboxUnavailable(RuntimeError):  # noqa: N818 - a finding about the machine, not a fault of the call
    """Generated code can not be run safely here. There is no lesser sandbox: nothing was run."""


def refused(primitive: str, number: int) -> SandboxUnavailable:
    """The error for a refused `primitive`, with what to change."""
    fix = FIXES.get(primitive, "use a kernel and a container profile that allow it")
    why = os.strerror(number) if number else "without a reason"
    return SandboxUnavailable(f"the sandbox needs {primitive}, refused here ({why}): {fix}")
