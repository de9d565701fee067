"""What frames of one connection may cost: how many that bring nothing, and how much of the time."""

from __future__ import annotations

import time

from scheduler_ext.http.http2 import frames

# Frames that bring nothing (pings, settings, windows, resets of what is over, crumbs of bodies, heads without an
# answer) of which a connection has so many, so many more a second, and more with each answer and each part of it that
# was sent.
_PATIENCE, _PATIENCE_SECOND, _PATIENCE_ANSWER = 1000.0, 100, 4
# With a request that is given up: its head, the reset and the ping that Go's clients send with it. Such requests may be
# as many as anybody likes: what they cost is work with frames, which is bounded as such.
_PATIENCE_GIVEN_UP = 3
# Microseconds of work with frames, about: of a connection at once, then others have their turn; ahead; and in a second,
# all such together that have had that much ahead.
AT_ONCE, _AHEAD, _SECOND = 256, 4096, 250_000
FRAME = 4
_MOST_PAUSE = 5.0  # seconds: less than a frame may take


class Allowance:
    """`work`: what was done and is not paid for."""

    __slots__ = ("_patience", "_patient_at", "_worked_at", "work")

    def __init__(self, now: float) -> None:
        self._patience, self._patient_at = _PATIENCE, now
        self.work, self._worked_at = 0.0, now

    def bear(self) -> None:
        """One more frame that brings nothing."""
        self._patience -= 1
        if self._patience < 0:
            now = time.monotonic()
            self._patience += min((now - self._patient_at) * _PATIENCE_SECOND, _PATIENCE)
            self._patient_at = now
            if self._patience < 0:
                raise frames.Broken(frames.ENHANCE_YOUR_CALM, "too many frames for nothing")

    def sent(self) -> None:
        """An answer, or a part of one."""
        patience, work = self._patience + _PATIENCE_ANSWER, self.work - _PATIENCE_ANSWER * FRAME
        self._patience = patience if patience < _PATIENCE else _PATIENCE  # min and max take as long as all the rest
        self.work = work if work > 0 else 0.0

    def given_up(self) -> None:
        """A request."""
        self._patience = min(self._patience + _PATIENCE_GIVEN_UP, _PATIENCE)

    def pause(self, behind: int) -> float:
        """For how long no more may be done, where `behind` other connections have to wait, too: all of them as long as
        they take together."""
        now = time.monotonic()
        work = self.work - (now - self._worked_at) * _SECOND
        self.work, self._worked_at = work if work > 0 else 0.0, now
        return min((work - _AHEAD) / _SECOND * (behind + 1), _MOST_PAUSE) if work > _AHEAD else 0.0
