"""What one supervisor does for all runs of a user: it arbitrates, and keeps the limits in force true."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vcuda import arbiter, region
from vcuda.runs import card_choice
from vcuda.runs.context_costs import ContextCosts
from vcuda.runs.errors import RunError
from vcuda.runs.ledger import Ledger
from vcuda.runs.overhead import RunOverhead

PERIOD_SECONDS = 0.25  # how soon a dead arbiter is replaced, a new neighbour seen


@dataclass
class Arbitration:
    """One supervisor's part.

    The right to arbitrate is a file lock: it moves on when its holder dies, however it dies.
    """

    ledger: Ledger
    user_id: int
    warn: Callable[[str], None]
    _right: int | None = None
    _arbiter: arbiter.Arbiter | None = None
    _overhead: RunOverhead | None = None
    _limits: dict[str, tuple[region.CardLimit, ...]] = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set)

    @property
    def holds(self) -> bool:
        return self._right is not None

    def tick(self) -> None:
        """Take over if nobody arbitrates; if it is us, follow the bookings. Never raises for a broken entry."""
        try:
            if self._right is None:
                self._right = self.ledger.arbiter_lock()
            if self._right is None:
                return
            if self._arbiter is None:
                self._arbiter = arbiter.Arbiter()
                self._overhead = RunOverhead()
            self._follow(self._arbiter)
        except (RunError, region.RegionError, OSError) as error:
            self._warn_once(f"idle GPU time is not lent at the moment: {error}")

    @property
    def questions(self) -> int:
        """A descriptor that becomes readable when a run wants to know its free memory; -1: there is none."""
        return self._overhead.descriptor if self._overhead is not None else -1

    def answer(self) -> None:
        if self._overhead is not None:
            self._overhead.answer()

    def close(self) -> None:
        if self._arbiter is not None:
            self._arbiter.close()
        if self._overhead is not None:
            self._overhead.close()

    def _follow(self, arbiter_now: arbiter.Arbiter) -> None:
        everyone = self.ledger.bookings()
        costs = ContextCosts(self.ledger.folder)
        mine = {entry.name: entry for entry in everyone if entry.user_id == self.user_id}
        for name in [name for name in self._limits if name not in mine]:
            arbiter_now.remove(name)
            del self._limits[name]
        for name, entry in mine.items():
            wanted = costs.fill(card_choice.limits(entry, everyone))
            if self._limits.get(name) == wanted:
                continue
            folder = self.ledger.region_folder(name)
            try:
                region.update(folder, wanted)
                if name not in self._limits:
                    arbiter_now.add(name, folder)
            except (region.RegionError, OSError) as error:
                self._warn_once(f"run {name} keeps its guaranteed share only: {error}")
                continue
            self._limits[name] = wanted
        if self._overhead is not None:
            self._overhead.follow({name: self.ledger.region_folder(name) for name in mine})

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self.warn(message)
