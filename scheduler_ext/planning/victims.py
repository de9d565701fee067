"""Whom to evict so that a pod fits on a node's cards: the lowest priorities, then the fewest pods. Works on a copy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler_ext.planning.evidence import CandidateNodes, Freed, Holder
from scheduler_ext.protocol.reasons import FITS
from scheduler_ext.scoring.exact_search import Budget
from scheduler_ext.scoring.least import least
from scheduler_ext.state.cluster import Bools, Ints

_MOST_SETS = 300  # of one size, on one node: beyond that the search is greedy
_MOST_SETS_IN_ALL = 30_000  # half a second
_MOST_CHOICES = 20_000  # of cards, on one node: for the sets of few pods, and as many for all else


@dataclass(frozen=True, slots=True)
class Proposal:
    """What kube-scheduler proposes to evict from a node.

    `shares`: UIDs of pods with a share. `others`: how many pods without one; they go in any case, freeing
    `cpu_milli` and `memory_bytes`.
    """

    shares: frozenset[str] = frozenset()
    others: int = 0
    cpu_milli: int = 0
    memory_bytes: int = 0


Set = tuple[Holder, ...]


class _Search:
    def __init__(self, candidates: CandidateNodes, priority: int, proposals: Sequence[Proposal]) -> None:
        self._candidates, self._proposals = candidates, proposals
        # What is being deleted goes without us; the rest, those who should stay first.
        self._leaving = [tuple(one for one in held if one.leaving) for held in candidates.holders]
        self._may = [
            self._ordered(position, [one for one in held if one.bound and not one.leaving and one.priority < priority])
            for position, held in enumerate(candidates.holders)
        ]  # fmt: skip
        # So that what is found of a node does not depend on which others are looked at with it.
        self._budgets = [Budget(_MOST_CHOICES) for _ in proposals]
        self._of_sets = [Budget(_MOST_CHOICES) for _ in proposals]
        self._all = least(candidates.shape)
        self._left = candidates.freed(np.arange(len(proposals)), self._leaving)
        self._least = np.array([self._needed(position) for position in range(len(proposals))], np.int64).reshape(-1, 2)

    def _ordered(self, position: int, held: list[Holder]) -> list[Holder]:
        """High priorities stay first; among equals those on cards with many pods, so that few have to go elsewhere."""
        crowd: dict[str, int] = {}
        for one in held:
            for uuid in one.usage.cards:
                crowd[uuid] = crowd.get(uuid, 0) + 1
        proposed = self._proposals[position].shares

        def key(one: Holder) -> tuple[int, int, bool, str]:
            most = max((crowd[uuid] for uuid in one.usage.cards), default=0)
            return -one.priority, -most, one.uid in proposed, one.uid

        return sorted(held, key=key)

    def _needed(self, position: int) -> tuple[int, int]:
        """The cpu and memory that evicted shares must free: what lacks, but never more than the proposal frees."""
        candidates, proposal = self._candidates, self._proposals[position]
        named = [one for one in candidates.holders[position] if one.uid in proposal.shares and not one.leaving]
        gone = self._leaving[position]
        lacks = (
            candidates.shape.cpu_milli - int(candidates.view.free_cpu[position]) - proposal.cpu_milli
            - sum(one.usage.cpu_milli for one in gone),
            candidates.shape.memory_bytes - int(candidates.view.free_memory[position]) - proposal.memory_bytes
            - sum(one.usage.memory_bytes for one in gone),
        )  # fmt: skip
        frees = (sum(one.usage.cpu_milli for one in named), sum(one.usage.memory_bytes for one in named))
        return min(lacks[0], frees[0]), min(lacks[1], frees[1])

    def fits(self, pairs: Sequence[tuple[int, Set]], budgets: Sequence[Budget] | None = None) -> Bools:
        """Whether the pod fits on each position when those pods, and those that leave anyway, are gone."""
        if not pairs:
            return np.zeros(0, np.bool_)
        positions = np.array([position for position, _ in pairs])
        return self._fit(positions, self._candidates.freed(positions, [gone for _, gone in pairs]), budgets)

    def _fit(self, positions: Ints, freed: Freed, budgets: Sequence[Budget] | None = None) -> Bools:
        """`freed`: by those who are evicted; those who leave anyway are added here."""
        needed = self._least[positions]
        fitting: Bools = (freed.cpu_milli >= needed[:, 0]) & (freed.memory_bytes >= needed[:, 1])
        freed = freed.plus(self._left.at(positions))
        fitting &= ~self._lacks(positions, freed).any(axis=1)
        at = np.flatnonzero(fitting)
        codes = self._candidates.codes_with(positions[at], freed.at(at), budgets=budgets or self._budgets)
        fitting[at] = codes == FITS
        return fitting

    def _lacks(self, positions: Ints, freed: Freed) -> Ints:
        """What the cards have too little of in sum: most sets are left there."""
        candidates, view = self._candidates, self._candidates.view
        cores, blocks = view.free_cores[positions] + freed.cores, view.free_blocks[positions] + freed.blocks
        return self._all.lacks(candidates.usable(positions), cores, blocks)

    def _fewest(self, sets: dict[int, Set]) -> dict[int, int]:
        """How many have to go at least, of each set that would do: those with the most free no more than that."""
        positions = np.array(list(sets), np.int64)
        lacks = self._lacks(positions, self._left.at(positions))[:, :2].tolist()
        found = {}
        for (position, may), lacking in zip(sets.items(), lacks, strict=True):
            shares = [one.usage.cards.values() for one in may]
            most = 1
            for kind, lack in enumerate(lacking):
                frees = sorted((sum(share[kind] for share in ones) for ones in shares), reverse=True)
                sums = itertools.accumulate(frees)
                most = max(most, next((count for count, freed in enumerate(sums, 1) if freed >= lack), len(may)))
            found[position] = most
        return found

    def highest(self) -> dict[int, int]:
        """Positions that can be freed → how high the highest priority among the victims has to be, at least."""
        levels = {position: sorted({one.priority for one in may}) for position, may in enumerate(self._may)}
        able = self.fits([(position, tuple(may)) for position, may in enumerate(self._may)])
        spans = {position: [-1, len(levels[position]) - 1] for position in np.flatnonzero(able).tolist()}
        none = self.fits([(position, ()) for position in spans])
        for position, free in zip(list(spans), none.tolist(), strict=True):
            if free:
                spans[position][1] = -1
        while busy := [position for position, (low, high) in spans.items() if high - low > 1]:
            middles = [sum(spans[position]) // 2 for position in busy]
            tried = self.fits(
                [
                    (position, self.up_to(position, levels[position][middle]))
                    for position, middle in zip(busy, middles, strict=True)
                ]
            )
            for position, middle, enough in zip(busy, middles, tried.tolist(), strict=True):
                spans[position][1 if enough else 0] = middle
        return {
            position: levels[position][high] if high >= 0 else -(2**31) - 1 for position, (_, high) in spans.items()
        }

    def up_to(self, position: int, level: int) -> Set:
        return tuple(one for one in self._may[position] if one.priority <= level)

    def cost(self, position: int, gone: Set) -> tuple[int, int, int, int, list[str]]:
        """Fewest pods, then lowest priorities, then those proposed, then the smallest shares."""
        proposed = self._proposals[position].shares
        return (
            len(gone), sum(one.priority for one in gone), sum(one.uid not in proposed for one in gone),
            sum(cores for one in gone for cores, _ in one.usage.cards.values()), sorted(one.uid for one in gone),
        )  # fmt: skip

    def smallest(self, levels: dict[int, int]) -> dict[int, Set]:
        """Per position a smallest set: exact where few enough sets are to be tried, else one that can't shrink."""
        found: dict[int, Set] = {position: () for position, level in levels.items() if level < -(2**31)}
        open_ = {position: self.up_to(position, level) for position, level in levels.items() if position not in found}
        tried, here, fewest = 0, open_, self._fewest(open_)
        for size in itertools.count(1):
            here = {
                position: may
                for position, may in here.items()
                if position not in found and size < len(may) and math.comb(len(may), size) <= _MOST_SETS
            }
            pairs = [
                (position, some)
                for position, may in here.items()
                if size >= fewest[position]
                for some in itertools.combinations(may, size)
            ]
            tried += len(pairs)
            if not here or tried > _MOST_SETS_IN_ALL:
                break
            able = self.fits(pairs, self._of_sets)
            fitting = [pair for pair, fits in zip(pairs, able.tolist(), strict=True) if fits]
            for position, some in fitting:
                if position not in found or self.cost(position, some) < self.cost(position, found[position]):
                    found[position] = some
        return found | self._shrunk({position: may for position, may in open_.items() if position not in found})

    def _shrunk(self, sets: dict[int, Set]) -> dict[int, Set]:
        """One after the other stays, of whom the pod does not need that they go.

        What the rest frees is not summed anew each time.
        """
        positions = np.array(list(sets), np.int64)
        freed = self._candidates.freed(positions, list(sets.values()))
        going: dict[int, list[Holder]] = {position: [] for position in sets}
        for step in range(max(map(len, sets.values()), default=0)):
            ones = [may[step : step + 1] for may in sets.values()]
            without = freed.less(self._candidates.freed(positions, ones))
            fits = self._fit(positions, without)
            for position, one, stays in zip(sets, ones, fits.tolist(), strict=True):
                if not stays:
                    going[position] += one
            freed = freed.where(fits, without)
        return {position: tuple(gone) for position, gone in going.items()}


def choose(candidates: CandidateNodes, priority: int, proposals: Sequence[Proposal]) -> list[tuple[Set, Set] | None]:
    """Per node: (the shares to evict, who is leaving anyway); None where no eviction below `priority` lets the pod in.

    The highest priority among the victims is as low as it can be; then their number, then the sum of their priorities.
    Nobody of `priority` or above, and nobody whom the API server has not shown on the node, is chosen. Where the
    pod would fit without any eviction that we know of, the proposal stands: kube-scheduler has its reasons.
    """
    search = _Search(candidates, priority, proposals)
    chosen = search.smallest(search.highest())
    answers: list[tuple[Set, Set] | None] = [None] * len(proposals)
    for position, gone in chosen.items():
        named = proposals[position].shares
        going = gone or tuple(
            one
            for one in candidates.holders[position]
            if one.uid in named and one.bound and (one.priority < priority or one.leaving)
        )
        leaving = tuple(one for one in candidates.holders[position] if one.leaving and one.bound)
        answers[position] = (going, leaving)
    return answers
