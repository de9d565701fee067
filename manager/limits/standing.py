"""Where limits of ours may stand in the driver, on disk: what a daemon after this one must know to take them away.

A group is written down before its first limit is set. A power cut takes groups and limits along, so nothing here waits
for the disk.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manager.cgroups import pods
from vcuda import plain_file
from vcuda.driver.memory_limits import CannotLimit

VERSION = 1
FILE_NAME = "driver-limits.json"

log = logging.getLogger(__name__)


@dataclass
class Group:
    """A control group of a pod, or of one of its containers.

    `inode`: a group that is made anew under its name is another one. `cards`: by UUID, those on which it may have a
    limit of ours, and the bytes that the driver has confirmed to this daemon; None: it has not been asked yet.
    """

    pod_uid: str
    container: str
    path: Path
    inode: int
    cards: dict[str, int | None] = field(default_factory=dict)

    @property
    def gone(self) -> bool:
        return pods.inode(self.path) != self.inode


class Standing:
    """The groups, by path, and their file in `folder`. One user at a time: `DriverLimits`, under its lock."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self._groups: dict[Path, Group] = {}
        try:
            self._groups = _decoded(json.loads(plain_file.read(self.path)))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning(
                "%s can't be read (%s): limits that a daemon before this one has set are found again with their pods",
                self.path,
                error,
            )

    @property
    def pods(self) -> Collection[str]:
        """UIDs of the pods that may have limits."""
        return {group.pod_uid for group in self._groups.values()}

    def of(self, pod_uid: str) -> list[Group]:
        """The groups of a pod that are still there, its own first."""
        for group in [group for group in self._groups.values() if group.pod_uid == pod_uid and group.gone]:
            self.drop(group, group.cards)
        found = [group for group in self._groups.values() if group.pod_uid == pod_uid]
        return sorted(found, key=lambda group: group.container)

    def at(self, path: Path) -> Group | None:
        """The group at this path, if it is the one that was written down."""
        group = self._groups.get(path)
        return group if group is not None and not group.gone else None

    def mark(self, pod_uid: str, container: str, path: Path, uuid: str) -> Group:
        """Write down that a limit is about to be set. Raises CannotLimit; then none may be."""
        group = self.at(path)
        if group is None:
            inode = pods.inode(path)
            if inode is None:
                raise CannotLimit(f"the control group {path} is gone")
            group = Group(pod_uid, container, path, inode)
        if uuid in group.cards:
            return group
        before = self._groups.get(path)
        self._groups[path] = group
        group.cards[uuid] = None
        try:
            self._save()
        except OSError as error:
            del group.cards[uuid]
            if before is None:
                del self._groups[path]
            else:
                self._groups[path] = before
            raise CannotLimit(
                f"cannot write {self.path}, which says where limits are: {error.strerror}; make room or make it "
                "writable"
            ) from error
        return group

    def drop(self, group: Group, uuids: Collection[str]) -> None:
        """No limit of ours stands there any more."""
        for uuid in list(uuids):
            group.cards.pop(uuid, None)
        if not group.cards and self._groups.get(group.path) is group:
            del self._groups[group.path]
        try:
            self._save()
        except OSError as error:  # who reads it finds no limit where it names one
            log.debug("cannot write %s: %s", self.path, error)

    def _save(self) -> None:
        rows = [
            {
                "pod_uid": group.pod_uid,
                "container": group.container,
                "path": str(group.path),
                "inode": group.inode,
                "cards": sorted(group.cards),
            }
            for group in self._groups.values()
        ]
        temporary = self.path.with_name(f".{FILE_NAME}")
        temporary.write_text(json.dumps({"version": VERSION, "groups": rows}) + "\n")
        temporary.replace(self.path)


def _decoded(document: Any) -> dict[Path, Group]:
    if document["version"] != VERSION:
        raise ValueError(f"version {document['version']!r} is not {VERSION}")
    found = {}
    for row in document["groups"]:
        cards: dict[str, int | None] = dict.fromkeys(map(str, row["cards"]))
        path = Path(row["path"])
        found[path] = Group(str(row["pod_uid"]), str(row["container"]), path, int(row["inode"]), cards)
    return found
