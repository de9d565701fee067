"""Keeps the driver directory current: made in the background when driver or build change, never during a call."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from pathlib import Path

from manager.container import driver_dir
from manager.container.driver_dir import MANIFEST, Mirror, MirrorError
from manager.errors import Reason, Refusal
from manager.process.logs import Conditions
from vcuda.driver.root import HostRoot

log = logging.getLogger(__name__)


class MirrorKeeper:
    """The current driver directory, or the reason why there is none."""

    def __init__(self, base: Path, root: HostRoot, shims: Path) -> None:
        self._base = base
        self._root = root
        self._shims = shims
        self._lock = threading.Lock()
        self._mirror: Mirror | None = None
        self._made_for = ""
        self._problem = "it has not been made yet"
        self._conditions = Conditions(log)

    def refresh(self, driver_version: str) -> None:
        """Make the directory if the driver is another, or the directory is gone. Called from one background thread."""
        with self._lock:
            if not driver_version:
                self._problem = "there is no driver on this node"
                return
            if self._made_for == driver_version and self._usable():
                return
            try:
                self._mirror = driver_dir.make(self._base, self._root, self._shims, driver_version)
            except MirrorError as error:
                self._problem = str(error)
                self._conditions.set("mirror", str(error))
                return
            self._made_for = driver_version
            self._conditions.clear("mirror", "the driver directory can be made again")
            log.info("driver %s is mirrored in %s", self._mirror.driver_version, self._mirror.directory)

    def _usable(self) -> bool:
        return self._mirror is not None and (self._mirror.directory / MANIFEST).exists()

    def current(self) -> Mirror:
        """Raises Refusal."""
        found = self._mirror
        if found is None or not self._usable():
            raise Refusal(Reason.DRIVER_UNAVAILABLE, f"no driver directory can be given: {self._problem}")
        return found

    @property
    def ready(self) -> bool:
        return self._usable()

    def remove_unused(self, used: Collection[Path]) -> None:
        for path in driver_dir.remove_unused(self._base, used):
            log.info("removed the driver directory %s, which no container mounts", path)
