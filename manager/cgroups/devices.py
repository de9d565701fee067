"""The two versions of control groups behind one face: what a group may not open, and allowing it again."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

from manager.cgroups import bpf, pods
from manager.cgroups.bpf import Number
from vcuda import device_access

_NEEDED = frozenset("rw")


class CannotTell(Exception):
    """Nobody can say now what the group may open; the message says why."""


class Unwatched(Exception):
    """There are no control groups that could be watched; the message says why."""


class Devices(Protocol):
    """One version of control groups. `base`: the folder below which the groups of pods are."""

    base: Path
    version: str

    def lost(self, group: Path, needed: Mapping[str, Number]) -> tuple[str, ...]:
        """Which of the `needed` nodes (path to number) the group may not read and write.

        Raises OSError (it is gone) and CannotTell.
        """

    def allow(self, group: Path, numbers: Collection[Number]) -> None:
        """Let it read and write these devices. Raises OSError."""


def of_machine(root: Path, nodes: Path) -> Devices:
    """By what is mounted at `root`; version 2 keeps device nodes of its own in the folder `nodes`. Raises Unwatched."""
    found = pods.hierarchy(root)
    if found is None:
        raise Unwatched(f"there is no {root / 'devices'}; mount the host's control groups there, or set --cgroup-root")
    base, controller = found
    return Listed(base) if controller else Probed(base, nodes)


def missing(listed: str, needed: Mapping[str, Number]) -> tuple[str, ...]:
    """Which of the `needed` nodes (path to number) a `devices.list` does not grant for reading and writing.

    Lines are `type major:minor access`, any number may be `*`; type `a` is every device (kernel, cgroup-v1/devices).
    """
    granted: dict[tuple[str, str], set[str]] = {}
    for line in listed.splitlines():
        words = line.split()
        if len(words) != 3 or words[0] not in ("a", "c"):
            continue
        numbers = ("*:*" if words[0] == "a" else words[1]).partition(":")
        granted.setdefault((numbers[0], numbers[2]), set()).update(words[2])
    found = []
    for path, number in needed.items():
        major, minor = map(str, number)
        names = ((major, minor), (major, "*"), ("*", minor), ("*", "*"))
        access = {right for name in names for right in granted.get(name, ())}
        if not access >= _NEEDED:
            found.append(path)
    return tuple(found)


class Listed:
    """Version 1: a file lists what is allowed, another takes more."""

    version = "control groups v1"

    def __init__(self, base: Path) -> None:
        self.base = base

    def lost(self, group: Path, needed: Mapping[str, Number]) -> tuple[str, ...]:
        return missing((group / "devices.list").read_text(), needed)

    def allow(self, group: Path, numbers: Collection[Number]) -> None:
        for major, minor in numbers:
            (group / "devices.allow").write_text(f"c {major}:{minor} rw")


class Probed:
    """Version 2: programs decide and show nothing, so a process of the group asks."""

    version = "control groups v2"

    def __init__(self, base: Path, nodes: Path) -> None:
        self.base = base
        self._nodes = nodes

    def lost(self, group: Path, needed: Mapping[str, Number]) -> tuple[str, ...]:
        if not needed:
            return ()
        nodes = [self._node(number) for number in needed.values()]
        for place in pods.with_those_below(group):  # one that hands controllers down holds no process itself
            try:
                closed = device_access.closed(place, nodes)
            except OSError as error:
                if error.errno in (errno.EBUSY, errno.EOPNOTSUPP):
                    continue
                if isinstance(error, FileNotFoundError):
                    raise
                raise CannotTell(_why(error)) from error
            return tuple(path for path, shut in zip(needed, closed, strict=True) if shut)
        raise CannotTell("no group of it may hold a process")

    def allow(self, group: Path, numbers: Collection[Number]) -> None:
        bpf.allow(group, numbers)

    def _node(self, number: Number) -> Path:
        """A device node to ask about.

        The host's own may be missing, and have rights of their own. Raises CannotTell.
        """
        path = self._nodes / f"{number[0]}:{number[1]}"
        try:
            if not path.exists():
                self._nodes.mkdir(mode=0o700, exist_ok=True)
                os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(*number))
        except OSError as error:
            raise CannotTell(f"no device node can be made at {path}: {error.strerror}") from error
        return path


def _why(error: OSError) -> str:
    words = {
        errno.ETIMEDOUT: "it is frozen",
        errno.EAGAIN: "it may hold no further process (pids.max)",
        errno.ECHILD: "what asked was ended before it had an answer",
        errno.ENOSYS: "the kernel has no clone3 (Linux 5.7 has)",
        errno.EINVAL: "the kernel can't begin a process in a control group (Linux 5.7 can)",
    }
    return words.get(error.errno or 0, str(error))
