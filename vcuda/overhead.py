"""What a container uses of a card beside its ledger: what its processes hold by the driver, less the shims' charges.

Code that is loaded at a kernel's first use, the driver's own buffers: nothing in the tenant's process can tell them
exactly. Whoever sees the driver's figures (gpu-manager, the supervisor of `vcuda run`) measures here and writes the
figure into the limits.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Collection, Hashable, Mapping
from pathlib import Path

from vcuda.region import CardUsage

_MOST_RESTLESS = 3  # samples in a row during which the ledger changed


class Meter:
    """The overhead of every container and card, by any key of the caller's.

    A figure moves only as far as two samples in a row agree (it is the median of itself and the last two), so that
    memory on its way between the driver's books and the ledger is neither taken for overhead nor makes it vanish.
    """

    def __init__(self) -> None:
        self._figures: dict[Hashable, int] = {}
        self._restless: dict[Hashable, tuple[int, int]] = {}  # samples in a row, the least excess in them
        self._last: dict[Hashable, int] = {}

    def figure(self, key: Hashable) -> int:
        """Bytes; 0 for what was never sampled."""
        return self._figures.get(key, 0)

    def take(self, key: Hashable, before: CardUsage, after: CardUsage, driver_bytes: int) -> int:
        """One sample: the driver's bytes, and the ledger read before and after them. Returns the figure now.

        It counts only if the ledger did not change meanwhile; a tenant could keep it changing for ever, so that after
        _MOST_RESTLESS such samples in a row what exceeded all that was reserved in each of them counts. Whether a
        driver counts managed memory as the process's is not known: any figure between both readings is right then, and
        the one in force is kept as far as it is one.
        """
        figure = self.figure(key)
        if before.ledger_mark != after.ledger_mark or before.unsettled or after.unsettled:
            times, excess = self._restless.get(key, (0, driver_bytes))
            excess = min(excess, driver_bytes - max(before.reserved_bytes, after.reserved_bytes))
            self._restless[key] = (times + 1, excess)
            if times < _MOST_RESTLESS:
                return figure
            least = most = max(figure, excess)
        else:
            self._restless.pop(key, None)
            least = max(0, driver_bytes - after.ledger_bytes)
            most = max(0, driver_bytes - max(0, after.ledger_bytes - after.managed_bytes))
        sample = min(max(figure, least), most)
        figure = sorted((figure, self._last.get(key, figure), sample))[1]
        self._last[key] = sample
        self._figures[key] = figure
        return figure

    def keep(self, keys: Collection[Hashable]) -> None:
        """Forget all others: those containers are gone."""
        for known in (self._figures, self._last, self._restless):
            for key in known.keys() - set(keys):
                del known[key]


# Touched; written or cut, which no shim does (they map it): somebody damages the account; the file is gone.
_IN_ATTRIB, _IN_MODIFY, _IN_IGNORED = 0x4, 0x2, 0x8000
_EVENT = struct.Struct("iIII")  # inotify(7)
_BYTES = 65536


class Questions:
    """Which containers want a sample now: a shim asks by touching its usage file, so that nobody has to poll.

    Where the kernel gives no watches, nobody asks; samples are then taken at the measurer's own pace.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = int(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        """Becomes readable with a question; -1: there will be none."""
        self._watched: dict[str, tuple[int, tuple[int, int]]] = {}
        self._asked: set[str] = set()

    def follow(self, files: Mapping[str, Path]) -> None:
        """Watch these usage files, by the caller's names, and no others."""
        self._look()  # a file made anew may have the inode of the old one, whose watch has ended
        for name in [name for name in self._watched if name not in files]:
            self._drop(name)
        for name, path in files.items():
            try:
                status = path.stat()
            except OSError:
                continue
            identity = (status.st_dev, status.st_ino)
            if self._watched.get(name, (0, None))[1] == identity:
                continue
            self._drop(name)  # made anew under the same name
            watch = int(self._libc.inotify_add_watch(self.descriptor, os.fsencode(path), _IN_ATTRIB | _IN_MODIFY))
            if watch >= 0:
                self._watched[name] = (watch, identity)

    @property
    def followed(self) -> int:
        """How many files are watched; one that goes ends its watch."""
        return len(self._watched)

    def _drop(self, name: str) -> None:
        known = self._watched.pop(name, None)
        if known is not None:
            self._libc.inotify_rm_watch(self.descriptor, known[0])

    def read(self) -> set[str]:
        """The names that asked since the last call; never blocks."""
        self._look()
        asked, self._asked = self._asked, set()
        return asked & self._watched.keys()

    def _look(self) -> None:
        try:
            data = os.read(self.descriptor, _BYTES)
        except OSError:
            return
        names = {watch: name for name, (watch, _) in self._watched.items()}
        place = 0
        while place + _EVENT.size <= len(data):
            watch, mask, _, length = _EVENT.unpack_from(data, place)
            place += _EVENT.size + length
            if watch in names and mask & (_IN_ATTRIB | _IN_MODIFY):
                self._asked.add(names[watch])
            if watch in names and mask & _IN_IGNORED:
                self._watched.pop(names[watch], None)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
