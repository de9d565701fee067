"""What is allocated, on disk: a snapshot and a journal of the changes since, both checksummed.

`state.json` is versioned and replaced atomically; `state.journal` begins with the checksum of the snapshot that it
continues and gets one line per change: a pod that is being admitted waits for an append, never for the disk. After
`save` returns, the change survives the death of this process. A power cut may take the changes since the last `sync`:
those are in kubelet's own checkpoint, from which a start completes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from manager.allocations.record import Allocation, decode, encode
from vcuda import plain_file

VERSION = 1
FILE_NAME = "state.json"
JOURNAL_NAME = "state.journal"
# A journal of this size is folded into a new snapshot, when nobody waits.
JOURNAL_BYTES = 256 * 1024
NEEDED_BYTES = 64 * 1024  # room for a few changes
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
        text = plain_file.read(self.path)
        try:
            changes = plain_file.read(self.journal)
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
            raise StateError(f"the state file {self.path} is damaged and can't be moved away: {problem}") from error
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
        """Write these changes; `everything`: all allocations after them, in case that they have to be written anew.

        Raises StateError; then the files say what they said before.
        """
        if self._descriptor < 0 or self._inodes != self._current_inodes():
            self.compact(everything())
            return
        if not put and not drop:
            return
        self._append(_line(_canonical({"put": [encode(item) for item in put], "drop": [list(key) for key in drop]})))

    def _append(self, line: bytes) -> None:
        try:
            written = os.write(self._descriptor, line)
        except OSError as error:
            self._take_back()
            raise self._unwritable(self.journal, error.strerror) from error
        if written != len(line):
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
        """Write a new snapshot and begin a new journal; `sync` brings both to the disk. Raises StateError."""
        checksum, document = _snapshot(allocations)
        self.close()
        try:
            self._written(self.path, document).replace(self.path)
            # Between the two the old journal belongs to no snapshot, and the new snapshot needs none.
            self._begin_journal(_line(_canonical({"snapshot": checksum})))
        except OSError as error:
            raise self._unwritable(self.path, error.strerror) from error
        self._unsynced = True

    def fold(self, lock: threading.Lock, everything: Callable[[], Iterable[Allocation]]) -> None:
        """Put the journal into a new snapshot. `lock`: the writer's; nobody holds it while the disk is waited for.

        A line in the old journal says that it continues the new snapshot too: all its changes in their order end in the
        same state, whichever of the two they begin from. So one rename decides, and a kill at any moment loses nothing.
        Raises StateError.
        """
        with lock:
            if self._descriptor < 0 or self._inodes != self._current_inodes():
                self.compact(everything())
                return
            allocations, inodes, position = list(everything()), self._inodes, self._bytes
        checksum, document = _snapshot(allocations)
        first = _line(_canonical({"snapshot": checksum}))
        temporary = self._temporary(self.path)
        try:
            self._written(self.path, document, durable=True)
            with lock:
                if self._inodes != inodes or self._descriptor < 0:
                    return  # somebody has taken the files away, and all was written anew
                with self.journal.open("rb") as journal:
                    journal.seek(position)
                    meanwhile = journal.read()
                self._append(first)
                temporary.replace(self.path)
                self._inodes = self._current_inodes()
                self._begin_journal(first + meanwhile)
        except OSError as error:
            raise self._unwritable(self.path, error.strerror) from error
        finally:
            temporary.unlink(missing_ok=True)
        self._unsynced = True

    def _begin_journal(self, lines: bytes) -> None:
        self._written(self.journal, lines).replace(self.journal)
        descriptor = os.open(self.journal, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self.close()
        self._descriptor, self._bytes, self._inodes = descriptor, len(lines), self._current_inodes()

    @staticmethod
    def _temporary(path: Path) -> Path:
        return path.with_name(f".{path.name}.{os.getpid()}")

    def _written(self, path: Path, data: bytes, *, durable: bool = False) -> Path:
        """A file beside `path`, to take its place. Raises OSError."""
        temporary = self._temporary(path)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
        except OSError:
            temporary.unlink(missing_ok=True)  # a daemon that ends at every start would leave one each time
            raise
        return temporary

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
        """Bring the changes to the disk; the caller need not hold any lock.

        A failure is the next `append`'s to tell.
        """
        if not self._unsynced:
            return
        self._unsynced = False
        for path in (self.path, self.journal):
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            except OSError:
                continue
            with contextlib.suppress(OSError):
                os.fdatasync(descriptor)
            os.close(descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _snapshot(allocations: Iterable[Allocation]) -> tuple[str, bytes]:
    """The checksum and the text of a snapshot."""
    rows = {item.key: item for item in allocations}
    data = _canonical({"allocations": [encode(item) for item in rows.values()]})
    checksum = _checksum(data)
    return checksum, f'{{"version":{VERSION},"checksum":"{checksum}","data":{data}}}\n'.encode()


def _replay(found: dict[Key, Allocation], changes: bytes, snapshot: str) -> None:
    """Apply a journal that continues this snapshot.

    Raises ValueError for a damaged line; the last may be half written, and then nobody was told.
    """
    lines, ours = [], False
    whole = changes.splitlines(keepends=True)
    for number, line in enumerate(whole):
        text = line[_CHECKSUM_LENGTH + 1 :].rstrip(b"\n").decode(errors="replace")
        if line != _line(text):
            if number == len(whole) - 1:
                break
            raise ValueError(f"line {number + 1} of the journal is damaged")
        change: Mapping[str, Any] = json.loads(text)
        ours = ours or change.get("snapshot") == snapshot
        lines.append(change)
    for change in lines if ours else ():  # else it is of an earlier snapshot, and what it says is in this one
        for uid, container in change.get("drop", ()):
            found.pop((str(uid), str(container)), None)
        for item in map(decode, change.get("put", ())):
            found[item.key] = item
