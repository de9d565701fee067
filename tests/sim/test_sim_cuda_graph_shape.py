"""The shape of the simulated driver's graphs: nodes and edges are listed as they were made, clones are apart, and changes are obeyed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import sim_cuda
from vcuda import sim

# A diamond of empty nodes: top, two in the middle, bottom; `count` asks for a list's length, `listed` for the list.
DIAMOND = """
    cuda, P = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p
    def call(name, *arguments):
        assert (code := getattr(cuda, name)(*arguments)) == 0, (name, code)
    def listed(name, owner, room=8):
        nodes, number = (P * room)(), ctypes.c_size_t()
        call(name, owner, None, ctypes.byref(number))
        total = number.value
        number.value = room
        call(name, owner, nodes, ctypes.byref(number))
        assert number.value == min(total, room)
        return [letters.get(each) for each in nodes[:number.value]]
    def edges(graph):
        first, second, number = (P * 8)(), (P * 8)(), ctypes.c_size_t(8)
        call("cuGraphGetEdges", graph, first, second, ctypes.byref(number))
        return sorted(letters[one] + letters[other] for one, other in zip(first[:number.value], second[:number.value]))
    context()
    graph, letters, nodes = P(), {}, {}
    call("cuGraphCreate", ctypes.byref(graph), 0)
    for letter, before in (("t", ""), ("l", "t"), ("r", "t"), ("b", "lr")):
        node = P()
        call("cuGraphAddEmptyNode", ctypes.byref(node), graph, (P * len(before))(*(nodes[each] for each in before)), len(before))
        nodes[letter], letters[node.value] = node, letter
    def link(change, one, other):
        return getattr(cuda, f"cuGraph{change}Dependencies")(graph, (P * 1)(nodes[one]), (P * 1)(nodes[other]), 1)
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> sim.Machine:
    return sim.Machine.create(tmp_path_factory.mktemp("shape") / "machine")


def test_nodes_and_edges_are_listed_from_every_side(machine: sim.Machine) -> None:
    got = sim_cuda.run(
        machine,
        DIAMOND
        + """
    answer([listed("cuGraphGetNodes", graph), listed("cuGraphGetNodes", graph, 2), listed("cuGraphGetRootNodes", graph),
            edges(graph), listed("cuGraphNodeGetDependencies", nodes["b"]), listed("cuGraphNodeGetDependentNodes", nodes["t"])])
    """,
    )
    assert got == [list("tlrb"), list("tl"), ["t"], ["lb", "rb", "tl", "tr"], ["l", "r"], ["l", "r"]]


def test_edges_and_nodes_come_and_go(machine: sim.Machine) -> None:
    got = sim_cuda.run(
        machine,
        DIAMOND
        + """
    said = [link("Add", "t", "b"), link("Add", "t", "t"), link("Remove", "l", "b")]
    after = edges(graph)
    call("cuGraphDestroyNode", nodes["r"])
    answer([said, after, edges(graph), listed("cuGraphGetNodes", graph)])
    """,
    )
    assert got == [[0, 1, 0], ["rb", "tb", "tl", "tr"], ["tb", "tl"], list("tlb")]


def test_a_clone_is_apart_and_knows_its_originals(machine: sim.Machine) -> None:
    got = sim_cuda.run(
        machine,
        DIAMOND
        + """
    clone, twin, kind = P(), P(), ctypes.c_int()
    call("cuGraphClone", ctypes.byref(clone), graph)
    call("cuGraphNodeFindInClone", ctypes.byref(twin), nodes["b"], clone)
    call("cuGraphNodeGetType", twin, ctypes.byref(kind))
    other = P()
    call("cuGraphCreate", ctypes.byref(other), 0)
    stranger = cuda.cuGraphNodeFindInClone(ctypes.byref(P()), nodes["b"], other)
    call("cuGraphDestroyNode", twin)
    number = ctypes.c_size_t()
    call("cuGraphGetNodes", clone, None, ctypes.byref(number))
    answer([twin.value != nodes["b"].value, kind.value, stranger, number.value, listed("cuGraphGetNodes", graph)])
    """,
    )
    empty = 5
    assert got == [True, empty, 1, 3, list("tlrb")]


def test_a_graph_draws_itself(machine: sim.Machine, tmp_path: Path) -> None:
    path = tmp_path / "graph.dot"
    sim_cuda.run(machine, DIAMOND + f'    call("cuGraphDebugDotPrint", graph, {str(path)!r}.encode(), 0)\n')
    assert path.read_text().startswith("digraph") and path.read_text().count("->") == 4
