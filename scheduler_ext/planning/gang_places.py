"""Looks for places for all pods of a gang at once, on a copy of the nodes: without the engine's lock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scheduler_ext.scoring import gang_search, scores
from scheduler_ext.scoring.quotas import Quotas
from scheduler_ext.scoring.scores import Scores, Table
from scheduler_ext.scoring.typical_pods import Typical
from scheduler_ext.state.cluster import Cluster, Ints, Usage
from scheduler_ext.state.pods import Record, State
from scheduler_ext.state.shape import Shape


def roomy(cluster: Cluster, quotas: Quotas, namespace: str, table: Table, rows: Ints) -> int | None:
    """The best row for one more. kube-scheduler checked the nodes' cpu and memory for one pod only: they count here."""
    shape = table.shape
    enough = (cluster.free_cpu[rows] >= shape.cpu_milli) & (cluster.free_memory[rows] >= shape.memory_bytes)
    some = rows[enough]
    closed, _ = quotas.closed(namespace, table, some)
    return scores.cheapest(table, cluster, some[~closed])


class Place(NamedTuple):
    """A place of a gang: the row of its node, and what it books there."""

    row: int
    usage: Usage


class Found(NamedTuple):
    """Places of a gang, fewer than its wishes where not all can be had. `as_planned`: its first pod has no choice."""

    places: list[Place]
    as_planned: bool = False


class Outlook(NamedTuple):
    """The nodes and a namespace's quotas as they were, and places of a gang to find there among some rows."""

    cluster: Cluster
    quotas: Quotas
    typical: Typical
    namespace: str
    rows: Ints
    wishes: list[Shape]
    held: object  # Quotas.held of then

    def places(self) -> Found:
        """Those that are there at once: for all wishes, or for as many as could be had.

        In the order of the wishes first; where that fails, what is hardest to place goes first, and places for a few
        pods are then searched exactly. Takes long, once, and needs no lock: 1,024 of nine shares are up to 0.9 s.
        """
        count, tables, order = len(self.wishes), Scores(), list(range(len(self.wishes)))
        with tables.one_budget():
            places = self._by_greed(tables, order)
            if len(places) == count or not gang_search.possible(self.wishes, self.cluster, self.rows):
                return Found(places)
            if len(set(self.wishes)) > 1:
                hard = [gang_search.hardness(shape, self.cluster) for shape in self.wishes]
                order.sort(key=lambda number: hard[number], reverse=True)
                others = self._by_greed(tables, order)
                if len(others) == count:
                    at = dict(zip(order, others, strict=True))
                    return Found([at[number] for number in range(count)], as_planned=True)
                places = max(places, others, key=len)
        exact = self._exactly() if count <= gang_search.MOST_PODS else None
        return Found(places) if exact is None else Found(exact, as_planned=True)

    def _by_greed(self, tables: Scores, order: Sequence[int]) -> list[Place]:
        """The best place for one wish after the other, up to the first that can't be had. Leaves the book as it was."""
        cluster, booked = self.cluster, list[Record]()
        for number in order:
            table = tables.table(self.wishes[number], cluster, self.typical)
            row = roomy(cluster, self.quotas, self.namespace, table, self.rows)
            if row is None:
                break
            booked.append(self._book(number, Place(row, scores.use_of(cluster, table, row))))
        for record in booked:
            cluster.release(record.uid, record.node)
            self.quotas.count(record, -1)
        return [Place(cluster.index[record.node], record.usage) for record in booked]

    def _book(self, number: int, place: Place) -> Record:
        node = self.cluster.names[place.row]
        record = Record(str(number), self.namespace, "", node, place.usage, State.RESERVED, 0.0)
        self.cluster.book(record.uid, node, place.usage)
        self.quotas.count(record, 1)
        return record

    def _exactly(self) -> list[Place] | None:
        def place(number: int, spot: gang_search.Spot) -> Place:
            cards, shape = self.cluster.cards[spot.row], self.wishes[number]
            use = {cards[column].uuid: amounts for column, amounts in spot.use.items()}
            return Place(spot.row, Usage(use, shape.cpu_milli, shape.memory_bytes))

        def allow(number: int, spot: gang_search.Spot, sign: int) -> bool:
            one, node = place(number, spot), self.cluster.names[spot.row]
            if sign > 0 and self.quotas.over(self.namespace, (), node, one.usage.cards):
                return False
            self.quotas.count(Record("", self.namespace, "", node, one.usage, State.RESERVED, 0.0), sign)
            return True

        def covering(row: int) -> object:
            return self.quotas.covering(self.namespace, self.cluster.names[row])

        search = gang_search.Search(self.wishes, self.cluster, self.rows)
        if self.quotas.of(self.namespace):
            search = gang_search.Search(
                self.wishes, self.cluster, self.rows, allow=allow, kind=covering, exactly_alike=False
            )
        found = search.run()
        return None if found is None else [place(number, spot) for number, spot in enumerate(found)]

    def has_room(self) -> bool:
        return len(self.places().places) == len(self.wishes)
