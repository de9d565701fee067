"""Kubernetes quantities of cpu and memory, and what a pod's spec requests of both: used for scoring only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_QUANTITY = re.compile(r"([+-]?\d+\.?\d*|[+-]?\.\d+)(?:[eE]([+-]?\d{1,2})|(m|k|[MGTPE]i?|Ki|n|u))?")
_FACTORS = {
    "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip
_LARGEST = 2**60  # keeps sums over a node's pods within int64


def amount(value: object, unit: float = 1.0) -> int:
    """A quantity in multiples of `unit` (0.001 for milli-cpu), rounded up; 0 for anything that is not a quantity.

    kube-scheduler has checked the pod before us; a value that it would refuse must not stop us, so it counts as 0.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) and len(value) <= 40 else None
    if match is None:
        return 0
    number = float(match[1]) * 10.0 ** int(match[2] or 0) * _FACTORS.get(match[3], 1.0) / unit
    return int(min(max(0.0, -(-number // 1)), _LARGEST))


def cpu_and_memory(amounts: object) -> tuple[int, int]:
    """(milli-cpu, bytes) of a `requests` or `allocatable` object."""
    if not isinstance(amounts, Mapping):
        return 0, 0
    return amount(amounts.get("cpu"), 0.001), amount(amounts.get("memory"))


def pod_requests(pod: Mapping[str, Any]) -> tuple[int, int]:
    """(milli-cpu, bytes) that kube-scheduler counts for a pod: containers and sidecars together, or the largest init.

    Source: Kubernetes, "Resource sharing within containers"; pod overhead is added.
    """
    spec = pod.get("spec")
    if not isinstance(spec, Mapping):
        return 0, 0
    standing, peak = (0, 0), (0, 0)
    for key in ("initContainers", "containers"):
        listed = spec.get(key)
        for container in listed if isinstance(listed, list) else ():
            if not isinstance(container, Mapping):
                continue
            resources = container.get("resources")
            wanted = cpu_and_memory(resources.get("requests")) if isinstance(resources, Mapping) else (0, 0)
            total = (standing[0] + wanted[0], standing[1] + wanted[1])
            if key == "initContainers" and container.get("restartPolicy") != "Always":
                peak = (max(peak[0], total[0]), max(peak[1], total[1]))
            else:
                standing = total
    overhead = cpu_and_memory(spec.get("overhead"))
    return max(peak[0], standing[0]) + overhead[0], max(peak[1], standing[1]) + overhead[1]
