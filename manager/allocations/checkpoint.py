"""What is allocated, on disk: a snapshot and a journal of the changes since, both checksummed.

`state.json` is versioned and replaced atomically; `state.journal` begins with the checksum of the snapshot that it belongs to and gets one line
per change: a pod that is being admitted waits for an append, not for the disk. After `save` returns, the change survives the death of this
process. A power cut may take the changes since the last `sync`: those are in kubelet's own checkpoint, from which a start completes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from manager.allocations.record import Allocation, decode, encode

VERSION = 1
FILE_NAME = "state.json"
JOURNAL_NAME = "state.journal"
# A journal of this size is folded into a new snapshot, when nobody waits.
JOURNAL_BYTES = 256 * 1024
_CHECKSUM_LENGTH = 16

Key = tuple[str, str]


class StateError(Exception):
    """The state can't be written or read; the message names the file, the reason and the way out."""


class StateDamaged(StateError):
    """The state was there but unusable; it is kept aside as `kept`."""

    def __init__(self, message: str, kept: Path) -> None:
        super().__init__(message)
        self.kept = kept


def _canonical(data: Any) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def _checksum(canonical: str) -> str:
    return hashlib.sha256(canonical.encode()).hexdigest()


def _line(text: str) -> bytes:
    return f"{_checksum(text)[:_CHECKSUM_LENGTH]} {text}\n".encode()


class StateFile:
    """Both files in `directory`. One writer: the daemon, under its allocation lock."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
        self.journal = directory / JOURNAL_NAME
        self._descriptor = -1
        self._inodes = (0, 0)
        self._bytes = 0
        self._unsynced = False

    # Reading.

    def load(self) -> dict[Key, Allocation]:
        """Everything that was saved; empty if nothing ever was. Raises StateDamaged, StateError."""
        try:
            return self.read()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StateError(
                f"cannot read the state file {error.filename}: {error.strerror}; make it readable or point "
                "--checkpoint-path elsewhere"
            ) from error
        except ValueError as error:
            raise self._keep(error) from error

    def read(self) -> dict[Key, Allocation]:
        """The same and without touching what is damaged. Raises OSError, ValueError."""
        text = self.path.read_bytes()
        try:
            changes = self.journal.read_bytes()
        except FileNotFoundError:
            changes = b""
        try:
            document = json.loads(text)
            if document["version"] != VERSION:
                raise ValueError(f"version {document['version']!r} is not {VERSION}")
            if document["checksum"] != _checksum(_canonical(document["data"])):
                raise ValueError("the checksum does not match")
            found = {item.key: item for item in map(decode, document["data"]["allocations"])}
            _replay(found, changes, document["checksum"])
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return found

    def _keep(self, error: Exception) -> StateDamaged:
        stamp = f"damaged-{time.time_ns()}"
        kept = self.path.with_name(f"{FILE_NAME}.{stamp}")
        try:
            self.path.rename(kept)
            if self.journal.exists():
                self.journal.rename(self.journal.with_name(f"{JOURNAL_NAME}.{stamp}"))
        except OSError as problem:
            raise StateError(
                f"the state file {self.path} is damaged and can't be moved away: {problem}"
            ) from error
        return StateDamaged(
            f"the state file {self.path} is damaged ({error!s:.120}); it is kept as {kept} and the state is rebuilt "
            "from kubelet's records",
            kept,
        )

    # Writing.

    def append(
        self,
        put: Collection[Allocation],
        drop: Collection[Key],
        everything: Callable[[], Iterable[Allocation]],
    ) -> None:
        """Write these changes; `everything`: all allocations as they are after them, in case that they have to be written anew.

        Raises StateError; then the files say what they said before.
        """
        if self._descriptor < 0 or self._inodes != self._current_inodes():
            self.compact(everything())
            return
        if not put and not drop:
            return
        data = _line(_canonical({"put": [encode(item) for item in put], "drop": [list(key) for key in drop]}))
        try:
            written = os.write(self._descriptor, data)
        except OSError as error:
            self._take_back()
            raise self._unwritable(self.journal, error.strerror) from error
        if written != len(data):
            self._take_back()
            raise self._unwritable(self.journal, "the disk is full")
        self._bytes += written
        self._unsynced = True

    def _take_back(self) -> None:
        """Half a line must not stand before the next one."""
        try:
            os.ftruncate(self._descriptor, self._bytes)
        except OSError:
            self.close()  # the next change makes a new snapshot

    @staticmethod
    def _unwritable(path: Path, why: str | None) -> StateError:
        return StateError(f"cannot write the state file {path}: {why}; make room or make it writable")

    def compact(self, allocations: Iterable[Allocation]) -> None:
        """Write a new snapshot and begin a new journal, both on the disk when this returns. Raises StateError."""
        rows = {item.key: item for item in allocations}
        data = _canonical({"allocations": [encode(item) for item in rows.values()]})
        checksum = _checksum(data)
        self.close()
        try:
            self._replace(
                self.path, f'{{"version":{VERSION},"checksum":"{checksum}","data":{data}}}\n'.encode()
            )
            # Between the two the old journal belongs to no snapshot, and the new snapshot needs none.
            first = _line(_canonical({"snapshot": checksum}))
            self._replace(self.journal, first)
            self._descriptor = os.open(self.journal, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            self._inodes = self._current_inodes()
        except OSError as error:
            raise self._unwritable(self.path, error.strerror) from error
        self._bytes = len(first)
        self._unsynced = False

    def _replace(self, path: Path, data: bytes) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    def _current_inodes(self) -> tuple[int, int]:
        try:
            return os.stat(self.path).st_ino, os.stat(self.journal).st_ino  # noqa: PTH116  (at every save: half the time)
        except OSError:
            return 0, 0

    @property
    def long(self) -> bool:
        """Whether the journal should be folded into a snapshot."""
        return self._bytes > JOURNAL_BYTES

    def sync(self) -> None:
        """Bring the changes to the disk; the caller need not hold any lock. A failure is the next `append`'s to tell."""
        if not self._unsynced:
            return
        self._unsynced = False
        try:
            descriptor = os.open(self.journal, os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return
        with contextlib.suppress(OSError):
            os.fdatasync(descriptor)
        os.close(descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _replay(found: dict[Key, Allocation], changes: bytes, snapshot: str) -> None:
    """Apply a journal's lines. Raises ValueError for a damaged one; the last may be half written, and then nobody was told."""
    lines = changes.splitlines(keepends=True)
    for number, line in enumerate(lines):
        text = line[_CHECKSUM_LENGTH + 1 :].rstrip(b"\n").decode(errors="replace")
        if line != _line(text):
            if number == len(lines) - 1:
                return
            raise ValueError(f"line {number + 1} of the journal is damaged")
        change: Mapping[str, Any] = json.loads(text)
        if number == 0:
            if change.get("snapshot") != snapshot:
                return  # of an earlier snapshot: what it says is in this one
            continue
        for uid, container in change["drop"]:
            found.pop((str(uid), str(container)), None)
        for item in map(decode, change["put"]):
            found[item.key] = item
