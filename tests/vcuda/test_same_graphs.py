"""A share changes nothing about graphs: nodes of every kind are made, asked, changed and run as on the driver itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import same
from tests.support import share as shares
from tests.support.share import MIB, Share
from vcuda.sim import Machine, SimCard

# A graph with a node, run; and what all of it gave.
BEGIN = """
context, graph = begin(), None
graph = made("cuGraphCreate", 0)
def run(executable):
    ok("cuGraphLaunch", executable, None)
    ok("cuCtxSynchronize")
def instantiated(given=None):
    return made("cuGraphInstantiateWithFlags", given or graph, u64(0))
"""


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Share:
    folder: Path = tmp_path_factory.mktemp("graphs")
    machine = Machine.create(folder / "machine", [SimCard()])
    return shares.simulated(folder / "share", machine, [shares.limit(machine, memory_bytes=256 * MIB)])


@pytest.mark.parametrize("version", ["", "_v2"])
def test_a_kernel_node_keeps_its_own_copy_of_its_parameters(share: Share, version: str) -> None:
    got = same.answers(
        share,
        BEGIN
        + f"""
first, second, version = kernel("spin_1us"), kernel("spin_2us"), {version!r}
values = [u64(77), uint(5)]
pointers = (P * 2)(*(C.addressof(each) for each in values))
node = P()
ok("cuGraphAddKernelNode" + version, ref(node), graph, None, size(0), ref(launch_of(first, 3, pointers)))
values[0].value = 78  # after the node was made: it must not see this
def held():
    found = Kernel()
    ok("cuGraphKernelNodeGetParams" + version, node, ref(found))
    return [found.function == first.value, found.grid[0], C.cast(found.params[0], C.POINTER(u64))[0],
            found.context == context.value]
seen = [held()]
ok("cuGraphKernelNodeSetParams" + version, node, ref(launch_of(second, 4, pointers)))
seen.append(held())
executable = instantiated()
ok("cuGraphExecKernelNodeSetParams" + version, executable, node, ref(launch_of(first, 1, pointers)))
run(executable)
wrong = [call("cuGraphExecKernelNodeSetParams" + version, executable, node, ref(launch_of(first, 0, pointers))),
         call("cuGraphKernelNodeSetParams" + version, node, None), call("cuGraphKernelNodeGetParams" + version, node, None),
         call("cuGraphAddKernelNode" + version, ref(node), graph, None, size(1), ref(launch_of(first, 1, pointers)))]
answer([seen, wrong])
""",
    )
    knows_context = bool(version)
    assert got == [[[True, 3, 77, knows_context], [False, 4, 78, knows_context]], [1, 1, 1, 1]]


def test_a_kernel_nodes_attributes_are_kept_and_copied(share: Share) -> None:
    got = same.answers(
        share,
        BEGIN
        + """
function, nodes = kernel(), [P(), P()]
values = [u64(1), uint(1)]
pointers = (P * 2)(*(C.addressof(each) for each in values))
for node in nodes:
    ok("cuGraphAddKernelNode_v2", ref(node), graph, None, size(0), ref(launch_of(function, 1, pointers)))
empty = made("cuGraphAddEmptyNode", graph, None, size(0))
value = (C.c_int * 16)(3)
priority = 8
ok("cuGraphKernelNodeSetAttribute", nodes[0], priority, value)
ok("cuGraphKernelNodeCopyAttributes", nodes[1], nodes[0])
found = (C.c_int * 16)()
ok("cuGraphKernelNodeGetAttribute", nodes[1], priority, found)
wrong = [call("cuGraphKernelNodeGetAttribute", nodes[1], 99, found), call("cuGraphKernelNodeSetAttribute", nodes[1], priority, None),
         call("cuGraphKernelNodeCopyAttributes", nodes[1], empty)]
answer([found[0], wrong])
""",
    )
    assert got == [3, [1, 1, 1]]


def test_copies_and_sets_in_a_graph_move_the_bytes_that_they_were_last_told_to(share: Share) -> None:
    got = same.answers(
        share,
        BEGIN
        + """
ones, twos, target = filled(1, 4096), filled(2, 4096), filled(0, 4096)
other = filled(0, 4096)
copy = made("cuGraphAddMemcpyNode", graph, None, size(0), ref(flat_copy(target, ones, 4096)), context)
set_node = made("cuGraphAddMemsetNode", graph, None, size(0), ref(Memset(other, 0, 7, 1, 4096, 1)), context)
found = Copy3D()
ok("cuGraphMemcpyNodeGetParams", copy, ref(found))
seen = [found.width, found.source.device == ones.value]
executable = instantiated()
run(executable)
seen.append([read(target, 4096) == b"\\1" * 4096, read(other, 4096) == b"\\7" * 4096])
ok("cuGraphExecMemcpyNodeSetParams", executable, copy, ref(flat_copy(target, twos, 100)), context)
ok("cuGraphExecMemsetNodeSetParams", executable, set_node, ref(Memset(other, 0, 9, 1, 10, 1)), context)
run(executable)
seen.append([read(target, 101) == b"\\2" * 100 + b"\\1", read(other, 11) == b"\\x09" * 10 + b"\\7"])
ok("cuGraphMemcpyNodeSetParams", copy, ref(flat_copy(target, twos, 4096)))
run(instantiated())
seen.append(read(target, 4096) == b"\\2" * 4096)
wrong = [call("cuGraphExecMemcpyNodeSetParams", executable, set_node, ref(flat_copy(target, twos, 1)), context),
         call("cuGraphMemcpyNodeGetParams", set_node, ref(found)), call("cuGraphMemcpyNodeSetParams", copy, None)]
answer([seen, wrong])
""",
    )
    assert got == [[4096, True, [True, True], [True, True], True], [1, 1, 1]]


def test_host_functions_of_a_graph_can_be_exchanged(share: Share) -> None:
    got = same.answers(
        share,
        BEGIN
        + """
called = []
function = Callback(lambda data: called.append(data))
node = made("cuGraphAddHostNode", graph, None, size(0), ref(Host(function, 5)))
executable = instantiated()
run(executable)
ok("cuGraphExecHostNodeSetParams", executable, node, ref(Host(function, 6)))
run(executable)
ok("cuGraphHostNodeSetParams", node, ref(Host(function, 7)))
found = Host()
ok("cuGraphHostNodeGetParams", node, ref(found))
run(instantiated())
answer([called, found.data])
""",
    )
    assert got == [[5, 6, 7], 7]


def test_events_and_children_of_an_executable_graph_can_be_exchanged(share: Share) -> None:
    got = same.answers(
        share,
        BEGIN
        + """
events = [made("cuEventCreate", 0) for _ in range(2)]
record = made("cuGraphAddEventRecordNode", graph, None, size(0), events[0])
wait = made("cuGraphAddEventWaitNode", graph, (P * 1)(record), size(1), events[0])
calls = []
function = Callback(lambda data: calls.append(data))
children = []
for data in (1, 2):
    child = made("cuGraphCreate", 0)
    made("cuGraphAddHostNode", child, None, size(0), ref(Host(function, data)))
    children.append(child)
node = made("cuGraphAddChildGraphNode", graph, None, size(0), children[0])
executable = instantiated()
run(executable)
ok("cuGraphExecEventRecordNodeSetEvent", executable, record, events[1])
ok("cuGraphExecEventWaitNodeSetEvent", executable, wait, events[1])
ok("cuGraphExecChildGraphNodeSetParams", executable, node, children[1])
run(executable)
ok("cuGraphEventRecordNodeSetEvent", record, events[1])
found = P()
ok("cuGraphEventRecordNodeGetEvent", record, ref(found))
answer([calls, [call("cuEventQuery", each) for each in events], found.value == events[1].value,
        call("cuGraphChildGraphNodeGetGraph", record, ref(found)), call("cuGraphExecChildGraphNodeSetParams", executable, node, None)])
""",
    )
    assert got == [[1, 2], [0, 0], True, 1, 1]


def test_nodes_of_any_kind_are_added_and_set_by_one_call(share: Share) -> None:
    got = same.answers(
        share,
        BEGIN
        + """
source, target, other = filled(3, 256), filled(0, 256), filled(0, 256)
event, child = made("cuEventCreate", 0), made("cuGraphCreate", 0)
called = []
function = Callback(lambda data: called.append(data))
class CopyNode(C.Structure):
    _fields_ = [("flags", C.c_int), ("reserved", C.c_int), ("context", P), ("copy", Copy3D)]
values = [u64(1), uint(1)]
pointers = (P * 2)(*(C.addressof(each) for each in values))
bodies = {KERNEL: launch_of(kernel(), 1, pointers), COPY: CopyNode(0, 0, None, flat_copy(target, source, 256)),
          SET: Memset(other, 0, 8, 1, 256, 1), HOST: Host(function, 4), CHILD: child, EMPTY: u64(0), RECORD: event, WAIT: event,
          ALLOC: NodeAlloc(PoolProperties(1, 0, Location(1, 0)), None, 0, MIB, 0)}
nodes = {}
for number, (kind, body) in enumerate(bodies.items()):
    nodes[kind], params = P(), node_of(kind, body)
    if number % 2:
        ok("cuGraphAddNode", ref(nodes[kind]), graph, None, size(0), ref(params))
    else:
        ok("cuGraphAddNode_v2", ref(nodes[kind]), graph, None, None, size(0), ref(params))
pointer = NodeAlloc.from_buffer_copy(params.body).pointer
free = P()
ok("cuGraphAddNode", ref(free), graph, (P * 1)(nodes[ALLOC]), size(1), ref(node_of(FREE, u64(pointer))))
freed, bytes_ = u64(), NodeAlloc()
ok("cuGraphMemFreeNodeGetParams", free, ref(freed))
ok("cuGraphMemAllocNodeGetParams", nodes[ALLOC], ref(bytes_))
executable = instantiated()
run(executable)
first = [read(target, 256) == b"\\3" * 256, read(other, 256) == b"\\x08" * 256, list(called)]
ok("cuGraphExecNodeSetParams", executable, nodes[HOST], ref(node_of(HOST, Host(function, 5))))
ok("cuGraphNodeSetParams", nodes[SET], ref(node_of(SET, Memset(other, 0, 9, 1, 256, 1))))
run(executable)
second = [read(other, 1) == b"\\x08", list(called)]
found = Memset()
ok("cuGraphMemsetNodeGetParams", nodes[SET], ref(found))
wrong = [call("cuGraphAddNode", ref(free), graph, None, size(0), ref(node_of(9, u64(0)))),
         call("cuGraphAddNode", ref(free), graph, None, size(0), None),
         call("cuGraphExecNodeSetParams", executable, nodes[SET], ref(node_of(HOST, Host(function, 5)))),
         call("cuGraphMemFreeNodeGetParams", nodes[SET], ref(freed))]
answer([pointer != 0 and freed.value == pointer, bytes_.bytes, first, second, found.value, wrong])
""",
    )
    assert got == [True, MIB, [True, True, [4]], [True, [4, 5]], 9, [801, 1, 1, 1]]


def test_an_executable_graph_takes_another_graph_of_its_shape_only(share: Share) -> None:
    got = same.answers(
        share,
        BEGIN
        + """
calls = []
function = Callback(lambda data: calls.append(data))
def chain(*data):
    new, before = made("cuGraphCreate", 0), None
    for each in data:
        nodes = (P * 1)(before) if before else None
        before = made("cuGraphAddHostNode", new, nodes, size(1 if nodes else 0), ref(Host(function, each)))
    return new
executable = instantiated(chain(1, 2))
def update(new):
    node, result, info_ = P(), C.c_int(9), (P * 3)()
    first = call("cuGraphExecUpdate", executable, new, ref(node), ref(result))
    second = call("cuGraphExecUpdate_v2", executable, new, info_)
    return [first, second, result.value, (info_[0] or 0) & 0xffffffff, node.value == info_[1]]
apart = made("cuGraphCreate", 0)
for data in (5, 6):
    made("cuGraphAddHostNode", apart, None, size(0), ref(Host(function, data)))
kinds = made("cuGraphCreate", 0)
for _ in range(2):
    made("cuGraphAddEmptyNode", kinds, None, size(0))
said = [update(chain(3, 4)), update(chain(3)), update(apart), update(kinds), call("cuGraphExecUpdate_v2", executable, apart, None)]
run(executable)
answer([said, calls])
""",
    )
    refused, topology, kind = 910, 2, 3
    assert got == [
        [
            [0, 0, 0, 0, True],
            [refused, refused, topology, topology, True],
            [refused, refused, topology, topology, True],
            [refused, refused, kind, kind, True],
            1,
        ],
        [3, 4],
    ]


def test_a_graph_is_instantiated_in_every_version_of_the_call(share: Share) -> None:
    got = same.answers(
        share,
        BEGIN
        + """
calls = []
function = Callback(lambda data: calls.append(data))
node = made("cuGraphAddHostNode", graph, None, size(0), ref(Host(function, 1)))
log, error_node = C.create_string_buffer(b"old", 64), P(5)
class Params(C.Structure):
    _fields_ = [("flags", u64), ("stream", P), ("node", P), ("result", C.c_int)]
found, flags = [], u64(9)
for name in ("cuGraphInstantiate", "cuGraphInstantiate_v2"):
    executable = P()
    ok(name, ref(executable), graph, ref(error_node), log, size(64))
    found.append([error_node.value, log.value.decode()])
    run(executable)
for name in ("cuGraphInstantiateWithParams", "cuGraphInstantiateWithParams_ptsz"):
    executable, params = P(), Params(flags=8, result=7)
    ok(name, ref(executable), graph, ref(params))
    ok("cuGraphExecGetFlags", executable, ref(flags))
    found.append([params.result, flags.value])
    ok("cuGraphUpload", executable, None)
    ok("cuGraphUpload_ptsz", executable, None)
    ok("cuGraphLaunch_ptsz", executable, None)
    ok("cuStreamSynchronize_ptsz", None)
enabled, set_node = uint(9), made("cuGraphAddMemsetNode", graph, None, size(0), ref(Memset(filled(0, 4), 0, 1, 1, 4, 1)), context)
executable = instantiated()
ok("cuGraphNodeSetEnabled", executable, set_node, 0)
ok("cuGraphNodeGetEnabled", executable, set_node, ref(enabled))
wrong = [call("cuGraphInstantiateWithParams", ref(executable), graph, None), call("cuGraphExecGetFlags", executable, None),
         call("cuGraphNodeSetEnabled", executable, node, 0), call("cuGraphNodeGetEnabled", executable, set_node, None),
         call("cuGraphInstantiateWithFlags", ref(executable), graph, u64(99)), call("cuGraphExecDestroy", None),
         call("cuGraphUpload", None, None), call("cuGraphCreate", None, 0), call("cuGraphCreate", ref(P()), 1),
         call("cuGraphClone", None, graph), call("cuGraphNodeGetType", node, None)]
ok("cuGraphExecDestroy", executable)
answer([found, len(calls), enabled.value, wrong])
""",
    )
    assert got == [[[None, ""], [None, ""], [0, 8], [0, 8]], 4, 0, [1] * 11]


def test_edges_are_listed_with_their_data_and_changed_by_the_newer_calls(share: Share) -> None:
    got = same.answers(
        share,
        BEGIN
        + """
first = made("cuGraphAddEmptyNode", graph, None, size(0))
second = made("cuGraphAddEmptyNode", graph, None, size(0))
one, other = (P * 1)(first), (P * 1)(second)
ok("cuGraphAddDependencies_v2", graph, one, other, None, size(1))
again = call("cuGraphAddDependencies_v2", graph, one, other, None, size(1))
data, count, nodes, ends = (C.c_ubyte * 16)(*[5] * 16), size(2), (P * 2)(), (P * 2)()
def asked(name, *arguments):
    data[:] = [5] * 16
    count.value = 2
    ok(name, *arguments, data, ref(count))
    return [count.value, list(data[:8])]
listed = [asked("cuGraphGetEdges_v2", graph, nodes, ends), asked("cuGraphNodeGetDependencies_v2", second, nodes),
          nodes[0] == first.value, asked("cuGraphNodeGetDependentNodes_v2", first, nodes), nodes[0] == second.value]
ok("cuGraphRemoveDependencies_v2", graph, one, other, None, size(1))
gone = call("cuGraphRemoveDependencies_v2", graph, one, other, None, size(1))
wrong = [call("cuGraphGetEdges", graph, None, None, None), call("cuGraphNodeGetDependencies", first, None, None),
         call("cuGraphNodeGetDependentNodes", first, None, None), call("cuGraphAddDependencies", graph, None, None, size(1)),
         call("cuGraphNodeFindInClone", None, first, graph), call("cuGraphDebugDotPrint", graph, None, 0)]
answer([again, listed, gone, wrong])
""",
    )
    plain = [1, [0] * 8]
    assert got == [1, [plain, plain, True, plain, True], 1, [1] * 6]
