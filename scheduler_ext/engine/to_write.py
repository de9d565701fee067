"""What is to be written to the API server by the way: events, answers to resizes, wakings, templates."""

from __future__ import annotations

from collections.abc import Collection

from scheduler_ext.engine.parts import Parts
from scheduler_ext.engine.resizes import Unanswered
from scheduler_ext.engine.templates import Unused, Wanted
from scheduler_ext.state.notices import Notice
from scheduler_ext.state.unschedulable import RETRY, Unschedulable

_COMPARED_AT_ONCE = 64  # nodes for which the lock is held


class ToWrite(Parts):
    """What is taken from here, and given back where nobody could write it."""

    def compare(self) -> None:
        """Compare bookings that may differ with what the nodes' managers report, a few nodes at a time; what has
        differed for a minute is told.
        """
        with self._lock:
            nodes = self._comparison.nodes()
        for start in range(0, len(nodes), _COMPARED_AT_ONCE):
            with self._lock:
                self._comparison.look(nodes[start : start + _COMPARED_AT_ONCE])

    def notices(self, most: int = 20, closed: Collection[str] = ()) -> list[Notice]:
        """What is to be told as events now, once; see Notices."""
        with self._lock:
            return self.cache.notices.take(most, closed)

    def not_told(self, notice: Notice) -> None:
        """Nobody tried to send it."""
        with self._lock:
            self.cache.notices.put_back(notice)

    def unanswered(self) -> list[Unanswered]:
        """Answers to resizes that the API server does not have yet."""
        with self._lock:
            return self._resizes.unwritten()

    def answered(self, one: Unanswered) -> None:
        """The API server has one of them, or never will."""
        with self._lock:
            self._resizes.written(one)

    def to_wake(self, most: int, closed: Collection[str] = ()) -> list[Unschedulable]:
        """Refused pods whose reason has passed without an API event: kube-scheduler is to look at them again.

        None of namespaces that are `closed` now: these are looked at later.
        """
        return self._waking.take(most, closed)

    def not_woken(self, one: Unschedulable, seconds: float | None = RETRY) -> None:
        """One of them could not be, and may be after so many seconds; None: it was not tried."""
        with self._lock:
            self.cache.unschedulable.not_woken(one, seconds)

    def missing_templates(self) -> list[Wanted]:
        """ResourceClaimTemplates that pods wait for."""
        with self._lock:
            return self._templates.missing()

    def unused_templates(self) -> list[Unused]:
        """Those of ours that no pod has named for a while."""
        with self._lock:
            return self._templates.unused()
