"""Control groups of pods: kubelet's names for them, their folders, and whether anybody is in them."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

# Kubelet's names of a pod's group: "pod<uid>" (cgroupfs) and "…-pod<uid with _>.slice" (systemd); a static pod's UID is
# 32 digits.
POD_GROUP = re.compile(
    r"(?:^|-)pod([0-9a-f]{8}([-_])[0-9a-f]{4}\2[0-9a-f]{4}\2[0-9a-f]{4}\2[0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?$"
)
# Kubelet's tree is "kubepods" or "kubepods.slice" below its own --cgroup-root, which systemd's names repeat.
_TREE = re.compile(r"kubepods|(?:.+-)?kubepods\.slice")
_DEPTH = 4
# What systemd has started holds what it likes below its group: containers, sessions, whole machines.
_CLOSED = (".scope", ".service")
_CLASSES = ("", "burstable", "besteffort")


def plain(uid: str) -> str:
    """A pod's UID without what cgroup drivers write in different ways."""
    return uid.replace("-", "").replace("_", "")


def hierarchy(root: Path) -> tuple[Path, str] | None:
    """The one hierarchy below `root` that tells pods, and its controller, "" for version 2; None: there is none.

    Of version 1 that of the devices: one alone among several may be a user's own, and runtimes use this one.
    """
    devices = root / "devices"
    if (devices / "devices.list").exists() or (devices / "cgroup.procs").exists():
        return devices, "devices"
    return (root, "") if (root / "cgroup.controllers").exists() else None


def folders_in(folder: Path) -> list[Path]:
    """The groups below one; none if it is gone."""
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def trees(root: Path) -> list[Path]:
    """The groups in which a kubelet keeps its pods, below `root`, the top of the control groups.

    Users to whom a part of the hierarchy was given make groups of any name there: only those count that belong, all
    the way, to whom `root` belongs.
    """
    found, level = [], [root]
    for _ in range(_DEPTH):
        below = [inner for folder in level for inner in _made_with(root, folder)]
        found += [folder for folder in below if _TREE.fullmatch(folder.name) and _in_its_place(root, folder)]
        level = [folder for folder in below if folder not in found and not folder.name.endswith(_CLOSED)]
    return found


def of_pod(among: Sequence[Path], uid: str) -> list[Path]:
    """The groups of a pod in these trees; more than one where kubelet's cgroup driver was changed under its pods.

    What lies below a pod's group a tenant may name as it likes: it is not looked at.
    """
    places = (path for tree in among for path in _places(tree, uid) if POD_GROUP.search(path.rpartition("/")[2]))
    return [Path(path) for path in places if _is_group(path)]


def with_processes(root: Path, uids: Iterable[str]) -> frozenset[str]:
    """Of these pods, by UID, those in whose groups below `root` is a process; none where no hierarchy tells of pods."""
    found = hierarchy(root)
    among = trees(found[0]) if found is not None else []
    return frozenset(uid for uid in uids if any(map(populated, of_pod(among, uid))))


def populated(group: Path) -> bool:
    """Whether a process is in the group or in one below it; False if it is gone."""
    try:
        return "populated 1" in _text(f"{group}/cgroup.events").splitlines()
    except FileNotFoundError:  # version 1 does not say; of a group that is gone there are none
        return any(True for _ in processes(group))
    except OSError:
        return group.exists()


def inode(group: Path) -> int | None:
    """Tells a group from one that is made anew under its name; None if it is gone."""
    try:
        return group.stat().st_ino
    except OSError:
        return None


def processes(group: Path) -> Iterator[int]:
    """PIDs of a control group, its own first, then those of the groups that a container has made for itself."""
    for each in with_those_below(group):
        with contextlib.suppress(OSError, ValueError):  # a group of threads does not say; those below it may
            yield from map(int, _text(f"{each}/cgroup.procs").split())


def with_those_below(group: Path) -> Iterator[Path]:
    """A group and all below it, each before its own. A container may nest more than a stack has frames."""
    left = [group]
    while left:
        each = left.pop()
        yield each
        left += reversed(folders_in(each))


def _text(path: str) -> str:
    """A file of a group; Python's own reader takes several times as long. Raises OSError."""
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        return file.read().decode()


def _places(tree: Path, uid: str) -> Iterator[str]:
    stem = tree.name.removesuffix(".slice")
    for quality in _CLASSES:
        if stem == tree.name:
            yield f"{tree}/{quality}/pod{uid}" if quality else f"{tree}/pod{uid}"
        else:
            name = f"{stem}-{quality}" if quality else stem
            above = f"{tree}/{name}.slice" if quality else tree
            yield f"{above}/{name}-pod{uid.replace('-', '_')}.slice"


def _in_its_place(root: Path, tree: Path) -> bool:
    """Slices are named after the slices around them."""
    around = "" if tree.parent == root else f"{tree.parent.name.removesuffix('.slice')}-"
    return not tree.name.endswith(".slice") or tree.name == f"{around}kubepods.slice"


def _is_group(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _made_with(root: Path, folder: Path) -> Iterator[Path]:
    """The groups below one that nobody but the owner of `root` may have made or may change."""
    try:
        owner = root.stat().st_uid
    except OSError:
        return
    for below in folders_in(folder):
        try:
            found = below.lstat()
        except OSError:
            continue
        if found.st_uid == owner and not found.st_mode & 0o022:
            yield below
