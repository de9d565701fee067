"""This node's pods as the API server tells them: watched, and kept while it is away."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from manager.kube.api import Kube, Pod
from vcuda.kube.informer import Handlers, Informer
from vcuda.kube.objects import STATUSES, ended, mirrored, name_of, uid_of

_SPEC = ("nodeName", "initContainers", "containers", "resourceClaims")
_LISTS = ("initContainers", "containers")
_CONTAINER = ("name", "resources", "restartPolicy")
VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
_STATUS = ("phase", "reason", "message", "resourceClaimStatuses")
# Where kubelet has a pod from; in its own list it writes this itself, whatever stood there (kubernetes
# pkg/kubelet/config).
_SOURCE_ANNOTATION = "kubernetes.io/config.source"

# Namespace and name by kubelet's UID, of pods that kubelet itself has said are static.
StaticPods = Mapping[str, tuple[str, str]]


def essential(pod: Mapping[str, Any]) -> Pod:
    """What our rules read of a pod; the rest is most of what is listed, and of the memory it would take.

    What has not the form of a pod stays as it is: those rules judge it.
    """
    found = dict(pod)
    metadata, spec, status = (pod.get(name) for name in ("metadata", "spec", "status"))
    if isinstance(metadata, dict) and "managedFields" in metadata:
        found["metadata"] = {name: value for name, value in metadata.items() if name != "managedFields"}
    if isinstance(spec, dict):
        found["spec"] = kept = _only(spec, _SPEC)
        for name in _LISTS:
            if isinstance(kept.get(name), list):
                kept[name] = [_container(item) if isinstance(item, dict) else item for item in kept[name]]
    if isinstance(status, dict):
        found["status"] = kept = _only(status, _STATUS)
        conditions = status.get("conditions")
        if isinstance(conditions, list):
            ours = [one for one in conditions if isinstance(one, dict) and "/" in str(one.get("type"))]
            kept |= {"conditions": ours} if ours else {}  # Kubernetes' own have no domain
        for name in STATUSES:
            if isinstance(status.get(name), list):
                kept[name] = [_only(item, ("state",)) for item in status[name] if isinstance(item, dict)]
    return found


def _container(item: Mapping[str, Any]) -> dict[str, Any]:
    kept = _only(item, _CONTAINER)
    variables = item.get("env")
    if isinstance(variables, list):
        ours = [one for one in variables if isinstance(one, dict) and one.get("name") == VISIBLE_DEVICES]
        if ours:
            kept["env"] = ours
    mounts = item.get("volumeMounts")
    if isinstance(mounts, list):
        kept["volumeMounts"] = [_only(one, ("mountPath",)) for one in mounts if isinstance(one, dict)]
    return kept


def _named(pod: Pod, container: str) -> Mapping[str, Any]:
    spec = pod.get("spec") or {}
    listed = (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))
    return next((item for item in listed if isinstance(item, Mapping) and item.get("name") == container), {})


def visible_devices(pod: Pod, container: str) -> str | None:
    """What a container's own NVIDIA_VISIBLE_DEVICES asks NVIDIA's runtime for; None: unset, or brings nothing."""
    for one in _named(pod, container).get("env") or ():
        # The API server leaves an empty value out. "none" still brings the driver's libraries.
        if "valueFrom" in one or one.get("value", "") not in ("", "void"):
            return str(one.get("value", "(from elsewhere)"))
    return None


def volume_paths(pod: Pod, container: str) -> list[str]:
    """Where a container mounts volumes."""
    return [str(one.get("mountPath", "")) for one in _named(pod, container).get("volumeMounts") or ()]


def claims_of(pod: Pod) -> dict[str, str]:
    """The ResourceClaims that a pod uses, its own ones and those made for it: how its containers call each, by name."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    named = [*(spec.get("resourceClaims") or ()), *(status.get("resourceClaimStatuses") or ())]
    return {str(item["resourceClaimName"]): str(item.get("name")) for item in named if item.get("resourceClaimName")}


def _only(mapping: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: mapping[name] for name in names if name in mapping}


def is_static(pod: Pod, *, own_view: bool) -> bool:
    """Whether kubelet has the pod from a file or a URL of its own: the API server's object then has another UID.

    `own_view`: it is of kubelet's own list; else of `as_kubelet_knows`.
    """
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    return annotations.get(_SOURCE_ANNOTATION, "api") != "api" if own_view else mirrored(pod) is not None


def kubelet_uid(pod: Pod, static: StaticPods) -> str:
    """The UID by which kubelet knows the pod that an object of the API server shows; "" where kubelet runs none for it.

    A mirror pod's word counts for a static pod of its own namespace and name only: see MIRROR_ANNOTATION.
    """
    said = mirrored(pod)
    if said is None:
        return uid_of(pod)
    return said if static.get(said) == name_of(pod) else ""


def as_kubelet_knows(pods: Iterable[Pod], static: StaticPods) -> list[Pod]:
    """Objects of the API server, each with kubelet's UID as its own; without those for which kubelet runs no pod."""
    found = []
    for pod in pods:
        uid = kubelet_uid(pod, static)
        if uid == uid_of(pod):
            found.append(pod)
        elif uid:
            found.append({**pod, "metadata": {**pod["metadata"], "uid": uid}})
    return found


class NodePods:
    """Follows them. `on_gone`: one was deleted or has ended, or some may have; `on_pod`: one is as it says now."""

    def __init__(self, kube: Kube, on_gone: Callable[[], None], on_pod: Callable[[Pod], None]) -> None:
        self._on_gone = on_gone
        self._on_pod = on_pod
        self._known: dict[str, Pod] = {}
        self._listed = False
        self.informer = Informer(
            kube.client, Handlers("pods", self._seen, self._lost, self._complete, selector=kube.selector)
        )

    @property
    def known(self) -> list[Pod] | None:
        """Their essentials by the last word of the API server; None before its first."""
        return list(self._known.values()) if self._listed else None

    def _seen(self, pod: Pod) -> str:
        key = str(pod["metadata"]["uid"])
        kept = essential(pod)
        self._known[key] = kept
        if ended(kept):
            self._on_gone()
        else:
            self._on_pod(kept)
        return key

    def _lost(self, pod: Pod) -> None:
        self._known.pop(str(pod["metadata"]["uid"]), None)
        self._on_gone()

    def _complete(self, keys: Collection[str], _began: float) -> None:
        self._known = {key: pod for key, pod in self._known.items() if key in keys}
        self._listed = True
        self._on_gone()
