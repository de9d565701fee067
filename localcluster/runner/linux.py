"""The few Linux calls that Python 3.11 does not offer: mounts, namespaces, prctl. Errors name the call and path."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 1, 2, 4, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x04000000, 0x10000000, 0x20000000

_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER = 1, 24, 36
_SYS_PIVOT_ROOT, _SYS_MOUNT_SETATTR = 155, 442  # x86-64
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = -100, 0x8000, 1

# What a container's root user keeps: the default list of the common container runtimes, without MKNOD and NET_RAW.
_KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 31})

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """mount(2). Raises OSError with what was asked."""
    encoded = options.encode() if options is not None else None
    _check(
        _libc.mount(source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), encoded),
        f"mount {source} on {target}",
    )


def bind(source: str, target: str, *, read_only: bool) -> None:
    """Bind a file or a whole tree. Read-only holds for the tree's submounts too where the kernel is 5.12 or newer."""
    mount(source, target, None, MS_BIND | MS_REC)
    if not read_only:
        return
    attributes = _MountAttr(attr_set=_MOUNT_ATTR_RDONLY)
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        target.encode(),
        ctypes.c_uint(_AT_RECURSIVE),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    if result != 0:
        # In a user namespace a remount must repeat the flags that were locked on the source.
        kept = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | 8)
        mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | kept)


def unmount_below(directory: Path) -> None:
    """Unmount whatever is mounted below `directory`, deepest first. Raises OSError that names the mount."""
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    points = [line.split()[1].encode().decode("unicode_escape") for line in mounts]
    for point in sorted((p for p in points if p.startswith(f"{directory}/")), key=len, reverse=True):
        _check(_libc.umount2(point.encode(), ctypes.c_int(MNT_DETACH)), f"umount {point}")


def unshare(flags: int) -> None:
    """unshare(2). Raises OSError."""
    _check(_libc.unshare(ctypes.c_int(flags)), f"unshare 0x{flags:x}")


def setns(descriptor: int) -> None:
    """setns(2): join the namespace of an open file of /proc/PID/ns. Raises OSError."""
    _check(_libc.setns(ctypes.c_int(descriptor), ctypes.c_int(0)), "setns")


def pivot_root(new_root: str) -> None:
    """Make `new_root` the root and drop the old one entirely."""
    os.chdir(new_root)
    _check(_libc.syscall(ctypes.c_long(_SYS_PIVOT_ROOT), b".", b"."), f"pivot_root {new_root}")
    _check(_libc.umount2(b".", ctypes.c_int(MNT_DETACH)), "umount of the old root")
    os.chdir("/")


def sethostname(name: str) -> None:
    """sethostname(2) of this UTS namespace. Raises OSError."""
    _check(_libc.sethostname(name.encode(), ctypes.c_size_t(len(name.encode()))), f"sethostname {name}")


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this process the signal when the thread that started it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl PR_SET_PDEATHSIG")


def become_subreaper() -> None:
    """Orphans below this process become its children, so that no process of a container can get away."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl PR_SET_CHILD_SUBREAPER")


def drop_capabilities() -> None:
    """Limit the bounding set: what root can have after the next exec."""
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text(encoding="ascii"))
    for capability in range(last + 1):
        if capability not in _KEPT_CAPABILITIES:
            _check(_libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0), f"prctl PR_CAPBSET_DROP {capability}")
