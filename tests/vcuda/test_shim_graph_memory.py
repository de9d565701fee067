"""Memory that graphs allocate counts: never over the share by the card's own books, and given back when it is trimmed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import share as shares
from tests.support.share import MIB, Share
from vcuda.sim import Machine, SimCard

LIMIT = 250 * MIB
CONTEXT = 64 * MIB

GRAPHS = """
class PoolProperties(C.Structure):
    _fields_ = [("type", C.c_int), ("handles", C.c_int), ("location", Location), ("security", C.c_void_p),
                ("most", size), ("rest", C.c_ubyte * 56)]
class Allocation(C.Structure):
    _fields_ = [("pool", PoolProperties), ("access", C.c_void_p), ("accesses", size), ("bytes", size), ("pointer", u64)]
def graph_of(count, child=False, flags=0):
    '''An executable graph that allocates and frees; in a graph of its own within it, if `child`.'''
    graph, node, free = C.c_void_p(), C.c_void_p(), C.c_void_p()
    ok("cuGraphCreate", C.byref(graph), 0)
    allocation = Allocation(PoolProperties(1, 0, Location(1, 0)), None, 0, count)
    ok("cuGraphAddMemAllocNode", C.byref(node), graph, None, size(0), C.byref(allocation))
    ok("cuGraphAddMemFreeNode", C.byref(free), graph, C.byref(node), size(1), u64(allocation.pointer))
    if child:
        inner, graph = graph, C.c_void_p()
        ok("cuGraphCreate", C.byref(graph), 0)
        ok("cuGraphAddChildGraphNode", C.byref(node), graph, None, size(0), inner)
    executable = C.c_void_p()
    ok("cuGraphInstantiateWithFlags", C.byref(executable), graph, u64(flags))
    return executable
def launch(executable):
    return call("cuGraphLaunch", executable, None)
def used():
    return (info()[1] - info()[0]) // MIB - 64
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine.create(tmp_path / "machine", [SimCard()])


@pytest.fixture
def share(machine: Machine, tmp_path: Path) -> Share:
    return shares.simulated(tmp_path / "share", machine, [shares.limit(machine, memory_bytes=LIMIT)])


def peak(share: Share) -> int:
    assert share.machine
    return max(process.peak_bytes for process in share.machine.report().cards[0].processes)


def test_a_launch_takes_what_its_graph_allocates_until_it_is_trimmed(share: Share) -> None:
    steps = share.run(
        GRAPHS
        + """
begin()
graph = graph_of(40 * MIB)
steps = [used()]
for _ in range(20):
    ok("cuGraphLaunch", graph, None)
ok("cuCtxSynchronize")
steps.append(used())
ok("cuGraphLaunch_ptsz", graph_of(20 * MIB, child=True), None)
ok("cuCtxSynchronize")
steps.append(used())
ok("cuDeviceGraphMemTrim", 0)
steps.append(used())
answer(steps)
"""
    )
    assert steps == [
        0,
        64,
        66,
        2,
    ]  # the simulated driver takes steps of 32 MiB; the thread's own stream is charged a chunk


@pytest.mark.parametrize("child", [False, True])
def test_a_graph_that_does_not_fit_is_refused_at_its_launch(share: Share, child: bool) -> None:
    process = share.start(
        GRAPHS
        + f"""
begin()
small, large = graph_of(30 * MIB), graph_of(200 * MIB, child={child})
results = [launch(large), launch(small)]
held = fill(8 * MIB)[1]
results += [launch(large), launch(small)]
answer([results, len(held), used()])
sys.stdin.read()
"""
    )
    assert process.stdout
    line = process.stdout.readline()
    most = peak(share) if line else 0
    said = process.communicate("", timeout=60)[1]
    assert line == "[[2, 0, 2, 2], 23, 184]\n", said
    assert most <= LIMIT
    assert share.usage().cards[0].memory_peak_bytes <= LIMIT


def test_idle_graph_memory_makes_room_before_an_allocation_is_refused(share: Share) -> None:
    outcome = share.run(
        GRAPHS
        + """
begin()
graph = graph_of(150 * MIB)
ok("cuGraphLaunch", graph, None)
ok("cuCtxSynchronize")
before = used()
answer([before, alloc(100 * MIB)[0], used(), launch(graph)])
"""
    )
    assert outcome == [160, 0, 100, 2]


def test_an_upload_counts_and_a_handle_that_comes_back_is_another_graph(share: Share) -> None:
    outcome = share.run(
        GRAPHS
        + """
begin()
large = graph_of(300 * MIB)
results = [call("cuGraphUpload", large, None)]
for _ in range(50):
    ok("cuGraphExecDestroy", large)
    graph = C.c_void_p()
    ok("cuGraphCreate", C.byref(graph), 0)
    ok("cuGraphInstantiate_v2", C.byref(large), graph, None, None, size(0))
    results.append(launch(large))
answer([results[0], set(results[1:]) == {0}, used()])
"""
    )
    assert outcome == [2, True, 0]
