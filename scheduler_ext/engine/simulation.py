"""Where a pod would fit, on nodes that exist or that an autoscaler could add; nothing is decided or stays booked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from scheduler_ext.engine.cache import SchedulerCache
from scheduler_ext.engine.choose import Chooser
from scheduler_ext.protocol.reasons import CODE_OF, FITS, REFUSALS, ExtenderReason
from scheduler_ext.scoring.quotas import Quotas
from scheduler_ext.scoring.scores import Table
from scheduler_ext.scoring.second_choice import SecondChoices
from scheduler_ext.scoring.typical_pods import Typical
from scheduler_ext.state import objects, templates
from scheduler_ext.state.cluster import Cluster, Ints
from scheduler_ext.state.shape import Shape
from vcuda.spec.names import Names
from vcuda.spec.request import PodRequest

UNKNOWN = (
    f"{ExtenderReason.UNKNOWN_NODE}: no such node is known, and no object of it was sent "
    "(nodeCacheCapable: false sends them)"
)
_QUOTA = CODE_OF[ExtenderReason.QUOTA_EXCEEDED]


class CandidateNodes(NamedTuple):
    """What is needed to judge nodes that do not exist. Nothing in it changes any more."""

    asked: PodRequest
    shape: Shape
    names: Names
    models: list[str]
    typical: Typical
    cluster: Cluster  # of such nodes; none yet
    quotas: Quotas  # for them, with what is held on those that exist
    labels: dict[str, Mapping[str, str]]  # the quotas look here


class Simulation:
    """Answers simulate."""

    def __init__(self, cache: SchedulerCache, chooser: Chooser) -> None:
        self._cache, self._chooser = cache, chooser

    def here(self, pod: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, str], CandidateNodes]:
        """Per node that exists why the pod does not fit there, "" where it does; and what judges others.

        Raises InvalidRequest.
        """
        cache = self._cache
        asked, shape = cache.asked(pod)
        known = [name for name in names if name in cache.cluster.index]
        with self._chooser.passing(asked.uid, objects.priority(pod)):
            its = cache.cluster, cache.quotas, asked.namespace, cache.table(shape), cache.rows(known), cache.typical()
            found = _reasons(known, cache.second, *its)
        own = cache.pods.get(asked.uid)
        if own is not None and own.node in found:
            found[own.node] = ""  # it has its place there
        cluster, labels = Cluster(), dict[str, Mapping[str, str]]()
        for model in cache.cluster.models:
            cluster.model_id(model)  # the numbers that `typical` knows them by
        for size in cache.cluster.sizes:
            cluster.size_id(size)
        quotas = cache.quotas.elsewhere(asked.namespace, cluster, labels)
        return found, CandidateNodes(
            asked, shape, cache.names, list(cluster.models), cache.typical(), cluster, quotas, labels
        )

    def beyond(self, candidates: CandidateNodes, nodes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """The same for nodes that do not exist. Holds up nobody."""
        found: dict[str, str] = {}
        for name, data in nodes.items():
            read = templates.read(data, candidates.names, candidates.models, candidates.shape.models)
            if read.problem is not None:
                found[name] = read.problem
                continue
            candidates.labels[name] = read.labels
            candidates.cluster.set_node(name, read.cards, read.cpu_milli, read.memory_bytes)
        cluster, table = candidates.cluster, Table(candidates.shape)
        table.refresh(cluster, candidates.typical)
        its = cluster, candidates.quotas, candidates.asked.namespace, table, np.arange(len(cluster)), candidates.typical
        return found | _reasons(cluster.names, SecondChoices(), *its)


def _reasons(
    names: Sequence[str], second: SecondChoices, cluster: Cluster, quotas: Quotas, namespace: str, table: Table,
    rows: Ints, typical: Typical,
) -> dict[str, str]:  # fmt: skip
    closed, quota = quotas.closed(namespace, table, rows)
    for one in second.look(cluster, quotas, namespace, table, rows[closed], typical)[0]:
        closed &= ~np.isin(rows, one.rows)
    codes = np.where(closed, _QUOTA, table.code[rows]).tolist()
    said = REFUSALS.copy()
    said[FITS] = ""
    said[_QUOTA] += f": {quota}"
    return {name: said[code] for name, code in zip(names, codes, strict=True)}
