"""`kubectl vcuda explain POD`: what it asks, where it is or why it waits, what was said about it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

from vcuda.kube.errors import KubeError
from vcuda.kube.objects import phase_of
from vcuda.kubectl import explanation, output
from vcuda.kubectl.cluster import Cluster, told_at
from vcuda.kubectl.errors import PluginError
from vcuda.printable import printable
from vcuda.quoted import quoted
from vcuda.spec import placement, request, resize
from vcuda.spec.errors import SpecError
from vcuda.spec.units import BLOCK_BYTES, format_bytes

_MOST_EVENTS = 5
_TOLD = ("type", "reason", "message")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pod", metavar="POD")


def run(cluster: Cluster, options: argparse.Namespace) -> int:
    """1 where the extender could not be asked: all else is said all the same."""
    pod = cluster.pod(options.pod)
    found: dict[str, Any] = {
        "pod": {"namespace": cluster.namespace, "name": options.pod, "uid": pod["metadata"].get("uid", "")},
        "phase": phase_of(pod),
        "node": (pod.get("spec") or {}).get("nodeName"),
        "asks": _asks(cluster, pod),
        "placed": _placed(cluster, pod),
        "memory_held_by": _held_by(cluster, pod),
        "resize": _resize(cluster, pod),
        "events": _events(cluster, pod),
    }
    failure = ""
    if found["asks"]:
        try:
            where = f"/explain/{cluster.namespace}/{options.pod}"
            found["extender"] = cluster.page(cluster.leader(), "probes", where, _explanation)
        except (PluginError, KubeError) as error:
            failure = str(error)
    if options.json:
        output.as_json(found)
    else:
        print("\n".join(printable(line) for line in _lines(found)))
    if failure:
        output.say(failure)
    return int(bool(failure))


def _asks(cluster: Cluster, pod: Mapping[str, Any]) -> list[dict[str, Any]] | str:
    """By container; a sentence where it asks for what no card can give, [] where it asks for no share."""
    if not request.asks_for_share(pod, cluster.names):
        return []
    try:
        asked = request.parse_pod(pod, cluster.names)
    except SpecError as error:
        return str(error)
    return [
        {"container": one.name, "cores": one.cores, "core_limit": one.core_limit, "memory_blocks": one.memory_blocks}
        for one in asked.containers
    ]


def _placed(cluster: Cluster, pod: Mapping[str, Any]) -> dict[str, Any]:
    text = (pod["metadata"].get("annotations") or {}).get(cluster.names.placement)
    if not text or not (pod.get("spec") or {}).get("nodeName"):
        return {}
    try:
        found = placement.decode(text)
    except SpecError:
        return {}
    return {
        name: [[one.uuid, one.cores, one.memory_blocks] for one in shares] for name, shares in found.containers.items()
    }


def _held_by(cluster: Cluster, pod: Mapping[str, Any]) -> dict[str, Any]:
    """By container and card: the shim, the driver, both or none. Empty where its node's daemon does not tell."""
    node = (pod.get("spec") or {}).get("nodeName")
    if not node or not request.asks_for_share(pod, cluster.names):
        return {}
    try:
        return cluster.page(cluster.daemon(node), "metrics", "/usage", partial(_holders, pod))
    except (PluginError, KubeError):
        return {}


def _holders(pod: Mapping[str, Any], report: Any) -> dict[str, Any]:
    return {
        at["container"]: {share["uuid"]: str(share.get("held_by", "shim")) for share in at["cards"]}
        for at in report.get("containers", ())
        if at["pod_uid"] == pod["metadata"].get("uid")
    }


def _explanation(data: Any) -> dict[str, Any]:
    """The extender's answer, of which lines can be made."""
    explanation.lines(data)
    found: dict[str, Any] = data
    return found


def _resize(cluster: Cluster, pod: Mapping[str, Any]) -> dict[str, str]:
    wanted = (pod["metadata"].get("annotations") or {}).get(cluster.names.resize)
    if wanted is None:
        return {}
    answer = resize.read(pod, cluster.names)
    if answer is None or answer.request != resize.known_as(wanted):
        return {"asked": wanted, "state": "not answered yet"}
    return {"asked": wanted, "state": f"refused: {answer.refused}" if answer.refused else "granted"}


def _events(cluster: Cluster, pod: Mapping[str, Any]) -> list[dict[str, str]]:
    try:
        found = cluster.events(pod)
    except KubeError as error:
        output.say(f"its events can't be read: {error}")
        return []
    warned = [
        item
        for item in found
        if item.get("type") == "Warning" or "gpu" in str((item.get("source") or {}).get("component"))
    ]
    return [
        {"at": told_at(item), **{key: str(item.get(key) or "") for key in _TOLD}} for item in warned[-_MOST_EVENTS:]
    ]


def _lines(found: dict[str, Any]) -> list[str]:
    pod, asks = found["pod"], found["asks"]
    name = f"pod {pod['namespace']}/{pod['name']}"
    where = f" on node {found['node']}" if found["node"] else ""
    lines = [f"{name}: {found['phase'] or 'no phase'}{where}"]
    if isinstance(asks, str):
        lines.append(f"  it asks for what no card can give: {asks}")
    elif not asks:
        lines.append("  it asks for no share of a card: we have nothing to do with it")
    else:
        lines += [f"  {_asked(one)}" for one in asks]
    for container, shares in found["placed"].items():
        for uuid, cores, blocks in shares:
            held = found["memory_held_by"].get(container, {}).get(uuid)
            by = {"both": "shim and driver", "none": "nobody: it is past the shim"}.get(held or "", held)
            lines.append(
                f"  {container} has {cores} cores, {format_bytes(blocks * BLOCK_BYTES)} of card {uuid}"
                + (f"; its memory is held by {by}" if by else "")
            )
    if found["resize"]:
        lines.append(f"  resize {quoted(found['resize']['asked'], 80)}: {found['resize']['state']}")
    if "extender" in found:
        lines += ["the extender says:", *(f"  {line}" for line in explanation.lines(found["extender"]))]
    lines += [f"  {one['at']} {one['reason']}: {one['message']}" for one in found["events"]]
    return lines


def _asked(one: dict[str, Any]) -> str:
    limit = f" (up to {one['core_limit']})" if one["core_limit"] > one["cores"] else ""
    memory = f", {format_bytes(one['memory_blocks'] * BLOCK_BYTES)}" if one["memory_blocks"] else ""
    return f"{one['container']} asks for {one['cores']} cores{limit}{memory}"
