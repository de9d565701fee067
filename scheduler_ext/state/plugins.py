"""Extended resources of nodes' device plugins: one that a node has not can only be a DeviceClass's there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


class Plugins:
    """Which nodes have each resource. Not locked: the engine's lock covers it."""

    def __init__(self) -> None:
        self._resources: dict[str, Collection[str]] = {}  # by node
        self._nodes: dict[str, set[str]] = {}  # by resource

    def set_node(self, node: str, resources: Collection[str]) -> None:
        old = self._resources.get(node, ())
        if resources == old:
            return
        for one in old:
            self._nodes[one].discard(node)
            if not self._nodes[one]:
                del self._nodes[one]
        for one in resources:
            self._nodes.setdefault(one, set()).add(node)
        self._resources[node] = resources
        if not resources:
            del self._resources[node]

    def __contains__(self, resource: str) -> bool:
        return resource in self._nodes

    def among(self, nodes: Sequence[str], resources: Iterable[str]) -> Sequence[str]:
        """Those of some nodes that have all of some resources, one at least."""
        some = set[str].intersection(*(self._nodes.get(one, set()) for one in resources))
        return [node for node in nodes if node in some] if some else []
