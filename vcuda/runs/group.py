"""A run's own control group with the driver's limits, where this user may make one: programs past our library, too."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pynvml

from vcuda.driver import memory_limits, nvml
from vcuda.driver.memory_limits import CannotLimit
from vcuda.runs.booking import Share

_PREFIX = "vcuda-run-"
_SECONDS = 1.0  # until those who have ended are out of their group


def make(name: str, shares: Sequence[Share], library: Path) -> Path | None:
    """The folder of a group below this process's own, limited to the shares by the NVML at `library`.

    None where the driver can't, or this user may not: then our library holds the run alone. The group is locked as long
    as this process lives, or one that it forks before it executes another program: nobody may be in it until then, and
    another run, perhaps of another ledger, must not take it for one that was left.
    """
    limited = [share for share in shares if not share.whole]
    parent = own() if limited else None
    if parent is None:
        return None
    try:
        nvml.load(library)
        pynvml.nvmlInit()
    except (OSError, pynvml.NVMLError):
        return None
    group = parent / f"{_PREFIX}{name}"
    try:
        handles = [pynvml.nvmlDeviceGetHandleByUUID(share.uuid) for share in limited]
        for handle in handles:
            memory_limits.get(handle, parent)  # whether it can at all, before anything is made
        _sweep(parent)
        _made(group)
        for handle, share in zip(handles, limited, strict=True):
            memory_limits.put(handle, group, share.memory_bytes)
            now = memory_limits.get(handle, group)
            if now is None or now.hard_bytes != share.memory_bytes:
                raise CannotLimit("it was set, and the driver says otherwise")
    except (OSError, pynvml.NVMLError, CannotLimit):
        remove(group)
        return None
    finally:
        pynvml.nvmlShutdown()
    return group


def _made(group: Path) -> None:
    """Make it and lock it; again where a sweep came between. Raises OSError."""
    deadline = time.monotonic() + _SECONDS
    while True:
        group.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            descriptor = os.open(group, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if group.stat().st_ino == os.fstat(descriptor).st_ino:
                    return
            except OSError:
                os.close(descriptor)
                raise
            os.close(descriptor)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{group} can't be locked")
        time.sleep(0.001)


def _sweep(parent: Path) -> None:
    """What supervisors that were killed have left; a group that has processes, or is about to, stays."""
    for left in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _opened(left) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.rmdir()


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def own() -> Path | None:
    """The folder of this process's control group of version 2; None where none is mounted, or it is above the mount."""
    mounts = (line.split() for line in _text("/proc/self/mounts").splitlines())
    point = next((words[1] for words in mounts if words[2:3] == ["cgroup2"]), None)
    groups = [line for line in _text("/proc/self/cgroup").splitlines() if line.startswith("0::/")]
    if point is None or not groups or ".." in groups[0].split("/"):
        return None
    return Path(point, groups[0].removeprefix("0::/"))


def join(group: Path) -> None:
    """Put this process, and so those that it starts, into the group. Raises OSError; then it stays where it is."""
    (group / "cgroup.procs").write_text("0")


def remove(group: Path) -> None:
    """When nobody is left in it. Its limits go with it."""
    deadline = time.monotonic() + _SECONDS
    while group.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.01)


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
