"""A copy of nodes and bookings to plan on, so that planning holds up nobody."""

from __future__ import annotations

from typing import NamedTuple

from scheduler_ext.protocol.reasons import CODE_OF, FITS, ROW_CODES
from scheduler_ext.scoring.quotas import Quotas
from scheduler_ext.scoring.typical_pods import Typical
from scheduler_ext.state.cluster import Cluster, Described
from scheduler_ext.state.pods import PodCache, Record
from vcuda.spec.errors import Reason


class Snapshot(NamedTuple):
    """Nodes, card models by number, copies of all records, quotas, and the typical pods of the moment."""

    nodes: list[Described]
    models: list[str]
    records: list[Record]
    quotas: Quotas
    typical: Typical

    def rebuilt(self) -> tuple[Cluster, PodCache, Quotas]:
        """A cluster, pods and quotas of one's own. Card models get the numbers that `typical` knows them by."""
        cluster = Cluster()
        for model in self.models:
            cluster.model_id(model)
        for node in self.nodes:
            # No cards at all is no problem of the node's: that code is what follows from it.
            known = node.problem in (FITS, CODE_OF[Reason.NO_CARDS])
            problem = None if known else ROW_CODES[node.problem]
            cluster.set_node(node.name, node.cards, node.cpu_milli, node.memory_bytes, problem)
        quotas = self.quotas.copy(cluster)
        pods = PodCache(cluster, changed=quotas.count)
        for record in self.records:
            pods.put(record)
        return cluster, pods, quotas
