"""What one run holds, and its file in the ledger.

Other users write these files too: nothing in one is believed blindly.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from vcuda.spec.units import CORES_PER_CARD

VERSION = 1
MOST_FILE_BYTES = 64 * 1024
MOST_SHARES = 16
_MOST_TEXT = 4096


@dataclass(frozen=True)
class Share:
    """A slice of one card: `cores` guaranteed, up to `core_limit` of idle time, both in 1/100 card.

    `oversell_bytes`: what it may hold in all, beyond `memory_bytes` as managed memory; 0: no more than these.
    """

    uuid: str
    minor: int
    cores: int
    core_limit: int
    memory_bytes: int
    whole: bool = False
    oversell_bytes: int = 0


@dataclass(frozen=True)
class Booking:
    """A run: `pid` of `vcuda run`, `since` in Unix seconds, `folder` with its libraries (its owner's business).

    `name` and `user_id` come from the file system, never from the file.
    """

    name: str
    user_id: int
    pid: int
    since: float
    command: str
    folder: str
    shares: tuple[Share, ...]

    def on(self, uuid: str) -> Share | None:
        return next((share for share in self.shares if share.uuid == uuid), None)


def encode(booking: Booking) -> bytes:
    """The content of its file; a long command is cut."""
    data = asdict(booking) | {"version": VERSION, "command": booking.command[:_MOST_TEXT]}
    del data["name"], data["user_id"]
    return json.dumps(data).encode()


def _text(data: dict[str, Any], key: str, most: int = _MOST_TEXT) -> str:
    value = data[key]
    if not isinstance(value, str) or len(value) > most:
        raise ValueError(f"{key} is not a text of at most {most} characters")
    return value


def _number(data: dict[str, Any], key: str, least: int, most: int) -> int:
    value = data[key]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{key} is not a whole number from {least} to {most}")
    return value


def _share(data: Any) -> Share:
    cores = _number(data, "cores", 1, CORES_PER_CARD)
    return Share(
        uuid=_text(data, "uuid", 96),
        minor=_number(data, "minor", -1, 2**20),
        cores=cores,
        core_limit=_number(data, "core_limit", cores, CORES_PER_CARD),
        memory_bytes=_number(data, "memory_bytes", 0, 2**63 - 1),
        whole=data["whole"] is True,
        oversell_bytes=_number(data, "oversell_bytes", 0, 2**63 - 1) if "oversell_bytes" in data else 0,
    )


def decode(raw: bytes, name: str, user_id: int) -> Booking:
    """Parse a booking file of the user who owns it. Raises ValueError that says what is wrong."""
    try:
        data = json.loads(raw)
        version = _number(data, "version", 1, 2**31)
        if version != VERSION:
            raise ValueError(f"it has version {version}, this program reads {VERSION}")
        since, rows = data["since"], data["shares"]
        if type(since) not in (int, float) or not 0 <= since < 2**40:
            raise ValueError("since is not a time")
        if not isinstance(rows, list) or not 1 <= len(rows) <= MOST_SHARES:
            raise ValueError(f"shares is not a list of 1 to {MOST_SHARES}")
        shares = tuple(_share(row) for row in rows)
        if len({share.uuid for share in shares}) != len(shares):
            raise ValueError("it books one card twice")
        return Booking(
            name=name,
            user_id=user_id,
            pid=_number(data, "pid", 1, 2**31 - 1),
            since=float(since),
            command=_text(data, "command"),
            folder=_text(data, "folder"),
            shares=shares,
        )
    except KeyError as error:
        raise ValueError(f"it lacks {error}") from error
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is not a booking ({error!s:.80})") from error
