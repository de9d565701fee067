"""What the API server's objects mean for us: a node's cards, a pod's place and use.

Nothing here trusts an unbound pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scheduler_ext.protocol.reasons import ExtenderReason
from scheduler_ext.state.cluster import Usage
from vcuda.spec import bookings, inventory, placement, request, resize
from vcuda.spec.bookings import Report
from vcuda.spec.device_classes import may_be_of_class
from vcuda.spec.errors import InvalidInventory, InvalidPlacement, InvalidRequest, Reason
from vcuda.spec.inventory import Card
from vcuda.spec.names import Names
from vcuda.spec.request import PodRequest
from vcuda.spec.units import parse_quantity

SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict"
_MOST = 2**31  # no card has so much; keeps a forged annotation from overflowing the cluster's integers
_LARGEST = 2**54  # cpu or memory, 16 PiB: keeps sums over hundreds of pods within int64


@dataclass(frozen=True, slots=True)
class SeenNode:
    """A node; `problem` says why it has no cards that we could use."""

    name: str
    cards: tuple[Card, ...]
    cpu_milli: int
    memory_bytes: int
    problem: Reason | ExtenderReason | None
    labels: Mapping[str, str]
    bookings: object  # the annotation of what its manager says of its pods; see `report`
    plugins: frozenset[str]  # extended resources of its device plugins


_LONGEST_VERSION = 20  # digits: 64 bits


def mapping(value: object) -> Mapping[str, Any]:
    """What a field holds; nothing where that is no object."""
    # From JSON it is a dict or nothing: an abstract class is asked in Python, a dozen times for each pod.
    if value is None:
        return {}
    return value if isinstance(value, (dict, Mapping)) else {}


def _rounded_up(value: object, parts: int = 1) -> int:
    """A quantity in 1/`parts`, rounded up; 0 for what is none.

    kube-scheduler has checked the pod before us; a value that it would refuse must not stop us.
    """
    number, divisor = parse_quantity(value) or (0, 1)
    return min(max(0, -(-number * parts // divisor)), _LARGEST)


def cpu_and_memory(amounts: object) -> tuple[int, int]:
    """(milli-cpu, bytes) of a `requests` or `allocatable` object."""
    if not isinstance(amounts, Mapping):
        return 0, 0
    return _rounded_up(amounts.get("cpu"), 1000), _rounded_up(amounts.get("memory"))


def pod_requests(pod: Mapping[str, Any]) -> tuple[int, int]:
    """(milli-cpu, bytes) that kube-scheduler counts for a pod: containers and sidecars together, or the largest init.

    Source: Kubernetes, "Resource sharing within containers"; pod overhead is added.
    """
    spec = pod.get("spec")
    if not isinstance(spec, Mapping):
        return 0, 0
    standing, peak = (0, 0), (0, 0)
    for key in ("initContainers", "containers"):
        listed = spec.get(key)
        for container in listed if isinstance(listed, list) else ():
            if not isinstance(container, Mapping):
                continue
            resources = container.get("resources")
            wanted = cpu_and_memory(resources.get("requests")) if isinstance(resources, Mapping) else (0, 0)
            total = (standing[0] + wanted[0], standing[1] + wanted[1])
            if key == "initContainers" and container.get("restartPolicy") != "Always":
                peak = (max(peak[0], total[0]), max(peak[1], total[1]))
            else:
                standing = total
    overhead = cpu_and_memory(spec.get("overhead"))
    return max(peak[0], standing[0]) + overhead[0], max(peak[1], standing[1]) + overhead[1]


def node(data: Mapping[str, Any], names: Names) -> SeenNode:
    """Read a Node. Without the manager's inventory there are no UUIDs, so nothing can be placed there."""
    metadata = mapping(data.get("metadata"))
    allocatable = mapping(mapping(data.get("status")).get("allocatable"))
    cpu, memory = cpu_and_memory(allocatable)
    plugins = frozenset(one for one in allocatable if may_be_of_class(one, names) and _rounded_up(allocatable[one]) > 0)
    text = mapping(metadata.get("annotations")).get(names.inventory)
    name = str(metadata.get("name", ""))
    labels = mapping(metadata.get("labels"))
    rest = (labels, mapping(metadata.get("annotations")).get(names.bookings), plugins)
    if not isinstance(text, str):
        return SeenNode(name, (), cpu, memory, ExtenderReason.NO_INVENTORY, *rest)
    try:
        return SeenNode(name, inventory.decode(text), cpu, memory, None, *rest)
    except InvalidInventory as error:
        return SeenNode(name, (), cpu, memory, error.reason, *rest)


def report(text: object) -> tuple[Report | None, str]:
    """What a manager says of its pods, None: nothing; and why that can't be read, or ""."""
    try:
        return (bookings.decode(text) if isinstance(text, str) else None), ""
    except InvalidInventory as error:
        return None, error.message


def place(pod: Mapping[str, Any]) -> str:
    """The node that a pod is bound to, or ""."""
    return str(mapping(pod.get("spec")).get("nodeName") or "")


def leaving(pod: Mapping[str, Any]) -> bool:
    """Whether somebody has asked for the pod's deletion."""
    return bool(mapping(pod.get("metadata")).get("deletionTimestamp"))


def runs(pod: Mapping[str, Any]) -> bool:
    """Whether kubelet has started a pod, and nobody has asked for its end."""
    return mapping(pod.get("status")).get("phase") == "Running" and not leaving(pod)


def nomination(pod: Mapping[str, Any]) -> str:
    """The node on which kube-scheduler has made room for a pod by preemption, or ""."""
    return str(mapping(pod.get("status")).get("nominatedNodeName") or "")


def unschedulable(pod: Mapping[str, Any]) -> bool:
    """Whether kube-scheduler has found no place for a pod, and put it aside."""
    told = mapping(pod.get("status")).get("conditions")
    return any(
        (one.get("type"), one.get("status"), one.get("reason")) == ("PodScheduled", "False", "Unschedulable")
        for one in (told if isinstance(told, list) else ())
        if isinstance(one, Mapping)
    )


def priority(pod: Mapping[str, Any]) -> int:
    """Kubernetes' priority of a pod; 0 where the API server has not set one."""
    value = mapping(pod.get("spec")).get("priority")
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def uid(pod: Mapping[str, Any]) -> str:
    """ "" for what has none: such a pod is never booked."""
    value = mapping(pod.get("metadata")).get("uid")
    return value if isinstance(value, str) else ""


def version(data: Mapping[str, Any]) -> int:
    """An object's resource version, which grows with each write (KEP-5504); 0 where it says none that does."""
    text = mapping(data.get("metadata")).get("resourceVersion")
    return (
        int(text) if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < _LONGEST_VERSION else 0
    )


def named(pod: Mapping[str, Any], name: str) -> str | None:
    """An annotation's value, if it is a text."""
    text = mapping(mapping(pod.get("metadata")).get("annotations")).get(name)
    return text if isinstance(text, str) else None


def annotation(pod: Mapping[str, Any], names: Names) -> str | None:
    """The pod's placement annotation, as it is written."""
    return named(pod, names.placement)


def _was_taken(pod: Mapping[str, Any]) -> bool:
    """Whether kubelet has taken a pod in, and so its devices were given; an owner has no right to `status`."""
    return bool(mapping(pod.get("status")).get("startTime"))


@dataclass(frozen=True, slots=True)
class SeenUse:
    """What a bound pod uses. `wrong` says why its placement annotation was not believed."""

    usage: Usage
    request: PodRequest | None
    wrong: str | None = None


def bound_use(pod: Mapping[str, Any], names: Names) -> SeenUse:
    """What a bound pod books on its node.

    A placement that contradicts the pod's own request books nothing: the manager refuses such a pod. But one that
    kubelet has taken was not refused: it was written since. Its cards are unknown then until the manager or its owner
    names them, as those of a share without any placement are, which was bound past us. Of a pod that was resized the
    annotation may say the old amounts or the new ones.
    """
    cpu, memory = pod_requests(pod)
    try:
        asked = request.parse_pod(pod, names)
    except InvalidRequest as error:
        return SeenUse(Usage({}, cpu, memory), None, str(error))
    if not asked:
        return SeenUse(Usage({}, cpu, memory), None)
    text = annotation(pod, names)
    if text is None:
        return SeenUse(Usage({}, cpu, memory, unplaced=True), asked)
    try:
        chosen, answer = placement.decode(text), resize.read(pod, names)
        granted = answer.granted if answer is not None else {}
        placement.check(resize.as_asked(chosen, asked, granted), asked)
    except InvalidPlacement as error:
        return SeenUse(Usage({}, cpu, memory, unplaced=_was_taken(pod)), asked, str(error))
    use = {
        card: (min(cores, _MOST), min(blocks, _MOST))
        for card, (cores, blocks) in placement.peak_use(asked, chosen).items()
    }
    return SeenUse(Usage(use, cpu, memory), asked)


def movable(pod: Mapping[str, Any], names: Names) -> bool:
    """Whether the owner lets a pod be moved: our annotation or the cluster autoscaler's says "false" if not."""
    annotations = mapping(mapping(pod.get("metadata")).get("annotations"))
    return all(annotations.get(key) != "false" for key in (names.movable, SAFE_TO_EVICT))
