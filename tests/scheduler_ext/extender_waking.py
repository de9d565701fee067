"""Refused pods and who of them is woken, for the tests of waking."""

from __future__ import annotations

from typing import Any

from scheduler_ext.engine.core import Engine
from scheduler_ext.state.unschedulable import REST
from tests.scheduler_ext.extender_engine import Clock, engine_with
from tests.scheduler_ext.extender_support import BLOCKS, NAMES, cards, node, pod

GANG = {NAMES.gang: "g/2"}


def whole(name: str, **fields: Any) -> dict[str, Any]:
    return pod(name, 100, BLOCKS, **fields)


def one_card(**options: Any) -> tuple[Engine, Clock]:
    return engine_with(node("a", cards("a", 1)), **options)


def placed(engine: Engine, one: dict[str, Any], *names: str) -> bool:
    engine.see_pod(one)
    return engine.filter(one, names or ["a"]).chosen is not None


def woken(engine: Engine, clock: Clock, seconds: float = REST) -> list[str]:
    """By name, after so many seconds."""
    clock.now += seconds
    return [one.name for one in engine.to_wake(16)]
