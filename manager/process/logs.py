"""A guard that says a lasting condition only once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from vcuda.logs import fields


class Conditions:
    """Conditions that last: each text is logged when it comes and when it goes, not in between."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()

    def set(self, name: str, text: str, known: Mapping[str, str] | None = None) -> bool:
        """Returns whether this is news. `known`: fields of the line."""
        with self._lock:
            if self._texts.get(name) == text:
                return False
            self._texts[name] = text
        self._log.warning("%s", text, extra=fields(known))
        return True

    def clear(self, name: str, text: str = "", known: Mapping[str, str] | None = None) -> bool:
        with self._lock:
            if self._texts.pop(name, None) is None:
                return False
        self._log.info("%s", text or f"{name}: well again", extra=fields(known))
        return True

    def active(self) -> dict[str, str]:
        with self._lock:
            return dict(self._texts)
