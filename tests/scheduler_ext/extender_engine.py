"""An engine with a clock of the test, and what the API server shows of its decisions."""

from __future__ import annotations

from typing import Any

from scheduler_ext.engine.bindings import Write
from scheduler_ext.engine.core import Engine
from tests.scheduler_ext.extender_support import NAMES


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def engine_with(*nodes: dict[str, Any], **options: Any) -> tuple[Engine, Clock]:
    clock = Clock()
    engine = Engine(NAMES, clock=clock, wall_clock=lambda: 1, **options)
    for one in nodes:
        engine.see_node(one)
    engine.synced("nodes")
    engine.synced("pods")
    return engine, clock


def bound(one: dict[str, Any], write: Write) -> dict[str, Any]:
    """The pod as the API server shows it after our write."""
    metadata = one["metadata"] | {"annotations": one["metadata"].get("annotations", {}) | dict(write.annotations)}
    return one | {"metadata": metadata, "spec": one["spec"] | {"nodeName": write.node}}


def free(engine: Engine) -> float:
    return engine.figures()["free_cores"]
