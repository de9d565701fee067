"""What a pod asks for: its limits and our annotations, checked, per container.

The rules are those of the systems our users come from: only `limits` count (Kubernetes copies them to requests),
under 100 cores is a share of one card and needs memory, multiples of 100 are whole cards, anything else is refused.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from vcuda.quoted import quoted
from vcuda.spec import gang
from vcuda.spec.errors import InvalidRequest, Reason
from vcuda.spec.gang import Gang
from vcuda.spec.names import Names
from vcuda.spec.units import CORES_PER_CARD, parse_count

MAX_CARDS_PER_CONTAINER = 16  # VC_MAX_CARDS of the region
MAX_CONTAINERS_PER_POD = 64  # with a share; each costs a step of placing on every node
MAX_ANNOTATION_CHARS = 4096  # of each that a pod asks by: its owner may edit it for ever, and each value is a class
MAX_FILTER_ITEMS = 64  # models or UUIDs that a pod may name

_DEFAULT_NAMES = Names()


class Kind(enum.StrEnum):
    """When a container runs: all APP and SIDECAR ones together, INIT ones one by one before."""

    APP = "app"
    INIT = "init"
    SIDECAR = "sidecar"  # an init container with restartPolicy: Always


class Priority(enum.StrEnum):
    """Who comes first on a contended card, within what each is promised."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"


class Policy(enum.StrEnum):
    """How the extender compares nodes and cards that fit."""

    FGD = "fgd"
    BINPACK = "binpack"
    SPREAD = "spread"
    TOPOLOGY = "topology"


@dataclass(frozen=True)
class ContainerRequest:
    """One container's request: `cores` in 1/100 card, `memory_blocks` of 256 MiB, `core_limit` elastic ceiling.

    `index` counts `spec.containers`, and is None for init containers and sidecars. `oversell_blocks`: what it may hold
    in all, beyond `memory_blocks` as managed memory; 0: no more than these.
    """

    name: str
    kind: Kind
    index: int | None
    cores: int
    memory_blocks: int
    core_limit: int
    oversell_blocks: int = 0

    @functools.cached_property
    def whole(self) -> bool:
        """Whether it asks for whole cards; then memory is not limited below the card's own."""
        return self.cores >= CORES_PER_CARD

    @functools.cached_property
    def card_count(self) -> int:
        return self.cores // CORES_PER_CARD if self.whole else 1

    @functools.cached_property
    def cores_per_card(self) -> int:
        return CORES_PER_CARD if self.whole else self.cores


class CardFilter(NamedTuple):
    """Which models or UUIDs a pod accepts: `include` empty means all; `exclude` always wins."""

    include: frozenset[str] = frozenset()
    exclude: frozenset[str] = frozenset()

    def allows(self, value: str) -> bool:
        return value not in self.exclude and (not self.include or value in self.include)


@dataclass(frozen=True)
class PodRequest:
    """A pod's whole request; `containers` are those that ask for a share, init containers and sidecars included.

    `policy` chooses node and card; `card_policy`, where it is given, the card, so that `policy` chooses the node only.
    """

    uid: str
    namespace: str
    name: str
    containers: tuple[ContainerRequest, ...]
    priority: Priority = Priority.NORMAL
    policy: Policy | None = None
    card_policy: Policy | None = None
    models: CardFilter = field(default_factory=CardFilter)
    uuids: CardFilter = field(default_factory=CardFilter)
    gang: Gang | None = None

    def __bool__(self) -> bool:
        """Whether the pod asks for any share at all."""
        return bool(self.containers)

    def container(self, name: str) -> ContainerRequest | None:
        return next((container for container in self.containers if container.name == name), None)


def check_cores(cores: int, asked: str) -> None:
    """Raise InvalidRequest (InvalidCores) unless `cores` is a share of one card or a number of whole cards.

    `asked` opens the message: who asks for how much.
    """
    if cores < 1 or (cores > CORES_PER_CARD and cores % CORES_PER_CARD):
        raise InvalidRequest(
            Reason.INVALID_CORES,
            f"{asked}; ask 1 to 99 for a share of one card, or a multiple of {CORES_PER_CARD} for whole cards",
        )
    if cores // CORES_PER_CARD > MAX_CARDS_PER_CONTAINER:
        raise InvalidRequest(
            Reason.INVALID_CORES,
            f"{asked}; one container may have at most {MAX_CARDS_PER_CONTAINER} cards "
            f"({MAX_CARDS_PER_CONTAINER * CORES_PER_CARD})",
        )


def _check_container(
    name: str,
    kind: Kind,
    index: int | None,
    limits: Mapping[str, object],
    core_limit: int | None,
    names: Names,
) -> ContainerRequest | None:
    if names.core not in limits and names.memory not in limits:
        return None
    where = f"container {name!r}"
    cores = parse_count(limits.get(names.core, 0), f"{names.core} of {where}")
    blocks = parse_count(limits.get(names.memory, 0), f"{names.memory} of {where}")
    if names.core not in limits or (cores == 0 and blocks > 0):
        raise InvalidRequest(
            Reason.INCOMPLETE_REQUEST,
            f"{where} asks for {names.memory} without {names.core}; add both to its limits",
        )
    if cores == 0:
        if names.memory in limits:
            return None  # 0 of both, explicitly: no share
        raise InvalidRequest(Reason.INVALID_CORES, f"{where} asks for 0 {names.core}; ask 1 to 99 or a multiple of 100")
    check_cores(cores, f"{where} asks for {cores} {names.core}")
    if blocks == 0 and cores < CORES_PER_CARD:
        if names.memory not in limits:
            raise InvalidRequest(
                Reason.INCOMPLETE_REQUEST,
                f"{where} asks for {names.core} without {names.memory}; add memory blocks of 256 MiB to its limits",
            )
        raise InvalidRequest(
            Reason.INVALID_MEMORY, f"{where} asks for 0 {names.memory}; a share needs at least 1 block"
        )
    whole = cores >= CORES_PER_CARD
    if core_limit is not None and not whole and core_limit < cores:
        raise InvalidRequest(
            Reason.INVALID_ANNOTATION,
            f"annotation {names.core_limit} is {core_limit}, below the {cores} {names.core} of {where}; "
            "the elastic limit must be at least the request",
        )
    limit = CORES_PER_CARD if whole else (core_limit or cores)
    return ContainerRequest(name, kind, index, cores, blocks, limit)


def _choice(value: object, options: type[enum.StrEnum], annotation: str) -> Any:
    try:
        return options(str(value))
    except ValueError:
        allowed = ", ".join(options)
        raise InvalidRequest(
            Reason.INVALID_ANNOTATION,
            f"annotation {annotation} is {quoted(value)}; it must be one of {allowed}",
        ) from None


def _policies(text: str | None, annotation: str) -> tuple[Policy | None, Policy | None]:
    """(policy, card policy) of "spread", for both, or of "node=spread,card=binpack"."""
    if text is None:
        return None, None
    if "=" not in text:
        return _choice(text, Policy, annotation), None
    parts = {key.strip(): word.strip() for key, _, word in (part.partition("=") for part in text.split(","))}
    if set(parts) != {"node", "card"} or text.count(",") != 1:
        raise InvalidRequest(
            Reason.INVALID_ANNOTATION,
            f'annotation {annotation} is {quoted(text)}; write one policy, or for instance "node=spread,card=binpack"',
        )
    return _choice(parts["node"], Policy, annotation), _choice(parts["card"], Policy, annotation)


def _core_limit(annotations: Mapping[str, str], names: Names) -> int | None:
    if names.core_limit not in annotations:
        return None
    value = annotations[names.core_limit]
    try:
        number = parse_count(value, f"annotation {names.core_limit}")
    except InvalidRequest as error:
        raise InvalidRequest(Reason.INVALID_ANNOTATION, error.message) from None
    if not 1 <= number <= CORES_PER_CARD:
        raise InvalidRequest(
            Reason.INVALID_ANNOTATION,
            f"annotation {names.core_limit} is {number}; it must be 1 to {CORES_PER_CARD}",
        )
    return number


def _card_filter(annotations: Mapping[str, str], annotation: str) -> CardFilter:
    items = [item.strip() for item in annotations.get(annotation, "").split(",") if item.strip()]
    if len(items) > MAX_FILTER_ITEMS:
        raise InvalidRequest(
            Reason.INVALID_ANNOTATION, f"annotation {annotation} names {len(items)}; it may name {MAX_FILTER_ITEMS}"
        )
    return CardFilter(
        frozenset(item for item in items if not item.startswith("!")),
        frozenset(item[1:].strip() for item in items if item.startswith("!")),
    )


@dataclass(frozen=True)
class _Oversell:
    """The annotation: `true` doubles every share; a number is each share's blocks in all; `name=number` is for one."""

    annotation: str
    doubled: bool = False
    blocks: int = 0
    by_name: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, annotations: Mapping[str, str], names: Names) -> _Oversell:
        value = annotations.get(names.oversell, "false")
        if value.lower() in ("true", "false"):
            return cls(names.oversell, doubled=value.lower() == "true")
        blocks, by_name = 0, {}
        for item in value.split(","):
            name, equals, number = item.strip().rpartition("=")
            try:
                count = parse_count(number, f"annotation {names.oversell}")
            except InvalidRequest:
                raise InvalidRequest(
                    Reason.INVALID_ANNOTATION,
                    f'annotation {names.oversell} is {quoted(value)}; it must be "true", a number of blocks of '
                    "256 MiB, or container=number, ...",
                ) from None
            if equals:
                by_name[name] = count
            else:
                blocks = count
        return cls(names.oversell, blocks=blocks, by_name=by_name)

    def apply(self, request: ContainerRequest) -> ContainerRequest:
        named = self.by_name.get(request.name)
        if request.whole:
            if named is not None:
                raise InvalidRequest(
                    Reason.INVALID_ANNOTATION,
                    f"annotation {self.annotation} names container {request.name!r}, which has whole cards: their "
                    "memory is not limited",
                )
            return request
        wanted = named if named is not None else 2 * request.memory_blocks if self.doubled else self.blocks
        if 0 < wanted < request.memory_blocks or (named is not None and wanted < request.memory_blocks):
            raise InvalidRequest(
                Reason.INVALID_ANNOTATION,
                f"annotation {self.annotation} gives container {request.name!r} {wanted} blocks in all, fewer than the "
                f"{request.memory_blocks} that it asks for",
            )
        return replace(request, oversell_blocks=wanted if wanted > request.memory_blocks else 0)


def _containers(spec: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    value = spec.get(key) or ()
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(c, Mapping) for c in value):
        raise InvalidRequest(Reason.INVALID_POD, f"spec.{key} is not a list of containers")
    return value


def annotations_read(names: Names) -> tuple[str, ...]:
    """The annotations that say what a pod asks for."""
    return (
        names.core_limit, names.oversell, names.policy, names.priority, names.card_model, names.card_uuid, names.gang,
    )  # fmt: skip


def _annotations(metadata: Mapping[str, Any], names: Names) -> dict[str, str]:
    found = _mapping(metadata.get("annotations"), "metadata.annotations")
    ours = {name: str(found[name]) for name in annotations_read(names) if name in found}
    for name, text in ours.items():
        if len(text) > MAX_ANNOTATION_CHARS:
            raise InvalidRequest(
                Reason.INVALID_ANNOTATION,
                f"annotation {name} has {len(text)} characters; it may have {MAX_ANNOTATION_CHARS}",
            )
    return ours


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidRequest(Reason.INVALID_POD, f"{what} is not an object")
    return value


def asks_for_share(pod: Mapping[str, Any], names: Names) -> bool:
    """Whether any container names one of our resources in its limits, valid or not. Never raises."""
    # From JSON they are dicts and lists; to ask an abstract class instead is a call in Python each time.
    spec = pod.get("spec")
    if not isinstance(spec, (dict, Mapping)):
        return False
    for key in ("containers", "initContainers"):
        listed = spec.get(key)
        for container in listed if isinstance(listed, (list, Sequence)) else ():
            resources = container.get("resources") if isinstance(container, (dict, Mapping)) else None
            limits = resources.get("limits") if isinstance(resources, (dict, Mapping)) else None
            if isinstance(limits, (dict, Mapping)) and (names.core in limits or names.memory in limits):
                return True
    return False


def parse_pod(pod: Mapping[str, Any], names: Names | None = None) -> PodRequest:
    """Parse a pod as the API server serves it (JSON). A pod without our resources gives an empty, falsy request.

    Raises InvalidRequest with a stable reason and a message that names the container or annotation. Our
    annotations are only looked at on pods that ask for a share: others' values are not our business.
    """
    names = names or _DEFAULT_NAMES
    metadata = _mapping(pod.get("metadata"), "metadata")
    identity = (
        str(metadata.get("uid", "")),
        str(metadata.get("namespace") or "default"),
        str(metadata.get("name", "")),
    )
    if not asks_for_share(pod, names):
        return PodRequest(*identity, ())
    spec = _mapping(pod.get("spec"), "spec")
    annotations = _annotations(metadata, names)
    labels = {str(k): str(v) for k, v in _mapping(metadata.get("labels"), "metadata.labels").items()}
    core_limit = _core_limit(annotations, names)
    oversell = _Oversell.parse(annotations, names)
    found: list[ContainerRequest] = []
    for key in ("initContainers", "containers"):
        for position, container in enumerate(_containers(spec, key)):
            name = str(container.get("name", ""))
            limits = _mapping(_mapping(container.get("resources"), "resources").get("limits"), "resources.limits")
            if key == "containers":
                kind, index = Kind.APP, position
            else:
                kind, index = (
                    (Kind.SIDECAR if container.get("restartPolicy") == "Always" else Kind.INIT),
                    None,
                )
            request = _check_container(name, kind, index, limits, core_limit, names)
            if request is None:
                continue
            if any(other.name == request.name for other in found):
                raise InvalidRequest(Reason.INVALID_POD, f"two containers are named {quoted(request.name)}")
            if len(found) == MAX_CONTAINERS_PER_POD:  # before all are read, each beside all others
                raise InvalidRequest(
                    Reason.INVALID_POD,
                    f"more than {MAX_CONTAINERS_PER_POD} containers ask for a share; one pod may have "
                    f"{MAX_CONTAINERS_PER_POD} of them",
                )
            found.append(oversell.apply(request))
    policy, card_policy = _policies(annotations.get(names.policy), names.policy)
    unknown = oversell.by_name.keys() - {request.name for request in found}
    if unknown:
        raise InvalidRequest(
            Reason.INVALID_ANNOTATION,
            f"annotation {names.oversell} names container {quoted(min(unknown))}, which asks for no share",
        )
    return PodRequest(
        *identity,
        tuple(found),
        priority=_choice(annotations.get(names.priority, Priority.NORMAL), Priority, names.priority),
        policy=policy,
        card_policy=card_policy,
        models=_card_filter(annotations, names.card_model),
        uuids=_card_filter(annotations, names.card_uuid),
        gang=gang.parse(annotations, labels, names),
    )


def parse_spec(pod: Mapping[str, Any], names: Names | None = None) -> PodRequest:
    """What the spec alone asks, for a pod that has its devices: its limits can't change, its annotations may.

    Elastic limit, oversell, priority and what chooses cards are the defaults. Raises InvalidRequest for the spec.
    """
    metadata = _mapping(pod.get("metadata"), "metadata")
    identity = {key: metadata[key] for key in ("uid", "namespace", "name") if key in metadata}
    return parse_pod({"metadata": identity, "spec": pod.get("spec")}, names)
