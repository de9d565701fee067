"""What the heaviest requests do to others (T37): for how long they hold the engine's lock, and how long a light filter waits beside them.

In this process, with the lock's holders timed. A hold is processor time of the holder, which does not depend on what else the machine does.
A wait is from when a light filter was due to its answer, at most, but no longer than this process ran meanwhile: not what other programs took.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, cast

import orjson
import uvloop

from benchmarks._extender_cluster import NAMES, node, running_pods, waiting_pod
from scheduler_ext.engine import garbage
from scheduler_ext.engine.core import Engine
from scheduler_ext.http.app import Extender
from scheduler_ext.planning import defrag, explain
from scheduler_ext.protocol.extender_v1 import Victims
from scheduler_ext.sync.binder import Binder

# At so many nodes and more; smaller clusters get their part of it.
PROPOSED = 400  # nodes that kube-scheduler proposes for a preemption: a tenth of 4,000, its own bound
SHARES = 80  # on each of them
NOMINATED = 1000
GANG = 1024  # pods of nine containers
CLASSES = 432  # kinds of pods, as real mixes have
_QUOTAS = "[{namespace: default, cores: 100000000}, {namespace: default, models: [NVIDIA L40S], cores: 100000000}]"


class Heavy(NamedTuple):
    """Milliseconds. `spent`: of the processor, by whoever asked."""

    held: float
    spent: float
    waited: float


class _TimedLock:
    """A lock that knows for how long it was held: seconds of the holder's processor time, while `counts`."""

    def __init__(self) -> None:
        self._lock, self._since, self.counts = threading.Lock(), 0.0, True
        self.held = [0.0]

    def __enter__(self) -> None:
        self._lock.acquire()
        self._since = time.thread_time()

    def __exit__(self, _kind: type[BaseException] | None, _: BaseException | None, _at: TracebackType | None) -> None:
        if self.counts:
            self.held.append(time.thread_time() - self._since)
        self._lock.release()


def _full(names: list[str], cards: int, pods: int) -> Engine:
    engine, dice = Engine(NAMES), random.Random(1)
    engine.learn()
    for name in names:
        engine.see_node(node(name, dice, cards))
    for pod in running_pods(names, cards, pods):
        engine.see_pod(pod)
    engine.synced("nodes")
    engine.synced("pods")
    return engine


def _pod(name: str, cores: int, blocks: int, containers: int = 1, gang: str = "") -> dict[str, Any]:
    limits = {NAMES.core: str(cores), NAMES.memory: str(blocks)}
    made = waiting_pod(name, limits, {"cpu": "10m", "memory": "1Mi"})
    made["spec"]["priority"] = 1000
    made["spec"]["containers"] = [made["spec"]["containers"][0] | {"name": f"c{at}"} for at in range(containers)]
    made["metadata"]["annotations"] = {NAMES.gang: gang} if gang else {}
    return made


def _body(pod: dict[str, Any], names: list[str]) -> bytes:
    return orjson.dumps({"Pod": pod, "Nodes": None, "NodeNames": names})


async def _asked(extender: Extender, pod: dict[str, Any], names: list[str]) -> None:
    """A filter request, as the server answers it."""
    answer = extender.filter(_body(pod, names))
    if not isinstance(answer, bytes):
        await answer


def _measured(
    engine: Engine, ask: Callable[[], Any] | Callable[[Extender], Awaitable[None]], names: list[str]
) -> Heavy:
    """What `ask` does to filters for one small pod on ten nodes, of which one is due each millisecond.

    As in the server: these are answered on a loop, and `ask` is done by a thread beside it, or by the loop if it is asynchronous.
    """
    light, lock, extender = _pod("light", 1, 1), _TimedLock(), Extender(engine, cast(Binder, None))
    body = _body(light, names[:10])

    def heavy() -> float:
        began = time.thread_time()
        ask()  # type: ignore[call-arg]
        return time.thread_time() - began

    async def on_the_loop() -> float:
        began = time.thread_time()
        await ask(extender)  # type: ignore[call-arg]
        return time.thread_time() - began

    async def both() -> Heavy:
        loop, waited, own = asyncio.get_running_loop(), 0.0, 0.0
        asked = loop.create_task(on_the_loop() if inspect.iscoroutinefunction(ask) else asyncio.to_thread(heavy))
        while not asked.done():
            due, ran = time.perf_counter() + 0.001, time.process_time()
            await asyncio.sleep(0.001)
            lock.counts, began = False, time.thread_time()
            answer = extender.filter(body)
            assert isinstance(answer, bytes)
            waited = max(waited, min(time.perf_counter() - due, time.process_time() - ran))
            lock.counts, own = True, own + time.thread_time() - began
        spent = await asked - (own if inspect.iscoroutinefunction(ask) else 0.0)
        return Heavy(1e3 * max(lock.held), 1e3 * spent, 1e3 * waited)

    engine.prepare(light)
    vars(engine)["_lock"] = lock
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(both())


def _crowded(count: int) -> tuple[Engine, list[str]]:
    names = [f"crowded-{number:03d}" for number in range(count)]
    return _full(names, 8, count * SHARES), names


def longest_ms(nodes: int, cards: int, pods: int) -> dict[str, Heavy]:
    garbage.begin()
    names = [f"gpu-node-{number:05d}" for number in range(nodes)]
    proposal, nominated, many, classes = (
        max(2, size * min(nodes, PROPOSED) // PROPOSED) for size in (PROPOSED, NOMINATED, GANG, CLASSES)
    )
    engine = _full(names, cards, pods)
    asking, each = _pod("waits", 100, 320), pods // nodes
    proposed = {name: Victims(tuple(f"running-{at + nodes * turn}" for turn in range(each)), 0) for at, name in enumerate(names[:proposal])}  # fmt: skip
    engine.prepare(asking)
    engine.filter(asking, names)
    broad, gang = _pod("broad", 1, 1, 64), _pod("gang-0", 1, 1, 9, gang=f"job/{many}")
    found: dict[str, Heavy] = {}

    def measure(what: str, ask: Callable[[], Any], on: Engine = engine, its: list[str] = names) -> None:
        found[what] = _measured(on, ask, its)

    measure("filter", lambda: engine.filter(asking, names))
    measure("explain", lambda: explain.explanation(engine.evidence(namespace="default", name="waits")))
    measure("explain of a running pod", lambda: engine.evidence(namespace="default", name=f"running-{pods - 1}"))
    measure("defrag", lambda: defrag.plan(engine.snapshot(), 1))
    measure(f"preempt, {proposal} nodes", lambda: engine.preempt(asking, proposed))
    measure("the page", engine.overview)
    measure("metrics", engine.figures)
    measure("64 containers, first of its class", lambda: (engine.prepare(broad), engine.filter(broad, names)))
    measure("quotas change", lambda: engine.see_quotas({"data": {"quotas": _QUOTAS}}))
    changed = node(names[0], random.Random(1), cards)
    changed["metadata"]["labels"] = {"pool": "other"}
    measure("a node's labels change", lambda: engine.see_node(changed))
    measure("filter with quotas", lambda: engine.filter(asking, names))
    measure(f"{classes} classes, each again", partial(_classes, names=names, count=classes))
    measure(
        f"gang of {many} of nine containers: its first filter",
        lambda: (engine.prepare(gang), engine.filter(gang, names[:proposal], engine.plan_gang(gang, names[:proposal]))),
    )
    engine.lose_pod(gang["metadata"]["uid"])
    crowded, there = _crowded(proposal)
    victims = {name: Victims(tuple(f"running-{at + proposal * turn}" for turn in range(SHARES)), 0) for at, name in enumerate(there)}  # fmt: skip
    measure(f"preempt, {proposal} nodes × {SHARES} shares", lambda: crowded.preempt(asking, victims), crowded, there)
    whole = _pod("gang-1", 50, 50, 9, gang=f"job2/{proposal}")
    crowded.filter(whole, there)
    measure(f"preempt for one of a gang of {proposal}", lambda: crowded.preempt(whole, victims), crowded, there)
    for at in range(nominated):
        one = _pod(f"nominated-{at}", 1, 1)
        one["spec"]["priority"], one["status"] = 1, {"nominatedNodeName": there[at % proposal]}
        crowded.see_pod(one)
    beside = f"beside {nominated} nominated pods"
    measure(
        f"preempt, {proposal} nodes × {SHARES} shares, {beside}",
        lambda: crowded.preempt(asking, victims),
        crowded,
        there,
    )
    measure(f"filter {beside}", lambda: crowded.filter(asking, there), crowded, there)
    measure(
        f"explain {beside}",
        lambda: explain.explanation(crowded.evidence(uid=asking["metadata"]["uid"])),
        crowded,
        there,
    )
    measure(f"simulate {beside}", lambda: crowded.simulate(asking, there, {}), crowded, there)
    return found


async def _classes(extender: Extender, names: list[str], count: int) -> None:
    for _ in range(2):
        for number in range(count):
            await _asked(extender, _pod(f"class-{number}", 1 + number % 72, 1 + number // 72), names)
            await asyncio.sleep(0)  # others' requests come between
