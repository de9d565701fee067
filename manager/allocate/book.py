"""The allocations of this node: in memory, on disk and as regions. Every change is under one lock, saved before it is
answered.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping

from manager.allocations.accounting import AllocationIndex
from manager.allocations.record import Allocation
from manager.allocations.state_file import StateError, StateFile
from manager.errors import Reason, Refusal
from manager.regions.regions import Neighbours, Regions
from vcuda.logs import fields

# Two other calls that take their whole time; kubelet waits for us without a limit, and what we refuse it gives up.
LOCK_TIMEOUT_S = 4.0

log = logging.getLogger(__name__)


class Book:
    """`index` is changed under `locked` alone."""

    def __init__(self, state: StateFile, regions: Regions) -> None:
        self.state, self.regions = state, regions
        self.lock = threading.Lock()
        self.index = AllocationIndex()
        self._called = float("-inf")

    def called(self) -> None:
        """A call of kubelet's begins."""
        self._called = time.monotonic()

    @property
    def quiet_s(self) -> float:
        """Seconds since kubelet's last call began."""
        return time.monotonic() - self._called

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """All allocations in the order in which they were made; a snapshot."""
        return self.index.snapshot

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Raises Refusal where others hold the lock for too long."""
        if not self.lock.acquire(timeout=LOCK_TIMEOUT_S):
            raise Refusal(Reason.BUSY, "another call has not ended in time; kubelet may try again")
        try:
            yield
        finally:
            self.lock.release()

    def restore(self, allocations: Mapping[tuple[str, str], Allocation], *, orphans: bool = True) -> None:
        """Take over what is known from the state file and kubelet; `orphans`: remove regions that nobody knows."""
        with self.locked():
            self.index = AllocationIndex(allocations.values())
            known = {item.region for item in allocations.values()}
            for orphan in self.regions.remove_orphans(known) if orphans else ():
                log.info("removed the region %s, which no container has", orphan)
            neighbours = Neighbours(allocations.values())
            for allocation in allocations.values():
                try:
                    if self.regions.ensure(allocation, neighbours.shared(allocation)):
                        log.warning(
                            "the region of %s was gone; made again", allocation.name, extra=fields(allocation.fields)
                        )
                except Refusal as refusal:
                    log.warning("%s", refusal.message, extra=fields(allocation.fields, reason=refusal.reason))
            self.save(self.index.values())

    def save(self, put: Iterable[Allocation], drop: Collection[tuple[str, str]] = ()) -> None:
        """`put` stands in the index already, `drop` may still.

        Raises Refusal; then the files say what they said before.
        """
        gone = set(drop)
        try:
            self.state.append([*put], drop, lambda: [item for key, item in self.index.items() if key not in gone])
        except StateError as error:
            raise Refusal(Reason.STATE_UNWRITABLE, str(error)) from error

    def sync(self) -> None:
        """Bring what is saved to the disk, and fold a long journal; for a moment when no pod is being admitted."""
        self.state.sync()
        if not self.state.long:
            return
        try:
            self.state.fold(self.lock, self.index.values)
        except StateError as error:
            log.warning("%s", error)

    def neighbours(self, allocation: Allocation) -> Neighbours:
        """Who is on the cards of one allocation."""
        cards = {share.uuid for share in allocation.shares}
        return Neighbours(self.index.on_cards(cards), cards)

    def reshare(self, cards: Collection[str]) -> None:
        """Have the regions on these cards (UUIDs) say who is there now; under the lock."""
        self.regions.reshare(self.index, cards)
