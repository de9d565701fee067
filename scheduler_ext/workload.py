"""The typical pods: which shapes the cluster is asked for, and how often; what fragmentation is measured against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from scheduler_ext.cluster import Bools, Floats, Ints
from scheduler_ext.shape import Shape, Step
from vcuda.spec.request import CardFilter
from vcuda.spec.units import CORES_PER_CARD

_MOST_SHAPES = 32  # the most frequent ones; the rest is folded away
_COVERED = 0.95  # or fewer, once they cover this part of all pods seen (as in the paper)
_MEMORY = 10_000  # pods after which the past counts half
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


class Typical(NamedTuple):
    """Typical pods as arrays, [m]. `allowed` is [card models, m], or None if no typical pod chooses its model.

    `cpu_per_card` (milli) and `memory_per_card` (bytes): the mean need of those that request any; tiny if none does.
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


class Kind(NamedTuple):
    """A typical pod: its largest container's wish, the whole pod's cpu and memory, the models it accepts."""

    step: Step
    cpu_milli: int
    memory_bytes: int
    models: CardFilter


def kind_of(shape: Shape) -> Kind:
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
        self._models = 0
        self._typical: Typical | None = None
        for shape in pods or ():
            self.observe(shape)

    def observe(self, shape: Shape) -> None:
        """Count one pod."""
        if not shape.steps:
            return
        kind = kind_of(shape)
        self._counts[kind] = self._counts.get(kind, 0.0) + 1.0
        self._total += 1.0
        if self._total > 2 * _MEMORY:
            halved = ((kind, count / 2) for kind, count in self._counts.items())
            # Kinds seen once, long ago, are dropped: pods with ever new requests must not fill our memory.
            self._counts = {kind: count for kind, count in halved if count > 0.5}
            self._total = sum(self._counts.values())

    def typical(self, models: Sequence[str], now: float) -> Typical:
        """The current distribution; a new version appears at most once a minute, and only if it moved.

        `now` is in seconds of any monotonic clock. A new card model in `models` makes a new version at once.
        """
        old = self._typical
        if old is not None and len(models) == self._models and now - self._refreshed < _REFRESH_SECONDS:
            return old
        self._refreshed = now
        weights = self._most_frequent()
        moved = sum(
            abs(weights.get(kind, 0.0) - self._weights.get(kind, 0.0))
            for kind in weights.keys() | self._weights
        )
        if old is not None and len(models) == self._models and moved / 2 < _DRIFT:
            return old
        self._weights, self._models = weights, len(models)
        self._typical = _compiled(weights, models, old.version + 1 if old else 0)
        return self._typical

    def _most_frequent(self) -> dict[Kind, float]:
        chosen: dict[Kind, float] = {}
        reached = 0.0
        for kind, count in sorted(self._counts.items(), key=lambda item: -item[1]):
            if len(chosen) == self._most or reached >= self._covered * self._total:
                break
            chosen[kind] = count
            reached += count
        return {kind: count / reached for kind, count in chosen.items()}


def _per_card(weights: dict[Kind, float], amounts: list[int]) -> float:
    cards = sum(
        weight * kind.step.cores / CORES_PER_CARD * kind.step.cards
        for (kind, weight), amount in zip(weights.items(), amounts, strict=True)
        if amount
    )
    total = sum(weight * amount for weight, amount in zip(weights.values(), amounts, strict=True))
    return max(total / cards, 1e-9) if cards else 1e-9


def _compiled(weights: dict[Kind, float], models: Sequence[str], version: int) -> Typical:
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
        np.array([[kind.models.allows(model) for kind in kinds] for model in models], np.bool_).reshape(
            len(models), -1
        )
        if choosy
        else None,
        _per_card(weights, [kind.cpu_milli for kind in kinds]),
        _per_card(weights, [kind.memory_bytes for kind in kinds]),
    )
