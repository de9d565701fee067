"""Shares whose clients are judged by the cards' own books while they run."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.support import same
from tests.support import share as shares
from tests.support.share import MIB, Share
from vcuda.sim import Machine, SimCard

LIMIT = 1024 * MIB
CONTEXT = 64 * MIB

# What the programs have in common: pools, graphs, a context for each card.
TOOLS = """
def pool_on(device=0, kind=1, place=1):
    return made("cuMemPoolCreate", ref(PoolProperties(kind, 0, Location(place, device))))
def figure(pool, attribute):
    value = u64()
    ok("cuMemPoolGetAttribute", pool, attribute, ref(value))
    return value.value // MIB
def stream():
    return made("cuStreamCreate", 1)
def finish(stream):
    graph = P()
    ok("cuStreamEndCapture", stream, ref(graph))
    return graph
def captured(stream, body):
    ok("cuStreamBeginCapture_v2", stream, 2)
    body()
    return finish(stream)
def run(graph, stream):
    executable = made("cuGraphInstantiateWithFlags", graph, u64(0))
    return executable, call("cuGraphLaunch", executable, stream)
def spin(stream, name="spin_400ms"):
    ok("cuLaunchKernel", kernel(name), 1, 1, 1, 32, 1, 1, 0, stream, None, None)
def free():
    return info()[0] // MIB
"""


def share_of_two_cards(tmp_path: Path) -> Share:
    machine = Machine.create(tmp_path / "machine", [SimCard(), SimCard()])
    limits = [shares.limit(machine, index, memory_bytes=LIMIT) for index in (0, 1)]
    return shares.simulated(tmp_path / "both", machine, limits)


def share_of_one_card(tmp_path: Path) -> Share:
    """Of a machine with two."""
    machine = Machine.create(tmp_path / "machine", [SimCard(), SimCard()])
    return shares.simulated(tmp_path / "share", machine, [shares.limit(machine, memory_bytes=LIMIT)])


def run(share: Share, code: str) -> tuple[object, list[int]]:
    """Run a client; return what it answered, and the most MiB that each card held meanwhile, by its own books."""
    assert share.machine
    machine, most, over = share.machine, [0, 0], threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            for index, card in enumerate(machine.report().cards):
                peak = sum(process.peak_bytes for process in card.processes)
                most[index] = max(most[index], card.used_bytes // MIB, peak // MIB)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return share.run(same.PRELUDE + TOOLS + code), most
    finally:
        over.set()
        watcher.join()


def within(share: Share, code: str) -> object:
    """What a client answers that never had more than its limit on any card."""
    answered, most = run(share, code)
    assert max(most) <= LIMIT // MIB, most
    return answered
