"""Memory that streams capture, and that graphs allocate, is their graph's, on each node's own card."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import books, same
from tests.support.share import Share


@pytest.fixture
def share(tmp_path: Path) -> Share:
    return books.share_of_one_card(tmp_path)


@pytest.fixture
def both(tmp_path: Path) -> Share:
    return books.share_of_two_cards(tmp_path)


def test_a_captured_allocation_is_its_graphs_and_never_its_pools(share: Share) -> None:
    answered = books.within(
        share,
        """
begin()
one = stream()
for _ in range(10):
    pool, pointer = pool_on(), u64()
    graph = captured(one, lambda: ok("cuMemAllocFromPoolAsync", ref(pointer), size(300 * MIB), pool, one))
    executable, result = run(graph, one)
    ok("cuMemPoolDestroy", pool)
    if result == 0:
        ok("cuMemFreeAsync", pointer, one)
        ok("cuStreamSynchronize", one)
    ok("cuGraphExecDestroy", executable); ok("cuGraphDestroy", graph)
ok("cuDeviceGraphMemTrim", 0)
answer(free())
""",
    )
    assert answered == 960 - 2  # its stream


def test_a_capture_that_is_thrown_away_leaves_nothing_charged(share: Share) -> None:
    assert share.run(
        same.PRELUDE
        + books.TOOLS
        + """
begin()
one = stream()
pointer = u64()
graph = captured(one, lambda: ok("cuMemAllocAsync", ref(pointer), size(600 * MIB), one))
ok("cuGraphDestroy", graph)
answer([free(), alloc(600 * MIB, "cuMemAllocAsync", one)[0]])
"""
    ) == [958, 0]


def test_every_node_of_a_graph_is_charged_on_its_own_card(both: Share) -> None:
    answered = books.within(
        both,
        """
begin()
results, held = [], []
one = stream()
for _ in range(6):
    graph = made("cuGraphCreate", 0)
    for device in (0, 1):
        node = NodeAlloc(PoolProperties(1, 0, Location(1, device)), None, 0, 300 * MIB)
        made("cuGraphAddMemAllocNode", graph, None, size(0), ref(node))
    results.append(run(graph, one)[1])
answer(results)
""",
    )
    assert answered == [0, 0, 0, 2, 2, 2]


def test_a_launch_of_a_memory_graph_on_a_full_stream_stands_in_nobodys_way(share: Share) -> None:
    """The stream is full because a callback waits for what a second thread does after its own launch: natively that ends."""
    assert (
        share.run(
            same.PRELUDE
            + books.TOOLS
            + """
import threading
context = begin()
def memory_graph(one):
    pointer = u64()
    ok("cuStreamBeginCapture_v2", one, 2)
    ok("cuMemAllocAsync", ref(pointer), size(MIB), one); ok("cuMemFreeAsync", pointer, one)
    return made("cuGraphInstantiateWithFlags", finish(one), u64(0))
full, other = stream(), stream()
graphs = [memory_graph(full), memory_graph(other)]
go = threading.Event()
wait = Callback(lambda _: go.wait(20) and None)
ok("cuLaunchHostFunc", full, wait, None)
function = kernel("spin_1us")
def second():
    ok("cuCtxSetCurrent", context)
    time.sleep(0.5)
    ok("cuGraphLaunch", graphs[1], other)
    go.set()
thread = threading.Thread(target=second)
thread.start()
began = time.monotonic()
for _ in range(3000):
    ok("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, full, None, None)
    if _ % 500 == 0:
        ok("cuGraphLaunch", graphs[0], full)
thread.join()
ok("cuStreamSynchronize", full)
answer(time.monotonic() - began < 15)
"""
        )
        is True
    )
