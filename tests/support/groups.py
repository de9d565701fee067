"""Control groups (version 2) of the kernel's for tests: made below a folder of this test run's own, removed with all that is in it."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import simulated
from vcuda.sim import Machine

_SECONDS = 10
_numbers = itertools.count()


def mount() -> Path | None:
    """Where version 2 is mounted, or None."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(point)
    return None


class Group:
    """One group; `path` is its folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def child(self, *names: str) -> Group:
        path = self.path.joinpath(*names)
        path.mkdir(parents=True)
        return Group(path)

    @property
    def enter(self) -> list[str]:
        """A command line that puts itself into the group and becomes the command behind it."""
        return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(self.path)]

    def remove(self) -> None:
        for folder, _, _ in os.walk(self.path, topdown=False):
            deadline = time.monotonic() + _SECONDS
            while True:  # who has ended may not be out of it yet
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()
                if not Path(folder).exists() or time.monotonic() > deadline:
                    break
                time.sleep(0.01)


@contextlib.contextmanager
def made(name: str) -> Iterator[Group]:
    """A group of this name below the hierarchy's root. Skips the test where none can be made."""
    root = mount()
    if root is None or os.geteuid() != 0:
        pytest.skip("needs root and control groups of version 2")
    group = Group(root / f"{name}-{os.getpid()}-{next(_numbers)}")  # no name comes twice
    try:
        group.path.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        yield group
    finally:
        group.remove()


def limit(machine: Machine, group: Group, hard_bytes: int) -> None:
    """Have the simulated driver let the group hold no more of the first card."""
    code = f"""
    nvmlInit()
    limits = c_nvmlSetMemoryLimits_v1_t({os.fsencode(group.path)!r}, 0, {hard_bytes})
    answer(nvmlDeviceSetMemoryLimits_v1(nvmlDeviceGetHandleByIndex(0), limits))
    """
    assert simulated.nvml(machine, code) is None
