"""Shares as claims of Dynamic Resource Allocation: what a ResourceClaim asks, what it was given, and its configuration.

Source of the fields: Kubernetes' API resource.k8s.io/v1. Objects come as the API server serves them (JSON).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vcuda.quoted import quoted
from vcuda.spec.errors import InvalidRequest, Reason
from vcuda.spec.inventory import Card
from vcuda.spec.names import Names
from vcuda.spec.placement import CardShare
from vcuda.spec.request import MAX_CARDS_PER_CONTAINER, ContainerRequest, Kind, Priority
from vcuda.spec.units import BLOCK_BYTES, CORES_PER_CARD, parse_quantity

GROUP_VERSION = "resource.k8s.io/v1"
EXTENDED_PREFIX = "deviceclass.resource.kubernetes.io/"  # before a DeviceClass's name: an extended resource (KEP-5004)
CORES, MEMORY = "cores", "memory"  # capacities of a device
CONFIG_KIND = "ShareConfig"
MOST_REQUESTS = 32  # of a claim (api/resource/v1, DeviceRequestsMaxSize)
_CONFIG_FIELDS = ("coreLimit", "priority", "oversell")
_MOST_BYTES = 2**63 - 1  # what Kubernetes' quantities say, and a region's 64 bits hold
_LONGEST_LABEL, _LONGEST_POOL = 63, 253  # characters (api/resource/v1)
_DEFAULT_NAMES = Names()


@dataclass(frozen=True)
class ShareConfig:
    """How a request's shares may be used; None: not said.

    `core_limit`: most hundredths of each card; `oversell`: bytes that a share may hold of each card in all, beyond its
    own as managed memory; True: twice its own.
    """

    core_limit: int | None = None
    priority: Priority | None = None
    oversell: bool | int | None = None

    def over(self, earlier: ShareConfig) -> ShareConfig:
        """What both say together; where both say something, this one counts."""
        return ShareConfig(
            earlier.core_limit if self.core_limit is None else self.core_limit,
            earlier.priority if self.priority is None else self.priority,
            earlier.oversell if self.oversell is None else self.oversell,
        )

    def limit(self, request: str, cores: int) -> int:
        """The elastic limit of a share of `cores`. Raises InvalidRequest."""
        if self.core_limit is None or cores == CORES_PER_CARD:
            return cores
        if self.core_limit < cores:
            raise _bad_config(
                f"coreLimit is {self.core_limit}, below the {cores} cores of request {request!r}; the elastic limit "
                "must be at least the request"
            )
        return self.core_limit

    def oversell_blocks(self, request: str, blocks: int) -> int:
        """Blocks that a share of `blocks` may hold in all; 0: no more than these. Raises InvalidRequest."""
        if not self.oversell:
            return 0
        wanted = 2 * blocks if self.oversell is True else self.oversell // BLOCK_BYTES
        if wanted < blocks:
            raise _bad_config(
                f"oversell gives request {request!r} {wanted} blocks of 256 MiB in all, fewer than the {blocks} that "
                "it asks for"
            )
        return wanted if wanted > blocks else 0


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


def _bad_claim(message: str) -> InvalidRequest:
    return InvalidRequest(Reason.INVALID_CLAIM, message)


def _bad_config(message: str) -> InvalidRequest:
    return InvalidRequest(Reason.INVALID_SHARE_CONFIG, f"{CONFIG_KIND}: {message}")


def _no_admin(request: str) -> str:
    return (
        f"request {request!r} asks for adminAccess: without a share nothing would limit its memory, which others were "
        "promised. Drop the field to get a share; a monitor needs no claim: gpu-manager's /metrics and /usage show "
        "each card and share, and a privileged container sees the cards by the host's driver"
    )


def _objects(value: object, what: str) -> Sequence[Mapping[str, Any]]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise _bad_claim(f"{what} is not a list of objects")
    return value


def _object(value: object, what: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _bad_claim(f"{what} is not an object")
    return value


# Configuration.


def parse_config(parameters: object, names: Names = _DEFAULT_NAMES) -> ShareConfig:
    """The opaque parameters of a claim or class for our driver.

    Raises InvalidRequest (InvalidShareConfig) for what is unknown or wrong: nothing is passed over in silence.
    """
    if not isinstance(parameters, Mapping):
        raise _bad_config(f"the parameters are {quoted(parameters)}; they must be an object")
    given = {str(name): value for name, value in parameters.items()}
    said = given.pop("apiVersion", None), given.pop("kind", None)
    if said != (names.config_version, CONFIG_KIND):
        raise _bad_config(
            f"it is a {quoted(said[1])} of {quoted(said[0])}; write apiVersion: {names.config_version}, "
            f"kind: {CONFIG_KIND}"
        )
    unknown = sorted(given.keys() - set(_CONFIG_FIELDS))
    if unknown:
        raise _bad_config(f"unknown field {quoted(unknown[0])}; there are {', '.join(_CONFIG_FIELDS)}")
    return ShareConfig(
        _core_limit(given.get("coreLimit")), _priority(given.get("priority")), _oversell(given.get("oversell"))
    )


def _core_limit(value: object) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 1 <= value <= CORES_PER_CARD:
        raise _bad_config(f"coreLimit is {quoted(value)}; it must be a number from 1 to {CORES_PER_CARD}")
    return value


def _priority(value: object) -> Priority | None:
    if value is None:
        return None
    if not isinstance(value, str) or value not in set(Priority):
        raise _bad_config(f"priority is {quoted(value)}; it must be one of {', '.join(Priority)}")
    return Priority(value)


def _oversell(value: object) -> bool | int | None:
    if value is None or isinstance(value, bool):
        return value
    found = parse_quantity(value)
    if found is None or found[0] <= 0:
        raise _bad_config(f'oversell is {quoted(value)}; it must be true, false or an amount of memory such as "4Gi"')
    size = max(1, found[0] // found[1])
    if size > _MOST_BYTES:
        raise _bad_config(f"oversell is {quoted(value)}; no card has more than 2^63 - 1 bytes")
    return size


def _configs(entries: object, what: str, names: Names) -> list[tuple[frozenset[str], ShareConfig]]:
    found = []
    for entry in _objects(entries, what):
        opaque = _object(entry.get("opaque"), f"{what}.opaque")
        if opaque.get("driver") != names.driver:
            continue
        requests = entry.get("requests") or []
        if not isinstance(requests, list):
            raise _bad_claim(f"{what}.requests is not a list")
        try:
            given = parse_config(opaque.get("parameters"), names)
        except RecursionError:  # to say what they are
            raise _bad_config("the parameters are nested too deep") from None
        found.append((frozenset(map(str, requests)), given))
    return found


# What a claim was given.


def parse_claim(claim: Mapping[str, Any], names: Names = _DEFAULT_NAMES) -> AllocatedClaim:
    """Our part of a ResourceClaim that has been allocated.

    Raises InvalidRequest: InvalidClaim for one that is not allocated or malformed, InvalidShareConfig for its
    configuration or its class's.
    """
    metadata = _object(claim.get("metadata"), "metadata")
    namespace, name, uid = (str(metadata.get(key) or "") for key in ("namespace", "name", "uid"))
    status = _object(claim.get("status"), "status")
    allocation = status.get("allocation")
    if not isinstance(allocation, Mapping):
        raise _bad_claim("it is not allocated: it has lost its devices, or never had any")
    devices = _object(allocation.get("devices"), "status.allocation.devices")
    results = tuple(
        _result(item)
        for item in _objects(devices.get("results"), "status.allocation.devices.results")
        if item.get("driver") == names.driver
    )
    consumers = _objects(status.get("reservedFor"), "status.reservedFor")
    return AllocatedClaim(
        namespace,
        name,
        uid,
        results,
        tuple(_configs(devices.get("config"), "status.allocation.devices.config", names)),
        tuple((str(item.get("name")), str(item.get("uid"))) for item in consumers if item.get("resource") == "pods"),
    )


def _result(item: Mapping[str, Any]) -> Result:
    alternative, pool, device = (str(item.get(key) or "") for key in ("request", "pool", "device"))
    request = alternative.partition("/")[0]
    if not (request and pool and device):
        raise _bad_claim("a result of its allocation lacks request, pool or device")
    if max(len(request), len(device)) > _LONGEST_LABEL or len(pool) > _LONGEST_POOL:
        raise _bad_claim(
            f"request {quoted(request)}, pool {quoted(pool)} or device {quoted(device)} of its allocation has a longer "
            "name than Kubernetes allows"
        )
    if item.get("adminAccess"):
        raise _bad_claim(_no_admin(request))
    consumed = _object(item.get("consumedCapacity"), "consumedCapacity")
    amounts = {str(name).rpartition("/")[2]: value for name, value in consumed.items()}
    cores = _amount(amounts.get(CORES), 1, f"{CORES} of request {request!r}")
    blocks = _amount(amounts.get(MEMORY), BLOCK_BYTES, f"{MEMORY} of request {request!r}")
    if (cores is not None and not 1 <= cores <= CORES_PER_CARD) or blocks == 0:
        raise _bad_claim(f"request {request!r} was given {cores} cores and {blocks} blocks of a device: no share")
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
        raise _bad_claim(f"request {name!r} has {len(use)} cards; one request may have {MAX_CARDS_PER_CONTAINER}")
    config = claim.config(results[0])
    whole = all(
        amounts == (CORES_PER_CARD, by_uuid[uuid].memory_blocks) for uuid, amounts in use.items()
    )  # of a card in part the rest is nobody's: its memory stays limited
    limit = max(config.limit(name, cores) for cores, _ in use.values())
    oversell = 0 if whole else max(config.oversell_blocks(name, blocks) for _, blocks in use.values())
    shares = tuple(CardShare(uuid, cores, blocks) for uuid, (cores, blocks) in use.items())
    return RequestShares(name, shares, limit, oversell, config.priority or Priority.NORMAL, whole)


# What a claim asks.


def asks_as_extended(pod: Mapping[str, Any], names: Names = _DEFAULT_NAMES) -> InvalidRequest | None:
    """Why a pod must wait that asks for devices of our class as an extended resource; None: it does not. Never raises.

    kube-scheduler makes its claim only after it has decided, so no filter could count it.
    """
    spec, resource = pod.get("spec"), EXTENDED_PREFIX + names.driver
    for key in ("containers", "initContainers"):
        listed = spec.get(key) if isinstance(spec, Mapping) else None
        for container in listed if isinstance(listed, list) else ():
            resources = container.get("resources") if isinstance(container, Mapping) else None
            for kind in ("limits", "requests"):
                amounts = resources.get(kind) if isinstance(resources, Mapping) else None
                if isinstance(amounts, Mapping) and resource in amounts:
                    return InvalidRequest(
                        Reason.INVALID_POD,
                        f"container {quoted(container.get('name'))} asks for {resource}, whole cards whose claim "
                        "kube-scheduler makes only after every quota was asked; name a ResourceClaim or a "
                        f"ResourceClaimTemplate of DeviceClass {names.driver} in its place",
                    )
    return None


def demand(
    spec: Mapping[str, Any], names: Names = _DEFAULT_NAMES, classes: Collection[str] | None = None
) -> tuple[ContainerRequest, ...]:
    """What a claim's `spec` asks of our cards, in the form that scoring knows; the names are the requests'.

    Several whole cards of one request are one entry, several shares are one each. Of a request with alternatives the
    most of each amount counts: only kube-scheduler knows which it will give, and an author may write one that no card
    meets. Memory that is not asked for is a whole card's: 0 blocks. `classes`: the names of our DeviceClasses.
    Raises InvalidRequest for what no card can ever give, and for a configuration that is wrong: what admission refuses.
    """
    classes = {names.driver} if classes is None else classes
    devices = _object(spec.get("devices"), "spec.devices")
    configs = tuple(_configs(devices.get("config"), "spec.devices.config", names))
    asked = AllocatedClaim("", "", "", (), configs)
    found: list[ContainerRequest] = []
    for request in _objects(devices.get("requests"), "spec.devices.requests"):
        name = str(request.get("name") or "")
        alternatives = _objects(request.get("firstAvailable"), f"firstAvailable of request {name!r}")
        exactly = _object(request.get("exactly"), f"exactly of request {name!r}")
        possible: list[tuple[ContainerRequest, int]] = []
        for body in alternatives or [exactly]:
            if str(body.get("deviceClassName")) not in classes:
                continue
            alternative = f"{name}/{body.get('name')}" if alternatives else name
            config = asked.config(Result(name, alternative, "", ""))
            possible.append(_asked(name, body, config))
        found += _most(possible) if possible else []
    return tuple(found)


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
        raise _bad_claim(_no_admin(name))
    mode, count = body.get("allocationMode", "ExactCount"), body.get("count", 1)
    if mode != "ExactCount" or type(count) is not int or count < 1:
        raise _bad_claim(
            f"request {name!r} has allocationMode {quoted(mode, 30)} and count {quoted(count, 30)}; ask for a count of "
            "shares"
        )
    if count > MAX_CARDS_PER_CONTAINER:
        raise _bad_claim(f"request {name!r} asks for {count} cards; one request may have {MAX_CARDS_PER_CONTAINER}")
    capacity = _object(body.get("capacity"), f"capacity of request {name!r}")
    wanted = _object(capacity.get("requests"), f"capacity.requests of request {name!r}")
    unknown = sorted(key for key in map(str, wanted) if key not in (CORES, MEMORY))
    if unknown:
        raise _bad_claim(f"request {name!r} asks for {quoted(unknown[0])}; a card has {CORES} and {MEMORY}")
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
