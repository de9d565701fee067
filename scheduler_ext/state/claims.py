"""What ResourceSlices and ResourceClaims mean for us: a node's cards, what a claim asks, what it was given.

Claims are their authors' to write, so each is bounded and checked; status.allocation is the scheduler's word.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler_ext.state.shape import Step
from vcuda.spec import claims
from vcuda.spec.errors import InvalidRequest
from vcuda.spec.inventory import MOST_CARDS, Card
from vcuda.spec.names import Names
from vcuda.spec.request import ContainerRequest
from vcuda.spec.units import BLOCK_BYTES, parse_quantity

Key = tuple[str, str]  # namespace and name
_MOST = 2**31  # no card has so much; keeps a forged amount from overflowing the cluster's integers
_LONGEST_EXPRESSION = 1000
_MOST_USERS = 256  # Kubernetes' bound of reservedFor
_TEXT = re.compile(r"""'[^'"\\]*'|"[^'"\\]*\"""")
_ONE = r"""(?:'[^'"\\]*'|"[^'"\\]*")"""
# device.attributes["vcuda.tencent.com"].productName == "NVIDIA L4", .startsWith("NVIDIA H100"), in ["…", "…"]
_MODEL = re.compile(
    rf"""device\.attributes\[['"](?P<driver>[^'"]+)['"]\]\.productName\s*(?P<how>==|in|\.startsWith\()\s*"""
    rf"""(?P<texts>{_ONE}|\[\s*{_ONE}(?:\s*,\s*{_ONE})*\s*\])\s*\)?"""
)
_CLOSED = ("NoSchedule", "NoExecute")


@dataclass(frozen=True, slots=True)
class SeenSlice:
    """A ResourceSlice of ours: a part of a node's pool, which has the node's name. `cards`: by device name."""

    name: str
    node: str
    generation: int
    slices: int
    cards: Mapping[str, Card]


@dataclass(frozen=True, slots=True)
class Wish:
    """One request of a claim, or one share of it."""

    step: Step
    all_memory: bool  # it names no amount, and gets all of a card's

    def blocks(self, of_card: int) -> int:
        """The blocks that it takes of a card that has so many."""
        return of_card if self.all_memory else self.step.blocks


@dataclass(frozen=True, slots=True)
class Given:
    """A device that a claim was given, or a part of it; None: all of it. `node`: the pool's name, too."""

    node: str
    device: str
    cores: int | None
    blocks: int | None


@dataclass(frozen=True, slots=True)
class Models:
    """What selectors say of a card's model, as far as they are read: it is, or begins with, one of each of `texts`."""

    texts: tuple[tuple[bool, tuple[str, ...]], ...] = ()  # whether it may go on after that; what

    def accept(self, model: str) -> bool:
        return all(model.startswith(some) if beginning else model in some for beginning, some in self.texts)


@dataclass(frozen=True, slots=True)
class SeenClaim:
    """A ResourceClaim. `given`: None: it is not allocated. `wishes`: of our cards. `problem`: why no card can give it.

    None of the three: it is none of ours. `models`: of all requests, where they agree. `open_requests`: those with
    alternatives, of which `wishes` has the most of each amount until `given` says which it was.
    """

    uid: str
    namespace: str
    name: str
    given: tuple[Given, ...] | None
    wishes: tuple[Wish, ...] = ()
    problem: InvalidRequest | None = None
    models: Models = Models()
    open_requests: tuple[str, ...] = ()
    users: tuple[str, ...] = ()  # UIDs of the pods for which it is reserved

    @property
    def key(self) -> Key:
        return self.namespace, self.name

    @property
    def ours(self) -> bool:
        return bool(self.wishes or self.given or self.problem)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _number(value: object) -> int:
    return value if type(value) is int else 0


def slice_of(data: Mapping[str, Any], names: Names) -> SeenSlice | None:
    """Read a ResourceSlice; None for other drivers', and for pools that are not their node's own."""
    spec = _mapping(data.get("spec"))
    node, pool = spec.get("nodeName"), _mapping(spec.get("pool"))
    if spec.get("driver") != names.driver or not isinstance(node, str) or not node or pool.get("name") != node:
        return None
    cards = {}
    for device in _list(spec.get("devices"))[:MOST_CARDS]:
        name, card = _mapping(device).get("name"), _card(_mapping(device))
        if isinstance(name, str) and card is not None:
            cards[name] = card
    name = str(_mapping(data.get("metadata")).get("name", ""))
    generation, count = _number(pool.get("generation")), _number(pool.get("resourceSliceCount"))
    return SeenSlice(name, node, generation, count, cards)


def _card(device: Mapping[str, Any]) -> Card | None:
    attributes, capacity = _mapping(device.get("attributes")), _mapping(device.get("capacity"))
    uuid = _mapping(attributes.get("uuid")).get("string")
    memory = parse_quantity(_mapping(capacity.get(claims.MEMORY)).get("value"))
    if not isinstance(uuid, str) or memory is None or device.get("allowMultipleAllocations") is not True:
        return None
    numa = _mapping(attributes.get("numaNode")).get("int")
    closed = any(_mapping(taint).get("effect") in _CLOSED for taint in _list(device.get("taints")))
    model = str(_mapping(attributes.get("productName")).get("string", ""))
    size = min(memory[0] // memory[1], _MOST * BLOCK_BYTES)
    minor = _number(_mapping(attributes.get("minor")).get("int"))
    return Card(uuid, minor, model, size, numa if type(numa) is int else None, healthy=not closed)


def claim_of(data: Mapping[str, Any], names: Names) -> SeenClaim:
    """Read a ResourceClaim. Never raises for what its author wrote."""
    metadata = _mapping(data.get("metadata"))
    uid, namespace, name = (str(metadata.get(key) or "") for key in ("uid", "namespace", "name"))
    status = _mapping(data.get("status"))
    allocation = status.get("allocation")
    users = tuple(str(_mapping(one).get("uid")) for one in _list(status.get("reservedFor"))[:_MOST_USERS])
    given = _given(_mapping(allocation), names) if isinstance(allocation, Mapping) else None
    spec = _mapping(data.get("spec"))
    try:
        asked = claims.demand(spec, names)
    except InvalidRequest as error:
        return SeenClaim(uid, namespace, name, given, problem=error if given is None else None, users=users)
    devices = _mapping(spec.get("devices"))
    listed = map(_mapping, _list(devices.get("requests"))[: claims.MOST_REQUESTS])
    several = tuple(str(one.get("name")) for one in listed if one.get("firstAvailable"))
    wishes, models = _wishes(devices, asked, names), _models(devices, names)
    return SeenClaim(uid, namespace, name, given, wishes, models=models, open_requests=several, users=users)


def _models(devices: Mapping[str, Any], names: Names) -> Models:
    """Of selectors in one of the usual forms; whatever else they say, kube-scheduler alone reads."""
    found = set()
    for request in map(_mapping, _list(devices.get("requests"))[: claims.MOST_REQUESTS]):
        body = _mapping(request.get("exactly"))
        texts = []
        for selector in map(_mapping, _list(body.get("selectors"))[: claims.MOST_REQUESTS]):
            expression = str(_mapping(selector.get("cel")).get("expression", ""))[:_LONGEST_EXPRESSION].strip()
            read = _MODEL.fullmatch(expression)
            if read is not None and read["driver"] == names.driver:
                some = tuple(one[1:-1] for one in _TEXT.findall(read["texts"]))
                texts.append((read["how"].startswith("."), some))
        found.add(Models(tuple(texts)))
    return found.pop() if len(found) == 1 else Models()


def _given(allocation: Mapping[str, Any], names: Names) -> tuple[Given, ...]:
    found = []
    for result in map(_mapping, _list(_mapping(allocation.get("devices")).get("results"))[: claims.MOST_REQUESTS]):
        if result.get("driver") != names.driver or result.get("adminAccess"):
            continue
        consumed = _mapping(result.get("consumedCapacity"))
        cores, blocks = _amount(consumed.get(claims.CORES), 1), _amount(consumed.get(claims.MEMORY), BLOCK_BYTES)
        found.append(Given(str(result.get("pool", "")), str(result.get("device", "")), cores, blocks))
    return tuple(found)


def _amount(value: object, unit: int) -> int | None:
    found = parse_quantity(value)
    return None if found is None else min(max(0, -(-found[0] // (found[1] * unit))), _MOST)


def _wishes(devices: Mapping[str, Any], asked: Sequence[ContainerRequest], names: Names) -> tuple[Wish, ...]:
    """Shares of one request are apart where a constraint says so; the rest of what constraints say is not read."""
    apart = {
        str(request)
        for constraint in map(_mapping, _list(devices.get("constraints")))
        for request in _list(constraint.get("requests"))
        if constraint.get("distinctAttribute") == f"{names.driver}/uuid"
    }
    alike = Counter(one.name for one in asked)
    found: dict[str, Wish] = {}
    wishes: list[Wish] = []
    for one in asked:
        together = alike[one.name] if one.name in apart else 1
        if together > 1 and one.name in found:
            continue
        cards = one.card_count if one.whole else together
        step = Step(one.cores_per_card, one.memory_blocks, cards, one.whole, False, 0)
        found[one.name] = Wish(step, all_memory=one.memory_blocks == 0)
        wishes.append(found[one.name])
    return tuple(wishes)


def names_of_claims(pod: Mapping[str, Any]) -> list[str]:
    """The claims that a pod uses, by name, as far as they have been made."""
    statuses = map(_mapping, _list(_mapping(pod.get("status")).get("resourceClaimStatuses")))
    made = {str(one.get("name")): one.get("resourceClaimName") for one in statuses}
    listed = [_mapping(one) for one in _list(_mapping(pod.get("spec")).get("resourceClaims"))]
    names = [one.get("resourceClaimName") or made.get(str(one.get("name"))) for one in listed]
    return [name for name in names if isinstance(name, str)]


def unmade(pod: Mapping[str, Any]) -> bool:
    """Whether a claim that a pod asks for by a template is still to be made; one whose status has no name never is."""
    statuses = _list(_mapping(pod.get("status")).get("resourceClaimStatuses"))
    known = {_mapping(one).get("name") for one in statuses}
    listed = map(_mapping, _list(_mapping(pod.get("spec")).get("resourceClaims")))
    return any(one.get("resourceClaimName") is None and one.get("name") not in known for one in listed)


def names_of_templates(pod: Mapping[str, Any]) -> list[str]:
    """The ResourceClaimTemplates that a pod names."""
    named = _mapping(pod.get("spec")).get("resourceClaims")
    if named is None:  # as of nearly all pods
        return []
    listed = map(_mapping, _list(named))
    return [name for one in listed if isinstance(name := one.get("resourceClaimTemplateName"), str)]
