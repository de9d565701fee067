"""A copy of what the engine knows that matters for one pod, so that explaining it holds up nobody."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from scheduler_ext.planning import pieces
from scheduler_ext.protocol.reasons import CODE_OF, FITS, ExtenderReason
from scheduler_ext.scoring import placing
from scheduler_ext.scoring.exact_search import Budget
from scheduler_ext.scoring.placing import Plan
from scheduler_ext.scoring.scores import allowed_cards
from scheduler_ext.scoring.typical_pods import Typical
from scheduler_ext.state.cluster import Bools, Cluster, Ints, Usage, View
from scheduler_ext.state.decisions import Decision, unpacked
from scheduler_ext.state.gangs import GangStatus
from scheduler_ext.state.pods import PodCache, Record, State
from scheduler_ext.state.shape import Shape
from vcuda.spec.inventory import Card

_CHUNK = 256
_FREED_AT_ONCE = 1024  # sets of pods
_UNPLACED = CODE_OF[ExtenderReason.UNPLACED_POD]


class ClaimStatus(NamedTuple):
    """One claim of a pod, for people. `state`: missing, foreign, impossible, undecided, waiting, assumed, allocated."""

    name: str
    state: str
    node: str | None
    cards: dict[str, tuple[int, int]]
    problem: str
    difference: str | None = None  # what its node's manager reports otherwise

    def __str__(self) -> str:
        said = {
            "missing": "has not been made yet",
            "foreign": "is of another driver",
            "impossible": self.problem,
            "undecided": self.problem,
            "waiting": "has no place yet",
            "assumed": f"is expected to be allocated on node {self.node}",
            "allocated": f"is allocated on node {self.node}",
        }
        return f"claim {self.name} {said[self.state]}" + (f"; {self.difference}" if self.difference else "")


class Holder(NamedTuple):
    """A pod with a share of a node's cards.

    `bound`: the API server has shown it there; `leaving`: it is being deleted.
    """

    uid: str
    name: str  # NAMESPACE/NAME
    usage: Usage
    priority: int = 0
    bound: bool = True
    leaving: bool = False


class Freed(NamedTuple):
    """What some pods would free, [k] positions: per card, of cpu and memory; how many have unknown cards."""

    cores: Ints  # [k, cards]
    blocks: Ints  # [k, cards]
    cpu_milli: Ints
    memory_bytes: Ints
    unplaced: Ints

    def at(self, where: slice | Ints) -> Freed:
        return Freed._make(array[where] for array in self)

    def plus(self, other: Freed) -> Freed:
        return Freed._make(mine + its for mine, its in zip(self, other, strict=True))

    def where(self, other_counts: Bools, other: Freed) -> Freed:
        """`other` on the positions where it counts, else this."""
        return Freed._make(
            np.where(other_counts.reshape(-1, *(1,) * (mine.ndim - 1)), its, mine)
            for mine, its in zip(self, other, strict=True)
        )

    def less(self, other: Freed) -> Freed:
        return Freed._make(mine - its for mine, its in zip(self, other, strict=True))


class _Held(NamedTuple):
    """What pods have, to be summed for many sets of them in a few steps: by their number, and card by card of all."""

    numbers: dict[str, int]  # by UID
    others: Ints  # [pods, 3]: cpu, memory, whether their cards are unknown
    starts: Ints  # [pods]: of its cards
    counts: Ints
    cards: Ints  # [cards of pods, 3]: column, cores, blocks

    @classmethod
    def of(cls, holders: Sequence[Sequence[Holder]], columns: Sequence[Mapping[str, int]]) -> _Held:
        numbers: dict[str, int] = {}
        others, counts, cards = list[int](), list[int](), list[int]()
        for its, ones in zip(columns, holders, strict=True):
            pieces.rest()
            for one in ones:
                numbers[one.uid] = len(numbers)
                usage, count = one.usage, 0
                others += usage.cpu_milli, usage.memory_bytes, usage.unplaced
                for uuid, use in usage.cards.items():
                    if (column := its.get(uuid)) is not None:
                        cards += column, *use
                        count += 1
                counts.append(count)
        sizes = np.array(counts, np.int64)
        return cls(
            numbers, np.array(others, np.int64).reshape(-1, 3), np.cumsum(sizes) - sizes, sizes,
            np.array(cards, np.int64).reshape(-1, 3),
        )  # fmt: skip

    def add(self, gone: Sequence[tuple[Holder, ...]], to: Freed) -> None:
        """Add what each of these sets has to a place of `to`."""
        who = np.array([self.numbers[one.uid] for ones in gone for one in ones], np.int64)
        place = np.repeat(np.arange(len(gone)), [len(ones) for ones in gone])
        for amounts, its in zip((to.cpu_milli, to.memory_bytes, to.unplaced), self.others[who].T, strict=True):
            np.add.at(amounts, place, its)
        counts = self.counts[who]
        ends = np.cumsum(counts)
        at = np.arange(ends[-1] if len(ends) else 0) + np.repeat(self.starts[who] - ends + counts, counts)
        columns, cores, blocks = self.cards[at].T
        where = np.repeat(place, counts) * to.cores.shape[1] + columns
        np.add.at(to.cores.reshape(-1), where, cores)
        np.add.at(to.blocks.reshape(-1), where, blocks)


@dataclass(frozen=True)
class CandidateNodes:
    """The nodes that a pod may use, position by position.

    Free amounts may be negative where others overbooked a card. `cuts`: one for each search that was over before all
    nodes that it was about had been looked at.
    """

    shape: Shape
    typical: Typical
    nodes: list[str]
    problem: Ints  # the node's own code, whatever the pod
    view: View
    allowed: Bools | None
    cards: list[tuple[Card, ...]]
    columns: list[Mapping[str, int]]
    holders: list[list[Holder]]
    cuts: list[int] = field(default_factory=list)

    @functools.cached_property
    def _held(self) -> _Held:
        return _Held.of(self.holders, self.columns)

    def codes(
        self, positions: Ints, shape: Shape | None = None, freed: Sequence[tuple[Holder, ...]] | None = None
    ) -> Ints:
        """Reason codes of some positions, for another shape, or as if for each the pods in `freed` had ended."""
        return self.codes_with(positions, None if freed is None else self.freed(positions, freed), shape)

    def codes_with(
        self,
        positions: Ints,
        freed: Freed | None,
        shape: Shape | None = None,
        budgets: Budget | Sequence[Budget] | None = None,
    ) -> Ints:
        """The same, with what is freed summed already.

        `budgets`: see placing.plan; per position of all. None: one of a request for each few hundred positions.
        """
        code = np.zeros(len(positions), np.int64)
        for start in range(0, len(positions), _CHUNK):
            pieces.rest()
            part = slice(start, start + _CHUNK)
            plan, problem = self._plan(
                positions[part], shape or self.shape, None if freed is None else freed.at(part), budgets
            )
            code[part] = np.where(problem == FITS, plan.code, problem)
        return code

    def picks(self, position: int, gone: tuple[Holder, ...]) -> list[int]:
        """The columns that the pod would get on a node, where it fits, if some pods had ended."""
        where = np.array([position])
        found: list[int] = self._plan(where, self.shape, self.freed(where, [gone]))[0].picks[0].tolist()
        return found

    def freed(self, positions: Ints, gone: Sequence[tuple[Holder, ...]]) -> Freed:
        """What the end of those pods would free on each position."""
        held, cards = self._held, self.view.free_cores.shape[1]
        cores, blocks = (np.zeros((len(positions), cards), np.int64) for _ in range(2))
        found = Freed(cores, blocks, *np.zeros((3, len(positions)), np.int64))
        for start in range(0, len(positions), _FREED_AT_ONCE):
            pieces.rest()
            part = slice(start, start + _FREED_AT_ONCE)
            held.add(gone[part], found.at(part))
        return found

    def let_go(self) -> None:
        """Free what is large here, a little at a time. Nothing is to be asked afterwards."""
        pieces.let_go(self.holders)

    def usable(self, positions: Ints) -> Bools:
        """[k, cards]: the cards that the pod may have."""
        usable = self.view.usable[positions]
        return usable if self.allowed is None else usable & self.allowed[positions]

    def _plan(
        self,
        positions: Ints,
        shape: Shape,
        freed: Freed | None,
        budgets: Budget | Sequence[Budget] | None = None,
    ) -> tuple[Plan, Ints]:
        view = View._make(array[positions] for array in self.view)
        problem, cores, blocks = self.problem[positions], view.free_cores, view.free_blocks
        if freed is not None:
            cores, blocks = cores + freed.cores, blocks + freed.blocks
            for place in np.flatnonzero(problem == _UNPLACED).tolist():
                if sum(one.usage.unplaced for one in self.holders[positions[place]]) <= freed.unplaced[place]:
                    problem[place] = FITS
        view = view._replace(free_cores=np.maximum(cores, 0), free_blocks=np.maximum(blocks, 0))
        allowed = None if self.allowed is None else self.allowed[positions]
        own: Budget | Sequence[Budget] = Budget() if budgets is None else budgets
        if not isinstance(own, Budget):
            own = [own[position] for position in positions.tolist()]
        plan = placing.plan(shape, view, allowed, self.typical, own)
        if isinstance(own, Budget) and own.cut:
            self.cuts.append(len(own.cut))
        return plan, problem


@dataclass(frozen=True)
class Evidence:
    """What is known about a pod. `record` is a copy; `candidates` is there if the pod waits and may fit one day.

    `waits_for`: of a nominated pod, who was evicted for it and is still there (NAMESPACE/NAME).
    `difference`: what the manager of its node reports otherwise. `ended`: by its status, not by that. `claims`: of a
    pod that has any.
    """

    decisions: list[Decision]
    record: Record | None
    candidates: CandidateNodes | None
    gang: GangStatus | None = None
    waits_for: tuple[str, ...] = ()
    difference: str | None = None
    ended: bool = False
    claims: tuple[ClaimStatus, ...] = ()


class CandidateCopy:
    """CandidateNodes in the making, node by node. The caller of `take` holds the engine's lock.

    `passed`: what is booked for such a nominated pod counts as free.
    """

    def __init__(
        self,
        cluster: Cluster,
        pods: PodCache,
        shape: Shape,
        nodes: list[str],
        passed: Callable[[Record], bool] = lambda _: False,
    ) -> None:
        self.nodes = nodes
        self._cluster, self._pods, self._shape, self._passed = cluster, pods, shape, passed
        self._place = {node: place for place, node in enumerate(nodes)}
        # One set of arrays for all nodes: tens of thousands of small ones would be work for the garbage collector.
        view = cluster.view(np.zeros(0, np.int64))
        self._view = View._make(_larger(array, (len(nodes), *array.shape[1:])) for array in view)
        self._problem = np.zeros(len(nodes), np.int64)
        self._allowed: Bools | None = None
        self._cards: list[tuple[Card, ...] | None] = [None] * len(nodes)  # None: the node is gone
        self._columns: list[Mapping[str, int]] = [{}] * len(nodes)
        self._holders: list[list[Holder]] = [[] for _ in nodes]

    def take(self, node: str) -> None:
        """Copy a node as it is now, in place of an older copy; none is left of one that is gone."""
        cluster, place = self._cluster, self._place[node]
        row = cluster.index.get(node)
        if row is None:
            self._cards[place], self._holders[place] = None, []
            return
        if cluster.usable.shape[1] > self._view.usable.shape[1]:
            self._widen(cluster.usable.shape[1])
        for name in View._fields[1:]:
            getattr(self._view, name)[place] = getattr(cluster, name)[row]
        self._view.rows[place], self._problem[place] = row, cluster.code[row]
        self._cards[place], self._columns[place] = cluster.cards[row], cluster.columns(row)
        self._holders[place] = holders = []
        for uid, usage in cluster.bookings(node).items():
            record = self._pods.get(uid)
            if record is not None and record.state is State.NOMINATED and self._passed(record):
                self._add(place, usage)
            elif record is not None and (usage.cards or usage.unplaced):
                holders.append(_holder(record, usage))
        allowed = allowed_cards(self._shape, cluster, np.array([row]))
        if allowed is not None:
            if self._allowed is None:
                self._allowed = np.zeros(self._view.usable.shape, np.bool_)
            self._allowed[place] = allowed[0]

    def _widen(self, columns: int) -> None:
        """A node with more cards than all before has come."""

        def wider(array: Any) -> Any:
            return _larger(array, (len(array),) + (columns,) * (array.ndim - 1))

        self._view = View._make(map(wider, self._view))
        self._allowed = None if self._allowed is None else wider(self._allowed)

    def _add(self, place: int, usage: Usage) -> None:
        """Give back what is booked on a node."""
        view, columns = self._view, self._columns[place]
        for uuid, (cores, blocks) in usage.cards.items():
            if uuid in columns:
                view.free_cores[place, columns[uuid]] += cores
                view.free_blocks[place, columns[uuid]] += blocks
        view.free_cpu[place] += usage.cpu_milli
        view.free_memory[place] += usage.memory_bytes

    def made(self, typical: Typical, leave_out: Container[str] = ()) -> CandidateNodes:
        """Of the nodes that are still there. Needs no lock, and comes last: what was copied is handed over."""
        cards = [() if ones is None else ones for ones in self._cards]
        lists: tuple[list[Any], ...] = (self.nodes, cards, self._columns, self._holders)
        problem, view, allowed = self._problem, self._view, self._allowed
        there = [at for at, node in enumerate(self.nodes) if self._cards[at] is not None and node not in leave_out]
        if len(there) < len(cards):
            lists = tuple([ones[at] for at in there] for ones in lists)
            problem, view = problem[there], View._make(array[there] for array in view)
            allowed = None if allowed is None else allowed[there]
        self._holders = []
        nodes, cards, columns, holders = lists
        return CandidateNodes(self._shape, typical, nodes, problem, view, allowed, cards, columns, holders)


def _larger(array: Any, shape: tuple[int, ...]) -> Any:
    new = np.zeros(shape, array.dtype)
    new[tuple(slice(size) for size in array.shape)] = array
    return new


def _holder(record: Record, usage: Usage) -> Holder:
    name = f"{record.namespace}/{record.name}"
    return Holder(record.uid, name, usage, record.priority, record.state is State.CONFIRMED, record.leaving)


def offered_now(cluster: Cluster, decision: Decision) -> list[str]:
    """The nodes that kube-scheduler offered then and that are still there. The caller holds the engine's lock."""
    if decision.offered is None:
        return []
    rows = unpacked(decision.offered)
    # A row may have got another node since.
    rows = rows[cluster.born[rows] <= decision.clock]
    return [name for row in rows.tolist() if (name := cluster.names[row])]
