"""The simulated driver of CUDA 13.3: what it has beyond the 550's, and that the 550's lacks it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import sim_cuda
from vcuda import sim

MIB = 2**20
# By the symbol: the bindings here are older than these functions.
LIBRARY = """
lib = ctypes.CDLL("libcuda.so.1"); P = ctypes.c_void_p
def call(name, *values): return getattr(lib, name)(*values)
def found(name, version):
    address, status = P(), ctypes.c_int()
    assert lib.cuGetProcAddress_v2(name, ctypes.byref(address), version, ctypes.c_uint64(0), ctypes.byref(status)) == 0
    return [address.value is not None, status.value]
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> sim.Machine:
    return sim.Machine.create(tmp_path_factory.mktemp("sim") / "machine", [sim.SimCard()], newer=True)


def test_newer_functions_are_found_from_their_version_on_and_missing_in_the_older_driver(
    machine: sim.Machine, tmp_path: Path
) -> None:
    code = (
        LIBRARY
        + """
names = [b"cuStreamBeginRecaptureToGraph", b"cuStreamBeginCaptureToCig", b"cuMemGetMemPool", b"cuCtxCreate"]
answer([int(ok(cu.cuDriverGetVersion())), [[found(name, version) for version in (12040, 13030)] for name in names],
        hasattr(lib, "cuStreamBeginRecaptureToGraph_ptsz")])
"""
    )
    late = [[False, 2], [True, 0]]
    assert sim_cuda.run(machine, code) == [13030, [late, late, late, [[True, 0], [True, 0]]], True]
    older = sim.Machine.create(tmp_path / "older")
    none = [[False, 1], [False, 1]]
    assert sim_cuda.run(older, code) == [12040, [none, none, none, [[True, 0], [True, 0]]], False]


def test_a_recapture_takes_the_same_shape_only_and_a_graphics_capture_runs_nothing(
    machine: sim.Machine,
) -> None:
    before = machine.report().cards[0].busy_ns
    assert sim_cuda.run(
        machine,
        LIBRARY
        + """
context(); stream = ok(cu.cuStreamCreate(1)); handle = P(int(stream)); short, long = kernel("spin_1ms", "spin_3ms")
def capturing():
    status = ctypes.c_int(); assert call("cuStreamIsCapturing", handle, ctypes.byref(status)) == 0; return status.value
ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)); launch(short, stream)
graph = ok(cu.cuStreamEndCapture(stream)); made = P(); steps = []
def recapture(*functions):
    assert call("cuStreamBeginRecaptureToGraph", handle, 2, P(int(graph)), None, None) == 0; steps.append(capturing())
    for function in functions: launch(function, stream)
    steps.append(call("cuStreamEndCapture", handle, ctypes.byref(made))); return made.value == int(graph)
steps.append(recapture(long)); ok(cu.cuGraphLaunch(ok(cu.cuGraphInstantiate(graph, 0)), stream)); ok(cu.cuStreamSynchronize(stream))
steps.append(recapture(long, short)); steps.append(capturing())
shared = (P * 1)(1); assert call("cuStreamBeginCaptureToCig", handle, shared) == 0; steps.append(capturing())
launch(long, stream); steps += [call("cuStreamEndCapture", handle, ctypes.byref(made)), call("cuStreamEndCaptureToCig", handle), capturing()]
ok(cu.cuCtxSynchronize()); answer(steps)
""",
    ) == [1, 0, True, 1, 901, False, 0, 1, 401, 0, 0]
    assert machine.report().cards[0].busy_ns - before == 3_000_000, "the recaptured graph's kernel alone ran"


def test_pools_by_location_lie_there(machine: sim.Machine) -> None:
    assert sim_cuda.run(
        machine,
        LIBRARY
        + """
context(); stream = ok(cu.cuStreamCreate(1)); start = used(); steps = []
class Location(ctypes.Structure): _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]
for kind, place in ((1, 1), (1, 2), (2, 1), (2, 0)):
    pool, pointer = P(), ctypes.c_uint64()
    assert call("cuMemGetMemPool", ctypes.byref(pool), ctypes.byref(Location(place, 0)), kind) == 0
    assert call("cuMemAllocFromPoolAsync", ctypes.byref(pointer), ctypes.c_size_t(32 << 20), pool, P(int(stream))) == 0
    steps.append((used() - start) >> 20)
answer(steps)
""",
    ) == [32, 32, 64, 64]
