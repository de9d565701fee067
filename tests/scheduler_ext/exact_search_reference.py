"""The exact search as plain Python, which the core's is compared with: the same choices in the same order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scheduler_ext.scoring.exact_search import Card, some_of
from scheduler_ext.state.shape import Shape, Step
from vcuda.spec.units import CORES_PER_CARD


def _need(step: Step, card: Card) -> tuple[int, int]:
    return step.cores, card[2] if step.whole else step.blocks


def possible(shape: Shape, cards: Sequence[Card]) -> bool:
    """Whether nothing as simple as a sum stands against it."""
    standing = [step for step in shape.steps if not step.init]
    whole = sum(step.cards for step in standing if step.whole)
    untouched = sum(1 for cores, blocks, total in cards if cores >= CORES_PER_CARD and blocks >= total > 0)
    parts = [step for step in standing if not step.whole]
    return (
        whole <= untouched
        and sum(step.cores * step.cards for step in parts) + CORES_PER_CARD * whole <= sum(card[0] for card in cards)
        and sum(step.blocks * step.cards for step in parts) <= sum(card[1] for card in cards)
        and all(sum(_fits(step, card) for card in cards) >= step.cards for step in shape.steps)
    )


def _fits(step: Step, card: Card) -> bool:
    cores, blocks = _need(step, card)
    return card[2] > 0 and card[0] >= cores and card[1] >= blocks


def search(shape: Shape, cards: Sequence[Card], most: int) -> tuple[list[int] | None, int]:
    """The columns of all steps in their order, or None; and how many of the choices that may be tried are left."""
    if not possible(shape, cards):
        return None, most
    looking = _Search(shape, cards, most)
    return looking.place(0), max(0, looking.left)


class _Search:
    def __init__(self, shape: Shape, cards: Sequence[Card], most: int) -> None:
        self._steps, self._cards, self.left = shape.steps, cards, most
        self._free = [[cores, blocks] for cores, blocks, _ in cards]
        self._picks: dict[int, tuple[int, ...]] = {}
        standing = [number for number, step in enumerate(self._steps) if not step.init]
        # Whole cards first, then what is hardest to place.
        self._order = sorted(standing, key=self._size, reverse=True)

    def _size(self, number: int) -> tuple[bool, int, int]:
        step = self._steps[number]
        total = max((card[2] for card in self._cards), default=1) or 1
        return step.whole, max(step.cores, CORES_PER_CARD * step.blocks // total), step.cards

    def place(self, depth: int) -> list[int] | None:
        if depth == len(self._order):
            return self._with_inits()
        step = self._steps[self._order[depth]]
        for chosen in self._choices(step):
            self.left -= 1
            if self.left < 0:
                return None
            self._take(step, chosen, -1)
            self._picks[self._order[depth]] = chosen
            found = self.place(depth + 1)
            self._take(step, chosen, 1)
            if found is not None:
                return found
        return None

    def _take(self, step: Step, chosen: Sequence[int], sign: int) -> None:
        for column in chosen:
            cores, blocks = _need(step, self._cards[column])
            self._free[column][0] += sign * cores
            self._free[column][1] += sign * blocks

    def _choices(self, step: Step) -> Iterator[tuple[int, ...]]:
        """Sets of cards for one step, fullest cards first; of cards that are alike now, only how many matters."""
        groups: dict[tuple[int, int, int], list[int]] = {}
        for column, (cores, blocks) in enumerate(self._free):
            if _fits(step, (cores, blocks, self._cards[column][2])):
                groups.setdefault((cores, blocks, self._cards[column][2]), []).append(column)
        kinds = [groups[key] for key in sorted(groups)]
        yield from some_of(kinds, step.cards)

    def _with_inits(self) -> list[int] | None:
        """Init containers run one by one, beside the sidecars that have started before."""
        sidecars = [number for number, step in enumerate(self._steps) if not step.init]
        for number, step in enumerate(self._steps):
            if not step.init:
                continue
            free = [[cores, blocks] for cores, blocks, _ in self._cards]
            for before in sidecars[: step.sidecars_before]:
                for column in self._picks[before]:
                    cores, blocks = _need(self._steps[before], self._cards[column])
                    free[column][0] -= cores
                    free[column][1] -= blocks
            fitting = [
                column
                for column, (cores, blocks) in enumerate(free)
                if _fits(step, (cores, blocks, self._cards[column][2]))
            ]
            if len(fitting) < step.cards:
                return None
            # Where the others stand already, its share costs nothing more.
            fitting.sort(key=lambda column: self._free[column])
            self._picks[number] = tuple(fitting[: step.cards])
        return [column for number in range(len(self._steps)) for column in self._picks[number]]
