"""A run's own control group with the driver's limits, where this user may make one: programs past our library, too."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import pynvml

from vcuda.driver import memory_limits, nvml
from vcuda.driver.memory_limits import CannotLimit
from vcuda.runs.booking import Share

_PREFIX = "vcuda-run-"
_SECONDS = 1.0  # until those who have ended are out of their group


def make(name: str, shares: Sequence[Share], library: Path, runs: Collection[str]) -> Path | None:
    """The folder of a group below this process's own, limited to the shares by the NVML at `library`.

    None where the driver can't, or this user may not: then our library holds the run alone. `runs`: names of those
    that live; one that has just begun may have nobody in its group yet.
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
        _sweep(parent, runs)
        group.mkdir()
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


def _sweep(parent: Path, runs: Collection[str]) -> None:
    """What supervisors that were killed have left; a group that has processes stays."""
    for left in parent.glob(f"{_PREFIX}*"):
        if left.name.removeprefix(_PREFIX) not in runs:
            with contextlib.suppress(OSError):
                left.rmdir()


def own() -> Path | None:
    """The folder of this process's control group of version 2; None where none is mounted, or it is above the mount."""
    mounts = (line.split() for line in _text("/proc/self/mounts").splitlines())
    point = next((words[1] for words in mounts if words[2:3] == ["cgroup2"]), None)
    groups = [line for line in _text("/proc/self/cgroup").splitlines() if line.startswith("0::/")]
    if point is None or not groups or ".." in groups[0].split("/"):
        return None
    return Path(point, groups[0].removeprefix("0::/"))


def join(group: Path) -> None:
    """Put this process, and so those that it starts, into the group. Where that is not allowed it stays where it is."""
    with contextlib.suppress(OSError):
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
