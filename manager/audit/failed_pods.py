"""Pods that kubelet could not admit: removed after a grace period when a controller makes another one.

A pod that fails with UnexpectedAdmissionError stays in the API server for good; its controller has replaced it long
ago.
"""

from __future__ import annotations

import calendar
import time
from collections.abc import Iterable, Iterator

from manager.kube.api import Pod
from vcuda.kube.objects import phase_of
from vcuda.spec.names import Names
from vcuda.spec.request import asks_for_share

FAILED_ADMISSION = "UnexpectedAdmissionError"


def failed_admissions(pods: Iterable[Pod], names: Names, grace_s: float, now: float) -> Iterator[Pod]:
    """Pods with a share and a controller whose admission failed at least `grace_s` before `now` (Unix time)."""
    for pod in pods:
        status = pod.get("status") or {}
        if phase_of(pod) != "Failed" or status.get("reason") != FAILED_ADMISSION:
            continue
        metadata = pod.get("metadata") or {}
        if metadata.get("deletionTimestamp") or not asks_for_share(pod, names):
            continue
        if not any(owner.get("controller") for owner in metadata.get("ownerReferences") or ()):
            continue
        failed = _unix(str(status.get("startTime") or metadata.get("creationTimestamp") or ""))
        if failed is not None and now - failed >= grace_s:
            yield pod


def _unix(text: str) -> float | None:
    try:
        return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))
    except ValueError:
        return None
