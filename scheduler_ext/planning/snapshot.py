"""A copy of nodes and bookings to plan on, so that planning holds up nobody."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from scheduler_ext.planning import pieces
from scheduler_ext.protocol.reasons import CODE_OF, FITS, ROW_CODES
from scheduler_ext.scoring.quotas import Quotas
from scheduler_ext.scoring.typical_pods import Typical
from scheduler_ext.state.cluster import Cluster, Described, Size
from scheduler_ext.state.pods import PodCache, Record
from vcuda.spec.errors import Reason


class Snapshot(NamedTuple):
    """Nodes, card models and sizes of nodes by number, all records, quotas, and the typical pods of the moment.

    Records are the engine's own: what one holds never changes in it, only how far its pod is. 100,000 copies would be
    work for the garbage collector, which holds up everybody.
    """

    nodes: list[Described]
    models: list[str]
    sizes: list[Size]
    records: list[Record]
    quotas: Quotas
    typical: Typical

    def rebuilt(self) -> tuple[Cluster, PodCache, Quotas]:
        """A cluster, pods and quotas of one's own. Models and sizes get the numbers that `typical` knows them by."""
        cluster = Cluster(len(self.nodes), max((len(node.cards) for node in self.nodes), default=0))
        for model in self.models:
            cluster.model_id(model)
        for size in self.sizes:
            cluster.size_id(size)
        for node in self.nodes:
            pieces.rest()
            # No cards at all is no problem of the node's: that code is what follows from it.
            known = node.problem in (FITS, CODE_OF[Reason.NO_CARDS])
            problem = None if known else ROW_CODES[node.problem]
            cluster.set_node(node.name, node.cards, node.cpu_milli, node.memory_bytes, problem)
        quotas = self.quotas.copy(cluster)
        pods = PodCache(cluster, changed=quotas.count)
        for record in self.records:
            pieces.rest()
            pods.put(record)
        return cluster, pods, quotas


def take(
    lock: AbstractContextManager[object],
    cluster: Cluster,
    records: PodCache,
    quotas: Quotas,
    typical: Callable[[], Typical],
) -> Snapshot:
    """What is so in one moment; the lock is held for a few nodes at a time."""
    nodes: dict[str, tuple[Described | None, list[Record]]] = {}

    def copy(name: str) -> None:
        there = [one for uid in cluster.bookings(name) if (one := records.get(uid)) is not None]
        nodes[name] = cluster.described(name), there

    def last() -> tuple[list[str], list[Size], Quotas, Typical]:
        return list(cluster.models), list(cluster.sizes), quotas.copy(), typical()

    rest = pieces.copied(lock, cluster, cluster.nodes, copy, last, others=True)
    known = [node for node, _ in nodes.values() if node is not None]
    models, sizes, its_quotas, its_typical = rest
    records_there = [one for _, ones in nodes.values() for one in ones]
    return Snapshot(known, models, sizes, records_there, its_quotas, its_typical)
