"""Control groups of pods: kubelet's names for them, and their folders."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

# Kubelet's names of a pod's group: "pod<uid>" (cgroupfs) and "…-pod<uid with _>.slice" (systemd); a static pod's UID is
# 32 digits.
POD_GROUP = re.compile(
    r"(?:^|-)pod([0-9a-f]{8}([-_])[0-9a-f]{4}\2[0-9a-f]{4}\2[0-9a-f]{4}\2[0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?$"
)
# Kubelet nests: root, quality of service, pod, container.
_DEPTH = 4


def plain(uid: str) -> str:
    """A pod's UID without what cgroup drivers write in different ways."""
    return uid.replace("-", "").replace("_", "")


def folders_in(folder: Path) -> list[Path]:
    """The groups below one; none if it is gone."""
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def pod_folders(folder: Path, pods: Collection[str], depth: int = _DEPTH) -> Iterator[tuple[str, Path]]:
    """UID (without dashes) and folder of each of these pods that has one below `folder`.

    What lies below a pod's folder a tenant may name as it likes: it is not looked at.
    """
    for below in folders_in(folder):
        match = POD_GROUP.search(below.name)
        if match:
            if plain(match[1]) in pods:
                yield plain(match[1]), below
        elif depth:
            yield from pod_folders(below, pods, depth - 1)
