"""What would let a waiting pod in: asking for less, or the end of other pods. Found with the code that places pods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, islice

import numpy as np

from scheduler_ext.planning.evidence import CandidateNodes, Holder
from scheduler_ext.protocol.reasons import CODE_OF, FITS, ExtenderReason
from scheduler_ext.state.cluster import Ints
from scheduler_ext.state.gangs import PLACE
from scheduler_ext.state.shape import Shape, Step, in_step_order
from vcuda.spec.errors import Reason
from vcuda.spec.request import PodRequest
from vcuda.spec.units import CORES_PER_CARD

_SHORT = [
    CODE_OF[reason]
    for reason in (Reason.INSUFFICIENT_CORES, Reason.INSUFFICIENT_MEMORY, Reason.INSUFFICIENT_WHOLE_CARDS)
]
Less = tuple[tuple[str, int], ...]  # (block, core or card; how many)
_ENDABLE = [*_SHORT, CODE_OF[ExtenderReason.UNPLACED_POD]]
_MOST_TRIED = 4096  # pods, or sets of them: 20 ms
_MOST_NODES = 32  # nodes on which sets are tried that are too many to try all
_MOST_SEARCHED = 128  # nodes on which all containers ask less, those with most free: 0.4 s
_MOST_TOGETHER = 3  # pods of a set where all sets are tried
_MOST_POINTS = 8  # exchanges of cores for blocks that are looked at
_MOST_SHOWN = 3
_CUT_OFF = "perhaps less would do: the search was cut off"


@dataclass(frozen=True)
class Remedy:
    """One way out.

    `less`: what containers would have to ask less, by name; `instead`: of a container that asks a whole card, the cores
    and blocks of one that would be there; `pods`: who would have to end (NAMESPACE/NAME). `cut_off`: it is one, but
    there may be better ones that the search did not come to.
    """

    text: str
    node: str
    less: tuple[tuple[str, Less], ...] = ()
    instead: tuple[int, int] | None = None
    pods: tuple[str, ...] = ()
    cut_off: bool = False


@dataclass(frozen=True)
class _Smaller:
    """What one step, by its position, may ask less; `cost`: the part of what it asks. The smallest is told first."""

    position: int
    less: Less
    cost: float
    row: int
    instead: tuple[int, int] | None = None


def _plural(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def _least(candidates: CandidateNodes, rows: Ints, most: int, shape: Callable[[int], Shape]) -> tuple[int, Ints] | None:
    """The smallest reduction 0…most that fits somewhere, and where; fewer and fewer rows are looked at."""

    def where(amount: int, rows: Ints) -> Ints:
        found: Ints = rows[candidates.codes(rows, shape(amount)) == FITS]
        return found

    if most < 0 or not len(rows := where(most, rows)):
        return None
    low, high = -1, most
    while high - low > 1:
        middle = (low + high) // 2
        some = where(middle, rows)
        if len(some):
            high, rows = middle, some
        else:
            low = middle
    return high, rows


def _with(shape: Shape, position: int, step: Step) -> Shape:
    return replace(shape, steps=(*shape.steps[:position], step, *shape.steps[position + 1 :]))


def _reduced(step: Step, amounts: Mapping[str, int]) -> Step:
    return step._replace(
        blocks=step.blocks - amounts.get("block", 0),
        cores=step.cores - amounts.get("core", 0),
        cards=step.cards - amounts.get("card", 0),
    )


def _frontier(candidates: CandidateNodes, rows: Ints, position: int) -> Iterator[tuple[int, int, int]]:
    """Blocks and cores less of one share, and a row where that fits: none of them asks more than it must."""
    shape, step = candidates.shape, candidates.shape.steps[position]

    def smaller(blocks: int, cores: int) -> Shape:
        return _with(shape, position, _reduced(step, {"block": blocks, "core": cores}))

    cores = step.cores - 1
    for _ in range(_MOST_POINTS):
        blocks_less = _least(candidates, rows, step.blocks - 1, lambda n: smaller(n, cores))  # noqa: B023
        if blocks_less is None:
            return
        blocks, there = blocks_less
        cores_less = _least(candidates, there, cores, lambda n: smaller(blocks, n))  # noqa: B023
        assert cores_less is not None, "it fits with the most"
        cores, there = cores_less
        yield blocks, cores, int(there[0])
        cores -= 1
        if cores < 0:
            return


def _share_less(candidates: CandidateNodes, rows: Ints, position: int) -> list[_Smaller]:
    """Blocks alone, cores alone, and the smallest of both where that is smaller than either."""
    step = candidates.shape.steps[position]
    alone: list[_Smaller] = []
    both: list[_Smaller] = []
    for blocks, cores, row in _frontier(candidates, rows, position):
        less = tuple((thing, amount) for thing, amount in (("block", blocks), ("core", cores)) if amount)
        found = _Smaller(position, less, blocks / step.blocks + cores / step.cores, row)
        (both if len(less) > 1 else alone).append(found)
    best = min(both, key=lambda one: one.cost, default=None)
    if best is not None and all(best.cost < one.cost for one in alone):
        alone.append(best)
    return alone


def _part_of_a_card(candidates: CandidateNodes, rows: Ints, position: int) -> list[_Smaller]:
    """Instead of a whole card the most cores that are free on one, and the most blocks beside them."""
    shape, step = candidates.shape, candidates.shape.steps[position]

    def part(cores: int, blocks: int) -> Shape:
        return _with(shape, position, step._replace(cores=cores, blocks=blocks, whole=False))

    found = _least(candidates, rows, CORES_PER_CARD - 2, lambda n: part(CORES_PER_CARD - 1 - n, 1))
    if found is None:
        return []
    cores, there = CORES_PER_CARD - 1 - found[0], found[1]
    most = int(candidates.view.free_blocks[there].max())
    fewer = _least(candidates, there, most - 1, lambda n: part(cores, most - n))
    assert fewer is not None, "one block fits"
    less = (("core", CORES_PER_CARD - cores),)
    return [_Smaller(position, less, 1 - cores / CORES_PER_CARD, int(fewer[1][0]), (cores, most - fewer[0]))]


def _alone(candidates: CandidateNodes, rows: Ints, position: int) -> list[_Smaller]:
    """What one container would have to ask less, if the others ask what they do."""
    shape, step = candidates.shape, candidates.shape.steps[position]
    if not step.whole:
        return _share_less(candidates, rows, position)
    if step.cards == 1:
        return _part_of_a_card(candidates, rows, position)
    found = _least(candidates, rows, step.cards - 1, lambda n: _with(shape, position, _reduced(step, {"card": n})))
    return [_Smaller(position, (("card", found[0]),), found[0] / step.cards, int(found[1][0]))] if found else []


def _together(candidates: CandidateNodes, rows: Ints) -> tuple[list[Less], int] | None:
    """What all containers would have to ask less, none of it more than it must: small ones are cut last."""
    steps = candidates.shape.steps
    most = [
        {"card": step.cards - 1} if step.whole else {"block": step.blocks - 1, "core": step.cores - 1} for step in steps
    ]
    cut = [dict(amounts) for amounts in most]

    def shape(position: int, thing: str, amount: int) -> Shape:
        cuts = [amounts | {thing: amount} if at == position else amounts for at, amounts in enumerate(cut)]
        return replace(
            candidates.shape, steps=tuple(_reduced(step, each) for step, each in zip(steps, cuts, strict=True))
        )

    free = candidates.view.free_cores[rows].sum(axis=1)
    rows = rows[np.argsort(-free, kind="stable")[:_MOST_SEARCHED]]
    for position in sorted(range(len(steps)), key=lambda at: (steps[at].whole, steps[at].cores, steps[at].blocks)):
        for thing in most[position]:
            found = _least(candidates, rows, cut[position][thing], partial(shape, position, thing))
            if found is None:
                return None
            cut[position][thing], rows = found
    return [tuple((thing, amount) for thing, amount in each.items() if amount) for each in cut], int(rows[0])


def _words(container: str, less: Less) -> str:
    return f"container {container} asks {' and '.join(_plural(amount, thing) for thing, amount in less)} less"


def ways_out(candidates: CandidateNodes, asked: PodRequest, codes: Ints) -> list[Remedy]:
    """All that are told."""
    found: list[Remedy] = []
    for search in (partial(_by_asking_less, candidates, asked, codes), partial(_by_ends, candidates, codes)):
        before = len(candidates.cuts)
        ways = search()
        if len(candidates.cuts) > before:
            ways = [replace(one, text=f"{one.text} ({_CUT_OFF})", cut_off=True) for one in ways]
        found += ways
    return found


def _by_asking_less(candidates: CandidateNodes, asked: PodRequest, codes: Ints) -> list[Remedy]:
    """The least that one container would have to ask less, the smallest part of it first; else all containers."""
    rows = np.flatnonzero(np.isin(codes, _SHORT))
    names = [container.name for container in in_step_order(asked)]
    found = [one for position in range(len(names)) for one in _alone(candidates, rows, position)]
    remedies = []
    for one in sorted(found, key=lambda one: one.cost)[:_MOST_SHOWN]:
        name, node = names[one.position], candidates.nodes[one.row]
        if one.instead is None:
            how = _words(name, one.less)
        else:
            cores, blocks = (_plural(*pair) for pair in zip(one.instead, ("core", "block"), strict=True))
            how = f"container {name} asks {cores} and {blocks} of a card instead of a whole one"
        remedies.append(Remedy(f"fits on node {node} if {how}", node, ((name, one.less),), one.instead))
    if not remedies and len(names) > 1 and len(rows) and (all_of_them := _together(candidates, rows)):
        cuts, row = all_of_them
        less = tuple((name, each) for name, each in zip(names, cuts, strict=True) if each)
        how = " and ".join(_words(*each) for each in less)
        remedies.append(Remedy(f"fits on node {candidates.nodes[row]} if {how}", candidates.nodes[row], less))
    return remedies


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


def _by_ends(candidates: CandidateNodes, codes: Ints) -> list[Remedy]:
    """Whose end lets the pod in: single pods, smallest first, else the fewest and smallest on one node."""
    full = np.flatnonzero(np.isin(codes, _ENDABLE)).tolist()
    full.sort(key=lambda position: len(_pods(candidates, position)))
    for count in range(1, _MOST_TOGETHER + 1):
        sets = ((at, gone) for at in full for gone in combinations(_pods(candidates, at), count))
        tried = list(islice(sets, _MOST_TRIED))
        after = candidates.codes(np.array([at for at, _ in tried], np.int64), freed=[gone for _, gone in tried])
        found = [one for one, code in zip(tried, after.tolist(), strict=True) if code == FITS]
        if found:
            found.sort(key=lambda one: tuple(map(sum, zip(*map(_size, one[1]), strict=True))))
            return [_end(candidates, *one) for one in found[: _MOST_SHOWN if count == 1 else 1]]
        if next(sets, None) is not None:  # too many to try all: those left, and larger ones, are tried by leaving out
            break
    more = []
    for position in full[:_MOST_NODES]:
        gone = fewest(candidates, position, sorted(_pods(candidates, position), key=_size, reverse=True))
        if gone:
            more.append((len(gone), position, gone))
    if not more:
        return []
    _, position, gone = min(more, key=lambda one: one[:2])
    return [_end(candidates, position, gone)]


def _end(candidates: CandidateNodes, position: int, gone: tuple[Holder, ...]) -> Remedy:
    names, node = tuple(sorted(holder.name for holder in gone)), candidates.nodes[position]
    ends = f"pod {names[0]} ends" if len(names) == 1 else f"pods {', '.join(names)} end"
    return Remedy(f"fits on node {node} when {ends}", node, pods=names)
