"""What may go wrong on purpose: a hook that sees every request first and may answer it, delay it or cut it off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Any


@dataclass(frozen=True)
class Request:
    """One request as it came. `path` has no query; `port` is the client's, the same on a kept connection."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Message
    port: int
    body: Any

    @property
    def watches(self) -> bool:
        return self.query.get("watch", "").lower() in ("1", "true")


@dataclass(frozen=True)
class Fault:
    """What happens instead of the true answer; all defaults: nothing but the true answer.

    `status`: this is answered, with `body` (else a Status that says so); 0 cuts the connection without an answer. `done`: the request
    is carried out all the same. `late_s` passes before the answer.
    """

    status: int | None = None
    done: bool = False
    late_s: float = 0.0
    body: bytes | None = None
    message: str = "on purpose"


Hook = Callable[[Request], Fault | None]
