"""A pod that asks for shares as extended resources, made one that asks for them by claims (DRA).

Nothing is written but the pod: it names ResourceClaimTemplates, which the extender makes once a pod waits for one (see
vcuda/spec/share_templates.py), and Kubernetes makes the claims, which belong to the pod. So a review has no side
effects, also where it is a dry run or another webhook refuses the pod after us.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler_ext.admission.change import Change
from vcuda.spec.errors import InvalidRequest, Reason
from vcuda.spec.names import Names
from vcuda.spec.request import CardFilter, Kind, PodRequest
from vcuda.spec.share_templates import ShareTemplate

_CLAIM = "vcuda-{}"  # the claim's name within the pod


def convert(change: Change, asked: PodRequest, names: Names) -> None:
    """Let each container with a share have a claim of its own; an init container one of an equal app container's.

    Raises InvalidRequest for what claims can't say.
    """
    if asked.models != CardFilter() or asked.uuids != CardFilter():
        raise InvalidRequest(
            Reason.INVALID_ANNOTATION,
            f"{names.card_model} and {names.card_uuid} choose no card for claims; write a ResourceClaimTemplate with a "
            "selector, such as device.attributes['" + names.driver + "'].productName == 'NVIDIA L4'",
        )
    spec = change.pod["spec"]
    listed = _list(spec.get("resourceClaims"), "spec.resourceClaims")
    taken = {str(claim.get("name")) for claim in listed if isinstance(claim, Mapping)}
    fresh = (
        name
        for number in range(len(listed) + len(asked.containers) + 1)
        if (name := _CLAIM.format(number)) not in taken
    )
    found: dict[str, str] = {}  # by template: the claim that an init container may use too
    for container in sorted(asked.containers, key=lambda one: one.kind is Kind.INIT):
        template = ShareTemplate.of(container, asked.priority).name
        claim = found.get(template) if container.kind is Kind.INIT else None
        if claim is None:
            claim = found[template] = next(fresh)
            listed.append({"name": claim, "resourceClaimTemplateName": template})
        _use(change, container.name, claim, names)
    change.put(listed, "spec", "resourceClaims")


def _use(change: Change, container: str, claim: str, names: Names) -> None:
    """Let a container name the claim in place of the resources."""
    for key in ("containers", "initContainers"):
        for index, one in enumerate(_list(change.pod["spec"].get(key), f"spec.{key}")):
            if not isinstance(one, Mapping) or one.get("name") != container:
                continue
            resources = one["resources"]
            for amounts in ("limits", "requests"):
                its = resources.get(amounts)
                for resource in (names.core, names.memory):
                    if isinstance(its, Mapping) and resource in its:
                        change.drop("spec", key, index, "resources", amounts, resource)
            claims = [*_list(resources.get("claims"), "resources.claims"), {"name": claim}]
            change.put(claims, "spec", key, index, "resources", "claims")
            return


def _list(value: object, what: str) -> list[Any]:
    """A copy of ours. Raises InvalidRequest."""
    if not isinstance(value, list | None):
        raise InvalidRequest(Reason.INVALID_POD, f"{what} is not a list")
    return list(value or ())
