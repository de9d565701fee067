"""How full the cluster was in the last hour, in bounded memory."""

from __future__ import annotations

import collections
from typing import NamedTuple

SECONDS = 30.0  # between two looks
_MOST = 120  # an hour


class Look(NamedTuple):
    """`at`: seconds since the epoch. `allocated`, `fragmented`: parts of all usable cards (see stats.use)."""

    at: int
    allocated: float
    fragmented: float
    waiting: int


class History:
    """A ring. Not locked: the engine's lock covers it."""

    def __init__(self) -> None:
        self._ring: collections.deque[Look] = collections.deque(maxlen=_MOST)

    def add(self, look: Look) -> None:
        self._ring.append(look)

    def all(self) -> list[Look]:
        """The oldest first."""
        return list(self._ring)
