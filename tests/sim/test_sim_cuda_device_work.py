"""Work that the host does not launch one by one: conditional nodes, graphs launched from the card; attributes of launches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import sim_cuda
from vcuda import sim

US = 1_000
BEGIN = """
context(); stream = ok(cu.cuStreamCreate(1)); home = ok(cu.cuCtxGetCurrent())
text = ".version 8.0\\n.target sm_80\\n.address_size 64\\n" + "".join(
    f".visible .entry {name}({', '.join(f'.param .u64 p{i}' for i in range(count))}) {{ ret; }}\\n"
    for name, count in (("sim_count_down", 2), ("sim_launch", 1), ("spin_100us", 0), ("spin_700us", 0)))
module = ok(cu.cuModuleLoadData(text.encode() + b"\\0"))
down, starter, short, long = (ok(cu.cuModuleGetFunction(module, name)) for name in (b"sim_count_down", b"sim_launch", b"spin_100us", b"spin_700us"))
kept = []
def node(graph, function, *values):
    params = cu.CUDA_KERNEL_NODE_PARAMS(); params.func = function
    params.gridDimX = params.gridDimY = params.gridDimZ = params.blockDimX = params.blockDimY = params.blockDimZ = 1
    words = [ctypes.c_uint64(value) for value in values]; pointers = (ctypes.c_void_p * (len(words) + 1))(*map(ctypes.addressof, words))
    kept.extend([words, pointers]); params.kernelParams = ctypes.addressof(pointers) if words else 0
    return ok(cu.cuGraphAddKernelNode(graph, None, 0, params))
def conditional(graph, handle, kind, size=1):
    # By the symbol and the layout of cuda.h 12.4: the bindings' node parameters are those of a newer one.
    params = (ctypes.c_uint64 * 32)(); params[0] = 13; params[2] = int(handle); params[3] = kind | size << 32
    made = ctypes.c_void_p()
    if error := ctypes.CDLL("libcuda.so.1").cuGraphAddNode(ctypes.byref(made), ctypes.c_void_p(int(graph)), None, ctypes.c_size_t(0), params):
        return error
    return [cu.CUgraph(ctypes.c_uint64.from_address(params[4] + 8 * i).value) for i in range(size)]
def ran(graph, times=1, flags=0):
    exec = ok(cu.cuGraphInstantiate(graph, flags))
    for _ in range(times): ok(cu.cuGraphLaunch(exec, stream))
    ok(cu.cuStreamSynchronize(stream)); return exec
"""


@pytest.fixture
def machine(tmp_path: Path) -> sim.Machine:
    return sim.Machine.create(tmp_path / "machine")


def busy_us(machine: sim.Machine) -> float:
    return machine.report().cards[0].busy_ns / US


def test_a_loop_runs_while_its_condition_holds_and_again_at_each_launch(machine: sim.Machine) -> None:
    sim_cuda.run(
        machine,
        BEGIN
        + """
graph = ok(cu.cuGraphCreate(0)); handle = ok(cu.cuGraphConditionalHandleCreate(graph, home, 6, 1))
body, = conditional(graph, handle, 1); node(body, short); node(body, down, int(handle), 2)
ran(graph, times=2); assert conditional(graph, 99, 1) == 1
""",
    )
    assert busy_us(machine) == 2 * 3 * (100 + 5), "three rounds of a kernel and of the one that counts down"


def test_a_choice_runs_one_body(machine: sim.Machine) -> None:
    sim_cuda.run(
        machine,
        BEGIN
        + """
for value, kind, size in ((1, 0, 2), (0, 0, 2), (0, 0, 1), (1, 2, 2), (5, 2, 2)):
    graph = ok(cu.cuGraphCreate(0)); handle = ok(cu.cuGraphConditionalHandleCreate(graph, home, value, 1))
    bodies = conditional(graph, handle, kind, size); node(bodies[0], short)
    for other in bodies[1:]: node(other, long)
    ran(graph)
""",
    )
    assert busy_us(machine) == 100 + 700 + 0 + 700 + 0


def test_a_graph_launched_from_the_card_is_time_that_no_launch_of_the_host_shows(
    machine: sim.Machine,
) -> None:
    sim_cuda.run(
        machine,
        BEGIN
        + """
inner = ok(cu.cuGraphCreate(0)); node(inner, long); node(inner, long)
device = ok(cu.cuGraphInstantiate(inner, 4)); other = ok(cu.cuGraphInstantiate(inner, 0))
for exec in (device, other): ok(cu.cuLaunchKernel(starter, 1, 1, 1, 1, 1, 1, 0, stream, ((int(exec),), (ctypes.c_uint64,)), 0))
ok(cu.cuStreamSynchronize(stream))
""",
    )
    assert busy_us(machine) == 2 * 5 + 2 * 700, "only what was made for launches from the card"


def test_launch_attributes_record_events_and_check_clusters(machine: sim.Machine) -> None:
    begun, done, bad = sim_cuda.run(
        machine,
        BEGIN
        + """
start, begun, done = (ok(cu.cuEventCreate(0)) for _ in range(3)); ID = cu.CUlaunchAttributeID
config = cu.CUlaunchConfig(); config.hStream = stream; config.gridDimX = 6
config.gridDimY = config.gridDimZ = config.blockDimX = config.blockDimY = config.blockDimZ = 1
def attribute(id): made = cu.CUlaunchAttribute(); made.id = id; return made
first = attribute(ID.CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT); first.value.launchCompletionEvent.event = begun
last = attribute(ID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT); last.value.programmaticEvent.event = done
early = attribute(ID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION); early.value.programmaticStreamSerializationAllowed = 1
config.attrs = [first, last, early]; config.numAttrs = 3
for _ in range(100): launch(long, stream)  # a host that is held up meanwhile hands over in time all the same
ok(cu.cuEventRecord(start, stream)); launch(short, stream); ok(cu.cuLaunchKernelEx(config, long, 0, 0)); ok(cu.cuStreamSynchronize(stream))
cluster = attribute(ID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION); cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1; codes = []
for size in (3, 4, 0):
    cluster.value.clusterDim.x = size; config.attrs = [cluster]; config.numAttrs = 1
    codes.append(int(cu.cuLaunchKernelEx(config, short, 0, 0)[0]))
answer([ok(cu.cuEventElapsedTime(start, begun)), ok(cu.cuEventElapsedTime(start, done)), codes])
""",
    )
    assert begun == pytest.approx(0.1, abs=0.02) and done == pytest.approx(0.8, abs=0.02)
    assert bad == [0, 912, 912]
