"""`kubectl vcuda resize POD core=50,memory=12`: asks, and waits for the extender's answer and the node's work."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

from vcuda.kubectl import output
from vcuda.kubectl.cluster import Cluster
from vcuda.kubectl.errors import PluginError
from vcuda.printable import printable
from vcuda.spec import placement, request, resize
from vcuda.spec.errors import SpecError
from vcuda.spec.units import BLOCK_BYTES, format_bytes

_EVERY_S = 0.5
_BY_NODE = ("ResizeCompleted", "ResizeWaits", "ResizeRefused")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pod", metavar="POD")
    parser.add_argument(
        "amounts",
        metavar="AMOUNTS",
        help="core=50,memory=12,core-limit=80 (memory in blocks of 256 MiB); "
        "of several containers NAME:core=50;NAME:memory=3",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="wait so long until it is done; 0: not at all (default: 60)",
    )


def run(cluster: Cluster, options: argparse.Namespace) -> int:
    """0: in force, or asked where nobody waits; 1: refused, or not done in time."""
    pod = cluster.pod(options.pod)
    _check(cluster, pod, options.amounts)
    # What the node said of an earlier request is no answer to this one.
    heard = {item["metadata"]["name"] for item in cluster.events(pod)} if options.timeout > 0 else set()
    cluster.annotate(pod, {cluster.names.resize: options.amounts})
    until = time.monotonic() + options.timeout
    state, message, found = "asked", "", pod
    while time.monotonic() < until and state not in ("refused", "done"):
        found = _same(cluster.pod(options.pod), pod)
        state, message = _state(cluster, found, options.amounts, heard)
        if state not in ("refused", "done"):
            time.sleep(_EVERY_S)
    told = {
        "pod": options.pod,
        "asked": options.amounts,
        "state": state,
        "message": message,
        "shares": _shares(cluster, found),
    }
    if options.json:
        output.as_json(told)
    else:
        _say(told, options)
    return int(state != "done" and options.timeout > 0)


def _check(cluster: Cluster, pod: Mapping[str, Any], amounts: str) -> None:
    if not request.asks_for_share(pod, cluster.names):
        raise PluginError(f"pod {pod['metadata']['name']} has no share that could be resized: it asks for none")
    if not (pod.get("spec") or {}).get("nodeName"):
        raise PluginError(
            f"pod {pod['metadata']['name']} does not run yet: change its limits instead, in the object that makes it"
        )
    try:
        resize.parse(amounts, request.parse_spec(pod, cluster.names), cluster.names)
    except SpecError as error:
        raise PluginError(str(error)) from error


def _same(found: dict[str, Any], pod: Mapping[str, Any]) -> dict[str, Any]:
    if found["metadata"]["uid"] != pod["metadata"]["uid"]:
        raise PluginError(f"pod {pod['metadata']['name']} has been replaced by another of that name: ask again")
    return found


def _state(cluster: Cluster, pod: Mapping[str, Any], amounts: str, heard: set[str]) -> tuple[str, str]:
    """asked, granted, waiting, refused or done; and what was said of it."""
    answer = resize.read(pod, cluster.names)
    if answer is None or answer.request != resize.known_as(amounts):
        return "asked", "the extender has not answered yet"
    if answer.refused:
        return "refused", answer.refused
    told = [
        item for item in cluster.events(pod) if item.get("reason") in _BY_NODE and item["metadata"]["name"] not in heard
    ]
    message = str(told[-1].get("message", "")) if told else ""
    if told and told[-1]["reason"] == "ResizeRefused":
        return "refused", message
    if _in_force(cluster, pod, answer):
        return "done", message
    return ("waiting", message) if told else ("granted", "the node has not done it yet")


def _placement(cluster: Cluster, pod: Mapping[str, Any]) -> placement.Placement:
    text = (pod["metadata"].get("annotations") or {}).get(cluster.names.placement)
    try:
        return placement.decode(text) if text else placement.Placement()
    except SpecError:
        return placement.Placement()


def _in_force(cluster: Cluster, pod: Mapping[str, Any], answer: resize.Answer) -> bool:
    """Whether the node's manager has written what was granted as the pod's placement, which it does last."""
    shares = _placement(cluster, pod).containers
    return all(target.share in shares.get(name, ()) for name, target in answer.granted.items())


def _shares(cluster: Cluster, pod: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [{"card": one.uuid, "cores": one.cores, "memory_blocks": one.memory_blocks} for one in shares]
        for name, shares in _placement(cluster, pod).containers.items()
    }


def _say(told: dict[str, Any], options: argparse.Namespace) -> None:
    if told["state"] == "done":
        for name, shares in told["shares"].items():
            for one in shares:
                size = format_bytes(one["memory_blocks"] * BLOCK_BYTES)
                text = f"{told['pod']}/{name}: {one['cores']} cores, {size} of card {one['card']}"
                print(printable(text))
        return
    if options.timeout <= 0:
        print(f"{told['pod']}: asked for {told['asked']}; `kubectl vcuda explain {told['pod']}` says what became of it")
        return
    tail = f": {told['message']}" if told["message"] else ""
    later = (
        ""
        if told["state"] == "refused"
        else f"; not done within {options.timeout:g} s, it goes on: `kubectl vcuda explain {told['pod']}`"
    )
    output.say(f"pod {told['pod']}: {told['state']}{tail}{later}")
