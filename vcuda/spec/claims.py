"""Shares as claims of Dynamic Resource Allocation: what a ResourceClaim asks, what it was given, and its configuration.

Source of the fields: Kubernetes' API resource.k8s.io/v1. Objects come as the API server serves them (JSON).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vcuda.quoted import quoted
from vcuda.spec import device_classes
from vcuda.spec.device_classes import EXTENDED_PREFIX, DeviceClass, Undecided, may_be_of_class
from vcuda.spec.errors import InvalidRequest, Reason
from vcuda.spec.inventory import Card
from vcuda.spec.names import Names
from vcuda.spec.placement import CardShare
from vcuda.spec.request import MAX_CARDS_PER_CONTAINER, ContainerRequest, Kind, Priority
from vcuda.spec.share_config import ShareConfig, bad_claim, configs_of, object_at, objects
from vcuda.spec.units import BLOCK_BYTES, CORES_PER_CARD, parse_quantity

GROUP_VERSION = "resource.k8s.io/v1"
CORES, MEMORY = "cores", "memory"  # capacities of a device
MOST_REQUESTS = 32  # of a claim (api/resource/v1, DeviceRequestsMaxSize)
_MOST_CONFIGS, _MOST_ALTERNATIVES = 32, 8  # the same (DeviceConfigMaxSize, FirstAvailableDeviceRequestMaxSize)
_LONGEST_SELECTOR = 1000  # characters of a claim's own that are read
_LONGEST_LABEL, _LONGEST_POOL = 63, 253  # characters (api/resource/v1)
_DEFAULT_NAMES = Names()
_NO_OTHERS: Mapping[str, Collection[str]] = {}


@dataclass(frozen=True)
class Result:
    """A device, or a share of one, that a claim was given. `share_id`: "" for a device that it has alone.

    `request`: as containers name it; `alternative`: of a request with alternatives, "request/alternative", else the
    same. `cores`, `memory_blocks`: None: all of the device.
    """

    request: str
    alternative: str
    pool: str
    device: str
    share_id: str = ""
    cores: int | None = None
    memory_blocks: int | None = None


@dataclass(frozen=True)
class AllocatedClaim:
    """What of a claim is our driver's. `pods`: name and UID of those that it is reserved for, in its own namespace."""

    namespace: str
    name: str
    uid: str
    results: tuple[Result, ...]
    configs: tuple[tuple[frozenset[str], ShareConfig], ...] = ()
    pods: tuple[tuple[str, str], ...] = ()

    def config(self, result: Result) -> ShareConfig:
        """What counts for a result: the class's words first, then the claim's, each over those before."""
        found = ShareConfig()
        for requests, config in self.configs:
            if not requests or requests & {result.request, result.alternative}:
                found = config.over(found)
        return found


@dataclass(frozen=True)
class RequestShares:
    """What one request of a claim has: a share of each of its cards, those of one card in one.

    `whole`: all of every card; `oversell_blocks`: of each card; 0: no more than its share.
    """

    name: str
    shares: tuple[CardShare, ...]
    core_limit: int
    oversell_blocks: int
    priority: Priority
    whole: bool


def _no_admin(request: str) -> str:
    return (
        f"request {request!r} asks for adminAccess: without a share nothing would limit its memory, which others were "
        "promised. Drop the field to get a share; a monitor needs no claim: gpu-manager's /metrics and /usage show "
        "each card and share, and a privileged container sees the cards by the host's driver"
    )


# What a claim was given.


def parse_claim(claim: Mapping[str, Any], names: Names = _DEFAULT_NAMES) -> AllocatedClaim:
    """Our part of a ResourceClaim that has been allocated.

    Raises InvalidRequest: InvalidClaim for one that is not allocated or malformed, InvalidShareConfig for its
    configuration or its class's.
    """
    metadata = object_at(claim.get("metadata"), "metadata")
    namespace, name, uid = (str(metadata.get(key) or "") for key in ("namespace", "name", "uid"))
    status = object_at(claim.get("status"), "status")
    allocation = status.get("allocation")
    if not isinstance(allocation, Mapping):
        raise bad_claim("it is not allocated: it has lost its devices, or never had any")
    devices = object_at(allocation.get("devices"), "status.allocation.devices")
    results = tuple(
        _result(item)
        for item in objects(devices.get("results"), "status.allocation.devices.results")
        if item.get("driver") == names.driver
    )
    consumers = objects(status.get("reservedFor"), "status.reservedFor")
    return AllocatedClaim(
        namespace,
        name,
        uid,
        results,
        tuple(configs_of(devices.get("config"), "status.allocation.devices.config", names)),
        tuple((str(item.get("name")), str(item.get("uid"))) for item in consumers if item.get("resource") == "pods"),
    )


def _result(item: Mapping[str, Any]) -> Result:
    alternative, pool, device = (str(item.get(key) or "") for key in ("request", "pool", "device"))
    request = alternative.partition("/")[0]
    if not (request and pool and device):
        raise bad_claim("a result of its allocation lacks request, pool or device")
    if max(len(request), len(device)) > _LONGEST_LABEL or len(pool) > _LONGEST_POOL:
        raise bad_claim(
            f"request {quoted(request)}, pool {quoted(pool)} or device {quoted(device)} of its allocation has a longer "
            "name than Kubernetes allows"
        )
    if item.get("adminAccess"):
        raise bad_claim(_no_admin(request))
    consumed = object_at(item.get("consumedCapacity"), "consumedCapacity")
    amounts = {str(name).rpartition("/")[2]: value for name, value in consumed.items()}
    cores = _amount(amounts.get(CORES), 1, f"{CORES} of request {request!r}")
    blocks = _amount(amounts.get(MEMORY), BLOCK_BYTES, f"{MEMORY} of request {request!r}")
    if (cores is not None and not 1 <= cores <= CORES_PER_CARD) or blocks == 0:
        raise bad_claim(f"request {request!r} was given {cores} cores and {blocks} blocks of a device: no share")
    return Result(request, alternative, pool, device, str(item.get("shareID") or ""), cores, blocks)


def _amount(value: object, unit: int, what: str) -> int | None:
    """A quantity in units, rounded up as the scheduler rounds between the steps of a capacity; None: not said."""
    if value is None:
        return None
    found = parse_quantity(value)
    if found is None or found[0] < 0:
        raise InvalidRequest(Reason.INVALID_QUANTITY, f'{what} is {quoted(value)}; write for instance "30" or "2560Mi"')
    return -(-found[0] // (found[1] * unit))


def shares_of(claim: AllocatedClaim, pool: str, cards: Mapping[str, Card]) -> tuple[RequestShares, ...]:
    """What a claim has in one pool, by request. `cards`: those of the pool, by their devices' names.

    Raises InvalidRequest: UnknownCard for a device that the pool does not have, InvalidShareConfig, InvalidClaim.
    """
    return tuple(
        _request_shares(claim, name, [item for item in claim.results if item.request == name], pool, cards)
        for name in dict.fromkeys(item.request for item in claim.results)
    )


def _request_shares(
    claim: AllocatedClaim, name: str, results: Sequence[Result], pool: str, cards: Mapping[str, Card]
) -> RequestShares:
    use: dict[str, tuple[int, int]] = {}
    by_uuid: dict[str, Card] = {}
    for item in results:
        card = cards.get(item.device)
        if card is None or item.pool != pool:
            raise InvalidRequest(
                Reason.UNKNOWN_CARD,
                f"request {name!r} was given device {item.device} of pool {item.pool}, which this node does not offer; "
                "delete the pod, so that the claim is allocated anew",
            )
        by_uuid[card.uuid] = card
        cores, blocks = use.get(card.uuid, (0, 0))
        use[card.uuid] = (
            cores + (CORES_PER_CARD if item.cores is None else item.cores),
            blocks + (card.memory_blocks if item.memory_blocks is None else item.memory_blocks),
        )
    if len(use) > MAX_CARDS_PER_CONTAINER:
        raise bad_claim(f"request {name!r} has {len(use)} cards; one request may have {MAX_CARDS_PER_CONTAINER}")
    config = claim.config(results[0])
    whole = all(
        amounts == (CORES_PER_CARD, by_uuid[uuid].memory_blocks) for uuid, amounts in use.items()
    )  # of a card in part the rest is nobody's: its memory stays limited
    limit = max(config.limit(name, cores) for cores, _ in use.values())
    oversell = 0 if whole else max(config.oversell_blocks(name, blocks) for _, blocks in use.values())
    shares = tuple(CardShare(uuid, cores, blocks) for uuid, (cores, blocks) in use.items())
    return RequestShares(name, shares, limit, oversell, config.priority or Priority.NORMAL, whole)


# What a claim asks.


def _resources(pod: Mapping[str, Any]) -> Iterator[tuple[object, str, object]]:
    """Each resource that a container of the pod names: the container's name, the resource and how much of it."""
    spec = pod.get("spec")
    for key in ("containers", "initContainers"):
        listed = spec.get(key) if isinstance(spec, Mapping) else None
        for container in listed if isinstance(listed, list) else ():
            resources = container.get("resources") if isinstance(container, Mapping) else None
            for kind in ("limits", "requests"):
                amounts = resources.get(kind) if isinstance(resources, Mapping) else None
                for resource, amount in amounts.items() if isinstance(amounts, Mapping) else ():
                    yield container.get("name"), resource, amount


def classes_as_extended(pod: Mapping[str, Any]) -> dict[str, object]:
    """The DeviceClasses that a pod names as extended resources, by the prefix that each class has. Never raises.

    Each with the name of a container that asks, as below.
    """
    return {
        resource.removeprefix(EXTENDED_PREFIX): container
        for container, resource, _ in _resources(pod)
        if resource.startswith(EXTENDED_PREFIX)
    }


def maybe_of_classes(pod: Mapping[str, Any], names: Names) -> dict[str, object]:
    """The other resources of which a pod asks some and that may be a class's `extendedResourceName`. Never raises."""
    return {
        resource: container
        for container, resource, amount in _resources(pod)
        if may_be_of_class(resource, names) and (parse_quantity(amount) or (0, 1))[0] > 0
    }


def asks_as_extended(
    pod: Mapping[str, Any],
    names: Names = _DEFAULT_NAMES,
    others: Mapping[str, Collection[str]] = _NO_OTHERS,
    but: Collection[str] = (),
) -> InvalidRequest | None:
    """Why a pod must wait that asks for devices of our class as an extended resource; None: it does not. Never raises.

    kube-scheduler makes its claim only after it has decided, so no filter could count it. `others`: the same for more
    resources, each with the DeviceClasses that stand behind it, without those in `but`.
    """
    own = EXTENDED_PREFIX + names.driver
    for container, resource, _ in _resources(pod):
        if resource == own or (resource in others and resource not in but):
            behind = names.driver if resource == own else min(others[resource])
            return InvalidRequest(
                Reason.INVALID_POD,
                f"container {quoted(container)} asks for {resource}, devices whose claim "
                "kube-scheduler makes only after every quota and gang was asked; name a ResourceClaim or a "
                f"ResourceClaimTemplate of DeviceClass {behind} in its place",
            )
    return None


def demand(
    spec: Mapping[str, Any], names: Names = _DEFAULT_NAMES, classes: Mapping[str, DeviceClass] | None = None
) -> tuple[ContainerRequest, ...]:
    """What a claim's `spec` asks of our cards, in the form that scoring knows; the names are the requests'.

    Several whole cards of one request are one entry, several shares are one each. Of a request with alternatives the
    most of each amount counts: only kube-scheduler knows which it will give, and an author may write one that no card
    meets. Memory that is not asked for is a whole card's: 0 blocks. `classes`: all DeviceClasses by name; None: nobody
    knows any, and only that of our driver's name counts.
    Raises InvalidRequest for what no card can ever give, and for a configuration that is wrong: what admission refuses;
    Undecided where it can't be told whether it asks anything.
    """
    devices = object_at(spec.get("devices"), "spec.devices")
    _check_length(devices)
    configs = tuple(configs_of(devices.get("config"), "spec.devices.config", names))
    found: list[ContainerRequest] = []
    doubt: Undecided | None = None
    for request in objects(devices.get("requests"), "spec.devices.requests"):
        name = str(request.get("name") or "")
        alternatives = objects(request.get("firstAvailable"), f"firstAvailable of request {name!r}")
        exactly = object_at(request.get("exactly"), f"exactly of request {name!r}")
        possible: list[tuple[ContainerRequest, int]] = []
        for body in alternatives or [exactly]:
            try:
                its = class_of(body, name, names, classes)
            except Undecided as error:
                doubt = doubt or error
                continue
            if its is None:
                continue
            alternative = f"{name}/{body.get('name')}" if alternatives else name
            asked = AllocatedClaim("", "", "", (), ((frozenset(), its.config), *configs))
            possible.append(_asked(name, body, asked.config(Result(name, alternative, "", ""))))
        found += _most(possible) if possible else []
    if doubt is not None:
        raise doubt
    return tuple(found)


def _check_length(devices: Mapping[str, Any]) -> None:
    """Raises InvalidRequest where it would take long to read: each request is looked at with each configuration."""
    requests = objects(devices.get("requests"), "spec.devices.requests")
    configs, alternatives = devices.get("config"), [one.get("firstAvailable") for one in requests]
    for what, listed, most in (
        ("requests", [requests], MOST_REQUESTS),
        ("configurations", [configs], _MOST_CONFIGS),
        ("alternatives of a request", alternatives, _MOST_ALTERNATIVES),
    ):
        many = max((len(one) for one in listed if isinstance(one, list)), default=0)
        if many > most:
            raise bad_claim(f"the claim has {many} {what}; Kubernetes takes {most}: make several claims of it")


def class_of(
    body: Mapping[str, Any], request: str, names: Names, classes: Mapping[str, DeviceClass] | None
) -> DeviceClass | None:
    """The class of a request, or of an alternative, that gets cards of ours; None: it gets none.

    Raises Undecided where that can't be told, InvalidRequest where the class's configuration is wrong.
    """
    name = str(body.get("deviceClassName") or "")
    if classes is None:
        return device_classes.own(names) if name == names.driver else None
    its = classes.get(name) or device_classes.unseen(name, names)
    return its if its.of_request(request, selectors_of(body), names) else None


def selectors_of(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Those of a request's own; what is longer or has another form, kube-scheduler alone reads."""
    try:
        found = device_classes.expressions(body.get("selectors"), "selectors")
    except InvalidRequest:
        return ()
    return tuple(one for one in found if len(one) <= _LONGEST_SELECTOR)


def _most(possible: Sequence[tuple[ContainerRequest, int]]) -> list[ContainerRequest]:
    """The largest amounts and the largest count of a request's alternatives, each per card."""
    ones, count = [one for one, _ in possible], max(count for _, count in possible)
    blocks = [one.memory_blocks for one in ones]
    most = replace(
        ones[0],
        cores=max(one.cores for one in ones),
        memory_blocks=max(blocks) if all(blocks) else 0,
        core_limit=max(one.core_limit for one in ones),
        oversell_blocks=max(one.oversell_blocks for one in ones),
    )
    return [replace(most, cores=most.cores * count)] if most.whole else [most] * count


def _asked(name: str, body: Mapping[str, Any], config: ShareConfig) -> tuple[ContainerRequest, int]:
    """A share, per card, and how many of it."""
    if body.get("adminAccess"):
        raise bad_claim(_no_admin(name))
    mode, count = body.get("allocationMode", "ExactCount"), body.get("count", 1)
    if mode != "ExactCount" or type(count) is not int or count < 1:
        raise bad_claim(
            f"request {name!r} has allocationMode {quoted(mode, 30)} and count {quoted(count, 30)}; ask for a count of "
            "shares"
        )
    if count > MAX_CARDS_PER_CONTAINER:
        raise bad_claim(f"request {name!r} asks for {count} cards; one request may have {MAX_CARDS_PER_CONTAINER}")
    capacity = object_at(body.get("capacity"), f"capacity of request {name!r}")
    wanted = object_at(capacity.get("requests"), f"capacity.requests of request {name!r}")
    unknown = sorted(key for key in map(str, wanted) if key not in (CORES, MEMORY))
    if unknown:
        raise bad_claim(f"request {name!r} asks for {quoted(unknown[0])}; a card has {CORES} and {MEMORY}")
    cores = _amount(wanted.get(CORES), 1, f"{CORES} of request {name!r}")
    blocks = _amount(wanted.get(MEMORY), BLOCK_BYTES, f"{MEMORY} of request {name!r}")
    cores = CORES_PER_CARD if cores is None else max(1, cores)
    if cores > CORES_PER_CARD:
        raise InvalidRequest(
            Reason.INVALID_CORES,
            f"request {name!r} asks for {cores} cores of one card, which has {CORES_PER_CARD}; for several cards ask "
            "for a count",
        )
    blocks = 0 if blocks is None else max(1, blocks)
    if blocks == 0 and cores < CORES_PER_CARD:
        raise InvalidRequest(
            Reason.INCOMPLETE_REQUEST,
            f"request {name!r} asks for {cores} {CORES} and no {MEMORY}, which is all memory of a card; add {MEMORY}",
        )
    limit = config.limit(name, cores)
    return ContainerRequest(name, Kind.APP, None, cores, blocks, limit, config.oversell_blocks(name, blocks)), count
