"""The typical pods: which shapes the cluster is asked for, and how often; what fragmentation is measured against."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from scheduler_ext.scoring import prices
from scheduler_ext.state.cluster import Bools, Cluster, Floats, Ints, Supply
from scheduler_ext.state.shape import Shape, Step
from vcuda.spec.request import CardFilter
from vcuda.spec.units import CORES_PER_CARD

_MOST_SHAPES = 32  # the most frequent ones; the rest is folded away
_COVERED = 0.95  # or fewer, once they cover this part of all pods seen (as in the paper)
_MOST_KINDS = 1024  # what mean needs, values and rents are worked out from
_MEMORY = 10_000  # pods after which the past counts half
_MOST_COUNTED = 4096  # kinds, or earlier: pods of ever new kinds must not fill our memory
_REFRESH_SECONDS = 60.0
_DRIFT = 0.05  # total variation below which the old distribution is kept: recomputing all scores is not free

# Before anything was seen: shares of three sizes and whole cards, weighted as pods rather than as cards.
_PRIOR_PODS = 20.0
_PRIOR = (
    (10, 1, 0.1),
    (25, 1, 0.15),
    (50, 1, 0.25),
    (100, 1, 0.4),
    (200, 2, 0.04),
    (400, 4, 0.03),
    (800, 8, 0.03),
)


@dataclass(frozen=True, eq=False)
class Typical:
    """Typical pods as arrays, [m]. `allowed` is [card models, m], or None if no typical pod chooses its model.

    `cpu_per_card` (milli) and `memory_per_card` (bytes): the mean need of all pods that request any; tiny if none does.
    `values` [card models, 101]: what a card's free hundredths are worth; `rent` [sizes of nodes, card models]; both in
    cards, see prices.py.
    """

    version: int
    cores: Ints
    blocks: Ints
    cards: Ints
    whole: Bools
    cpu_milli: Ints
    memory_bytes: Ints
    weight: Floats
    allowed: Bools | None
    cpu_per_card: float
    memory_per_card: float
    values: Floats
    rent: Floats


class Kind(NamedTuple):
    """A typical pod: its largest container's wish, the whole pod's cpu and memory, the models it accepts."""

    step: Step
    cpu_milli: int
    memory_bytes: int
    models: CardFilter


@functools.lru_cache(maxsize=1024)
def kind_of(shape: Shape) -> Kind:
    """The kind that a class of pods counts as: that of its largest step."""
    largest = max(shape.steps, key=lambda step: (step.cards, step.cores, step.blocks))
    return Kind(largest, shape.cpu_milli, shape.memory_bytes, shape.models)


def _prior() -> dict[Kind, float]:
    steps = ((Step(min(cores, 100), cores // 10 if cores < 100 else 0, cards, cores >= 100, False, 0), weight)
             for cores, cards, weight in _PRIOR)  # fmt: skip
    return {Kind(step, 0, 0, CardFilter()): weight * _PRIOR_PODS for step, weight in steps}


class Workload:
    """Counts the shapes of pods and, from time to time, makes a new `Typical` of them."""

    def __init__(
        self, pods: Iterable[Shape] | None = None, *, covered: float = _COVERED, most: int = _MOST_SHAPES
    ) -> None:
        """Start from known pods, all of equal weight, or from a general guess that real pods soon outweigh."""
        self._counts: dict[Kind, float] = _prior() if pods is None else {}
        self._total = sum(self._counts.values())
        self._covered, self._most = covered, most
        self._refreshed = float("-inf")
        self._weights: dict[Kind, float] = {}
        self._supply: Ints = np.zeros((0, 0), np.int64)
        self._typical: Typical | None = None
        self.aside = False  # whether `learn` makes new versions
        for shape in pods or ():
            self.observe(shape)

    def observe(self, shape: Shape) -> None:
        """Count one pod."""
        if not shape.steps:
            return
        kind = kind_of(shape)
        self._counts[kind] = self._counts.get(kind, 0.0) + 1.0
        self._total += 1.0
        if self._total > 2 * _MEMORY or len(self._counts) > _MOST_COUNTED:
            halved = ((kind, count / 2) for kind, count in self._counts.items())
            # Kinds seen once, long ago, are dropped.
            self._counts = {kind: count for kind, count in halved if count > 0.5}
            self._total = sum(self._counts.values())

    def typical(self, cluster: Cluster, now: float) -> Typical:
        """The current distribution; a new version at most once a minute, and only if pods or cards have changed.

        `now` is in seconds of any monotonic clock. A new card model in the cluster makes a new version at once. Beside
        `learn` only the first version and such are made.
        """
        old = self._typical
        if old is None or len(cluster.models) != self._supply.shape[1] or (not self.aside and self._due(now)):
            self._take(self._seen(cluster, now).next(old))
        assert self._typical is not None
        return self._typical

    def learn(self, lock: AbstractContextManager[object], cluster: Cluster, now: float) -> None:
        """Make the new version, when its time has come. `lock` covers all this, but is not held meanwhile: with a
        thousand kinds that is 0.1 s.
        """
        with lock:
            self.aside, old = True, self._typical
            seen = self._seen(cluster, now) if old is not None and self._due(now) else None
        if seen is not None:
            made = seen.next(old)
            with lock:
                if self._typical is old:
                    self._take(made)

    def _due(self, now: float) -> bool:
        return now - self._refreshed >= _REFRESH_SECONDS

    def _seen(self, cluster: Cluster, now: float) -> _Seen:
        self._refreshed = now
        old = None if self._typical is None else (self._weights, self._supply)
        bounds = self._most, self._covered
        return _Seen(dict(self._counts), self._total, list(cluster.models), cluster.supply(), *bounds, old)

    def _take(self, made: _Made | None) -> None:
        if made is not None:
            self._typical, self._weights, self._supply = made


class _Made(NamedTuple):
    typical: Typical
    weights: dict[Kind, float]
    supply: Ints


class _Seen(NamedTuple):
    """What was seen so far, and what the last version was made of."""

    counts: dict[Kind, float]
    total: float
    models: list[str]
    supply: Supply
    most: int
    covered: float
    old: tuple[dict[Kind, float], Ints] | None

    def next(self, last: Typical | None) -> _Made | None:
        """None if the last version will do."""
        weights = self._most_frequent(self.most, self.covered)
        cards = self.supply.cards
        if self.old is not None and cards.shape == self.old[1].shape:
            before, supply = self.old
            # How much the numbers of cards have changed, as a part of all cards.
            grown = float(np.abs(cards - supply).sum() / max(supply.sum(), 1))
            if max(_moved(weights, before), grown) < _DRIFT:
                return None
        kinds = self._most_frequent(_MOST_KINDS, 1.0)
        version = 0 if last is None else last.version + 1
        made = _compiled(weights, kinds, self.models, self.supply, version)
        return _Made(made, weights, cards)

    def _most_frequent(self, most: int, covered: float) -> dict[Kind, float]:
        chosen: dict[Kind, float] = {}
        reached = 0.0
        for kind, count in sorted(self.counts.items(), key=lambda item: -item[1]):
            if len(chosen) == most or reached >= covered * self.total:
                break
            chosen[kind] = count
            reached += count
        return {kind: count / reached for kind, count in chosen.items()}


def _moved(new: dict[Kind, float], old: dict[Kind, float]) -> float:
    """The total variation between two distributions."""
    return sum(abs(new.get(kind, 0.0) - old.get(kind, 0.0)) for kind in new.keys() | old) / 2


def _cards(kind: Kind) -> float:
    return kind.step.cores / CORES_PER_CARD * kind.step.cards


def _per_card(weights: dict[Kind, float], amounts: list[int]) -> float:
    cards = sum(
        weight * _cards(kind) for (kind, weight), amount in zip(weights.items(), amounts, strict=True) if amount
    )
    total = sum(weight * amount for weight, amount in zip(weights.values(), amounts, strict=True))
    return max(total / cards, 1e-9) if cards else 1e-9


def _values(kinds: dict[Kind, float], blocks: Ints) -> Floats:
    """Per model what free hundredths of its cards are worth, [models, 101]; a share is as large as its scarcer half."""
    found: dict[int, Floats] = {}
    for total in sorted(set(blocks.tolist())):
        wanted: dict[int, float] = {}
        for kind, weight in kinds.items():
            if not kind.step.whole:
                size = max(kind.step.cores, -(-CORES_PER_CARD * kind.step.blocks // max(total, 1)))
                if size < CORES_PER_CARD:
                    wanted[size] = wanted.get(size, 0.0) + weight
        found[total] = prices.values(wanted)
    return np.array([found[total] for total in blocks.tolist()]).reshape(-1, CORES_PER_CARD + 1)


def _rents(kinds: dict[Kind, float], models: list[str], supply: Supply) -> Floats:
    """[sizes, models]; a kind can use what it accepts where a node is large enough for the whole pod."""
    alike: dict[tuple[CardFilter, int, tuple[int, int, int]], float] = {}
    for kind, weight in kinds.items():
        least = 0 if kind.step.whole else kind.step.blocks
        key = kind.models, least, (kind.step.cards, kind.cpu_milli, kind.memory_bytes)
        alike[key] = alike.get(key, 0.0) + weight * _cards(kind)
    chosen = {which: [which.allows(model) for model in models] for which, _, _ in alike}
    accepted = np.array([chosen[which] for which, _, _ in alike], np.bool_).reshape(len(alike), len(models))
    accepted &= np.array([least for _, least, _ in alike], np.int64)[:, None] <= supply.blocks
    needs = np.array([need for _, _, need in alike], np.int64).reshape(-1, 1, 3)
    sizes = supply.sizes.copy()
    sizes[:, 1:][sizes[:, 1:] == 0] = np.iinfo(np.int64).max  # not told
    large: Bools = np.all(needs <= sizes, axis=2)
    sorts = (large[:, :, None] & accepted[:, None, :]).reshape(len(alike), supply.cards.size)
    return prices.rents(np.array(list(alike.values())), sorts, supply.cards.ravel()).reshape(supply.cards.shape)


def _compiled(
    weights: dict[Kind, float],
    all_kinds: dict[Kind, float],
    models: list[str],
    supply: Supply,
    version: int,
) -> Typical:
    kinds = list(weights)
    choosy = any(kind.models != CardFilter() for kind in kinds)
    return Typical(
        version,
        np.array([kind.step.cores for kind in kinds], np.int64),
        np.array([kind.step.blocks for kind in kinds], np.int64),
        np.array([kind.step.cards for kind in kinds], np.int64),
        np.array([kind.step.whole for kind in kinds], np.bool_),
        np.array([kind.cpu_milli for kind in kinds], np.int64),
        np.array([kind.memory_bytes for kind in kinds], np.int64),
        np.array(list(weights.values()), np.float64),
        np.array([[kind.models.allows(model) for kind in kinds] for model in models], np.bool_).reshape(len(models), -1)
        if choosy
        else None,
        _per_card(all_kinds, [kind.cpu_milli for kind in all_kinds]),
        _per_card(all_kinds, [kind.memory_bytes for kind in all_kinds]),
        _values(all_kinds, supply.blocks),
        _rents(all_kinds, models, supply),
    )
