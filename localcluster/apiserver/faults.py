"""What may go wrong on purpose: a hook that sees every request first and may answer it, delay it or cut it off."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Any

_TIMEOUT_S = 60.0


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
    def timeout_s(self) -> float:
        """For how long it may be carried out: what it asks, else what API servers allow (--request-timeout)."""
        asked = re.fullmatch(r"(\d+)(ms|s)", self.query.get("timeout", ""))
        return _TIMEOUT_S if asked is None else int(asked[1]) * (0.001 if asked[2] == "ms" else 1.0)

    @property
    def watches(self) -> bool:
        return self.query.get("watch", "").lower() in ("1", "true")


@dataclass(frozen=True)
class Fault:
    """What happens instead of the true answer; all defaults: nothing but the true answer.

    `status`: this is answered, with `body` (else a Status that says so); 0 cuts the connection without an answer.
    `done`: the request is carried out all the same. `late_s` passes before the answer, `stalled_s` before the request
    is carried out, whether its client is still there or not; a request whose own `timeout` is over by then never is,
    and gets a 504.
    """

    status: int | None = None
    done: bool = False
    late_s: float = 0.0
    stalled_s: float = 0.0
    body: bytes | None = None
    message: str = "on purpose"


Hook = Callable[[Request], Fault | None]
