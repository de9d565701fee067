"""Log lines on standard error, as text or JSON, and a guard that says a lasting condition only once."""

from __future__ import annotations

import json
import logging
import threading
import time


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        row = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return json.dumps(row)


def configure(log_format: str, verbosity: int) -> None:
    """All logs to stderr, as text or JSON lines; a verbosity of 4 or more shows debugging."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        _Json() if log_format == "json" else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if verbosity >= 4 else logging.INFO)
    for noisy in ("watchdog", "asyncio", "grpc"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class Conditions:
    """Conditions that last: each text is logged when it comes and when it goes, not in between."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()

    def set(self, name: str, text: str) -> bool:
        """Returns whether this is news."""
        with self._lock:
            if self._texts.get(name) == text:
                return False
            self._texts[name] = text
        self._log.warning("%s", text)
        return True

    def clear(self, name: str, text: str = "") -> bool:
        with self._lock:
            if self._texts.pop(name, None) is None:
                return False
        self._log.info("%s", text or f"{name}: well again")
        return True

    def active(self) -> dict[str, str]:
        with self._lock:
            return dict(self._texts)
