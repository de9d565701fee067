"""Pods as the API server and kube-scheduler write them: of 2 to 20 KB of JSON what is read here becomes objects.

What of it is alike in all pods of a Deployment is read once. The C core looks for it; where a text is unusual in any
way it reads nothing, and the whole text has to be parsed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson

from scheduler_ext.state import objects
from scheduler_ext.state.objects import SAFE_TO_EVICT
from scheduler_ext.state.shape import Shape
from vcuda._native import ffi, lib
from vcuda.kube.objects import ENDED_PHASES
from vcuda.spec import gang
from vcuda.spec.names import OLD_POD_GROUP_NAME_LABEL, OLD_POD_GROUP_SIZE_LABEL, POD_GROUP_LABEL, Names
from vcuda.spec.request import PodRequest, annotations_read, asks_for_share

GROUP_LABELS = (POD_GROUP_LABEL, OLD_POD_GROUP_NAME_LABEL, OLD_POD_GROUP_SIZE_LABEL)
# What no two pods have alike, in the order of KnownPod's members; the placement is one, too, and what an event is.
_OF_METADATA = ("uid", "namespace", "name", "resourceVersion", "creationTimestamp", "deletionTimestamp")
_NODE, _PHASE, _PLACEMENT, _TYPE, _COUNT = 6, 7, 8, 9, 10
_MOST_BYTES = 4 * 2**20  # of the texts of all kinds: their objects have about five times as much
_LONGEST_KIND = 64 * 1024


class PodKind:
    """What pods have in common that are alike in all but what is their own.

    `asks`: for a share. `alone`: of no gang. `settled`: not nominated, and neither asked for a resize nor had an answer
    to one. `found`: what they ask for, once it was looked at; see PodClasses.
    """

    __slots__ = (
        "alone", "asks", "containers", "found", "metadata", "movable", "nominated", "priority", "settled", "spec",
        "status",
    )  # fmt: skip

    def __init__(self, pod: Mapping[str, Any], names: Names) -> None:
        self.metadata, self.spec, self.status = pod["metadata"], pod["spec"], pod.get("status")
        self.containers = sum(len(self.spec.get(listed) or ()) for listed in ("containers", "initContainers"))
        self.asks, self.alone = asks_for_share(pod, names), not gang.may_name(pod, names)
        self.movable, self.priority = objects.movable(pod, names), objects.priority(pod)
        self.nominated = bool(objects.nomination(pod))
        told = (self.status or {}).get("conditions")
        self.settled = objects.named(pod, names.resize) is None and not told
        self.found: tuple[PodRequest, Shape] | None = None


class KnownPod(Mapping[str, Any]):
    """A pod without what nobody reads; `kind` is the same object for all that are alike, "" is what is not said.

    Its members become objects when they are asked for.
    """

    __slots__ = (
        "_made", "_placement_name", "created", "deleted", "kind", "name", "namespace", "node", "phase", "placement",
        "uid", "version",
    )  # fmt: skip

    def __init__(self, kind: PodKind, placement_name: str, said: list[str]) -> None:
        self.kind, self._placement_name = kind, placement_name
        self._made: dict[str, Any] | None = None
        (
            self.uid, self.namespace, self.name, self.version, self.created, self.deleted, self.node, self.phase,
            self.placement, _,
        ) = said  # fmt: skip

    def _members(self) -> dict[str, Any]:
        if self._made is None:
            kind = self.kind
            own = (self.uid, self.namespace, self.name, self.version, self.created, self.deleted)
            metadata = kind.metadata | {name: text for name, text in zip(_OF_METADATA, own, strict=True) if text}
            if self.placement:
                metadata["annotations"] = {**metadata["annotations"], self._placement_name: self.placement}
            self._made = {"metadata": metadata, "spec": kind.spec}
            if self.node:
                self._made["spec"] = {**kind.spec, "nodeName": self.node}
            if kind.status is not None:
                self._made["status"] = {**kind.status, "phase": self.phase} if self.phase else kind.status
        return self._made

    def __getitem__(self, name: str) -> Any:
        return self._members()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members())

    def __len__(self) -> int:
        return len(self._members())


class PodKinds:
    """The kinds of the last pods, by what is kept of their texts. Thread-safe."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._known: dict[str, PodKind | None] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def kind(self, text: str, pod_of: str) -> PodKind | None:
        """None for pods that have to be read whole."""
        try:
            return self._known[text]
        except KeyError:
            pod = orjson.loads(text).get(pod_of)
            kind = PodKind(pod, self._names) if _is_usual(pod) else None
        if len(text) <= _LONGEST_KIND:
            with self._lock:
                if self._bytes + len(text) > _MOST_BYTES:
                    self._known.clear()
                    self._bytes = 0
                self._bytes += 0 if text in self._known else len(text)
                self._known[text] = kind
        return kind


def _is_usual(pod: object) -> bool:
    """Whether it has the form that everybody expects, and no claims: these have rules of their own."""
    if not isinstance(pod, dict) or not isinstance(pod.get("metadata"), dict) or not isinstance(pod.get("spec"), dict):
        return False
    metadata, spec = pod["metadata"], pod["spec"]
    for listed in (spec.get("containers"), spec.get("initContainers")):
        if not isinstance(listed, list | None) or not all(isinstance(one, dict) for one in listed or ()):
            return False
    others = [metadata.get("annotations", {}), metadata.get("labels", {}), pod.get("status", {})]
    return "resourceClaims" not in spec and all(isinstance(one, dict) for one in others)


class PodTexts:
    """Reads the pod in texts of one form. Used by one thread at a time."""

    def __init__(
        self, names: Names, kinds: PodKinds, pod_of: str, *, only: bool = False, beside: Iterable[str] = ()
    ) -> None:
        """`pod_of`: the member that is the pod. `only`: what is neither this nor `beside` makes a text unusual."""
        self._placement, self._kinds, self._pod_of = names.placement, kinds, pod_of
        self._kept = ffi.gc(lib.vc_kept_new(int(only)), lib.vc_kept_free)
        if self._kept == ffi.NULL:
            raise MemoryError("no memory for the names of what is read of pods")
        self._keep_pod(self._keep(0, lib.VC_WITHIN, pod_of), names)
        self._keep(0, lib.VC_UNREAD, *beside)
        if not only:
            self._keep_own(0, ("type",), _TYPE)
        self._rest, self._room = ffi.NULL, 0

    def _keep(self, within: int, way: int, *names: str, slot: int = 0) -> int:
        """The place of the last one."""
        place = within
        for name in names:
            text = name.encode()
            place = lib.vc_kept_add(self._kept, within, text, len(text), way, slot)
            if place < 0:
                raise MemoryError("no memory for the names of what is read of pods")
        return place

    def _keep_own(self, within: int, names: Iterable[str], first: int) -> None:
        for slot, name in enumerate(names, first):
            self._keep(within, lib.VC_SLOT, name, slot=slot)

    def _keep_pod(self, pod: int, names: Names) -> None:
        metadata, spec, status = (self._keep(pod, lib.VC_WITHIN, name) for name in ("metadata", "spec", "status"))
        self._keep_own(metadata, _OF_METADATA, 0)
        annotations = self._keep(metadata, lib.VC_WITHIN, "annotations")
        self._keep_own(annotations, (names.placement,), _PLACEMENT)
        self._keep(annotations, lib.VC_WHOLE, *annotations_read(names), names.resize, names.movable, SAFE_TO_EVICT)
        self._keep(self._keep(metadata, lib.VC_WITHIN, "labels"), lib.VC_WHOLE, *GROUP_LABELS)
        self._keep_own(spec, ("nodeName",), _NODE)
        self._keep(spec, lib.VC_WHOLE, "priority", "overhead", "resourceClaims")
        for listed in ("initContainers", "containers"):
            self._keep(self._keep(spec, lib.VC_EACH, listed), lib.VC_WHOLE, "name", "resources", "restartPolicy")
        self._keep_own(status, ("phase",), _PHASE)
        self._keep(status, lib.VC_WHOLE, "nominatedNodeName")
        self._keep(self._keep(status, lib.VC_NAMING, "conditions"), lib.VC_UNREAD, names.resize)

    def read(self, text: bytes, start: int = 0, end: int = 0) -> tuple[str, KnownPod] | None:
        """What an event is, and its pod; None for what has to be parsed whole.

        From `start` to `end` somebody else has read it.
        """
        size = len(text) + _COUNT
        if size > self._room:
            self._rest, self._room = ffi.new("char[]", 2 * size), 2 * size
        size = lib.vc_kept_read(self._kept, ffi.from_buffer(text), len(text), start, end, _COUNT, self._rest)
        if size < 0:
            return None
        rest = ffi.buffer(self._rest, size)[:].decode()
        kept, *said = rest.rsplit("\n", _COUNT)
        kind = self._kinds.kind(kept, self._pod_of)
        if kind is None:
            return None
        if "\\" in rest:
            said = [orjson.loads(f'"{one}"') if "\\" in one else one for one in said]
        if not said[0] or said[_PHASE] in ENDED_PHASES:  # what the containers of those do is not kept
            return None
        return said[_TYPE], KnownPod(kind, self._placement, said)
