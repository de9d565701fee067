"""Nodes of the simulated driver's graphs give back what they were made of, take new parameters, and refuse other kinds' questions."""

from __future__ import annotations

import pytest

from tests.support import sim_cuda
from vcuda import sim


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> sim.Machine:
    return sim.Machine.create(tmp_path_factory.mktemp("nodes") / "machine")


def test_a_memset_node_is_what_it_was_made_or_set_to(machine: sim.Machine) -> None:
    got = sim_cuda.run(
        machine,
        """
        made, graph = context(), ok(cu.cuGraphCreate(0))
        target = ok(cu.cuMemAlloc(4096))
        params = cu.CUDA_MEMSET_NODE_PARAMS()
        params.dst, params.elementSize, params.width, params.height, params.value = target, 4, 16, 1, 7
        node = ok(cu.cuGraphAddMemsetNode(graph, [], 0, params, made))
        first = ok(cu.cuGraphMemsetNodeGetParams(node))
        seen = [first.value, first.width, int(first.dst) == int(target)]
        params.value = 9
        ok(cu.cuGraphMemsetNodeSetParams(node, params))
        wrong = [int(cu.cuGraphKernelNodeGetParams(node)[0]), int(cu.cuGraphEventRecordNodeGetEvent(node)[0])]
        answer([seen, ok(cu.cuGraphMemsetNodeGetParams(node)).value, wrong])
        """,
    )
    assert got == [[7, 16, True], 9, [1, 1]]


def test_event_nodes_hold_their_event(machine: sim.Machine) -> None:
    got = sim_cuda.run(
        machine,
        """
        context()
        graph, events = ok(cu.cuGraphCreate(0)), [ok(cu.cuEventCreate(0)) for _ in range(2)]
        record = ok(cu.cuGraphAddEventRecordNode(graph, [], 0, events[0]))
        wait = ok(cu.cuGraphAddEventWaitNode(graph, [record], 1, events[0]))
        held = [int(ok(cu.cuGraphEventRecordNodeGetEvent(record))) == int(events[0])]
        ok(cu.cuGraphEventWaitNodeSetEvent(wait, events[1]))
        held.append(int(ok(cu.cuGraphEventWaitNodeGetEvent(wait))) == int(events[1]))
        answer([held, int(cu.cuGraphEventWaitNodeGetEvent(record)[0])])
        """,
    )
    assert got == [[True, True], 1]


def test_a_child_graph_is_a_copy_of_its_own(machine: sim.Machine) -> None:
    got = sim_cuda.run(
        machine,
        """
        context()
        inner, outer = ok(cu.cuGraphCreate(0)), ok(cu.cuGraphCreate(0))
        ok(cu.cuGraphAddEmptyNode(inner, [], 0))
        node = ok(cu.cuGraphAddChildGraphNode(outer, [], 0, inner))
        ok(cu.cuGraphAddEmptyNode(inner, [], 0))
        copy = ok(cu.cuGraphChildGraphNodeGetGraph(node))
        count = lambda graph: int(ok(cu.cuGraphGetNodes(graph, 0))[1])
        answer([int(copy) != int(inner), count(inner), count(copy), count(outer)])
        """,
    )
    assert got == [True, 2, 1, 1]
