"""What a context takes of each card: measured once per card and driver for all runs of a user, told by their limits."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vcuda import region
from vcuda.driver import context_cost
from vcuda.runs import files
from vcuda.runs.driver import Driver

_MOST_FILE_BYTES = 64 * 1024


@dataclass
class ContextCosts:
    """The user's file in the ledger's folder.

    What can't be measured stays 0: the run's first context is then measured inside.
    """

    folder: Path
    measure: Callable[[Path, Path, str, Mapping[str, str]], int] = context_cost.measure

    @property
    def _path(self) -> Path:
        return self.folder / f"context-{os.geteuid()}"

    def fill(self, limits: Sequence[region.CardLimit]) -> tuple[region.CardLimit, ...]:
        """These limits with what is known of their cards."""
        known = self._read()
        return tuple(replace(card, context_bytes=known.get(card.uuid, 0)) for card in limits)

    def learn(self, driver: Driver, uuids: Collection[str], environment: Mapping[str, str]) -> None:
        """Measure those of the cards that are not known with this driver. Never raises."""
        mark = _mark(driver.cuda)
        known = self._read() if self._driver() == mark else {}
        found = {uuid: self.measure(driver.cuda, driver.nvml, uuid, environment) for uuid in uuids if uuid not in known}
        if any(found.values()):
            known = known | {uuid: count for uuid, count in found.items() if count}
            with contextlib.suppress(OSError):
                self._write(json.dumps({"driver": mark, "cards": known}).encode())

    def _write(self, data: bytes) -> None:
        descriptor = files.open_or_create(str(self._path), 0o600)
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, data, 0)
        finally:
            os.close(descriptor)

    def _driver(self) -> str:
        return str(self._content().get("driver", ""))

    def _read(self) -> dict[str, int]:
        cards = self._content().get("cards")
        if not isinstance(cards, dict):
            return {}
        return {str(uuid): count for uuid, count in cards.items() if type(count) is int and 0 < count < 1 << 36}

    def _content(self) -> dict[str, object]:
        """Only what this user wrote is believed: the folder is everybody's."""
        try:
            descriptor = files.open_file(str(self._path))
        except OSError:
            return {}
        try:
            if os.fstat(descriptor).st_uid != os.geteuid():
                return {}
            content = json.loads(files.read_bounded(descriptor, _MOST_FILE_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        finally:
            os.close(descriptor)
        return content if isinstance(content, dict) else {}


def _mark(library: Path) -> str:
    """Another driver is another file."""
    try:
        status = library.stat()
    except OSError:
        return ""
    return f"{library}:{status.st_size}:{status.st_mtime_ns}"
