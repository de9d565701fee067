"""Pods read by class: what thousands of pods of one Deployment ask for is parsed once."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import orjson

from scheduler_ext.state import objects
from scheduler_ext.state.pod_texts import GROUP_LABELS, KnownPod
from scheduler_ext.state.shape import Shape, shape_of
from vcuda.spec import request
from vcuda.spec.names import Names
from vcuda.spec.request import PodRequest, Policy

_MOST_BYTES = 16 * 2**20  # of all classes: thousands of usual ones
_LONGEST_KEY = 64 * 1024  # a pod of 64 containers has a fourth


class PodClasses:
    """What pods ask for, and their shapes; those of the last classes are kept, `_MOST_BYTES` in all. Thread-safe.

    Owners may make a new class with each edit of a waiting pod, so what is kept is counted by its size.
    """

    def __init__(self, names: Names, policy: Policy) -> None:
        """`policy`: of pods that name none."""
        self._names, self._policy = names, policy
        self._annotations = request.annotations_read(names)
        self._known: dict[bytes, tuple[PodRequest, Shape]] = {}
        self._bytes = 0
        self._lock = threading.Lock()  # of the two above where they change

    def read(self, pod: Mapping[str, Any]) -> tuple[PodRequest, Shape]:
        """What a pod asks for. Raises InvalidRequest."""
        if isinstance(pod, KnownPod) and pod.kind.found is not None:
            return _of(pod.uid, pod.namespace, pod.name, pod.kind.found)
        found = self._read(pod)
        if isinstance(pod, KnownPod):
            pod.kind.found = found
        return found

    def _read(self, pod: Mapping[str, Any]) -> tuple[PodRequest, Shape]:
        key = self._key(pod)
        found = self._known.get(key) if key is not None else None
        if found is None:
            asked = request.parse_pod(pod, self._names)
            found = asked, shape_of(asked, self._policy, *objects.pod_requests(pod))
            if key is not None and len(key) <= _LONGEST_KEY:
                self._keep(key, found)
            return found
        metadata = pod["metadata"]
        return _of(metadata.get("uid", ""), metadata.get("namespace"), metadata.get("name", ""), found)

    def _keep(self, key: bytes, found: tuple[PodRequest, Shape]) -> None:
        size = len(key) + 1024 * len(found[0].containers) + found[1].filter_bytes + 1024
        with self._lock:
            if key in self._known:  # another thread was faster
                return
            if self._bytes + size > _MOST_BYTES:
                self._known.clear()
                self._bytes = 0
            self._known[key] = found
            self._bytes += size

    def _key(self, pod: Mapping[str, Any]) -> bytes | None:
        """Everything that the two parsers look at, but the pod's identity; None for what has not the form of a pod."""
        try:
            metadata, spec = pod["metadata"], pod["spec"]
            annotations, labels = metadata.get("annotations") or {}, metadata.get("labels") or {}
            parts: list[Any] = [annotations.get(name) for name in self._annotations]
            parts += [labels.get(name) for name in GROUP_LABELS]
            parts.append(spec.get("overhead"))
            for listed in (spec.get("initContainers") or (), spec.get("containers") or ()):
                parts.append(len(listed))
                parts += [(one.get("name"), one.get("resources"), one.get("restartPolicy")) for one in listed]
            return orjson.dumps(parts)
        except (AttributeError, KeyError, TypeError):
            return None


def _of(uid: object, namespace: object, name: object, found: tuple[PodRequest, Shape]) -> tuple[PodRequest, Shape]:
    """What another pod of the same class asks for."""
    like, shape = found
    asked = object.__new__(PodRequest)  # its initialiser takes four times as long
    own = {"uid": str(uid), "namespace": str(namespace or "default"), "name": str(name)}
    asked.__dict__.update(like.__dict__ | own)
    return asked, shape
