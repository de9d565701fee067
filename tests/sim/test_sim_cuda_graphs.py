"""Stream capture and graphs on the simulated libcuda."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import sim_cuda
from vcuda import sim

MS = 1_000_000
MIB = 2**20


@pytest.fixture
def machine(tmp_path: Path) -> sim.Machine:
    return sim.Machine.create(tmp_path / "machine", [sim.SimCard(memory_bytes=1024 * MIB)])


def test_captured_work_costs_nothing_until_the_graph_is_launched(machine: sim.Machine) -> None:
    counted = sim_cuda.run(
        machine,
        """
        context(); function = kernel("spin_2ms"); stream = ok(cu.cuStreamCreate(1))
        pointer = ok(cu.cuMemAlloc(4096)); back = bytearray(4)
        ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
        for _ in range(3): launch(function, stream)
        ok(cu.cuMemsetD8Async(pointer, 9, 4, stream))
        graph = ok(cu.cuStreamEndCapture(stream))
        executable = ok(cu.cuGraphInstantiate(graph, 0))
        ok(cu.cuMemcpyDtoH(back, pointer, 4)); before = list(back)
        for _ in range(2): ok(cu.cuGraphLaunch(executable, stream))
        ok(cu.cuStreamSynchronize(stream)); ok(cu.cuMemcpyDtoH(back, pointer, 4))
        answer([ok(cu.cuGraphGetNodes(graph, 0))[1], ok(cu.cuGraphGetRootNodes(graph, 0))[1], before, list(back)])
        """,
    )
    assert counted == [4, 1, [0] * 4, [9] * 4]
    card = machine.report().cards[0]
    assert 12 * MS <= card.busy_ns < 12 * MS + 100_000


def test_a_capture_forks_and_joins_over_events_and_refuses_what_is_left_open(machine: sim.Machine) -> None:
    assert sim_cuda.run(
        machine,
        """
        context(); function = kernel("spin_1ms"); mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        main, side = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
        fork, join = ok(cu.cuEventCreate(2)), ok(cu.cuEventCreate(2))
        def capture(joined):
            ok(cu.cuStreamBeginCapture(main, mode)); launch(function, main)
            ok(cu.cuEventRecord(fork, main)); ok(cu.cuStreamWaitEvent(side, fork, 0))
            launch(function, side); launch(function, main)
            if joined: ok(cu.cuEventRecord(join, side)); ok(cu.cuStreamWaitEvent(main, join, 0))
            launch(function, main)
            return cu.cuStreamEndCapture(main)
        graph = ok(capture(True)); edges = ok(cu.cuGraphGetEdges(graph, 0))
        left_open = int(capture(False)[0])
        launch(function, side); ok(cu.cuStreamSynchronize(side))
        answer([edges[-1], left_open])
        """,
    ) == [4, 904]


def test_unsafe_calls_break_a_global_capture_unless_the_thread_is_relaxed(machine: sim.Machine) -> None:
    assert sim_cuda.run(
        machine,
        """
        context(); Mode = cu.CUstreamCaptureMode; mode = Mode.CU_STREAM_CAPTURE_MODE_GLOBAL
        stream, event = ok(cu.cuStreamCreate(1)), ok(cu.cuEventCreate(0)); ok(cu.cuEventRecord(event, 0))
        ok(cu.cuStreamBeginCapture(stream, mode))
        relaxed = ok(cu.cuThreadExchangeStreamCaptureMode(Mode.CU_STREAM_CAPTURE_MODE_RELAXED))
        fine = [int(cu.cuEventQuery(event)[0]) in (0, 600), int(cu.cuMemAlloc(4096)[0]), int(relaxed)]
        ok(cu.cuThreadExchangeStreamCaptureMode(relaxed))
        status = int(ok(cu.cuStreamIsCapturing(stream)))
        broken = [int(cu.cuMemAlloc(4096)[0]), int(cu.cuStreamEndCapture(stream)[0])]
        blocking = ok(cu.cuStreamCreate(0)); ok(cu.cuStreamBeginCapture(blocking, Mode.CU_STREAM_CAPTURE_MODE_RELAXED))
        implicit = int(cu.cuLaunchKernel(kernel("x"), 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)[0])
        answer([fine, status, broken, implicit, int(cu.cuStreamEndCapture(blocking)[0])])
        """,
    ) == [[True, 0, 0], 1, [900, 901], 906, 901]


def test_asking_the_legacy_stream_breaks_no_capture_and_its_memory_calls_do(machine: sim.Machine) -> None:
    """cuda.h of cuStreamIsCapturing: "The blocking stream capture is not invalidated"."""
    assert sim_cuda.run(
        machine,
        """
        context(); mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED; blocking = ok(cu.cuStreamCreate(0))
        held = ok(cu.cuMemAllocAsync(4096, 0)); steps = []
        for call in (lambda: cu.cuStreamIsCapturing(0), lambda: cu.cuMemAllocAsync(4096, 0), lambda: cu.cuMemFreeAsync(held, 0)):
            ok(cu.cuStreamBeginCapture(blocking, mode))
            steps.append([int(call()[0]), int(cu.cuStreamEndCapture(blocking)[0])])
        answer(steps)
        """,
    ) == [[906, 0], [906, 901], [906, 901]]


def test_memory_nodes_pay_at_launch_and_are_trimmed(machine: sim.Machine) -> None:
    steps = sim_cuda.run(
        machine,
        """
        context(); stream = ok(cu.cuStreamCreate(1)); start = used(); steps = []
        ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
        pointer = ok(cu.cuMemAllocAsync(40 << 20, stream)); ok(cu.cuMemsetD8Async(pointer, 1, 40 << 20, stream))
        ok(cu.cuMemFreeAsync(pointer, stream))
        executable = ok(cu.cuGraphInstantiate(ok(cu.cuStreamEndCapture(stream)), 0)); steps.append(used() - start)
        ok(cu.cuGraphLaunch(executable, stream)); ok(cu.cuStreamSynchronize(stream)); steps.append(used() - start)
        high = cu.CUgraphMem_attribute.CU_GRAPH_MEM_ATTR_USED_MEM_HIGH
        top = int(ok(cu.cuDeviceGetGraphMemAttribute(0, high)))
        ok(cu.cuDeviceGraphMemTrim(0)); steps.append(used() - start)
        answer([steps, top])
        """,
    )
    assert steps == [[0, 64 * MIB, 0], 40 * MIB]


def test_explicit_nodes_update_and_disable(machine: sim.Machine) -> None:
    def launched(setting: str) -> int:
        before = machine.report().cards[0].busy_ns
        sim_cuda.run(
            machine,
            f"""
            context(); short, long = kernel("spin_1ms", "spin_10ms")
            def params(function):
                made = cu.CUDA_KERNEL_NODE_PARAMS(); made.func = function
                made.gridDimX = made.gridDimY = made.gridDimZ = made.blockDimX = made.blockDimY = made.blockDimZ = 1
                return made
            def build(function):
                graph = ok(cu.cuGraphCreate(0)); first = ok(cu.cuGraphAddEmptyNode(graph, None, 0))
                return graph, ok(cu.cuGraphAddKernelNode(graph, [first], 1, params(function)))
            graph, node = build(short); executable = ok(cu.cuGraphInstantiate(graph, 0))
            {setting}
            ok(cu.cuGraphLaunch(executable, 0)); ok(cu.cuCtxSynchronize())
            """,
        )
        return machine.report().cards[0].busy_ns - before

    assert launched("pass") == MS
    assert launched("ok(cu.cuGraphExecKernelNodeSetParams(executable, node, params(long)))") == 10 * MS
    assert launched("ok(cu.cuGraphExecUpdate(executable, build(long)[0]))") == 10 * MS
    assert launched("ok(cu.cuGraphNodeSetEnabled(executable, node, 0))") == 0
    refuse = "graph2, _ = build(long); ok(cu.cuGraphAddEmptyNode(graph2, None, 0)); "
    assert launched(refuse + "assert int(cu.cuGraphExecUpdate(executable, graph2)[0]) == 910") == MS


def test_host_functions_and_events_cut_a_graph_where_they_stand(machine: sim.Machine) -> None:
    elapsed, seen = sim_cuda.run(
        machine,
        """
        context(); function = kernel("spin_5ms"); stream = ok(cu.cuStreamCreate(1)); seen = []
        @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        def call(data): seen.append(data)
        middle, end = ok(cu.cuEventCreate(0)), ok(cu.cuEventCreate(0))
        ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
        launch(function, stream); ok(cu.cuEventRecordWithFlags(middle, stream, 1)); launch(function, stream)
        ok(cu.cuLaunchHostFunc(stream, cu.CUhostFn(_ptr=ctypes.addressof(call)), 7))
        ok(cu.cuEventRecordWithFlags(end, stream, 1))
        executable = ok(cu.cuGraphInstantiate(ok(cu.cuStreamEndCapture(stream)), 0))
        ok(cu.cuGraphLaunch(executable, stream)); ok(cu.cuStreamSynchronize(stream))
        answer([ok(cu.cuEventElapsedTime(middle, end)), seen])
        """,
    )
    assert elapsed >= 5 and seen == [7]
