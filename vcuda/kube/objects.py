"""Kubernetes objects: where they are in the API, and what every reader of pods asks of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from vcuda.kube.errors import BadName

Object = Mapping[str, Any]

# A static pod is shown by the API server as a mirror pod, an object with a UID of its own; this annotation holds
# kubelet's. Whoever may create pods may write it: admission (NodeRestriction) asks it of kubelets and nobody else,
# only later changes of it are refused to all (kubernetes pkg/apis/core/validation, kubernetes/kubernetes#53467).
MIRROR_ANNOTATION = "kubernetes.io/config.mirror"

# Where a pod's status tells of its containers.
STATUSES = ("initContainerStatuses", "containerStatuses")

_CORE = "/api/v1"
_CLAIMS = "/apis/resource.k8s.io/v1"
_GROUPS = {
    "leases": "/apis/coordination.k8s.io/v1",
    "deviceclasses": _CLAIMS, "resourceclaims": _CLAIMS, "resourceclaimtemplates": _CLAIMS, "resourceslices": _CLAIMS,
}  # fmt: skip
# RFC 1123 subdomain, the form of all names that we use (apimachinery pkg/util/validation): nothing in it can end a path
# segment, begin a query or climb out of a folder.
_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
_LONGEST = 253


def checked(name: str) -> str:
    """The name itself. Raises BadName for what can't be an object's."""
    if len(name) > _LONGEST or _NAME.fullmatch(name) is None:
        raise BadName(f"{name[:80]!r} is not the name of a Kubernetes object")
    return name


def path(kind: str, namespace: str = "", name: str = "", subresource: str = "") -> str:
    """The path of a collection, of an object, or of an object's subresource.

    `kind`: plural, lower case. Raises BadName.
    """
    parts = [_GROUPS.get(kind, _CORE)]
    if namespace:
        parts += ["namespaces", checked(namespace)]
    parts.append(kind)
    if name or subresource:
        parts.append(checked(name))
    if subresource:
        parts.append(subresource)
    return "/".join(parts)


def uid_of(pod: Object) -> str:
    """The pod's own UID, which is kubelet's too for all but mirror pods."""
    return str((pod.get("metadata") or {}).get("uid", ""))


def mirrored(pod: Object) -> str | None:
    """The UID of the static pod of which an object says that it is the mirror; None: it does not say so."""
    value = ((pod.get("metadata") or {}).get("annotations") or {}).get(MIRROR_ANNOTATION)
    return None if value is None else str(value)


def name_of(pod: Object) -> tuple[str, str]:
    """Namespace and name; without a namespace it is in "default", as for kubectl."""
    metadata = pod.get("metadata") or {}
    return str(metadata.get("namespace") or "default"), str(metadata.get("name") or "")


def uids_by_name(pods: Iterable[Object]) -> dict[tuple[str, str], str]:
    """UIDs by namespace and name: PodResources knows pods by name only."""
    return {name_of(pod): uid_of(pod) for pod in pods}


def phase_of(pod: Object) -> str:
    """ "" for a pod that has none yet."""
    status = pod.get("status")
    return str(status.get("phase", "")) if isinstance(status, (dict, Mapping)) else ""  # from JSON: a dict


ENDED_PHASES = ("Succeeded", "Failed")


def terminal(pod: Object) -> bool:
    """Whether all containers of a pod have ended for good."""
    return phase_of(pod) in ENDED_PHASES


def ended(pod: Object) -> bool:
    """Whether nothing of a pod runs any more: one past its deadline is Failed while its containers still run.

    The one rule of daemon and extender for when a share is free again. What has not the form of a status counts for
    nothing.
    """
    status = pod.get("status")
    if not isinstance(status, (dict, Mapping)) or not terminal(pod):
        return False
    lists = [found for name in STATUSES if isinstance(found := status.get(name), list)]
    states = [item.get("state") for found in lists for item in found if isinstance(item, Mapping)]
    return not any(isinstance(state, Mapping) and "running" in state for state in states)
