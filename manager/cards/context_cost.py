"""What a context takes of each card: measured once per card and driver, kept in a file, told to shares by their limits.

Without it each container would learn it from what the card's use grows by while its first context is made, which
neighbours disturb.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from manager.cards.inventory import Snapshot
from vcuda import plain_file
from vcuda.driver import context_cost, layout
from vcuda.driver.root import HostRoot
from vcuda.logs import fields

NAME = "context-bytes.json"
_MOST_ATTEMPTS = 3

log = logging.getLogger(__name__)


class ContextCosts:
    """Single-threaded but for `bytes`, which may be asked from anywhere."""

    def __init__(
        self,
        folder: Path,
        root: HostRoot,
        measure: Callable[[Path, Path, str], int] = context_cost.measure,
    ) -> None:
        """The file lies in `folder`; a damaged one counts as none."""
        self._file = folder / NAME
        self._root = root
        self._measure = measure
        self._attempts: dict[str, int] = {}
        self._version, self._known = (
            self._load()
        )  # the shares of a restarted daemon are told before the driver is asked

    def bytes(self, uuid: str) -> int:
        """0: not known (yet); the container's first context is then measured in the container."""
        return self._known.get(uuid, 0)

    def look(self, snapshot: Snapshot) -> str:
        """Measure one card that is not known yet, if there is one: its UUID, or "" if nothing was learnt.

        Never raises.
        """
        if snapshot.driver_version != self._version:
            self._version, self._known, self._attempts = snapshot.driver_version, {}, {}
        for item in snapshot.cards:
            uuid = item.card.uuid
            if uuid in self._known or not item.card.healthy or self._attempts.get(uuid, 0) >= _MOST_ATTEMPTS:
                continue
            self._attempts[uuid] = self._attempts.get(uuid, 0) + 1
            cuda = self._root.find_library(layout.CUDA, self._version)
            nvml = self._root.find_library(layout.NVML, self._version)
            found = self._measure(cuda, nvml, uuid) if cuda and nvml else 0
            if found:
                log.info("a context takes %d MiB of card %s", found >> 20, uuid, extra=fields(uuid=uuid))
                self._known[uuid] = found
                self._save()
            return uuid if found else ""  # one a time: others wait for this thread
        return ""

    def _load(self) -> tuple[str, dict[str, int]]:
        """The driver's version and what contexts took with it."""
        try:
            data = json.loads(plain_file.read(self._file))
            known = {str(uuid): int(count) for uuid, count in data["cards"].items() if int(count) > 0}
            return str(data["driver"]), known
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return "", {}

    def _save(self) -> None:
        new = self._file.with_suffix(".new")
        try:
            new.write_text(json.dumps({"driver": self._version, "cards": self._known}))
            new.replace(self._file)
        except OSError as error:
            log.warning("%s can't be written: %s; contexts are measured again at the next start", new, error)
