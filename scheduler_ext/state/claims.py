"""What ResourceSlices and ResourceClaims mean for us: a node's cards, what a claim asks, what it was given.

Claims are their authors' to write, so each is bounded and checked; status.allocation is the scheduler's word.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from scheduler_ext.state.objects import mapping
from scheduler_ext.state.shape import Step
from vcuda.quoted import quoted
from vcuda.spec import claims, device_classes
from vcuda.spec.device_classes import DeviceClass, Undecided, Whose
from vcuda.spec.errors import InvalidRequest, Reason
from vcuda.spec.inventory import MOST_CARDS, Card
from vcuda.spec.names import Names
from vcuda.spec.request import ContainerRequest
from vcuda.spec.selectors import MISSING, UNKNOWN, matches, quantity, version
from vcuda.spec.units import BLOCK_BYTES, CORES_PER_CARD, parse_quantity

Key = tuple[str, str]  # namespace and name
_MOST = 2**31  # no card has so much; keeps a forged amount from overflowing the cluster's integers
_MOST_TEXT = 16 * 1024  # bytes of what is kept of a claim; its selectors are read under the engine's lock
_LONGEST_CLASS = 253
_MOST_USERS = 256  # Kubernetes' bound of reservedFor
_MOST_TRAITS = 32  # attributes and capacities of a device (api/resource/v1)
_OWN_TRAITS = ("uuid", "minor", "productName", "parentUUID", "nvlinkIsland")
_CLOSED = ("NoSchedule", "NoExecute")


@dataclass(frozen=True, slots=True)
class SeenSlice:
    """A ResourceSlice of ours: a part of a node's pool, which has the node's name. `cards`: by device name.

    `traits`: by UUID, the attributes that selectors may ask for.
    """

    name: str
    node: str
    generation: int
    slices: int
    cards: Mapping[str, Card]
    traits: Mapping[str, Mapping[str, Any]]


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
class SeenClaim:
    """A ResourceClaim. `given`: None: it is not allocated. `wishes`: of our cards. `problem`: why no card can give it.

    `doubt`: why it can't be told what it asks of our cards. None of the four: it is none of ours. `selectors`: of all
    requests and their classes, where they agree. `open_requests`: those with alternatives, of which `wishes` has the
    most of each amount until `given` says which it was.
    """

    uid: str
    namespace: str
    name: str
    given: tuple[Given, ...] | None
    wishes: tuple[Wish, ...] = ()
    problem: InvalidRequest | None = None
    doubt: Undecided | None = None
    selectors: tuple[str, ...] = ()
    open_requests: tuple[str, ...] = ()
    users: tuple[str, ...] = ()  # UIDs of the pods for which it is reserved

    @property
    def key(self) -> Key:
        return self.namespace, self.name

    @property
    def ours(self) -> bool:
        return bool(self.wishes or self.given or self.problem or self.doubt)


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _number(value: object) -> int:
    return value if type(value) is int else 0


def slice_of(data: Mapping[str, Any], names: Names) -> SeenSlice | None:
    """Read a ResourceSlice; None for other drivers', and for pools that are not their node's own."""
    spec = mapping(data.get("spec"))
    node, pool = spec.get("nodeName"), mapping(spec.get("pool"))
    if spec.get("driver") != names.driver or not isinstance(node, str) or not node or pool.get("name") != node:
        return None
    cards, traits = {}, {}
    for device in _list(spec.get("devices"))[:MOST_CARDS]:
        name, card = mapping(device).get("name"), _card(mapping(device))
        if isinstance(name, str) and card is not None:
            cards[name], traits[card.uuid] = card, _traits(mapping(device))
    name = str(mapping(data.get("metadata")).get("name", ""))
    generation, count = _number(pool.get("generation")), _number(pool.get("resourceSliceCount"))
    return SeenSlice(name, node, generation, count, cards, traits)


def _traits(device: Mapping[str, Any]) -> Mapping[str, Any]:
    """Cards of a kind have one object together. What each has for itself is left out: its Card knows the most of it."""
    found = []
    for name, value in list(mapping(device.get("attributes")).items())[:_MOST_TRAITS]:
        one = mapping(value)
        said = version(str(one["version"])) if "version" in one else one.get("string", one.get("int"))
        if name not in _OWN_TRAITS and (isinstance(said, str | int | tuple) or said is UNKNOWN):
            found.append((str(name), said))
    return _together(tuple(found))


@functools.lru_cache(maxsize=4096)
def _together(traits: tuple[tuple[str, Any], ...]) -> Mapping[str, Any]:
    return dict(traits)


def selected(selectors: Sequence[str], card: Card, traits: Mapping[str, Any], names: Names) -> bool:
    """Whether a card may be what selectors mean."""
    known = {
        "parentUUID": MISSING if traits.get("type") == "gpu" else UNKNOWN, "nvlinkIsland": UNKNOWN, **traits,
        "uuid": card.uuid, "minor": card.minor, "productName": card.model,
        claims.CORES: quantity(CORES_PER_CARD), claims.MEMORY: quantity(card.memory_blocks * BLOCK_BYTES),
    }  # fmt: skip
    return matches(selectors, device_classes.device(names, known, MISSING)) is not False


def may_be_selected(selectors: Sequence[str], model: str, names: Names) -> bool:
    """Whether selectors may mean a card of a model."""
    return matches(selectors, device_classes.device(names, {"productName": model})) is not False


def _card(device: Mapping[str, Any]) -> Card | None:
    attributes, capacity = mapping(device.get("attributes")), mapping(device.get("capacity"))
    uuid = mapping(attributes.get("uuid")).get("string")
    memory = parse_quantity(mapping(capacity.get(claims.MEMORY)).get("value"))
    if not isinstance(uuid, str) or memory is None or device.get("allowMultipleAllocations") is not True:
        return None
    numa = mapping(attributes.get("numaNode")).get("int")
    closed = any(mapping(taint).get("effect") in _CLOSED for taint in _list(device.get("taints")))
    model = str(mapping(attributes.get("productName")).get("string", ""))
    size = min(memory[0] // memory[1], _MOST * BLOCK_BYTES)
    minor = _number(mapping(attributes.get("minor")).get("int"))
    return Card(uuid, minor, model, size, numa if type(numa) is int else None, healthy=not closed)


def claim_of(data: Mapping[str, Any], names: Names) -> SeenClaim:
    """Read a ResourceClaim, but for what it asks. Never raises for what its author wrote."""
    metadata = mapping(data.get("metadata"))
    uid, namespace, name = (str(metadata.get(key) or "") for key in ("uid", "namespace", "name"))
    status = mapping(data.get("status"))
    allocation = status.get("allocation")
    users = tuple(str(mapping(one).get("uid")) for one in _list(status.get("reservedFor"))[:_MOST_USERS])
    given = _given(mapping(allocation), names) if isinstance(allocation, Mapping) else None
    return SeenClaim(uid, namespace, name, given, users=users)


def asking(seen: SeenClaim, spec: Mapping[str, Any], names: Names, classes: Mapping[str, DeviceClass]) -> SeenClaim:
    """The claim with what it asks as `classes` mean it; `spec`: see open_spec. Never raises."""
    try:
        if "large" in spec:
            _decide_large(spec["large"], names, classes)
            return seen
        asked = claims.demand(spec, names, classes)
    except Undecided as error:
        return replace(seen, doubt=error.with_traceback(None))  # whose frames hold the claim
    except InvalidRequest as error:
        return replace(seen, problem=error.with_traceback(None))
    devices = mapping(spec.get("devices"))
    listed = [mapping(one) for one in _list(devices.get("requests"))]
    several = tuple(str(one.get("name")) for one in listed if one.get("firstAvailable"))
    selectors = _selectors(listed, names, classes)
    return replace(seen, wishes=_wishes(devices, asked, names), selectors=selectors, open_requests=several)


def _decide_large(named: Sequence[str], names: Names, classes: Mapping[str, DeviceClass]) -> None:
    """Raises Undecided where one of its classes may be given cards of ours."""
    for name in named:
        if (classes.get(name) or device_classes.unseen(name, names)).whose is not Whose.OTHERS:
            raise Undecided(
                Reason.UNDECIDED_CLASS,
                f"what it asks of DeviceClass {quoted(name)} is more than {_MOST_TEXT} bytes, or nested too deep, and "
                "not read here; write fewer requests and shorter selectors",
            )


def _selectors(
    requests: Sequence[Mapping[str, Any]], names: Names, classes: Mapping[str, DeviceClass]
) -> tuple[str, ...]:
    """What chooses among cards of ours; that of alternatives kube-scheduler alone reads."""
    found = set()
    for request in requests:
        if request.get("firstAvailable"):
            return ()
        body = mapping(request.get("exactly"))
        its = claims.class_of(body, "", names, classes)
        if its is not None:
            found.add((*its.selectors, *claims.selectors_of(body)))
    return found.pop() if len(found) == 1 else ()


def open_spec(claim: Mapping[str, Any], names: Names) -> tuple[dict[str, Any], bytes, tuple[str, ...]]:
    """What of a claim that is not allocated says what it asks of our cards, the same as text, and the classes it names.

    `asking` reads it, at once and again when a class has changed. Of one that is larger than any of ours need be only
    the classes are left.
    """
    devices = mapping(mapping(claim.get("spec")).get("devices"))
    requests, config = devices.get("requests"), devices.get("config")
    bodies = [
        mapping(body)
        for one in map(mapping, _list(requests)[: claims.MOST_REQUESTS])
        for body in [one.get("exactly"), *_list(one.get("firstAvailable"))[: claims.MOST_REQUESTS]]
    ]
    named = tuple(dict.fromkeys(name for one in bodies if isinstance(name := one.get("deviceClassName"), str)))
    if isinstance(config, list):  # of another form: demand says so
        config = [one for one in config if not _of_another(one, names)]
    spec: dict[str, Any] = {"devices": {"requests": requests, "config": config}}
    if devices.get("constraints"):
        spec["devices"]["constraints"] = devices["constraints"]
    try:
        text = orjson.dumps(spec)
    except TypeError:  # nested too deep, halves of surrogate pairs
        text = b""
    if not 0 < len(text) <= _MOST_TEXT:
        named = tuple(one for one in named if len(one) <= _LONGEST_CLASS and one.isprintable())
        spec = {"large": list(named)}
        text = orjson.dumps(spec)
    return spec, text, named


def _of_another(config: object, names: Names) -> bool:
    opaque = config.get("opaque") if isinstance(config, Mapping) else None
    return isinstance(opaque, Mapping) and opaque.get("driver") != names.driver


def _given(allocation: Mapping[str, Any], names: Names) -> tuple[Given, ...]:
    found = []
    for result in map(mapping, _list(mapping(allocation.get("devices")).get("results"))[: claims.MOST_REQUESTS]):
        if result.get("driver") != names.driver or result.get("adminAccess"):
            continue
        consumed = mapping(result.get("consumedCapacity"))
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
        for constraint in map(mapping, _list(devices.get("constraints")))
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
    statuses = map(mapping, _list(mapping(pod.get("status")).get("resourceClaimStatuses")))
    made = {str(one.get("name")): one.get("resourceClaimName") for one in statuses}
    listed = [mapping(one) for one in _list(mapping(pod.get("spec")).get("resourceClaims"))]
    names = [one.get("resourceClaimName") or made.get(str(one.get("name"))) for one in listed]
    return [name for name in names if isinstance(name, str)]


def unmade(pod: Mapping[str, Any]) -> bool:
    """Whether a claim that a pod asks for by a template is still to be made; one whose status has no name never is."""
    statuses = _list(mapping(pod.get("status")).get("resourceClaimStatuses"))
    known = {mapping(one).get("name") for one in statuses}
    listed = map(mapping, _list(mapping(pod.get("spec")).get("resourceClaims")))
    return any(one.get("resourceClaimName") is None and one.get("name") not in known for one in listed)


def names_of_templates(pod: Mapping[str, Any]) -> list[str]:
    """The ResourceClaimTemplates that a pod names."""
    named = mapping(pod.get("spec")).get("resourceClaims")
    if named is None:  # as of nearly all pods
        return []
    listed = map(mapping, _list(named))
    return [name for one in listed if isinstance(name := one.get("resourceClaimTemplateName"), str)]
