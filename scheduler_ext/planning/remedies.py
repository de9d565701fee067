"""What would let a waiting pod in: asking for less, or the end of other pods. Found with the code that places pods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from scheduler_ext.planning.evidence import CandidateNodes, Holder
from scheduler_ext.protocol.reasons import CODE_OF, FITS, ExtenderReason
from scheduler_ext.state.cluster import Ints
from scheduler_ext.state.gangs import PLACE
from scheduler_ext.state.shape import Shape, in_step_order
from vcuda.spec.errors import Reason
from vcuda.spec.request import PodRequest

_SHORT = [
    CODE_OF[reason]
    for reason in (Reason.INSUFFICIENT_CORES, Reason.INSUFFICIENT_MEMORY, Reason.INSUFFICIENT_WHOLE_CARDS)
]
Less = tuple[tuple[str, int], ...]  # (block, core or card; how many)
_ENDABLE = [*_SHORT, CODE_OF[ExtenderReason.UNPLACED_POD]]
_MOST_TRIED = 4096  # single pods: 20 ms
_MOST_NODES = 32  # nodes on which several pods are tried together
_MOST_SHOWN = 3


@dataclass(frozen=True)
class Remedy:
    """One way out.

    `less`: what one container would have to ask less; `pods`: who would have to end (NAMESPACE/NAME).
    """

    text: str
    node: str
    container: str | None = None
    less: Less = ()
    pods: tuple[str, ...] = ()


def _plural(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def _least(candidates: CandidateNodes, rows: Ints, most: int, shape: Callable[[int], Shape]) -> tuple[int, Ints] | None:
    """The smallest reduction 1…most that fits somewhere, and where; fewer and fewer rows are looked at."""

    def where(amount: int, rows: Ints) -> Ints:
        found: Ints = rows[candidates.codes(rows, shape(amount)) == FITS]
        return found

    if most < 1 or not len(rows := where(most, rows)):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        some = where(middle, rows)
        if len(some):
            high, rows = middle, some
        else:
            low = middle
    return high, where(high, rows)


def _smaller(shape: Shape, position: int, *, blocks: int = 0, cores: int = 0, cards: int = 0) -> Shape:
    old = shape.steps[position]
    step = replace(old, blocks=old.blocks - blocks, cores=old.cores - cores, cards=old.cards - cards)
    return replace(shape, steps=(*shape.steps[:position], step, *shape.steps[position + 1 :]))


def _reductions(candidates: CandidateNodes, rows: Ints, position: int) -> list[tuple[Less, str]]:
    """(what to ask less, node) for one container."""
    shape, step = candidates.shape, candidates.shape.steps[position]
    if step.whole:
        found = _least(candidates, rows, step.cards - 1, lambda n: _smaller(shape, position, cards=n))
        return [((("card", found[0]),), candidates.nodes[found[1][0]])] if found else []
    answers: list[tuple[Less, str]] = []
    found = _least(candidates, rows, step.blocks - 1, lambda n: _smaller(shape, position, blocks=n))
    if found:
        answers.append(((("block", found[0]),), candidates.nodes[found[1][0]]))
    found = _least(candidates, rows, step.cores - 1, lambda n: _smaller(shape, position, cores=n))
    if found:
        answers.append(((("core", found[0]),), candidates.nodes[found[1][0]]))
    if answers:
        return answers

    def cores_less(blocks_less: int) -> int:
        """Both in proportion."""
        return min(step.cores - 1, -(-step.cores * blocks_less // step.blocks))

    found = _least(
        candidates, rows, step.blocks - 1, lambda n: _smaller(shape, position, blocks=n, cores=cores_less(n))
    )
    if found is None:
        return []
    return [((("block", found[0]), ("core", cores_less(found[0]))), candidates.nodes[found[1][0]])]


def by_asking_less(candidates: CandidateNodes, asked: PodRequest, codes: Ints) -> list[Remedy]:
    """The least that each container, alone, would have to ask less."""
    rows = np.flatnonzero(np.isin(codes, _SHORT))
    remedies = []
    for position, container in enumerate(in_step_order(asked)):
        for less, node in _reductions(candidates, rows, position):
            amounts = " and ".join(_plural(amount, thing) for thing, amount in less)
            remedies.append(
                Remedy(
                    f"fits on node {node} if container {container.name} asks {amounts} less",
                    node,
                    container.name,
                    less,
                )
            )
    return remedies[:_MOST_SHOWN]


def _size(holder: Holder) -> tuple[int, int]:
    return (
        sum(cores for cores, _ in holder.usage.cards.values()),
        sum(blocks for _, blocks in holder.usage.cards.values()),
    )


def _pods(candidates: CandidateNodes, position: int) -> list[Holder]:
    """Who holds something on a node, without the reserved places of gangs: those end by themselves."""
    return [holder for holder in candidates.holders[position] if not holder.uid.startswith(PLACE)]


def fewest(candidates: CandidateNodes, position: int, order: list[Holder]) -> tuple[Holder, ...] | None:
    """A smallest set, no member of which could stay, whose end lets the pod in on one node; None if nothing does.

    `order`: who may go, those who should stay first.
    """
    here = np.array([position])

    def lets_in(gone: list[Holder]) -> bool:
        return int(candidates.codes(here, freed=[tuple(gone)])[0]) == FITS

    gone = list(order)
    if not lets_in(gone):
        return None
    for holder in order:
        rest = [other for other in gone if other is not holder]
        if lets_in(rest):
            gone = rest
    return tuple(gone)


def by_ends(candidates: CandidateNodes, codes: Ints) -> list[Remedy]:
    """Whose end lets the pod in: single pods, smallest first, else the fewest on one node."""
    full = np.flatnonzero(np.isin(codes, _ENDABLE)).tolist()
    pairs = [(position, holder) for position in full for holder in _pods(candidates, position)][:_MOST_TRIED]
    if not pairs:
        return []
    after = candidates.codes(np.array([position for position, _ in pairs]), freed=[(holder,) for _, holder in pairs])
    single = sorted(
        (pair for pair, code in zip(pairs, after.tolist(), strict=True) if code == FITS),
        key=lambda pair: _size(pair[1]),
    )
    if single:
        return [
            Remedy(
                f"fits on node {candidates.nodes[position]} when pod {holder.name} ends",
                candidates.nodes[position],
                pods=(holder.name,),
            )
            for position, holder in single[:_MOST_SHOWN]
        ]
    full.sort(key=lambda position: len(_pods(candidates, position)))
    sets = []
    for position in full[:_MOST_NODES]:
        gone = fewest(candidates, position, sorted(_pods(candidates, position), key=_size, reverse=True))
        if gone:
            sets.append((len(gone), position, gone))
    if not sets:
        return []
    _, position, gone = min(sets, key=lambda one: one[:2])
    names = tuple(sorted(holder.name for holder in gone))
    node = candidates.nodes[position]
    return [Remedy(f"fits on node {node} when pods {', '.join(names)} end", node, pods=names)]
