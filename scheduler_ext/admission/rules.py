"""What becomes of a pod or claim that is created or changed: let through, completed, corrected, refused with a reason.

Nothing here looks at the cluster: what is refused could run on no card at all, and a pod that asks for no share is only
ever relieved of annotations that are not its author's to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler_ext.admission import claims
from scheduler_ext.admission.change import Change
from scheduler_ext.protocol.admission_v1 import Patch, Review
from vcuda.spec.claims import asks_as_extended, demand
from vcuda.spec.device_classes import parse_class
from vcuda.spec.errors import InvalidRequest, Reason
from vcuda.spec.names import Names
from vcuda.spec.request import PodRequest, asks_for_share, parse_pod
from vcuda.spec.units import CORES_PER_CARD, parse_count

_DEFAULT_SCHEDULER = "default-scheduler"  # what the API server writes where an author wrote nothing
CLAIM, CLAIM_TEMPLATE, DEVICE_CLASS = "ResourceClaim", "ResourceClaimTemplate", "DeviceClass"
_ANNOTATIONS = ("metadata", "annotations")
_MOST_ANNOTATIONS_BYTES = 256 * 2**10  # TotalAnnotationSizeLimitB of k8s.io/apimachinery: the API server refuses more


@dataclass(frozen=True)
class Rules:
    """The operator's choices.

    `scheduler_name`: given to pods with a share whose author chose none. `annotations`: given to pods with a share that
    lack them. `cores` and `memory_blocks`: what a container gets that names only the other of the two resources; 0: it
    is refused. `trusted`: users whose word about placements counts. `exempt`: namespaces whose pods pass as they are.
    `claims`: shares that pods ask for as extended resources become claims.
    """

    names: Names = field(default_factory=Names)
    scheduler_name: str | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)
    cores: int = 0
    memory_blocks: int = 0
    trusted: frozenset[str] = frozenset()
    exempt: frozenset[str] = frozenset()
    claims: bool = False


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
    # To take 70,000 of them away makes a patch of many times the pod; the API server looks at their size later.
    if _size(_annotations(review.thing)) > _MOST_ANNOTATIONS_BYTES:
        what = f"the annotations have more than {_MOST_ANNOTATIONS_BYTES} bytes, the most that Kubernetes takes"
        return Verdict(InvalidRequest(Reason.INVALID_ANNOTATION, f"{what}; write fewer"))
    change = Change(review.thing)
    if review.user not in rules.trusted:
        _keep_what_is_ours(change, _annotations(review.old), rules.names)
    problem = asks_as_extended(review.thing, rules.names) if review.operation == "CREATE" else None
    if problem is not None:
        return Verdict(problem)
    if review.operation == "CREATE" and asks_for_share(review.thing, rules.names):
        try:
            asked = _complete(change, rules)
            if rules.claims and change.pod["spec"].get("nodeName"):
                change.warn("spec.nodeName is set: nobody would allocate a claim, so the pod keeps its resources")
            elif rules.claims:
                claims.convert(change, asked, rules.names)
        except InvalidRequest as error:
            return Verdict(error)
    return Verdict(None, change.patch, change.warnings)


def decide_claim(review: Review, rules: Rules) -> Verdict:
    """Refuse a claim, or a template of one, whose requests of our class, or ShareConfig, no card can serve."""
    spec = review.thing.get("spec")
    if review.namespace in rules.exempt or review.operation != "CREATE" or not isinstance(spec, Mapping):
        return Verdict()
    if review.kind == CLAIM_TEMPLATE:
        spec = spec.get("spec")
    try:
        demand(spec if isinstance(spec, Mapping) else {}, rules.names)
    except InvalidRequest as error:
        return Verdict(error)
    return Verdict()


def decide_class(review: Review, rules: Rules) -> Verdict:
    """Refuse a DeviceClass for our cards with a ShareConfig that is wrong; warn of one of which we can't tell whose.

    Never raises: what has another form the API server refuses.
    """
    try:
        found = parse_class(review.thing, rules.names)
    except ValueError:
        return Verdict()
    if found.problem is not None:
        return Verdict(found.problem)
    why = found.undecided(rules.names)
    return Verdict(warnings=(f"in namespaces with a quota its claims wait: {why}",) if why else ())


def _annotations(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = pod.get("metadata")
    found = metadata.get("annotations") if isinstance(metadata, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _size(annotations: Mapping[str, Any]) -> int:
    return sum(len(name) + (len(value) if isinstance(value, str) else 0) for name, value in annotations.items())


def _keep_what_is_ours(change: Change, before: Mapping[str, Any], names: Names) -> None:
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


def _complete(change: Change, rules: Rules) -> PodRequest:
    """Give a pod with a share what its author left open. Raises InvalidRequest if that can't make it a valid one."""
    spec = change.pod["spec"]
    for key in ("initContainers", "containers"):
        listed = spec.get(key)
        for index, container in enumerate(listed if isinstance(listed, list) else ()):
            resources = container.get("resources") if isinstance(container, Mapping) else None
            limits = resources.get("limits") if isinstance(resources, Mapping) else None
            if isinstance(limits, Mapping):
                _complete_container(change, (key, index), limits, rules)
    asked = parse_pod(change.pod, rules.names)
    for name, value in rules.annotations.items():
        if name == rules.names.core_limit and all(container.whole for container in asked.containers):
            continue  # a whole card has no other limit
        if name not in _annotations(change.pod) and _is_valid_with(change.pod, name, value, rules.names):
            change.put(value, *_ANNOTATIONS, name)
    theirs = spec.get("schedulerName") not in (None, "", _DEFAULT_SCHEDULER)
    if rules.scheduler_name and not theirs and not spec.get("nodeName"):
        change.put(rules.scheduler_name, "spec", "schedulerName")
    return parse_pod(change.pod, rules.names)


def _is_valid_with(pod: Mapping[str, Any], annotation: str, value: str, names: Names) -> bool:
    """A default is no reason to refuse: an elastic limit below what a container asks for is left out."""
    metadata = {**(pod.get("metadata") or {}), "annotations": {**_annotations(pod), annotation: value}}
    try:
        parse_pod({**pod, "metadata": metadata}, names)
    except InvalidRequest:
        return False
    return True


def _complete_container(change: Change, where: tuple[str, int], limits: Mapping[str, Any], rules: Rules) -> None:
    names = rules.names
    if names.memory in limits and names.core not in limits and rules.cores:
        _limit(change, where, names.core, rules.cores)
    elif names.core in limits and names.memory not in limits and rules.memory_blocks:
        cores = parse_count(limits[names.core], f"{names.core} of container {where[1]}")
        if cores < CORES_PER_CARD:
            _limit(change, where, names.memory, rules.memory_blocks)


def _limit(change: Change, where: tuple[str, int], resource: str, amount: int) -> None:
    """Extended resources have equal requests and limits, or the API server refuses the pod."""
    for which in ("limits", "requests"):
        change.put(str(amount), "spec", *where, "resources", which, resource)
    change.warn(f"spec.{where[0]}[{where[1]}] names no {resource}; it gets {amount}")
