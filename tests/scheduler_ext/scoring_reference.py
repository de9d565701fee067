"""The reference of vcuda/src/scheduler: the same policies and greedy choice of cards, written with numpy, many nodes at once.

Slow and short. `test_extender_scoring` holds the C code equal to it, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from scheduler_ext.protocol.reasons import CODE_OF, FITS
from scheduler_ext.scoring.placing import Plan
from scheduler_ext.scoring.typical_pods import Typical
from scheduler_ext.state.cluster import Bools, Floats, Ints, View
from scheduler_ext.state.shape import Shape, Step
from vcuda.spec.errors import Reason
from vcuda.spec.request import Policy
from vcuda.spec.units import CORES_PER_CARD

_UNHEALTHY = CODE_OF[Reason.UNHEALTHY_CARD]
_NOT_ALLOWED = CODE_OF[Reason.CARD_NOT_ALLOWED]
_WHOLE = CODE_OF[Reason.INSUFFICIENT_WHOLE_CARDS]
_CORES = CODE_OF[Reason.INSUFFICIENT_CORES]
_MEMORY = CODE_OF[Reason.INSUFFICIENT_MEMORY]

_GROWTH_FIRST = 1e6  # more than any policy's cost of a card


class Rest(NamedTuple):
    """What is left: [k, cards] per card, [k] per node."""

    cores: Ints
    blocks: Ints
    cpu: Ints
    memory: Ints


# (view, before, after, taken, typical) → cost. `taken` [k, cards]: the cards that the container may take (one_card) or takes
# (several_cards). For one_card, `after` holds in column g the state of card g if card g is taken, all other cards
# being as before; the answer is [k, cards]. For several_cards, `after` is the state after the choice; the answer
# is [k]. Lower is better; values of impossible cards are ignored.
Score = Callable[[View, Rest, Rest, Bools, Typical], Floats]


class Scorer(NamedTuple):
    """A policy. `reads_workload`: its scores change when the typical pods do."""

    one_card: Score
    several_cards: Score


def worth(view: View, cores: Ints, blocks: Ints) -> Floats:
    """A card's rest as a fraction of the card, [k, cards]: the mean of cores and memory; 0 for unusable cards."""
    memory = blocks / np.maximum(view.total_blocks, 1)
    return np.where(view.usable, (cores / CORES_PER_CARD + memory) / 2, 0.0)


_WASTE = 10.0  # more than a share can change of a node's fragmentation: waste decides first
_STRANDED = 2.0
# Between nearly equal gradients the fuller node and card win: it keeps whole cards and empty nodes together.
_TIE_NODE = 2e-2
_TIE_CARD = 1e-3


def _takes(view: View, cores: Ints, blocks: Ints, typical: Typical) -> Bools:
    """[k, cards, m]: whether each card, in the given state, can take (one card of) each typical pod."""
    share = (cores[..., None] >= typical.cores) & (blocks[..., None] >= typical.blocks)
    untouched = (cores == CORES_PER_CARD) & (blocks == view.total_blocks)
    fits: Bools = np.where(typical.whole, untouched[..., None], share) & view.usable[..., None]
    if typical.allowed is not None:
        fits &= typical.allowed[view.model]
    return fits


def _hosts(rest: Rest, typical: Typical) -> Bools:
    """[k, m]: whether the node's cpu and memory suffice for each typical pod."""
    hosts: Bools = (rest.cpu[:, None] >= typical.cpu_milli) & (rest.memory[:, None] >= typical.memory_bytes)
    return hosts


def _fragments(view: View, rest: Rest, typical: Typical) -> tuple[Floats, Floats, Bools, Ints, Floats]:
    value = worth(view, rest.cores, rest.blocks)
    takes = _takes(view, rest.cores, rest.blocks, typical)
    count = takes.sum(axis=1)
    useful = (value[..., None] * takes).sum(axis=1)
    possible = (count >= typical.cards) & _hosts(rest, typical)
    expected = value.sum(axis=1) - (useful * possible * typical.weight).sum(axis=1)
    return expected, value, takes, count, useful


def _stranded(free: Floats, cpu: Ints, memory: Ints, typical: Typical) -> Floats:
    """Of a node's free cards (in cards), those that its cpu and memory could not serve."""
    served = np.minimum(cpu / typical.cpu_per_card, memory / typical.memory_per_card)
    return np.maximum(0.0, free - np.maximum(served, 0.0))


def fragmentation(view: View, rest: Rest, typical: Typical) -> Floats:
    """[k]: how many cards' worth of each node's free cards the expected typical pod can't use."""
    return _fragments(view, rest, typical)[0]


def waste(view: View, before: Rest, after: Rest, typical: Typical) -> Floats:
    """[k, cards]: what each card's taken part was worth beyond what is taken, in cards; below 0 where it fills a leftover.

    A part is as large as its scarcer half, cores or memory.
    """
    total = np.maximum(view.total_blocks, 1)

    # Not np.clip: on a few numbers it takes several times as long.
    def within(parts: Ints) -> Ints:
        return np.minimum(np.maximum(parts, 0), CORES_PER_CARD)

    def hundredths(cores: Ints, blocks: Ints) -> Ints:
        return within(np.minimum(cores, CORES_PER_CARD * blocks // total))

    cores, blocks = before.cores - after.cores, before.blocks - after.blocks
    taken = within(np.maximum(cores, -(-CORES_PER_CARD * blocks // total)))
    now, then = hundredths(before.cores, before.blocks), hundredths(after.cores, after.blocks)
    values, model = typical.values, view.model
    wasted: Floats = values[model, now] - values[model, then] - values[model, taken]
    return wasted


def _rent(view: View, typical: Typical) -> Floats:
    """[k, cards]; nodes of sizes that the typical pods do not know cost none."""
    known = np.where(view.size < len(typical.rent), view.size, 0)[:, None]
    rent: Floats = np.where(known == view.size[:, None], typical.rent[known, view.model], 0.0)
    return rent


def fgd_one_card(view: View, before: Rest, after: Rest, _taken: Bools, typical: Typical) -> Floats:
    now, value, takes, count, useful = _fragments(view, before, typical)
    then_value = worth(view, after.cores, after.blocks)
    then_takes = _takes(view, after.cores, after.blocks, typical)
    # Only card g changes: correct the node's sums by it instead of summing all cards again for every g.
    then_useful = useful[:, None] - value[..., None] * takes + then_value[..., None] * then_takes
    then_count = count[:, None] - takes + then_takes
    possible = (then_count >= typical.cards) & _hosts(after, typical)[:, None]
    free = value.sum(axis=1, keepdims=True) - value + then_value
    then = free - (then_useful * possible * typical.weight).sum(axis=2)
    stranded = _stranded(value.sum(axis=1), before.cpu, before.memory, typical)
    then_stranded = _stranded(free, after.cpu[:, None], after.memory[:, None], typical)
    gradient = then - now[:, None] + _STRANDED * (then_stranded - stranded[:, None])
    rent = _rent(view, typical) * (value - then_value)
    wasted = _WASTE * waste(view, before, after, typical)
    cost: Floats = wasted + gradient + rent + _TIE_NODE * free + _TIE_CARD * then_value
    return cost


def fgd_several_cards(view: View, before: Rest, after: Rest, _taken: Bools, typical: Typical) -> Floats:
    now, value, *_ = _fragments(view, before, typical)
    then, then_value, *_ = _fragments(view, after, typical)
    free: Floats = then_value.sum(axis=1)
    stranded = _stranded(value.sum(axis=1), before.cpu, before.memory, typical)
    then_stranded = _stranded(free, after.cpu, after.memory, typical)
    rent = (_rent(view, typical) * (value - then_value)).sum(axis=1)
    cost: Floats = then - now + _STRANDED * (then_stranded - stranded) + rent + _TIE_NODE * free
    return cost


_CARD_FIRST = 1000.0  # more than any node's rest in cards: the card decides, the node breaks ties


def binpack_one_card(view: View, before: Rest, after: Rest, _taken: Bools, _typical: Typical) -> Floats:
    now, then = worth(view, before.cores, before.blocks), worth(view, after.cores, after.blocks)
    cost: Floats = then * _CARD_FIRST + now.sum(axis=1, keepdims=True) + then - now
    return cost


def binpack_several_cards(view: View, _before: Rest, after: Rest, _taken: Bools, _typical: Typical) -> Floats:
    rest: Floats = worth(view, after.cores, after.blocks).sum(axis=1)
    return rest


_NODE_FIRST = 1000.0  # a node's mean rest decides down to 1/1000 card, the card breaks ties


def _mean_rest(view: View, now: Floats) -> Floats:
    cards = np.maximum(view.usable.sum(axis=1), 1)
    mean: Floats = now.sum(axis=1) / cards
    return mean


def spread_one_card(view: View, before: Rest, after: Rest, _taken: Bools, _typical: Typical) -> Floats:
    now, then = worth(view, before.cores, before.blocks), worth(view, after.cores, after.blocks)
    return -_NODE_FIRST * _mean_rest(view, now)[:, None] - then


def spread_several_cards(view: View, before: Rest, _after: Rest, _taken: Bools, _typical: Typical) -> Floats:
    return -_NODE_FIRST * _mean_rest(view, worth(view, before.cores, before.blocks))


_LINKS_FIRST = 1000.0


def topology_several_cards(view: View, before: Rest, after: Rest, taken: Bools, typical: Typical) -> Floats:
    pairs = taken[:, :, None] & taken[:, None, :]
    closeness: Floats = np.where(pairs, view.links, 0).sum(axis=(1, 2)) * _LINKS_FIRST
    return binpack_several_cards(view, before, after, taken, typical) - closeness


SCORERS: dict[Policy, Scorer] = {
    Policy.FGD: Scorer(fgd_one_card, fgd_several_cards),
    Policy.BINPACK: Scorer(binpack_one_card, binpack_several_cards),
    Policy.SPREAD: Scorer(spread_one_card, spread_several_cards),
    Policy.TOPOLOGY: Scorer(binpack_one_card, topology_several_cards),
}


def best_linked(links: Ints, free: Bools, count: int) -> Bools:
    """Pick `count` of the free cards of each node so that they are close to each other: [k, cards].

    Grown greedily from every free card as a seed; the best total closeness wins, then the lowest card.
    Rows with fewer free cards give a useless answer: the caller knows them.
    """
    if count == 1 or not links.any():
        return free & (np.cumsum(free, axis=1) <= count)
    rows, cards = free.shape
    chosen = np.eye(cards, dtype=np.bool_) & free[:, :, None]
    closeness = np.where(free, 0, -1)
    for _ in range(count - 1):
        gain = np.where(chosen | ~free[:, None, :], -1, chosen.astype(np.int64) @ links)
        best = gain.argmax(axis=2)
        np.put_along_axis(chosen, best[..., None], True, axis=2)
        closeness += np.where(free, np.take_along_axis(gain, best[..., None], axis=2)[..., 0], 0)
    picked: Bools = chosen[np.arange(rows), closeness.argmax(axis=1)]
    return picked & free


def _refusal(usable: Bools, allowed: Bools, fits: Bools, enough_cores: Bools, step: Step) -> Ints:
    enough = fits.any(axis=1) if step.cards == 1 else fits.sum(axis=1) >= step.cards
    if enough.all():
        return np.full(len(usable), FITS, np.int64)
    code = np.full(len(usable), _WHOLE if step.whole else _CORES, np.int64)
    if not step.whole:
        code[enough_cores.any(axis=1)] = _MEMORY
    code[~allowed.any(axis=1)] = _NOT_ALLOWED
    code[~usable.any(axis=1)] = _UNHEALTHY
    code[enough] = FITS
    return code


def _free_rides(fits: Bools, growth: Ints | None, step: Step) -> Bools:
    """The cards that fit; only those already booked for another phase, where these suffice."""
    if growth is None:
        return fits
    rides = fits & (growth == 0)
    return np.where((rides.sum(axis=1) >= step.cards)[:, None], rides, fits)


def plan(shape: Shape, view: View, allowed: Bools | None, typical: Typical) -> Plan:
    """Choose cards on every node of `view` for every step in turn. `allowed`: cards that the pod accepts (None: all).

    An init container's share is free again for the containers after it, so each card's peak over the phases is
    booked (`vcuda.spec.placement.peak_use`) and cards that are already booked for another phase cost nothing more.
    """
    node, card = SCORERS[shape.policy], SCORERS[shape.card_policy] if shape.card_policy else None
    rows, cards = view.free_cores.shape
    acceptable = view.usable if allowed is None else view.usable & allowed
    zero = np.zeros((rows, cards), np.int64)
    booked_cores, booked_blocks = zero, zero  # the peak so far
    phases = [(zero, zero)]  # what stands after 0, 1, … containers that keep running
    cost, code = np.zeros(rows), np.zeros(rows, np.int64)
    picks = np.zeros((rows, shape.columns), np.int64)
    cpu, memory = view.free_cpu, view.free_memory
    column = 0
    for number, step in enumerate(shape.steps, 1):
        standing_cores, standing_blocks = phases[step.sidecars_before] if step.init else phases[-1]
        wanted_cores = standing_cores + step.cores
        wanted_blocks = standing_blocks + (view.total_blocks if step.whole else step.blocks)
        enough_cores = acceptable & (wanted_cores <= view.free_cores)
        fits = enough_cores & (wanted_blocks <= view.free_blocks)
        code = np.where(code == FITS, _refusal(view.usable, acceptable, fits, enough_cores, step), code)

        peak_cores, peak_blocks = (
            np.maximum(booked_cores, wanted_cores),
            np.maximum(booked_blocks, wanted_blocks),
        )
        before = Rest(view.free_cores - booked_cores, view.free_blocks - booked_blocks, cpu, memory)
        cpu, memory = view.free_cpu - shape.cpu_milli, view.free_memory - shape.memory_bytes
        after = Rest(view.free_cores - peak_cores, view.free_blocks - peak_blocks, cpu, memory)
        growth = np.where(fits, peak_cores - booked_cores + peak_blocks - booked_blocks, 0) if step.init else None
        if step.cards == 1:
            by_card = (card or node).one_card(view, before, after, fits, typical)
            costs = np.where(fits, by_card.round(9), np.inf)
            best = (costs if growth is None else costs + _GROWTH_FIRST * growth).argmin(axis=1)
            taken = np.zeros((rows, cards), np.bool_)
            taken[np.arange(rows), best] = True
            if card is None:
                cost += costs[np.arange(rows), best]
        else:
            taken = best_linked(view.links, _free_rides(fits, growth, step), step.cards)
        if step.cards > 1 or card is not None:
            after = after._replace(
                cores=np.where(taken, after.cores, before.cores),
                blocks=np.where(taken, after.blocks, before.blocks),
            )
            cost += np.round(node.several_cards(view, before, after, taken, typical), 9)
        if number == len(shape.steps) and step.cards == 1:
            picks[:, column] = best  # the usual case: no step comes that would have to know what is booked
            break
        # Columns of the taken cards, lowest first (rows that do not fit get some columns; nobody reads them).
        order = np.argsort(~taken, axis=1, kind="stable")[:, : step.cards]
        picks[:, column : column + order.shape[1]] = order
        column += step.cards

        booked_cores = np.where(taken, peak_cores, booked_cores)
        booked_blocks = np.where(taken, peak_blocks, booked_blocks)
        if not step.init:
            phases.append(
                (
                    np.where(taken, wanted_cores, standing_cores),
                    np.where(taken, wanted_blocks, standing_blocks),
                )
            )
    cost[code != FITS] = np.inf
    return Plan(cost, code, picks)
