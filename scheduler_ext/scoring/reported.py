"""What quotas are charged of what a node's manager says that its pods have: its own cards, once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from vcuda.spec.bookings import Use
from vcuda.spec.inventory import Card
from vcuda.spec.units import CORES_PER_CARD


class Amounts(NamedTuple):
    """Hundredths of a card, 256 MiB blocks, whole cards."""

    cores: int = 0
    blocks: int = 0
    cards: int = 0


class _Sum(NamedTuple):
    """What pods have of a card in all, and what it has."""

    all: Amounts
    most: Amounts

    def charged(self) -> Amounts:
        return Amounts(*map(min, self.all, self.most))


_NOTHING = Amounts()


class Reported:
    """Sums by node, quota and card, of which no more is charged than the card has: what a node says may be a lie, of
    any of its pods, and of one after the other. What no card of the node has is charged to nobody.

    Charged are differences, so that whoever comes, goes or is counted anew in any order leaves what is right.
    """

    def __init__(self, cards: Mapping[str, Mapping[str, int]]) -> None:
        """`cards`: the blocks of each node's. Of a node whose cards change nothing is counted meanwhile."""
        self._cards = cards
        self._sums: dict[str, dict[tuple[tuple[str, int], str], _Sum]] = {}

    def count(self, quota: tuple[str, int], node: str, use: Use, sign: int) -> Amounts:
        """A pod of a node has this, or (-1) no more. Returns what that changes of what the quota is charged."""
        blocks_of, sums = self._cards.get(node, {}), self._sums.setdefault(node, {})
        changes = []
        for uuid, (cores, blocks) in use.items():
            old = sums.get((quota, uuid))
            if old is None and (sign < 0 or uuid not in blocks_of):
                continue
            old = old or _Sum(_NOTHING, Amounts(CORES_PER_CARD, blocks_of[uuid], 1))
            more = cores, blocks, cores >= CORES_PER_CARD
            new = old._replace(all=Amounts(*(had + sign * one for had, one in zip(old.all, more, strict=True))))
            changes.append([now - had for now, had in zip(new.charged(), old.charged(), strict=True)])
            sums[quota, uuid] = new
            if new.all == _NOTHING:
                del sums[quota, uuid]
        if not sums:
            del self._sums[node]
        return Amounts(*map(sum, zip(*changes, strict=True)))


def blocks_of(cards: tuple[Card, ...]) -> Mapping[str, int]:
    """By UUID."""
    return {card.uuid: card.memory_blocks for card in cards}
