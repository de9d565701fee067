"""Pods for the daemon's tests, and waiting for what a daemon does in its own time."""

from __future__ import annotations

import time
import uuid as uuids
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vcuda.spec.names import Names

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
