"""For how long the engine's lock is held while people ask and kube-scheduler preempts: what a filter may have to wait.

In this process, with the lock's holders timed. Processor time of the holder, which does not depend on what else the machine does.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from benchmarks._extender_cluster import NAMES, node, running_pods, waiting_pod
from scheduler_ext.engine.core import Engine
from scheduler_ext.planning import defrag, explain
from scheduler_ext.protocol.extender_v1 import Victims

PROPOSED = 400  # nodes that kube-scheduler proposes for a preemption: a tenth of 4,000, its own bound


class _TimedLock:
    """A lock that knows for how long it was held: seconds of the holder's processor time."""

    def __init__(self) -> None:
        self._lock, self._since = threading.Lock(), 0.0
        self.held: list[float] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        self._since = time.thread_time()

    def __exit__(self, _kind: type[BaseException] | None, _: BaseException | None, _at: TracebackType | None) -> None:
        self.held.append(time.thread_time() - self._since)
        self._lock.release()


def _full(names: list[str], cards: int, pods: int) -> Engine:
    engine, dice = Engine(NAMES), random.Random(1)
    for name in names:
        engine.see_node(node(name, dice, cards))
    for pod in running_pods(names, cards, pods):
        engine.see_pod(pod)
    engine.synced("nodes")
    engine.synced("pods")
    return engine


def longest_ms(nodes: int, cards: int, pods: int) -> dict[str, float]:
    """The longest hold of the lock by what was asked, in ms of processor time."""
    names = [f"gpu-node-{number:05d}" for number in range(nodes)]
    engine = _full(names, cards, pods)
    asking = waiting_pod("waits", {NAMES.core: "100", NAMES.memory: "320"}, {"cpu": "1", "memory": "1Gi"})
    asking["spec"]["priority"] = 1000
    each = pods // nodes
    proposed = {name: Victims(tuple(f"running-{at + nodes * turn}" for turn in range(each)), 0) for at, name in enumerate(names[:PROPOSED])}  # fmt: skip
    engine.prepare(asking)
    engine.filter(asking, names)
    found: dict[str, float] = {}
    asks: dict[str, Callable[[], Any]] = {
        "filter": lambda: engine.filter(asking, names),
        "explain": lambda: explain.explanation(engine.evidence(namespace="default", name="waits")),
        "explain of a running pod": lambda: engine.evidence(namespace="default", name=f"running-{pods - 1}"),
        "defrag": lambda: defrag.plan(engine.snapshot(), 1),
        f"preempt, {PROPOSED} nodes": lambda: engine.preempt(asking, proposed),
        "the page": engine.overview,
        "metrics": engine.figures,
    }
    for what, ask in asks.items():
        lock = _TimedLock()
        vars(engine)["_lock"] = lock
        ask()
        found[what] = 1e3 * max(lock.held)
    return found
