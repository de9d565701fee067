"""Clusters of any size for the page, and a server that shows them, without an API server."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Iterator
from http import HTTPStatus

import uvloop

from scheduler_ext.engine.core import Engine
from scheduler_ext.http.app import Guard, Probes
from scheduler_ext.http.server import Server
from scheduler_ext.state.cluster import Usage
from scheduler_ext.state.pods import Record, State
from tests.scheduler_ext.extender_support import NAMES, cards, node, pod

# Shares of a card of 40 blocks as a cluster of notebooks, services and training has them.
USUAL = ((10, 4), (25, 10), (30, 12), (50, 20), (20, 5), (5, 3), (100, 40), (40, 30), (15, 6), (33, 13))


def nobody_refused(_token: str, _path: str) -> HTTPStatus | None:
    return None


@contextlib.contextmanager
def served(engine: Engine, refusal: Guard = nobody_refused, standby: str | None = None) -> Iterator[str]:
    """The address of a server of the page."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(Probes(engine, standby_reason=lambda: standby, refusal=refusal), listener)

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(server.run_until_stopped(catch_signals=False))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.stop()
        thread.join(20)


def put(engine: Engine, name: str, on: str, uuid: str, cores: int, blocks: int, namespace: str = "default") -> None:
    """A pod that runs with a share of a card."""
    usage = Usage({uuid: (cores, blocks)})
    engine.cache.pods.put(Record(f"uid-{name}", namespace, name, on, usage, State.CONFIRMED, 0.0))


def large(nodes: int = 5000, per_node: int = 8, seed: int = 1) -> Engine:
    """A cluster that is about two thirds full, of two models, with some sick cards and nodes."""
    chance, engine = random.Random(seed), Engine(NAMES)
    number = 0
    for at in range(nodes):
        name = f"gpu-{at:04d}.cluster.example"
        its = cards(name, per_node, model="NVIDIA H100 80GB HBM3" if at % 3 else "Tesla T4")
        if chance.random() < 0.01:
            its = (its[0].__class__(**{**vars(its[0]), "healthy": False}), *its[1:])
        engine.see_node(node(name, its if at % 500 else None))
        for card in its if at % 500 else ():
            left = [100, card.memory_blocks]
            for cores, blocks in chance.sample(USUAL, 4):
                if cores <= left[0] and blocks <= left[1] and chance.random() < 0.8:
                    left = [left[0] - cores, left[1] - blocks]
                    put(engine, f"train-{number:06d}", name, card.uuid, cores, blocks, f"team-{number % 40}")
                    number += 1
    engine.synced("nodes")
    engine.synced("pods")
    return engine


def small() -> Engine:
    """Four nodes, one sick card, a node without cards, quotas, and pods that wait, each for another reason."""
    engine = Engine(NAMES)
    sick = cards("gpu-3", 4, model="Tesla T4")
    sick = (*sick[:2], sick[2].__class__(**{**vars(sick[2]), "healthy": False}), sick[3])
    for name, its in (
        ("gpu-1", cards("gpu-1", 8, model="NVIDIA H100 80GB HBM3", blocks=318)),
        ("gpu-2", cards("gpu-2", 8, model="NVIDIA H100 80GB HBM3", blocks=318)),
        ("gpu-3", sick),
        ("gpu-4", None),
    ):
        engine.see_node(node(name, its))
    engine.synced("nodes")
    engine.synced("pods")
    shares = [
        ("gpu-1", 0, 100, 318), ("gpu-1", 1, 30, 64), ("gpu-1", 1, 30, 128), ("gpu-1", 2, 50, 40), ("gpu-1", 2, 20, 200),
        ("gpu-1", 3, 60, 160), ("gpu-1", 4, 100, 318), ("gpu-1", 5, 25, 32), ("gpu-1", 6, 75, 240), ("gpu-1", 6, 20, 60),
        ("gpu-1", 7, 90, 300), ("gpu-2", 0, 100, 318), ("gpu-2", 1, 45, 100), ("gpu-2", 1, 45, 100), ("gpu-2", 2, 10, 280),
        ("gpu-2", 3, 50, 159), ("gpu-2", 3, 50, 159), ("gpu-2", 4, 20, 16), ("gpu-2", 4, 20, 16), ("gpu-2", 4, 20, 16),
        ("gpu-2", 5, 80, 280), ("gpu-2", 6, 55, 200), ("gpu-2", 7, 70, 100),
        ("gpu-3", 0, 30, 10), ("gpu-3", 0, 40, 12), ("gpu-3", 1, 85, 36), ("gpu-3", 3, 60, 25),
    ]  # fmt: skip
    for number, (on, card, cores, blocks) in enumerate(shares):
        kind = ("notebook", "inference", "training")[number % 3]
        put(engine, f"{kind}-{number}", on, f"GPU-{on}-{card}", cores, blocks, ("team-a", "team-b")[number % 2])
    engine.see_quotas(
        {"data": {"quotas": "[{namespace: team-a, cores: 1000, memoryBlocks: 3000}, {namespace: team-b, cards: 2}]"}}
    )
    for name, cores, blocks in (("trainer-7", 400, None), ("notebook-x", 80, 250)):
        waits = pod(name, cores, blocks, uid=name)
        waits["metadata"] |= {"namespace": "team-a", "creationTimestamp": "2026-01-01T10:00:00Z"}
        engine.see_pod(waits)
        engine.filter(waits, ["gpu-1", "gpu-2", "gpu-3", "gpu-4"])
    for _ in range(3):
        engine.remember()
    return engine
