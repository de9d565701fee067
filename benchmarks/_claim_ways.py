"""Ways to place claims on cards (DRA), as schedulers of the simulation: who chooses the node, and which of its cards.

kube-scheduler's allocator takes the first device that fits, in the order of the ResourceSlice, and looks at no score of
devices; an extender may refuse nodes. Sources: Kubernetes 1.36, pkg/scheduler/framework/plugins/{dynamicresources,
noderesources} and staging/src/k8s.io/dynamic-resource-allocation/structured.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from scheduler_ext.lab.simulate import Extender, Scheduler
from scheduler_ext.lab.trace import TracePod
from scheduler_ext.scoring.scores import Scores, first_fitting
from scheduler_ext.scoring.typical_pods import Typical, Workload
from scheduler_ext.state.cluster import Bools, Cluster, Ints
from scheduler_ext.state.shape import Shape, Step
from vcuda.spec.request import CardFilter

_FULL = 1 << 40  # sorts behind all that fits


class Order(enum.Enum):
    """The devices of a slice: as they were made, or written again after each allocation, the fullest card first."""

    STATIC = "by name"
    FULLEST = "fullest first"
    BEHIND = "fullest first, one allocation late"


def _fitting(cluster: Cluster, rows: Ints, step: Step, models: Bools) -> Bools:
    """[k, cards]: where one card's part of a step fits."""
    cores, blocks = cluster.free_cores[rows], cluster.free_blocks[rows]
    need = cluster.total_blocks[rows] if step.whole else step.blocks
    return cluster.usable[rows] & models[cluster.model[rows]] & (cores >= step.cores) & (blocks >= need)


class FirstFit:
    """The cards that kube-scheduler's allocator takes on each node."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._seen: Ints | None = None  # free cores as the last slices say
        self._changed: Ints | None = None

    def taken(self, cluster: Cluster, rows: Ints, shape: Shape) -> tuple[Bools, Bools]:
        """[k]: whether a pod of one container fits; [k, cards]: which cards it would get."""
        (step,) = shape.steps
        models = np.array([shape.models.allows(model) for model in cluster.models] or [True], np.bool_)
        fits = _fitting(cluster, rows, step, models)
        rank = self._ranks(cluster)[rows]
        rank = np.where(fits, rank, _FULL)
        order = np.argsort(rank, axis=1, kind="stable")[:, : step.cards]
        taken = np.zeros_like(fits)
        np.put_along_axis(taken, order, np.True_, axis=1)
        return fits.sum(axis=1) >= step.cards, taken & fits

    def _ranks(self, cluster: Cluster) -> Ints:
        """Least first; of equals the first by name."""
        if self._order is Order.STATIC:
            return np.zeros_like(cluster.free_cores)
        if self._order is Order.FULLEST:
            return cluster.free_cores
        if self._seen is None or self._changed is None:
            self._seen, self._changed = cluster.free_cores.copy(), cluster.changed.copy()
            self._now, self._clock = self._seen.copy(), self._changed.copy()
        moved = np.flatnonzero(cluster.changed != self._clock)
        # What stood in the slice before the node's last change is what kube-scheduler still sees of it.
        self._seen[moved] = self._now[moved]
        self._now[moved], self._clock[moved] = cluster.free_cores[moved], cluster.changed[moved]
        return self._seen


class KubeScheduler:
    """kube-scheduler alone: its scores of cpu and memory choose the node for all pods, equals by lot."""

    def __init__(self, order: Order, *, most_allocated: bool, seed: int, cards_last: bool = False) -> None:
        """`cards_last`: pods without a card go where the extender sends them, by its prioritize verb for them."""
        self._first, self._most, self._dice = FirstFit(order), most_allocated, random.Random(seed)
        self._extender = Extender() if cards_last else None
        self._capacity: tuple[Ints, Ints] | None = None

    def _best(self, cluster: Cluster, rows: Ints, cpu_milli: int, memory_bytes: int) -> int | None:
        if self._capacity is None:  # nothing is booked at the first pod
            self._capacity = cluster.free_cpu.copy(), cluster.free_memory.copy()
        if not len(rows):
            return None
        used = []
        amounts = ((cluster.free_cpu, cpu_milli or 100), (cluster.free_memory, memory_bytes or 200 << 20))
        for (free, asked), capacity in zip(amounts, self._capacity, strict=True):
            whole = np.maximum(capacity[rows], 1)
            used.append(np.minimum((whole - free[rows] + asked) / whole, 1.0))
        allocated = np.floor(100 * (used[0] + used[1]) / 2)
        balanced = np.floor(100 * (1 - np.abs(used[0] - used[1]) / 2))
        score = (allocated if self._most else 100 - allocated) + balanced
        return int(self._dice.choice(rows[score == score.max()].tolist()))

    def place(
        self, cluster: Cluster, rows: Ints, shape: Shape, typical: Typical  # noqa: ARG002 - it looks at no shares
    ) -> tuple[int, list[int]] | None:  # fmt: skip
        fits, taken = self._first.taken(cluster, rows, shape)
        row = self._best(cluster, rows[fits], shape.cpu_milli, shape.memory_bytes)
        return None if row is None else (row, _columns(taken[int(np.flatnonzero(rows == row)[0])]))

    def place_without_card(self, cluster: Cluster, rows: Ints, pod: TracePod) -> int | None:
        if self._extender is not None:
            return self._extender.place_without_card(cluster, rows, pod)
        return self._best(cluster, rows, pod.cpu_milli, pod.memory_bytes)


def _columns(taken: Bools) -> list[int]:
    return [int(column) for column in np.flatnonzero(taken)]


class ByExtender(Extender):
    """Our extender lets one node through; kube-scheduler takes that node's cards."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self._first = FirstFit(order)

    def place(self, cluster: Cluster, rows: Ints, shape: Shape, typical: Typical) -> tuple[int, list[int]] | None:
        place = super().place(cluster, rows, shape, typical)
        if place is None:
            return None
        _, taken = self._first.taken(cluster, np.array([place[0]]), shape)
        return place[0], _columns(taken[0])


class ByBook(Extender):
    """Nodes weighed by their first card that fits, where a claim's selector of models is kube-scheduler's alone.

    It offers only nodes that have such a card, and takes it there; the extender knows neither for one pod nor from the
    arrivals which models are asked for.
    """

    def __init__(self) -> None:
        super().__init__(Scores(allowed=first_fitting))
        self._first, self._workload, self._arrived = FirstFit(Order.STATIC), Workload(), 0

    def place(
        self, cluster: Cluster, rows: Ints, shape: Shape, typical: Typical  # noqa: ARG002 - it has its own
    ) -> tuple[int, list[int]] | None:  # fmt: skip
        fits, taken = self._first.taken(cluster, rows, shape)
        known = replace(shape, models=CardFilter())
        self._workload.observe(known)
        self._arrived += 1
        place = super().place(cluster, rows[fits], known, self._workload.typical(cluster, float(self._arrived)))
        return None if place is None else (place[0], _columns(taken[int(np.flatnonzero(rows == place[0])[0])]))


BUILT, BOTH = "node by us for the card by name", "node and card by us"  # what is built; what it is compared with

Way = Callable[[int], Scheduler]

# Those that allocate by themselves (a selector on the card written at admission, status.allocation) place what the
# extender places, as long as nobody leaves: Extender.
WAYS: dict[str, Way] = {
    "kube-scheduler, by name": lambda seed: KubeScheduler(Order.STATIC, most_allocated=False, seed=seed),
    "kube-scheduler, fullest card first": lambda seed: KubeScheduler(Order.FULLEST, most_allocated=False, seed=seed),
    "kube-scheduler MostAllocated, by name": lambda seed: KubeScheduler(Order.STATIC, most_allocated=True, seed=seed),
    "kube-scheduler MostAllocated, fullest": lambda seed: KubeScheduler(Order.FULLEST, most_allocated=True, seed=seed),
    "the same, pods without a card by us": lambda seed: KubeScheduler(
        Order.FULLEST, most_allocated=True, seed=seed, cards_last=True
    ),
    "node by us, by name": lambda _: ByExtender(Order.STATIC),
    "node by us, fullest card first": lambda _: ByExtender(Order.FULLEST),
    "node by us, fullest, one late": lambda _: ByExtender(Order.BEHIND),
    "the same, selectors not read": lambda _: ByBook(),
    BUILT: lambda _: Extender(Scores(allowed=first_fitting)),
    BOTH: lambda _: Extender(),
}
