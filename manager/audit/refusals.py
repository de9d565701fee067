"""Memory that containers were refused, told to their pods: who reads only events learns why an allocation failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from manager.allocations.record import Allocation
from manager.audit.consequences import Tell
from manager.audit.owners import Key
from vcuda.region import CardUsage, Usage
from vcuda.spec.units import BLOCK_BYTES, format_bytes

# The counters are in the tenant's own file: whoever drives them up gets no more events than this for a container.
BETWEEN_EVENTS_S = 600.0
# An event need not come sooner: to read 200 accounts every ten seconds doubled what an idle daemon takes.
LOOK_EVERY_S = 60.0


class Refusals:
    """Looks at the containers' counters again and again.

    What was counted before the first look was told by an earlier daemon.
    """

    def __init__(
        self, usage: Callable[[Allocation], Usage | None], tell: Tell, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._usage, self._tell, self._clock = usage, tell, clock
        self._told: dict[Key, tuple[int, float]] | None = None  # refusals, and when they were told
        self._looked = float("-inf")

    def look(self, allocations: Sequence[Allocation]) -> None:
        if self._clock() - self._looked < LOOK_EVERY_S:
            return
        self._looked = self._clock()
        before, self._told = self._told, {}
        for item in allocations:
            usage = self._usage(item)
            count, at = (before or {}).get(item.key, (0, float("-inf")))
            if usage is not None:
                now = sum(card.refusals for card in usage.cards)
                if before is None or now < count:
                    count = now
                elif now > count and self._clock() - at >= BETWEEN_EVENTS_S:
                    self._tell(item, "MemoryRefused", _message(item, usage.cards, now - count))
                    count, at = now, self._clock()
            self._told[item.key] = count, at


def _message(item: Allocation, cards: Sequence[CardUsage], times: int) -> str:
    limits = {share.uuid: share.memory_blocks * BLOCK_BYTES for share in item.shares}
    shares = "; ".join(
        f"of card {card.uuid} {format_bytes(card.memory_used_bytes)} of {format_bytes(limits[card.uuid])} are in use, "
        f"{format_bytes(max(0, card.memory_used_bytes - card.ledger_bytes))} of it overhead, "
        f"{format_bytes(card.memory_peak_bytes)} at most"
        for card in cards
        if card.refusals and card.uuid in limits
    )
    return (
        f"container {item.container} was refused GPU memory {times} times because its share is full, "
        f"not the card: {shares}. "
        "Its standard error says how much was asked for; ask for more vcuda-memory or use less"
    )
