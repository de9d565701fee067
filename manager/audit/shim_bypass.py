"""Processes of containers with a share that hold a card without our library: nothing limits them.

A process holds a card if the driver lists it there or if it has the card's device node open. Ours are the files of the
driver directory that its container was given, by identity: a tenant can name a file of its own as it likes.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from manager.allocations.record import Allocation
from manager.audit.consequences import Tell
from manager.cards.driver import CardProcess
from vcuda.driver import layout
from vcuda.logs import fields

# A process may be between its start and its first library: only what stays is told.
LASTING_LOOKS = 2
_CARD_NODE = re.compile(r"/dev/nvidia(\d+)$")
# Open files that one look reads beside those of suspects: tenants may have any number.
_FILES_A_LOOK = 2000

log = logging.getLogger(__name__)

Key = tuple[str, str]
At = tuple[Key, str]  # container, card UUID


class Owner(Protocol):
    """What is used of `manager.audit.owners.Owners`."""

    def container(self, pid: int, uuid: str = "") -> Key | None: ...


class BypassWatch:
    """Looks when asked, remembers what lasts, and tells it once per process."""

    def __init__(self, tell: Tell, proc: Path = Path("/proc")) -> None:
        """`tell` is called once per process, with the container and what was found."""
        self._tell = tell
        self._proc = str(proc)
        self._seen: dict[tuple[At, int], int] = {}
        self._next_pid = 0  # where the next look goes on

    def look(
        self,
        allocations: Sequence[Allocation],
        owner: Owner,
        held: Mapping[str, Iterable[CardProcess]],
    ) -> dict[At, int]:
        """How many processes hold each card of each container without our library; 0 included.

        `held`: the processes of each card that says, by UUID. Needs the host's PID namespace, and its PIDs in `proc`.
        """
        by_key = {item.key: item for item in allocations}
        found: set[tuple[At, int]] = set()
        for (key, uuid), pid in self._holders(by_key, owner, held):
            if not self._has_ours(pid, by_key[key]):
                found.add(((key, uuid), pid))
        self._seen = {at: self._seen.get(at, 0) + 1 for at in found}
        counts = {(item.key, share.uuid): 0 for item in allocations for share in item.shares}
        for (at, pid), times in sorted(self._seen.items()):
            if times < LASTING_LOOKS:
                continue
            counts[at] = counts.get(at, 0) + 1
            if times == LASTING_LOOKS:
                item = by_key[at[0]]
                message = (
                    f"container {item.container}: process {pid} ({self._name(pid)}) uses card {at[1]} without our "
                    "library, so nothing but a limit of the driver's own, where there is one, limits it; it found the "
                    "driver by another way, see docs/clients.md"
                )
                log.warning(
                    "%s: %s", item.name, message, extra=fields(item.fields, uuid=at[1], reason="DriverWithoutShim")
                )
                self._tell(item, "DriverWithoutShim", message)
        return counts

    def _holders(
        self,
        by_key: Mapping[Key, Allocation],
        owner: Owner,
        held: Mapping[str, Iterable[CardProcess]],
    ) -> Iterator[tuple[At, int]]:
        listed: set[tuple[int, int]] = set()  # PID, minor
        for uuid, processes in held.items():
            for process in processes:
                key = owner.container(process.pid, uuid)
                if key is not None and key in by_key:
                    yield (key, uuid), process.pid
                    listed.add((process.pid, by_key[key].minors.get(uuid, -1)))
        if not by_key:
            return
        left = _FILES_A_LOOK
        suspects = {pid for _, pid in self._seen}
        for pid in self._in_turn(suspects):
            if left <= 0 and pid not in suspects:
                self._next_pid = pid
                break
            key = owner.container(pid)
            if key is None or key not in by_key:
                continue
            minors, read = self._open_cards(pid, None if pid in suspects else _FILES_A_LOOK)
            left -= read
            for minor in minors:
                if (pid, minor) in listed:
                    continue  # MIG instances share their card's node, and the driver has said which one it is
                for uuid, known in by_key[key].minors.items():
                    if known == minor:
                        yield (key, uuid), pid

    def _in_turn(self, suspects: Collection[int]) -> list[int]:
        """All processes: those that the last look found first, then from where it ended."""
        return sorted(self._pids(), key=lambda pid: (pid not in suspects, pid < self._next_pid, pid))

    def _pids(self) -> Iterator[int]:
        try:
            names = os.listdir(self._proc)  # noqa: PTH208  (of hundreds of processes at every look)
        except OSError:
            return
        yield from (int(name) for name in names if name.isdigit())

    def _open_cards(self, pid: int, most: int | None) -> tuple[set[int], int]:
        """Minors of the cards whose nodes the process has open, and how many files were read: all, or `most`."""
        folder = f"{self._proc}/{pid}/fd"
        minors: set[int] = set()
        try:
            names = os.listdir(folder)  # noqa: PTH208
        except OSError:
            return minors, 0
        if most is not None and len(names) > most:
            begin = random.randrange(len(names) - most + 1)  # nobody can know which are not looked at
            names = names[begin : begin + most]
        for name in names:
            try:
                match = _CARD_NODE.search(os.readlink(f"{folder}/{name}"))  # noqa: PTH115
            except OSError:
                continue  # closed meanwhile
            if match:
                minors.add(int(match[1]))
        return minors, len(names)

    def _has_ours(self, pid: int, item: Allocation) -> bool:
        """Whether one of our files is mapped; also true for a process that has ended or can't be read."""
        ours = _files(item.mirror)
        if not ours:
            return True  # from before this was recorded: nothing to compare with
        inodes = {inode for _, inode in ours}
        folder = Path(self._proc, str(pid))
        try:
            lines = (folder / "maps").read_text(errors="replace").splitlines()
        except OSError:
            return True
        if not lines:
            return True
        for line in lines:
            fields = line.split(None, 5)
            if len(fields) < 6 or int(fields[4]) not in inodes:
                continue
            try:
                # The mapped file itself: its path is the tenant's, and some file systems show another device in maps.
                status = (folder / "map_files" / fields[0]).stat()
            except OSError:
                return True
            if (status.st_dev, status.st_ino) in ours:
                return True
        return False

    def _name(self, pid: int) -> str:
        try:
            return Path(self._proc, str(pid), "comm").read_text().strip()
        except OSError:
            return "ended"


@functools.lru_cache(maxsize=64)
def _files(directory: str) -> frozenset[tuple[int, int]]:
    """Identities of our own files in a driver directory, which never change once it is made."""
    if not directory:
        return frozenset()
    paths = [Path(directory) / "lib64" / name for name in layout.SHIMS]
    paths.append(Path(directory) / "preload" / layout.PRELOAD)
    found = set()
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue
        found.add((status.st_dev, status.st_ino))
    return frozenset(found)
