"""What becomes of a pod that is created or changed: let through, completed, corrected, or refused with a reason.

Nothing here looks at the cluster: what is refused could run on no card at all, and a pod that asks for no share is only
ever relieved of annotations that are not its author's to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler_ext.protocol.admission_v1 import Patch, Review, pointer
from vcuda.spec.errors import InvalidRequest
from vcuda.spec.names import Names
from vcuda.spec.request import asks_for_share, parse_pod
from vcuda.spec.units import CORES_PER_CARD, parse_count

_DEFAULT_SCHEDULER = "default-scheduler"  # what the API server writes where an author wrote nothing
_ANNOTATIONS = ("metadata", "annotations")
_MOST_WARNINGS = 8


@dataclass(frozen=True)
class Rules:
    """The operator's choices.

    `scheduler_name`: given to pods with a share whose author chose none. `annotations`: given to pods with a share that
    lack them. `cores` and `memory_blocks`: what a container gets that names only the other of the two resources; 0: it
    is refused. `trusted`: users whose word about placements counts. `exempt`: namespaces whose pods pass as they are.
    """

    names: Names = field(default_factory=Names)
    scheduler_name: str | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)
    cores: int = 0
    memory_blocks: int = 0
    trusted: frozenset[str] = frozenset()
    exempt: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Verdict:
    """What to answer: a refusal, or a patch (maybe empty) with words for whoever created the pod."""

    refusal: InvalidRequest | None = None
    patch: tuple[Patch, ...] = ()
    warnings: tuple[str, ...] = ()


def decide(review: Review, rules: Rules) -> Verdict:
    """Never raises for a pod, however odd: what can't be understood is not ours, or is refused."""
    if review.namespace in rules.exempt:
        return Verdict()
    change = _Change(review.pod)
    if review.user not in rules.trusted:
        _keep_what_is_ours(change, _annotations(review.old), rules.names)
    if review.operation != "CREATE" or not asks_for_share(review.pod, rules.names):
        return change.verdict()
    try:
        _complete(change, rules)
    except InvalidRequest as error:
        return Verdict(error)
    return change.verdict()


class _Change:
    """What becomes of a pod, the patch that makes it of the original, and why.

    Only what changes is copied: pods may be large.
    """

    def __init__(self, pod: Mapping[str, Any]) -> None:
        self.pod: dict[str, Any] = dict(pod)
        self._own: dict[int, Any] = {id(self.pod): self.pod}
        self._patch: list[Patch] = []
        self._warnings: list[str] = []

    def verdict(self) -> Verdict:
        told = self._warnings[:_MOST_WARNINGS]
        if more := len(self._warnings) - len(told):
            told.append(f"and {more} more of this kind")
        return Verdict(None, tuple(self._patch), tuple(told))

    def warn(self, words: str) -> None:
        self._warnings.append(words)

    def put(self, value: object, *path: str | int) -> None:
        """Set a field; what holds it is made where it is missing."""
        place: Any = self.pod
        for depth, part in enumerate(path[:-1]):
            if not isinstance(path[depth + 1], int) and not isinstance(_member(place, part), dict):
                place[part] = {}
                self._add({}, *path[: depth + 1])
            place = self._mine(place, part)
        place[path[-1]] = value
        self._add(value, *path)

    def _mine(self, place: Any, part: str | int) -> Any:
        """The member, as a copy of ours that may be changed."""
        found = place[part]
        if id(found) not in self._own:
            found = place[part] = found.copy()
            self._own[id(found)] = found
        return found

    def drop(self, *path: str) -> None:
        place: Any = self.pod
        for part in path[:-1]:
            place = self._mine(place, part)
        del place[path[-1]]
        self._patch.append({"op": "remove", "path": pointer(*path)})

    def _add(self, value: object, *path: str | int) -> None:
        # To "add" a member that is there replaces it (RFC 6902, 4.1).
        self._patch.append({"op": "add", "path": pointer(*map(str, path)), "value": value})


def _member(place: Any, part: str | int) -> Any:
    return place.get(part) if isinstance(place, dict) else place[part]


def _annotations(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = pod.get("metadata")
    found = metadata.get("annotations") if isinstance(metadata, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _keep_what_is_ours(change: _Change, before: Mapping[str, Any], names: Names) -> None:
    """Put the annotations that we write back to what they were: absent, on a new pod."""
    now = dict(_annotations(change.pod))
    for name in sorted(key for key in {*now, *before} if names.written_by_us(key)):
        if name in before:
            if name in now and now[name] == before[name]:
                continue
            change.put(before[name], *_ANNOTATIONS, name)
            change.warn(f"annotation {name} says where the pod was placed; it stays as it was")
        else:
            change.drop(*_ANNOTATIONS, name)
            change.warn(f"annotation {name} was removed: the scheduler writes it when the pod is placed")


def _complete(change: _Change, rules: Rules) -> None:
    """Give a pod with a share what its author left open. Raises InvalidRequest if that can't make it a valid one."""
    spec = change.pod["spec"]
    for key in ("initContainers", "containers"):
        listed = spec.get(key)
        for index, container in enumerate(listed if isinstance(listed, list) else ()):
            resources = container.get("resources") if isinstance(container, Mapping) else None
            limits = resources.get("limits") if isinstance(resources, Mapping) else None
            if isinstance(limits, Mapping):
                _complete_container(change, (key, index), limits, rules)
    parse_pod(change.pod, rules.names)
    for name, value in rules.annotations.items():
        if name not in _annotations(change.pod) and _is_valid_with(change.pod, name, value, rules.names):
            change.put(value, *_ANNOTATIONS, name)
    theirs = spec.get("schedulerName") not in (None, "", _DEFAULT_SCHEDULER)
    if rules.scheduler_name and not theirs and not spec.get("nodeName"):
        change.put(rules.scheduler_name, "spec", "schedulerName")


def _is_valid_with(pod: Mapping[str, Any], annotation: str, value: str, names: Names) -> bool:
    """A default is no reason to refuse: an elastic limit below what a container asks for is left out."""
    metadata = {**(pod.get("metadata") or {}), "annotations": {**_annotations(pod), annotation: value}}
    try:
        parse_pod({**pod, "metadata": metadata}, names)
    except InvalidRequest:
        return False
    return True


def _complete_container(change: _Change, where: tuple[str, int], limits: Mapping[str, Any], rules: Rules) -> None:
    names = rules.names
    if names.memory in limits and names.core not in limits and rules.cores:
        _limit(change, where, names.core, rules.cores)
    elif names.core in limits and names.memory not in limits and rules.memory_blocks:
        cores = parse_count(limits[names.core], f"{names.core} of container {where[1]}")
        if cores < CORES_PER_CARD:
            _limit(change, where, names.memory, rules.memory_blocks)


def _limit(change: _Change, where: tuple[str, int], resource: str, amount: int) -> None:
    """Extended resources have equal requests and limits, or the API server refuses the pod."""
    for which in ("limits", "requests"):
        change.put(str(amount), "spec", *where, "resources", which, resource)
    change.warn(f"spec.{where[0]}[{where[1]}] names no {resource}; it gets {amount}")
