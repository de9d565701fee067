"""What limits a pod is promised: bytes by card, of the pod and of containers that share one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from manager.allocations.accounting import pod_use
from manager.allocations.record import Allocation
from vcuda.spec.request import Kind
from vcuda.spec.units import BLOCK_BYTES


def wanted(pod: Sequence[Allocation]) -> dict[str, int]:
    """Bytes by card that the pod has booked, the peak over its init containers and the rest.

    What it holds beyond that is managed memory. A card that one of its containers has whole needs no limit.
    """
    shares = [item for item in pod if not item.whole]
    whole = whole_cards(pod)
    use = pod_use(shares) if shares else {}
    return {uuid: blocks * BLOCK_BYTES for uuid, (_, blocks) in use.items() if uuid not in whole and blocks}


def whole_cards(pod: Sequence[Allocation]) -> set[str]:
    """Those that one of its containers has whole: nobody else is there."""
    return {share.uuid for item in pod if item.whole for share in item.shares}


def shares_of(pod: Sequence[Allocation]) -> list[tuple[Allocation, str, int]]:
    """Each share of a card: its container, the card's UUID, bytes."""
    return [
        (item, share.uuid, share.memory_blocks * BLOCK_BYTES) for item in pod if not item.whole for share in item.shares
    ]


def apart(pod: Sequence[Allocation]) -> list[tuple[Allocation, str, int]]:
    """The shares of cards that containers which run at the same time divide, and nobody has whole."""
    together = [row for row in shares_of(pod) if row[0].kind is not Kind.INIT]
    on_card = Counter(uuid for _, uuid, _ in together)
    limited = wanted(pod)
    return [row for row in together if on_card[row[1]] > 1 and row[1] in limited]
