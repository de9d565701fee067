"""Pods for the daemon's tests, and waiting for what a daemon does in its own time."""

from __future__ import annotations

import time
import uuid as uuids
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from manager.allocations.record import Allocation
from vcuda.spec.names import Names
from vcuda.spec.placement import CardShare
from vcuda.spec.request import Kind

NAMES = Names()
DEADLINE_S = 20.0


def eventually(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_S) -> Any:
    """Poll until the condition gives something true, and return that."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {seconds:.0f} s")


def container(name: str, cores: object, blocks: object = None, **more: Any) -> dict[str, Any]:
    limits = {NAMES.core: str(cores)}
    if blocks is not None:
        limits[NAMES.memory] = str(blocks)
    return {"name": name, "resources": {"limits": limits}, **more}


def allocation(*shares: CardShare, **more: Any) -> Allocation:
    """What the daemon has booked for a container of its own pod "u"; `more`: fields that are other than those of an ordinary share."""
    cores = sum(share.cores for share in shares)
    usual: dict[str, Any] = {
        "pod_uid": "u",
        "namespace": "default",
        "pod_name": "p",
        "container": "c",
        "kind": Kind.APP,
        "cores": cores,
        "memory_blocks": sum(share.memory_blocks for share in shares),
        "core_limit": cores,
        "priority": "normal",
        "shares": shares,
        "minors": {share.uuid: 0 for share in shares},
        "region": "",
        "mirror": "",
    }
    return Allocation(**usual | more)


def pod(
    name: str,
    *containers: dict[str, Any],
    init: Sequence[dict[str, Any]] = (),
    annotations: Mapping[str, str] | None = None,
    uid: str | None = None,
) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": uid or str(uuids.uuid4()),
            "annotations": dict(annotations or {}),
        },
        "spec": {"nodeName": "node-1", "containers": list(containers), "initContainers": list(init)},
        "status": {"phase": "Pending"},
    }
