"""Which container an Allocate call is for: pure rules over lists of pods and records.

Kubelet admits pods one after another, and within a pod container by container (init containers first, in order), asking
for all resources of one container before the next, in random order. So the call is for a pod that is neither finished
nor refused, whose first container that lacks something lacks this resource and asks this number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from manager.kube.api import Pod
from vcuda.kube.objects import name_of, terminal, uid_of
from vcuda.spec.errors import InvalidRequest
from vcuda.spec.names import Names
from vcuda.spec.units import parse_count

# What is held already: (pod UID, container) -> resources out of "core" and "memory".
Holdings = Mapping[tuple[str, str], Set[str]]


@dataclass(frozen=True)
class Candidate:
    """A pod that could be the one being admitted, and the container that comes next in it.

    `static`: kubelet has it from a file or a URL of its own.
    """

    pod: Pod
    container: str
    static: bool = False

    @property
    def uid(self) -> str:
        return uid_of(self.pod)

    @property
    def full_name(self) -> tuple[str, str]:
        return name_of(self.pod)

    @property
    def name(self) -> str:
        return "/".join(self.full_name)


def asked(pod: Pod, names: Names) -> list[tuple[str, dict[str, int]]]:
    """Per container, in kubelet's order, how many devices of which of our resources it asks; valid or not.

    A number that is none is left out: kubelet never calls for it.
    """
    spec = pod.get("spec") or {}
    found = []
    for key in ("initContainers", "containers"):
        for container in spec.get(key) or ():
            numbers = _numbers((container.get("resources") or {}).get("limits") or {}, names)
            if numbers:
                found.append((str(container.get("name", "")), numbers))
    return found


def _numbers(limits: Mapping[str, Any], names: Names) -> dict[str, int]:
    found = {}
    for resource, name in (("core", names.core), ("memory", names.memory)):
        if name in limits:
            try:
                number = parse_count(limits[name], name)
            except InvalidRequest:
                continue
            if number > 0:
                found[resource] = number
    return found


def others_are_asked(pod: Pod, container: str, names: Names) -> bool:
    """Whether kubelet asks other device plugins than ours for this container, in an order that nobody knows."""
    spec = pod.get("spec") or {}
    return any(
        "/" in resource and resource not in (names.core, names.memory)  # what kubelet has itself has no domain
        for key in ("initContainers", "containers")
        for item in spec.get(key) or ()
        if item.get("name") == container
        for resource in (item.get("resources") or {}).get("limits") or {}
    )


@dataclass(frozen=True)
class Facts:
    """What an admission needs of a pod, taken from it once: hundreds of pods are looked at for each call."""

    pod: Pod
    uid: str
    terminal: bool
    deleted: bool
    asked: tuple[tuple[str, dict[str, int]], ...]
    placement: str | None = None  # the annotation, as it is written

    @classmethod
    def of(cls, pod: Pod, names: Names) -> Facts:
        metadata = pod.get("metadata") or {}
        written = (metadata.get("annotations") or {}).get(names.placement)
        return cls(
            pod,
            uid_of(pod),
            terminal(pod),
            bool(metadata.get("deletionTimestamp")),
            tuple(asked(pod, names)),
            None if written is None else str(written),
        )

    def next_container(self, holdings: Holdings) -> tuple[str, dict[str, int]] | None:
        """The first container that lacks something, and what it lacks."""
        for container, numbers in self.asked:
            held = holdings.get((self.uid, container))
            if held is None:
                return container, dict(numbers)
            if numbers.keys() <= held:
                continue
            lacking = {resource: number for resource, number in numbers.items() if resource not in held}
            return container, lacking
        return None


class FactsCache:
    """Facts of the pods of the last list, for lists whose unchanged pods are the same objects."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._known: dict[int, Facts] = {}
        self._last: tuple[Sequence[Pod], list[Facts]] = ((), [])

    def of(self, pods: Sequence[Pod]) -> list[Facts]:
        """A list that has not changed may be the same object; then the answer is the same object too."""
        if pods is self._last[0]:
            return self._last[1]
        known = {}
        found = []
        for pod in pods:
            facts = self._known.get(id(pod))
            if facts is None or facts.pod is not pod:
                facts = Facts.of(pod, self._names)
            known[id(pod)] = facts
            found.append(facts)
        self._known = known
        self._last = (pods, found)
        return found


def candidates(
    pods: Sequence[Facts],
    resource: str,
    count: int,
    holdings: Holdings,
    *,
    excluded: Collection[str] = (),
    last_uid: str | None = None,
    skip_deleted: bool = True,
) -> list[Candidate]:
    """All containers that the call may be for.

    `excluded`: UIDs of refused pods. `last_uid`: the pod of the last call that went well; admission is serial, so
    another pod that has some of its devices but not all was given up. None: unknown (the daemon just started).
    """
    passed = {uid for uid, _ in holdings} - {last_uid} if last_uid is not None else frozenset()
    found = []
    for facts in pods:
        uid = facts.uid
        if uid in passed:  # nearly all, on a busy node
            continue
        if not facts.asked or not uid or facts.terminal or uid in excluded:
            continue
        if skip_deleted and facts.deleted:
            continue
        step = facts.next_container(holdings)
        if step is not None and step[1].get(resource) == count:
            found.append(Candidate(facts.pod, step[0]))
    return found
