"""Pods on nodes whose managers report, for the tests of what stays booked though no living pod explains it."""

from __future__ import annotations

from typing import Any

from scheduler_ext.engine.bindings import Write
from scheduler_ext.engine.core import Engine
from scheduler_ext.state.pods import State
from tests.scheduler_ext.extender_engine import Clock, bound
from tests.scheduler_ext.extender_support import cards, node, pod

Half = tuple[Engine, Clock, dict[str, Any]]


def placed(engine: Engine, name: str, cores: int = 100, blocks: int = 40, at: str = "a") -> dict[str, Any]:
    one = pod(name, cores, blocks, uid=name)
    assert engine.filter(one, [at]).chosen == at
    write = engine.begin_bind(name, at)
    assert isinstance(write, Write)
    engine.end_bind(name, State.BOUND)
    shown = bound(one, write)
    engine.see_pod(shown)
    return shown


def with_room_elsewhere(engine: Engine, name: str = "q") -> str | None:
    """Where a newcomer goes for whom node b has room."""
    engine.see_node(node("b", cards("b", 1)))
    return engine.filter(pod(name, 60, 1, uid=name), ["a", "b"]).chosen


def waits_again(shown: dict[str, Any]) -> dict[str, Any]:
    """As an etcd that was restored has it."""
    return pod(shown["metadata"]["name"], 100, 40, uid=shown["metadata"]["uid"])
