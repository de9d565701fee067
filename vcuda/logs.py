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

from vcuda.printable import printable

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


def fields(known: Mapping[str, object] | None = None, /, **more: object) -> dict[str, Any]:
    """For `extra=` of a log call: `known` and `more`, by the names of FIELDS; what is empty is left out."""
    found = {**(known or {}), **more}
    unknown = found.keys() - FIELDS.keys()
    if unknown:
        raise TypeError(f"no field of log lines: {', '.join(sorted(unknown))}")
    return {_ATTRIBUTE: {name: str(found[name]) for name in FIELDS if found.get(name)}}


def of(record: logging.LogRecord) -> Mapping[str, str]:
    """The fields of a record."""
    found: Mapping[str, str] = getattr(record, _ATTRIBUTE, {})
    return found


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s:")

    def format(self, record: logging.LogRecord) -> str:
        words = [_FORGED.sub(r"\1\\x3d", printable(record.getMessage()))]
        for name, value in of(record).items():
            words.append(f"{name}={value if _PLAIN.fullmatch(value) else json.dumps(value)}")
        record.asctime = self.formatTime(record)
        line = f"{self.formatMessage(record)} {' '.join(words)}"
        if record.exc_info:
            shown = self.formatException(record.exc_info).splitlines()
            line += "".join(f"\n    {printable(each)}" for each in shown)
        return line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        row = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **of(record),
        }
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
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
