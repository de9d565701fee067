"""Log lines of both daemons, as text or JSON, with fields that a collector reads: whom and what a line is of.

What a tenant or the API server has written can neither begin a line nor forge a field: control characters are escaped,
values that are not plain words are quoted.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from typing import Any

from vcuda.printable import told

FORMATS = ("text", "json")
FORMAT_HELP = "one line of text or one JSON object per message, with the fields of docs/names.md"
# The fields, in the order of text lines.
FIELDS = {
    "pod": "namespace and name of the pod, NAMESPACE/NAME",
    "claim": "namespace and name of the ResourceClaim, NAMESPACE/NAME",
    "container": "the container, or the claim's request",
    "uid": "the pod's UID, or the claim's",
    "node": "the node (of the extender's lines; a daemon's are of its own)",
    "uuid": "the cards' UUIDs, with commas between",
    "reason": "the code of the refusal or event (docs/errors.md)",
}
_PLAIN = re.compile(r"[\w.:/,@%+-]+", re.ASCII)
_FORGED = re.compile(rf"\b({'|'.join(FIELDS)})=")
_ATTRIBUTE = "vcuda_fields"
_MOST_MESSAGE = 8192  # characters, as a field's: a collector may take no longer line
_MOST_FIELD = 1024
_MOST_LINES = 200  # of a traceback


def fields(known: Mapping[str, object] | None = None, /, **more: object) -> dict[str, Any]:
    """For `extra=` of a log call: `known` and `more`, by the names of FIELDS; what is empty is left out."""
    found = {**(known or {}), **more}
    unknown = found.keys() - FIELDS.keys()
    if unknown:
        raise TypeError(f"no field of log lines: {', '.join(sorted(unknown))}")
    return {_ATTRIBUTE: {name: _cut(str(found[name]), _MOST_FIELD) for name in FIELDS if found.get(name)}}


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def of(record: logging.LogRecord) -> Mapping[str, str]:
    """The fields of a record."""
    found: Mapping[str, str] = getattr(record, _ATTRIBUTE, {})
    return found


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s:")

    def format(self, record: logging.LogRecord) -> str:
        words = [_FORGED.sub(r"\1\\x3d", told(record.getMessage(), _MOST_MESSAGE))]
        for name, value in of(record).items():
            words.append(f"{name}={value if _PLAIN.fullmatch(value) else json.dumps(value)}")
        record.asctime = self.formatTime(record)
        line = f"{self.formatMessage(record)} {' '.join(words)}"
        if record.exc_info:
            shown = self.formatException(record.exc_info).splitlines()
            line += "".join(f"\n    {told(each, _MOST_MESSAGE)}" for each in shown[-_MOST_LINES:])
        return line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        row = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _cut(record.getMessage(), _MOST_MESSAGE),
            **of(record),
        }
        if record.exc_info:
            shown = self.formatException(record.exc_info).splitlines()
            row["exception"] = "\n".join(_cut(each, _MOST_MESSAGE) for each in shown[-_MOST_LINES:])
        return json.dumps(row)


def configure(log_format: str, level: int) -> None:
    """All logs to standard error; `level` as of `logging`."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if log_format == "json" else _Text())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("watchdog", "asyncio", "grpc"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
