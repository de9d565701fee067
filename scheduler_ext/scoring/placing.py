"""Choosing cards for every container of one shape on many nodes at once, and what that choice costs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from scheduler_ext.protocol.reasons import CODE_OF, FITS
from scheduler_ext.scoring import exact
from scheduler_ext.scoring.policies import SCORERS
from scheduler_ext.scoring.policies.base import Rest, Scorer
from scheduler_ext.scoring.typical_pods import Typical
from scheduler_ext.state.cluster import Bools, Floats, Ints, View
from scheduler_ext.state.shape import Shape, Step
from vcuda.spec.errors import Reason

_UNHEALTHY = CODE_OF[Reason.UNHEALTHY_CARD]
_NOT_ALLOWED = CODE_OF[Reason.CARD_NOT_ALLOWED]
_WHOLE = CODE_OF[Reason.INSUFFICIENT_WHOLE_CARDS]
_CORES = CODE_OF[Reason.INSUFFICIENT_CORES]
_MEMORY = CODE_OF[Reason.INSUFFICIENT_MEMORY]

_GROWTH_FIRST = 1e6  # more than any policy's cost of a card


class Plan(NamedTuple):
    """For each of k nodes: the cost (inf: impossible), the reason code (0: fits), the picked columns in step order."""

    cost: Floats
    code: Ints
    picks: Ints


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


class Scorers(NamedTuple):
    """What a shape is scored by: `node` alone, or `node` between nodes and `card` between the cards of one."""

    node: Scorer
    card: Scorer | None = None

    @classmethod
    def of(cls, shape: Shape) -> Scorers:
        return cls(SCORERS[shape.policy], SCORERS[shape.card_policy] if shape.card_policy else None)

    @property
    def reads_workload(self) -> bool:
        return self.node.reads_workload or (self.card is not None and self.card.reads_workload)


def plan(shape: Shape, view: View, allowed: Bools | None, scorers: Scorers, typical: Typical) -> Plan:
    """Choose cards on every node of `view` for every step in turn. `allowed`: cards that the pod accepts (None: all).

    An init container's share is free again for the containers after it, so each card's peak over the phases is
    booked (`vcuda.spec.placement.peak_use`) and cards that are already booked for another phase cost nothing more.
    """
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
        growth = (
            np.where(fits, peak_cores - booked_cores + peak_blocks - booked_blocks, 0) if step.init else None
        )
        if step.cards == 1:
            by_card = (scorers.card or scorers.node).one_card(view, before, after, fits, typical)
            costs = np.where(fits, by_card.round(9), np.inf)
            best = (costs if growth is None else costs + _GROWTH_FIRST * growth).argmin(axis=1)
            taken = np.zeros((rows, cards), np.bool_)
            taken[np.arange(rows), best] = True
            if scorers.card is None:
                cost += costs[np.arange(rows), best]
        else:
            taken = best_linked(view.links, _free_rides(fits, growth, step), step.cards)
        if step.cards > 1 or scorers.card is not None:
            after = after._replace(
                cores=np.where(taken, after.cores, before.cores),
                blocks=np.where(taken, after.blocks, before.blocks),
            )
            cost += np.round(scorers.node.several_cards(view, before, after, taken, typical), 9)
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
    if len(shape.steps) > 1:
        _second_look(shape, view, acceptable, scorers, typical, Plan(cost, code, picks))
    return Plan(cost, code, picks)


def _second_look(
    shape: Shape, view: View, acceptable: Bools, scorers: Scorers, typical: Typical, plan: Plan
) -> None:
    """Search on the rows that greed refused, and put what is found into the plan."""
    budget = exact.Budget()
    for row in np.flatnonzero((plan.code != FITS) & acceptable.any(axis=1)).tolist():
        usable = acceptable[row]
        amounts = (view.free_cores[row], view.free_blocks[row], view.total_blocks[row])
        cards = list(zip(*(np.where(usable, amount, 0).tolist() for amount in amounts), strict=True))
        found = exact.search(shape, cards, budget)
        if found is None:
            continue
        here = View._make(array[row : row + 1] for array in view)
        picks = np.array([found], np.int64)
        cores, blocks = peaks(shape, here.total_blocks, picks)
        before = Rest(here.free_cores, here.free_blocks, here.free_cpu, here.free_memory)
        after = Rest(
            here.free_cores - cores, here.free_blocks - blocks,
            here.free_cpu - shape.cpu_milli, here.free_memory - shape.memory_bytes,
        )  # fmt: skip
        cost = scorers.node.several_cards(here, before, after, cores > 0, typical)
        plan.cost[row], plan.code[row], plan.picks[row] = round(float(cost[0]), 9), FITS, found


def peaks(shape: Shape, totals: Ints, picks: Ints) -> tuple[Ints, Ints]:
    """(cores, blocks) that a shape books per card, [k, cards], with these picks: the peak over its phases."""
    rows = np.arange(len(picks))[:, None]
    zero = np.zeros_like(totals)
    peak_cores, peak_blocks = zero.copy(), zero.copy()
    phases = [(zero, zero)]
    column = 0
    for step in shape.steps:
        taken = picks[:, column : column + step.cards]
        column += step.cards
        standing = phases[step.sidecars_before] if step.init else phases[-1]
        cores, blocks = standing[0].copy(), standing[1].copy()
        cores[rows, taken] += step.cores
        blocks[rows, taken] += totals[rows, taken] if step.whole else step.blocks
        peak_cores, peak_blocks = np.maximum(peak_cores, cores), np.maximum(peak_blocks, blocks)
        if not step.init:
            phases.append((cores, blocks))
    return peak_cores, peak_blocks
