"""A copy of what the engine knows that matters for one pod, so that explaining it holds up nobody."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from scheduler_ext.protocol.reasons import CODE_OF, FITS, ExtenderReason
from scheduler_ext.scoring import placing
from scheduler_ext.scoring.placing import Plan, Scorers
from scheduler_ext.scoring.scores import allowed_cards
from scheduler_ext.scoring.typical_pods import Typical
from scheduler_ext.state.cluster import Bools, Cluster, Ints, Usage, View
from scheduler_ext.state.decisions import Decision, unpacked
from scheduler_ext.state.gangs import GangStatus
from scheduler_ext.state.pods import PodCache, Record, State
from scheduler_ext.state.shape import Shape
from vcuda.spec.inventory import Card

_CHUNK = 256
_UNPLACED = CODE_OF[ExtenderReason.UNPLACED_POD]


class Holder(NamedTuple):
    """A pod with a share of a node's cards. `bound`: the API server has shown it there; `leaving`: it is being deleted."""

    uid: str
    name: str  # NAMESPACE/NAME
    usage: Usage
    priority: int = 0
    bound: bool = True
    leaving: bool = False


@dataclass(frozen=True)
class Ground:
    """The nodes that a pod may use, position by position. Free amounts may be negative where others overbooked a card."""

    shape: Shape
    typical: Typical
    nodes: list[str]
    problem: Ints  # the node's own code, whatever the pod
    view: View
    allowed: Bools | None
    cards: list[tuple[Card, ...]]
    columns: list[dict[str, int]]
    holders: list[list[Holder]]

    def codes(
        self, positions: Ints, shape: Shape | None = None, freed: list[tuple[Holder, ...]] | None = None
    ) -> Ints:
        """Reason codes of some positions, for another shape, or as if for each the pods in `freed` had ended."""
        code = np.zeros(len(positions), np.int64)
        for start in range(0, len(positions), _CHUNK):
            part = slice(start, start + _CHUNK)
            code[part] = self._codes(positions[part], shape or self.shape, freed[part] if freed else None)
        return code

    def picks(self, position: int, gone: tuple[Holder, ...]) -> list[int]:
        """The columns that the pod would get on a node, where it fits, if some pods had ended."""
        found: list[int] = self._plan(np.array([position]), self.shape, [gone])[0].picks[0].tolist()
        return found

    def _codes(self, positions: Ints, shape: Shape, freed: list[tuple[Holder, ...]] | None) -> Ints:
        plan, problem = self._plan(positions, shape, freed)
        return np.where(problem == FITS, plan.code, problem)

    def _plan(
        self, positions: Ints, shape: Shape, freed: list[tuple[Holder, ...]] | None
    ) -> tuple[Plan, Ints]:
        view = View._make(array[positions] for array in self.view)
        problem = self.problem[positions]
        for place, (position, gone) in enumerate(zip(positions.tolist(), freed or (), strict=False)):
            columns = self.columns[position]
            for holder in gone:
                for uuid, (cores, blocks) in holder.usage.cards.items():
                    if uuid in columns:
                        view.free_cores[place, columns[uuid]] += cores
                        view.free_blocks[place, columns[uuid]] += blocks
            if problem[place] == _UNPLACED and not any(
                holder.usage.unplaced for holder in self.holders[position] if holder not in gone
            ):
                problem[place] = FITS
        view = view._replace(
            free_cores=np.maximum(view.free_cores, 0), free_blocks=np.maximum(view.free_blocks, 0)
        )
        allowed = None if self.allowed is None else self.allowed[positions]
        return placing.plan(shape, view, allowed, Scorers.of(shape), self.typical), problem


@dataclass(frozen=True)
class Evidence:
    """What is known about a pod. `record` is a copy; `ground` is there if the pod waits and may fit somewhere one day.

    `waits_for`: of a nominated pod, who was evicted for it and is still there (NAMESPACE/NAME).
    `difference`: what the manager of its node reports otherwise.
    """

    decisions: list[Decision]
    record: Record | None
    ground: Ground | None
    gang: GangStatus | None = None
    waits_for: tuple[str, ...] = ()
    difference: str | None = None


def gather(
    cluster: Cluster, pods: PodCache, typical: Typical, decisions: list[Decision], uid: str
) -> Evidence:
    """Copy what matters. The caller holds the engine's lock."""
    record = pods.get(uid)
    last = decisions[0] if decisions else None
    if record is not None or last is None or last.shape is None or last.offered is None:
        return Evidence(decisions, replace(record) if record else None, None)
    rows = unpacked(last.offered)
    # A row may have got another node since.
    rows = rows[cluster.born[rows] <= last.clock]
    rows = rows[[bool(cluster.names[row]) for row in rows.tolist()]] if len(rows) else rows
    return Evidence(decisions, None, ground_of(cluster, pods, typical, last.shape, rows))


def _holder(record: Record, usage: Usage) -> Holder:
    name = f"{record.namespace}/{record.name}"
    return Holder(record.uid, name, usage, record.priority, record.state is State.CONFIRMED, record.leaving)


def ground_of(cluster: Cluster, pods: PodCache, typical: Typical, shape: Shape, rows: Ints) -> Ground:
    """Copy some rows of the cluster, with who holds what there. The caller holds the engine's lock."""
    nodes = [cluster.names[row] for row in rows.tolist()]
    holders = []
    for node in nodes:
        booked = [(pods.get(held), usage) for held, usage in cluster.bookings(node).items()]
        holders.append(
            [
                _holder(one, usage)
                for one, usage in booked
                if one is not None and (usage.cards or usage.unplaced)
            ]
        )
    view = cluster.view(rows)._replace(
        free_cores=cluster.free_cores[rows], free_blocks=cluster.free_blocks[rows]
    )
    cards = [cluster.cards[row] for row in rows.tolist()]
    columns = [{card.uuid: column for column, card in enumerate(ones)} for ones in cards]
    problem, allowed = cluster.code[rows], allowed_cards(shape, cluster, rows)
    return Ground(shape, typical, nodes, problem, view, allowed, cards, columns, holders)
