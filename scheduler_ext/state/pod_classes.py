"""Pods read by class: what thousands of pods of one Deployment ask for is parsed once."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import orjson

from scheduler_ext.state import objects
from scheduler_ext.state.shape import Shape, shape_of
from vcuda.spec import request
from vcuda.spec.names import OLD_POD_GROUP_NAME_LABEL, OLD_POD_GROUP_SIZE_LABEL, POD_GROUP_LABEL, Names
from vcuda.spec.request import PodRequest, Policy

_MOST_BYTES = 16 * 2**20  # of all classes: thousands of usual ones
_LONGEST_KEY = 64 * 1024  # a pod of 64 containers has a fourth
_LABELS = (POD_GROUP_LABEL, OLD_POD_GROUP_NAME_LABEL, OLD_POD_GROUP_SIZE_LABEL)


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
        key = self._key(pod)
        found = self._known.get(key) if key is not None else None
        if found is None:
            asked = request.parse_pod(pod, self._names)
            found = asked, shape_of(asked, self._policy, *objects.pod_requests(pod))
            if key is not None and len(key) <= _LONGEST_KEY:
                self._keep(key, found)
            return found
        metadata, (like, shape) = pod["metadata"], found
        asked = PodRequest(
            str(metadata.get("uid", "")), str(metadata.get("namespace") or "default"), str(metadata.get("name", "")),
            like.containers, like.priority, like.policy, like.card_policy, like.models, like.uuids, like.gang,
        )  # fmt: skip
        return asked, shape

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
            parts += [labels.get(name) for name in _LABELS]
            parts.append(spec.get("overhead"))
            for listed in (spec.get("initContainers") or (), spec.get("containers") or ()):
                parts.append(len(listed))
                parts += [(one.get("name"), one.get("resources"), one.get("restartPolicy")) for one in listed]
            return orjson.dumps(parts)
        except (AttributeError, KeyError, TypeError):
            return None
