"""Settings read anew while the daemon runs: on SIGHUP, and when the file of `--config` has changed."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from manager.config.settings import Settings
from manager.errors import StartError
from vcuda.settings import describe, flag_of

log = logging.getLogger(__name__)


class Reloader:
    """Has the settings that are in force; only those that can change live do."""

    def __init__(self, settings: Settings, reread: Callable[[], Settings]) -> None:
        self._settings = settings
        self._reread = reread
        self._asked = threading.Event()
        self._mark = _mark(settings.config)

    def current(self) -> Settings:
        return self._settings

    def ask(self) -> None:
        """Read at the next `poll` whether or not the file has changed."""
        self._asked.set()

    def poll(self) -> Settings | None:
        """The settings from now on; None if they are as before.

        What is wrong with new ones is logged, and the old ones stay.
        """
        mark = _mark(self._settings.config)
        if mark == self._mark and not self._asked.is_set():
            return None
        self._mark = mark
        self._asked.clear()
        try:
            wanted = self._reread()
        except StartError as error:
            log.error("the settings stay as they were: %s", error)
            return None
        changes = {}
        for field in dataclasses.fields(Settings):
            value = getattr(wanted, field.name)
            if value == getattr(self._settings, field.name):
                continue
            if field.metadata["live"]:
                changes[field.name] = value
            else:
                log.warning("--%s has changed; that takes effect at the next start", flag_of(field.name))
        if not changes:
            log.info("the settings were read again; nothing to change")
            return None
        self._settings = dataclasses.replace(self._settings, **changes)
        changed = {flag_of(name) for name in changes}
        lines = [line for line in describe(self._settings) if line.partition(":")[0] in changed]
        log.info("changed settings: %s", ", ".join(lines))
        return self._settings


def _mark(config: Path | None) -> tuple[int, int, int] | None:
    """What tells one content of the file from the next; a ConfigMap's file is a link that moves to another one."""
    try:
        status = config.stat() if config is not None else None
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size) if status is not None else None
