"""Extended resources that some node's device plugins offer: what no node offers can only be a DeviceClass's."""

from __future__ import annotations

import collections
from collections.abc import Collection


class Plugins:
    """How many nodes have each resource. Not locked: the engine's lock covers it."""

    def __init__(self) -> None:
        self._nodes: dict[str, Collection[str]] = {}
        self._count: collections.Counter[str] = collections.Counter()

    def set_node(self, node: str, resources: Collection[str]) -> None:
        old = self._nodes.get(node, ())
        if resources == old:
            return
        self._count.subtract(old)
        self._count.update(resources)
        self._count = +self._count
        self._nodes[node] = resources
        if not resources:
            del self._nodes[node]

    def __contains__(self, resource: str) -> bool:
        return resource in self._count
