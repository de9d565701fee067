"""`kubectl vcuda doctor NODE`: from the node object inwards to what the daemon finds there."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from vcuda.kube.errors import KubeError
from vcuda.kubectl import output
from vcuda.kubectl.cluster import Cluster, ready
from vcuda.kubectl.errors import PluginError
from vcuda.spec import inventory
from vcuda.spec.errors import SpecError

OK, WARN, FAIL = "ok", "warn", "FAIL"
Check = tuple[str, str, str]  # what, verdict, details


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", metavar="NODE")


def run(cluster: Cluster, options: argparse.Namespace) -> int:
    """1 if something fails."""
    node = cluster.node(options.node)
    parts: tuple[Callable[[], Iterator[Check]], ...] = (
        lambda: _node(cluster, node),
        lambda: _daemon(cluster, options.node),
        lambda: _extender(cluster),
    )
    checks: list[Check] = []
    for part in parts:
        try:
            checks += part()
        except (PluginError, KubeError) as error:
            checks.append(("asking", FAIL, str(error)))
    if options.json:
        output.as_json([dict(zip(("what", "verdict", "details"), check, strict=True)) for check in checks])
    else:
        output.table(["verdict", "what", "details"], [(verdict, what, details) for what, verdict, details in checks])
    return int(any(verdict == FAIL for _, verdict, _ in checks))


def _node(cluster: Cluster, node: dict[str, Any]) -> Iterator[Check]:
    metadata, status = node["metadata"], node.get("status") or {}
    if (node.get("spec") or {}).get("unschedulable"):
        yield "node", WARN, "it is cordoned: no new pod comes here; `kubectl uncordon` it"
    listed = status.get("conditions")
    known = (item for item in (listed if isinstance(listed, list) else ()) if isinstance(item, dict))
    conditions = {str(item.get("type")): item for item in known}
    kubelet = (status.get("nodeInfo") or {}).get("kubeletVersion", "?")
    if (conditions.get("Ready") or {}).get("status") == "True":
        yield "kubelet", OK, f"Ready, {kubelet}"
    else:
        yield (
            "kubelet",
            FAIL,
            f"the node is not Ready: {(conditions.get('Ready') or {}).get('message', 'it says nothing')}",
        )
    for resource in (cluster.names.core, cluster.names.memory):
        offered = str((status.get("allocatable") or {}).get(resource, "0"))
        found = OK if offered != "0" else FAIL
        yield (
            resource,
            found,
            f"{offered} allocatable"
            + ("" if found == OK else ": no daemon has registered with kubelet, or no card is healthy"),
        )
    yield _cards(cluster, (metadata.get("annotations") or {}).get(cluster.names.inventory))


def _cards(cluster: Cluster, text: str | None) -> Check:
    if text is None:
        return (
            "inventory",
            FAIL,
            f"the node has no annotation {cluster.names.inventory}: until the daemon writes it nothing is placed here",
        )
    try:
        cards = inventory.decode(text)
    except SpecError as error:
        return "inventory", FAIL, str(error)
    sick = [card.uuid for card in cards if not card.healthy]
    if sick or not cards:
        return "inventory", FAIL, f"{len(cards)} cards, not healthy: {', '.join(sick) or 'there is none'}"
    return "inventory", OK, f"{len(cards)} cards, all healthy"


def _daemon(cluster: Cluster, node: str) -> Iterator[Check]:
    pod = cluster.daemon(node)
    name = pod["metadata"]["name"]
    if ready(pod):
        yield "daemon", OK, f"pod {name} is ready"
    else:
        yield "daemon", FAIL, f"pod {name} is not ready: see `kubectl -n {cluster.system} describe pod {name}`"
    yield from cluster.page(pod, "metrics", "/doctor", _checks)


def _checks(data: Any) -> list[Check]:
    return [(str(check["what"]), str(check["verdict"]), str(check["details"])) for check in data]


def _extender(cluster: Cluster) -> Iterator[Check]:
    yield "extender", OK, f"pod {cluster.leader()['metadata']['name']} leads"
