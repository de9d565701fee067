"""Whether a few pods fit on the nodes' cards together, by a bounded exact search; for small gangs that greed refused.

Greed gives each pod the node that is best for it alone: a share on the only untouched card leaves none for the next
pod, which wants a whole one, though the share would fit elsewhere. Here whole cards and large shares come first, nodes
and cards that are alike are tried once, and so is each way to leave the same room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from scheduler_ext.protocol.reasons import FITS
from scheduler_ext.scoring import scores
from scheduler_ext.scoring.exact_search import some_of
from scheduler_ext.state.cluster import Cluster, Ints
from scheduler_ext.state.shape import Shape, Step
from vcuda.spec.units import CORES_PER_CARD

MOST_PODS = 8
MOST_STEPS = 10_000  # choices of cards that are tried for one gang: about 0.4 s, of which others are served

Use = dict[int, tuple[int, int]]  # by column: cores and blocks


class Spot(NamedTuple):
    """A pod's node, and what it books of each card there."""

    row: int
    use: Use


class Card(NamedTuple):
    """What one card has left. `takers`: which of the shapes may use it."""

    cores: int
    blocks: int
    total: int
    model: int
    takers: tuple[bool, ...]


_State = tuple[tuple[Card, ...], int, int, object]  # cards, cpu, memory, and what else tells nodes apart


class _Enough(Exception):
    """All choices that may be tried were."""


class Search:
    """Of places for some pods among some rows.

    `allow`: told of a spot (1) before it counts, and says whether it may; told of it again (-1) when it is given up.
    `kind` tells apart nodes that quotas do. `exactly_alike`: whether places that leave the same room are as good.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        cluster: Cluster,
        rows: Ints,
        *,
        allow: Callable[[int, Spot, int], bool] = lambda _pod, _spot, _sign: True,
        kind: Callable[[int], object] = lambda _row: None,
        exactly_alike: bool = True,
    ) -> None:
        self._shapes, self._allow, self._alike = shapes, allow, exactly_alike
        self.left = MOST_STEPS
        self._order = sorted(range(len(shapes)), key=lambda number: hardness(shapes[number], cluster), reverse=True)
        self._kinds = list(dict.fromkeys(shapes))
        self._ids: dict[_State, int] = {}
        self._states: list[_State] = []
        states = _states(self._kinds, cluster, rows, kind)
        self._now = {row: self._id(state) for row, state in states.items()}
        self._before = dict(self._now)
        alike: dict[int, list[int]] = {}
        for row, number in self._now.items():
            alike.setdefault(number, []).append(row)
        # The fullest nodes first.
        groups = sorted(alike.items(), key=lambda group: sum(card.cores for card in self._states[group[0]][0]))
        self._groups = [
            [its for number, its in groups if _may_hold(shape, taker, self._states[number])]
            for taker, shape in enumerate(self._kinds)
        ]
        self._touched: list[int] = []
        self._spots: dict[int, Spot] = {}
        self._seen: set[object] = set()

    def _id(self, state: _State) -> int:
        number = self._ids.setdefault(state, len(self._states))
        if number == len(self._states):
            self._states.append(state)
        return number

    def run(self) -> list[Spot] | None:
        """A spot for each of the pods; None if there is no way, or none was found within the bound."""
        try:
            found = self._place(0)
        except _Enough:
            return None
        return [self._spots[number] for number in range(len(self._shapes))] if found else None

    def _place(self, depth: int) -> bool:
        if depth == len(self._order):
            return True
        if self._alike:
            left = depth, tuple(sorted((self._before[row], self._now[row]) for row in set(self._touched)))
            if left in self._seen:
                return False
            self._seen.add(left)
        number = self._order[depth]
        shape = self._shapes[number]
        taker = self._kinds.index(shape)
        for row in self._rows(taker):
            before = self._now[row]
            cards, cpu, memory, kind = self._states[before]
            if not _may_hold(shape, taker, self._states[before]):
                continue
            tried: set[tuple[Card, ...]] = set()
            for use in self._ways(shape, taker, cards):
                rest = tuple(
                    card._replace(cores=card.cores - use[at][0], blocks=card.blocks - use[at][1]) if at in use else card
                    for at, card in enumerate(cards)
                )
                if self._alike and (same := tuple(sorted(rest))) in tried:
                    continue
                if self._alike:
                    tried.add(same)
                spot = Spot(row, use)
                if not self._allow(number, spot, 1):
                    continue
                self._now[row] = self._id((rest, cpu - shape.cpu_milli, memory - shape.memory_bytes, kind))
                self._touched.append(row)
                self._spots[number] = spot
                if self._place(depth + 1):
                    return True
                self._touched.pop()
                self._now[row] = before
                self._allow(number, spot, -1)
        return False

    def _rows(self, taker: int) -> Iterator[int]:
        """Those that differ: first where something was placed, then one of each group of which nothing is used."""
        shown = set[int]()
        for row in dict.fromkeys(self._touched):
            if self._now[row] not in shown:
                shown.add(self._now[row])
                yield row
        used = set(self._touched)
        for group in self._groups[taker]:
            fresh = next((row for row in group if row not in used), None)
            if fresh is not None:
                yield fresh

    def _try(self) -> None:
        if not self.left:
            raise _Enough
        self.left -= 1

    def _ways(self, shape: Shape, taker: int, cards: Sequence[Card]) -> Iterator[Use]:
        """What a pod may book of a node's cards: its containers' shares, and where it is more, an init container's."""
        self._try()
        standing = [number for number, step in enumerate(shape.steps) if not step.init]
        standing.sort(key=lambda number: _hard(shape.steps[number], max(card.total for card in cards)), reverse=True)
        order = standing + [number for number, step in enumerate(shape.steps) if step.init]
        apps = [number for number, step in enumerate(shape.steps) if not step.init]
        picks: dict[int, tuple[int, ...]] = {}
        peaks = [(0, 0)] * len(cards)

        def had(column: int, beside: Sequence[int]) -> tuple[int, int]:
            cores = blocks = 0
            for number in beside:
                if column in picks[number]:
                    more = _need(shape.steps[number], cards[column])
                    cores, blocks = cores + more[0], blocks + more[1]
            return cores, blocks

        def rest(depth: int) -> Iterator[Use]:
            if depth == len(order):
                yield {column: peak for column, peak in enumerate(peaks) if any(peak)}
                return
            number = order[depth]
            step = shape.steps[number]
            beside = apps[: step.sidecars_before] if step.init else order[:depth]
            groups: dict[object, list[int]] = {}
            after: dict[int, tuple[int, int]] = {}
            for column, card in enumerate(cards):
                cores, blocks = _need(step, card)
                before = had(column, beside)
                peak = max(peaks[column][0], before[0] + cores), max(peaks[column][1], before[1] + blocks)
                if card.total > 0 and card.takers[taker] and peak[0] <= card.cores and peak[1] <= card.blocks:
                    after[column] = peak
                    history = tuple(other for other in order[:depth] if column in picks[other])
                    alike = history if len(apps) < len(order) else ()
                    groups.setdefault((card, peaks[column], alike), []).append(column)
            for chosen in some_of(list(groups.values()), step.cards):
                self._try()
                old = [peaks[column] for column in chosen]
                picks[number] = chosen
                for column in chosen:
                    peaks[column] = after[column]
                yield from rest(depth + 1)
                for column, peak in zip(chosen, old, strict=True):
                    peaks[column] = peak

        yield from rest(0)


def _need(step: Step, card: Card) -> tuple[int, int]:
    return step.cores, card.total if step.whole else step.blocks


def _hard(step: Step, total: int) -> tuple[bool, int, int]:
    return step.whole, max(step.cores, CORES_PER_CARD * step.blocks // max(1, total)), step.cards


def possible(shapes: Sequence[Shape], cluster: Cluster, rows: Ints) -> bool:
    """Whether nothing as simple as a sum stands against some pods together."""
    usable = cluster.usable[rows] & (cluster.code[rows] == FITS)[:, None]
    cores, blocks = (np.maximum(free[rows], 0)[usable].sum() for free in (cluster.free_cores, cluster.free_blocks))
    standing = [step for shape in shapes for step in shape.steps if not step.init]
    return bool(
        sum(step.cores * step.cards for step in standing) <= cores
        and sum(step.blocks * step.cards for step in standing if not step.whole) <= blocks
    )


def hardness(shape: Shape, cluster: Cluster) -> tuple[object, ...]:
    """Who of a gang should be placed first: whole cards, then what asks most of one card, then of all."""
    total = int(cluster.total_blocks.max(initial=1))
    each = [_hard(step, total) for step in shape.steps]
    whole = sum(step.cards for step in shape.steps if step.whole)
    return whole, max(one[1] for one in each), sum(one[1] * one[2] for one in each)


def _may_hold(shape: Shape, taker: int, state: _State) -> bool:
    """Whether each container of a pod finds its cards on a node, if it is alone there."""
    cards, cpu, memory, _ = state
    if cpu < shape.cpu_milli or memory < shape.memory_bytes:
        return False
    mine = [card for card in cards if card.takers[taker] and card.total > 0]
    for step in shape.steps:
        if sum(card.cores >= step.cores and card.blocks >= _need(step, card)[1] for card in mine) < step.cards:
            return False
    return True


def _states(shapes: Sequence[Shape], cluster: Cluster, rows: Ints, kind: Callable[[int], object]) -> dict[int, _State]:
    """The rows that any of some shapes may use, as they are."""
    rows = rows[cluster.code[rows] == FITS]
    usable = cluster.usable[rows]
    taken = [scores.allowed_cards(shape, cluster, rows) for shape in shapes]
    takers = np.stack([usable if one is None else usable & one for one in taken], axis=2).tolist()
    amounts = (cluster.free_cores, cluster.free_blocks, cluster.total_blocks, cluster.model)
    columns = [amount[rows].tolist() for amount in amounts]
    found: dict[int, _State] = {}
    for at, row in enumerate(rows.tolist()):
        count = len(cluster.cards[row])
        its = zip(*(one[at][:count] for one in columns), takers[at][:count], strict=True)
        cards = tuple(Card(cores, blocks, total, model, tuple(by)) for cores, blocks, total, model, by in its)
        if any(any(card.takers) for card in cards):
            found[row] = cards, int(cluster.free_cpu[row]), int(cluster.free_memory[row]), kind(row)
    return found
