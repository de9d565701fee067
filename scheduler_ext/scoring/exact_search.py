"""Whether several containers fit on one node's cards together, by a bounded exact search; for rows that greed refused.

Greed takes the containers in their order: a share on the emptiest card can leave no untouched card for the next one,
though both fit. The core (vcuda/src/scheduler/exact.c) places whole cards and large shares first, tries equal cards
once, and leaves early what can't work any more: 0.1 us for each choice, where Python took 10.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from scheduler_ext.state.shape import Shape
from vcuda._native import ffi, lib

MOST_STEPS = 2000  # choices that are tried for one node: about 0.2 ms
MOST_IN_ALL = 20_000  # for all that one request looks at while others wait: about 2 ms
MOST_AHEAD = 100_000  # for a pass over all nodes between other requests: about 10 ms

Card = tuple[int, int, int]  # free cores, free blocks, all blocks; an unusable card has none of any
_Case = tuple[Shape, tuple[Card, ...]]  # one pass may look for several shapes: a gang's


class Limits(NamedTuple):
    """How much a pod may book together on some of a node's cards; at most MOST_LIMITS of them.

    `rooms`: of each limit the cores, blocks and whole cards. `counted`: by card a bit for each limit that counts it.
    """

    rooms: tuple[int, ...]
    counted: Sequence[int]


MOST_LIMITS = 63
NO_LIMIT = 2**62


class Budget:
    """How many choices may still be tried in one pass, and what was found for each shape on nodes that were alike."""

    def __init__(self, left: int = MOST_IN_ALL) -> None:
        self.left = left
        self.found: dict[_Case, list[int] | None] = {}
        self.cut: set[_Case] = set()  # where it was over before a node's own bound: nothing is known there


def search(shape: Shape, cards: Sequence[Card], budget: Budget) -> tuple[list[int] | None, bool]:
    """The columns of all steps in their order, or None if there is no way, or none was found within the bound; and
    whether that is all that can be said: false where the pass's budget was over.

    Nodes with the same cards, in whatever order, are searched once.
    """
    order = sorted(range(len(cards)), key=lambda column: cards[column])
    alike = tuple(cards[column] for column in order)
    case = shape, alike
    if case not in budget.found:
        budget.found[case] = _search(shape, alike, budget)
    picks = budget.found[case]
    return None if picks is None else [order[pick] for pick in picks], case not in budget.cut


@functools.lru_cache(maxsize=64)
def _steps(shape: Shape) -> Any:
    named = ((one.cores, one.blocks, one.cards, one.whole, one.init, one.sidecars_before) for one in shape.steps)
    return ffi.new("struct vc_step[]", list(named))


def search_within(shape: Shape, cards: Sequence[Card], limits: Limits, budget: Budget) -> tuple[list[int] | None, bool]:
    """The same where what the pod books is limited, too. Remembers nothing."""
    found = _search(shape, cards, budget, limits)
    return found, (shape, tuple(cards)) not in budget.cut


def _search(shape: Shape, cards: Sequence[Card], budget: Budget, limits: Limits | None = None) -> list[int] | None:
    held, within = [], ffi.NULL
    if limits is not None:
        held = [ffi.new("int64_t[]", limits.rooms), ffi.new("int64_t[]", list(limits.counted))]
        within = ffi.new("struct vc_rooms *", [len(limits.rooms) // 3, *held])
    left, picks = ffi.new("int64_t *", min(MOST_STEPS, budget.left)), ffi.new("int64_t[]", shape.columns)
    spent = max(0, left[0])
    free = ffi.new("struct vc_free[]", cards)
    found = lib.vc_fit_exactly(_steps(shape), len(shape.steps), free, len(cards), within, left, picks)
    if found < 0:
        raise MemoryError("no memory to look for cards in")
    budget.left -= spent - left[0]
    if not found and left[0] <= 0 and spent < MOST_STEPS:
        budget.cut.add((shape, tuple(cards)))
    return list(picks) if found else None


def some_of(kinds: Sequence[Sequence[int]], count: int) -> Iterator[tuple[int, ...]]:
    """`count` columns of groups within which all are alike, the first groups first."""
    if not count:
        yield ()
        return
    if sum(map(len, kinds)) < count:
        return
    for taken in range(min(len(kinds[0]), count), -1, -1):
        for rest in some_of(kinds[1:], count - taken):
            yield (*kinds[0][:taken], *rest)
