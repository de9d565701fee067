"""The machine's ledger: a folder that all users share, one sub-folder per run, held alive by the run's processes.

A booking lives while any process holds its file's lock: the descriptor is inherited by the whole process tree, and the
kernel drops the lock with the last holder, whatever killed it. A process that closed the descriptor still counts
through its slot in the region. Other users' entries are theirs to write: what is malformed is ignored with one warning.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vcuda import region
from vcuda.runs import booking, container_life, files, locks
from vcuda.runs.booking import Booking
from vcuda.runs.errors import RunError

ENTRY_PREFIX = "run-"
UNFINISHED_PREFIX = ".new-"
BOOKING_NAME = "booking"
LOCK_NAME = "lock"
REGION_NAME = "vcuda"
PRIVATE_NAME = "private"  # of a container's run: who may be any user in there reaches the usage through a mount alone
LOCK_PATIENCE_SECONDS = 20.0
_POLL_SECONDS = 0.02


def default_folder() -> Path:
    """Where all users of a machine meet: shared memory, so that a reboot empties it."""
    return Path("/dev/shm/vcuda")


@dataclass(frozen=True)
class _Seen:
    user_id: int
    alive: bool
    booking: Booking | None


@dataclass
class Ledger:
    """An open ledger. `warn` is told once about each entry that can't be used."""

    folder: Path
    warn: Callable[[str], None]
    descriptor: int = -1  # of the folder
    _warned: set[str] = field(default_factory=set)

    @classmethod
    def existing(cls, folder: Path, warn: Callable[[str], None]) -> Ledger | None:
        """Open the ledger to read it: one that is not there is not made. Raises RunError as `open`."""
        return cls.open(folder, warn) if folder.exists() else None

    @classmethod
    def open(cls, folder: Path, warn: Callable[[str], None]) -> Ledger:
        """Open the ledger, making it if need be. Raises RunError that names the folder and the reason."""
        try:
            with contextlib.suppress(FileExistsError), files.permissive_umask():
                folder.mkdir(mode=0o1777)
            descriptor = files.open_folder(str(folder))
        except OSError as error:
            raise RunError(f"the ledger {folder} can't be used: {error.strerror}; give another --ledger") from error
        status = os.fstat(descriptor)
        theirs = status.st_uid not in (0, os.geteuid())
        open_to_all = bool(status.st_mode & stat.S_IWOTH)
        if open_to_all and not status.st_mode & stat.S_ISVTX:
            os.close(descriptor)
            raise RunError(f"the ledger {folder} is not safe: anyone may delete others' bookings; `chmod +t` it")
        if theirs and not open_to_all:
            os.close(descriptor)
            raise RunError(
                f"the ledger {folder} belongs to user {status.st_uid}, who keeps it private; "
                "ask for its removal or give another --ledger"
            )
        return cls(folder, warn, descriptor)

    def close(self) -> None:
        os.close(self.descriptor)

    def path(self, name: str) -> Path:
        return self.folder / name

    def region_folder(self, name: str) -> Path:
        return self.folder / name / REGION_NAME

    @contextlib.contextmanager
    def locked(self, patience_seconds: float = LOCK_PATIENCE_SECONDS) -> Iterator[None]:
        """Hold the ledger's lock: nobody else books meanwhile. Raises RunError that names who holds it for too long."""
        path = self.folder / LOCK_NAME
        deadline = time.monotonic() + patience_seconds
        while True:
            try:
                descriptor = files.open_or_create(str(path), 0o666)
            except OSError as error:
                raise RunError(
                    f"the ledger's lock {path} can't be opened: {error}; its owner must remove it"
                ) from error
            try:
                while not locks.try_exclusive(descriptor):
                    if time.monotonic() > deadline:
                        holder = locks.holder(descriptor)
                        raise RunError(f"the ledger {self.folder} stays locked by {holder}; end that process or wait")
                    time.sleep(_POLL_SECONDS)
                if not _is_same(descriptor, path):
                    continue  # it was removed while we waited; its successor counts
                yield
                return
            finally:
                os.close(descriptor)

    def bookings(self) -> list[Booking]:
        """All living bookings, oldest first."""
        seen = [self._look(name) for name in self._names((ENTRY_PREFIX,))]
        living = [entry.booking for entry in seen if entry is not None and entry.alive and entry.booking]
        return sorted(living, key=lambda entry: (entry.since, entry.name))

    def add(
        self, wanted: Booking, limits: Sequence[region.CardLimit], *, contained: bool = False
    ) -> tuple[Booking, int]:
        """Write a booking and its region; return it named, with the descriptor that keeps it alive.

        `contained`: the region is for containers, which mount it and may be any user.

        The caller holds the lock. All or nothing; raises RunError.
        """
        name = f"{ENTRY_PREFIX}{secrets.token_hex(6)}"
        temporary = self.folder / f"{UNFINISHED_PREFIX}{name}"
        entry = replace(wanted, name=name, user_id=os.geteuid(), folder=wanted.folder or str(self.folder / name))
        descriptor = -1
        try:
            with files.permissive_umask():
                temporary.mkdir(mode=0o755)
                if contained:
                    (temporary / PRIVATE_NAME).mkdir(mode=0o700)
                    (temporary / PRIVATE_NAME / REGION_NAME).mkdir(mode=0o755)
                    (temporary / REGION_NAME).symlink_to(f"{PRIVATE_NAME}/{REGION_NAME}")
                else:
                    (temporary / REGION_NAME).mkdir(mode=0o711)  # others see the inode, not more
            (temporary / BOOKING_NAME).write_bytes(booking.encode(entry))
            (temporary / BOOKING_NAME).chmod(0o644)
            descriptor = files.open_file(str(temporary / BOOKING_NAME))
            if not locks.try_exclusive(descriptor):
                raise RunError(f"{temporary} is in use by another program; give another --ledger")
            region.create(temporary / REGION_NAME, limits)
            if not contained:
                (temporary / REGION_NAME / region.USAGE_NAME).chmod(0o600)
            temporary.rename(self.folder / name)
        except (OSError, region.RegionError, RunError) as error:
            if descriptor >= 0:
                os.close(descriptor)
            shutil.rmtree(temporary, ignore_errors=True)
            raise (
                error if isinstance(error, RunError) else RunError(f"nothing can be booked in {self.folder}: {error}")
            ) from error
        return entry, descriptor

    def remove(self, name: str, libraries: str) -> None:
        """Take one's own booking out and delete its files, and its folder with libraries if that lies elsewhere."""
        with contextlib.suppress(OSError):  # first out of sight at once: a half-deleted entry would look damaged
            os.rename(
                name,
                UNFINISHED_PREFIX + name,
                src_dir_fd=self.descriptor,
                dst_dir_fd=self.descriptor,
            )
        shutil.rmtree(self.folder / (UNFINISHED_PREFIX + name), ignore_errors=True)
        if libraries and not Path(libraries).is_relative_to(self.folder):
            shutil.rmtree(libraries, ignore_errors=True)

    def purge(self) -> None:
        """Remove what this user's ended runs left. The caller holds the lock, so nobody is writing an entry."""
        for name in self._names((ENTRY_PREFIX, UNFINISHED_PREFIX)):
            seen = self._look(name)
            if seen is None or seen.user_id != os.geteuid():
                continue
            if name.startswith(UNFINISHED_PREFIX):
                shutil.rmtree(self.folder / name, ignore_errors=True)
            elif not seen.alive:
                self.remove(name, seen.booking.folder if seen.booking else "")

    def arbiter_lock(self) -> int | None:
        """A descriptor that holds this user's right to arbitrate, or None while another process has it.

        One arbiter per user and ledger, for it writes into its runs' limits, which nobody else may.
        """
        path = self.folder / f"arbiter-{os.geteuid()}"
        try:
            descriptor = files.open_or_create(str(path), 0o600)
        except OSError as error:
            self._warn_once(str(path), f"{path} can't be opened ({error}): no idle GPU time is lent; remove that file")
            return None
        if locks.try_exclusive(descriptor):
            return descriptor
        os.close(descriptor)
        return None

    def _names(self, prefixes: tuple[str, ...]) -> list[str]:
        try:
            with os.scandir(self.descriptor) as entries:
                return sorted(entry.name for entry in entries if entry.name.startswith(prefixes))
        except OSError as error:
            raise RunError(f"the ledger {self.folder} can't be read: {error.strerror}") from error

    def _look(self, name: str) -> _Seen | None:
        """What stands at an entry's place; None if it vanished or is no entry at all, which is warned about."""
        with contextlib.ExitStack() as stack:
            try:
                folder = files.open_folder(name, folder=self.descriptor)
                stack.callback(os.close, folder)
                user_id = os.fstat(folder).st_uid
                if name.startswith(UNFINISHED_PREFIX):
                    return _Seen(user_id, False, None)
                descriptor = files.open_file(BOOKING_NAME, folder=folder)
                stack.callback(os.close, descriptor)
                if os.fstat(descriptor).st_uid != user_id:
                    raise files.Unsafe("its booking belongs to another user than its folder")
                alive = not locks.is_free(descriptor) or _slot_in_use(folder) or bool(container_life.living(folder))
                raw = files.read_bounded(descriptor, booking.MOST_FILE_BYTES)
            except FileNotFoundError:
                return None
            except OSError as error:
                self._warn_once(name, f"ignoring {self.folder / name}: {error}; its owner should remove it")
                return None
        try:
            return _Seen(user_id, alive, booking.decode(raw, name, user_id))
        except ValueError as error:
            self._warn_once(name, f"ignoring the booking {self.folder / name}: {error}; its owner should remove it")
            return _Seen(user_id, alive, None)

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            self.warn(message)


def _slot_in_use(folder: int) -> bool:
    try:
        usage = os.stat(f"{REGION_NAME}/{region.USAGE_NAME}", dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return locks.has_slot_lock(usage)


def _is_same(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    return False
