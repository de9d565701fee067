"""When the peer must have done what it was to do: each of these, and when to look which it is."""

from __future__ import annotations

import time

from scheduler_ext.http import exchange

NEVER = float("inf")


class Times:
    """On the monotonic clock. `until`: the earliest of all, or before it; `by` adds those of single requests.

    `partial`: when what is here in part has to be; `head`: a head that goes on; `unread`: what we sent has to be read;
    `idle`: when who asks for nothing is sent away.
    """

    __slots__ = ("head", "idle", "partial", "unread", "until")

    def __init__(self) -> None:
        self.head = self.unread = NEVER
        self.partial = self.idle = self.until = time.monotonic() + exchange.SILENT_SECONDS

    def by(self, until: float) -> float:
        self.until = min(self.until, until)
        return until

    def expect(self, came: bool) -> None:
        """What is here in part, and more of it `came`."""
        if came or self.partial == NEVER:
            self.partial = self.by(time.monotonic() + exchange.HEAD_SECONDS)

    def expect_head(self) -> None:
        self.head = self.by(time.monotonic() + exchange.HEAD_SECONDS)

    def expect_reader(self) -> None:
        self.unread = self.by(time.monotonic() + exchange.UNREAD_SECONDS)

    def rest_idle(self) -> None:
        self.idle = time.monotonic() + exchange.IDLE_SECONDS
        self.until = min(self.idle, self.partial, self.head, self.unread)

    def look_again(self, idle: bool, not_before: float, first: float) -> None:
        """`first`: of the requests' times the earliest. What is here in part has until `not_before` at least."""
        partial = max(min(self.partial, self.head), not_before)
        self.until = min(partial, self.unread, self.idle if idle else NEVER, first)
