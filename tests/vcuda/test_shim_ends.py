"""What ends before its time: contexts and streams with work under way, threads that launched, processes that fork what they were at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import same
from tests.support import share as shares
from tests.support.share import MIB, Share
from vcuda.sim import Machine, SimCard

LIMIT = 512 * MIB

BEGIN = (
    same.PRELUDE
    + """
import threading
def launches(function, stream=None, times=4):
    for _ in range(times):
        ok("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, stream, (P * 2)(C.addressof(u64()), C.addressof(uint())), None)
"""
)


@pytest.fixture
def share(tmp_path: Path) -> Share:
    machine = Machine.create(tmp_path / "machine", [SimCard(), SimCard()])
    return shares.simulated(tmp_path / "share", machine, [shares.limit(machine, memory_bytes=LIMIT)])


@pytest.mark.parametrize("end", ["destroyed", "reset"])
def test_a_context_that_ends_with_work_under_way_gives_all_back_and_the_next_one_is_charged(
    share: Share, end: str
) -> None:
    left = share.run(
        BEGIN
        + """
ok("cuInit", 0)
ended = []
for _ in range(3):
    if sys.argv[1] == "reset":
        context = made("cuDevicePrimaryCtxRetain", 0)  # the same, which each reset empties
        ok("cuCtxSetCurrent", context)
    else:
        context = begin()
    streams = [made("cuStreamCreate", 1) for _ in range(3)]
    function = kernel("spin_5ms")
    for stream in streams:
        launches(function, stream)
    assert alloc(20 * MIB)[0] == 0
    ended.append(call("cuDevicePrimaryCtxReset_v2", 0) if sys.argv[1] == "reset" else call("cuCtxDestroy_v2", context))
begin()
assert ended == [0] * 3, ended
launches(kernel("spin_5ms"))
ok("cuCtxSynchronize")
answer(info()[0])
""",
        end,
    )
    contexts = 2 if end == "reset" else 1  # the primary one is retained still
    assert left == LIMIT - contexts * 64 * MIB - (64 << 10)  # and a kernel's code
    assert share.machine is not None
    card = share.machine.report().cards[0]
    assert share.usage().cards[0].gpu_time_ns >= 0.5 * card.busy_ns > 0


def test_a_context_that_the_driver_does_not_end_goes_on_being_charged(share: Share) -> None:
    first, second = share.run(
        BEGIN
        + """
context = begin()
launches(kernel("spin_1ms"))
ok("cuCtxSynchronize")
ok("cuCtxDestroy_v2", context)
again = call("cuCtxDestroy_v2", context)  # the driver's own error
primary = made("cuDevicePrimaryCtxRetain", 0)
made("cuDevicePrimaryCtxRetain", 0)
ok("cuCtxSetCurrent", primary)
function = kernel("spin_1ms")
launches(function)
ok("cuDevicePrimaryCtxRelease_v2", 0)  # retained once more: it stays
launches(function)
ok("cuCtxSynchronize")
answer([again, info()[0]])
"""
    )
    assert (first, second) == (709, LIMIT - 64 * MIB - (64 << 10))
    assert share.machine is not None
    assert share.usage().cards[0].gpu_time_ns >= 0.5 * share.machine.report().cards[0].busy_ns > 0


def test_what_threads_launched_is_charged_after_they_ended_and_their_streams_with_them(share: Share) -> None:
    done = share.run(
        BEGIN
        + """
context = begin()
function, done = kernel("spin_2ms"), []
def work(destroy):
    ok("cuCtxSetCurrent", context)
    streams = [made("cuStreamCreate", 1) for _ in range(20)]  # more than a thread remembers
    for stream in streams:
        launches(function, stream, 1)
    for stream in streams:
        ok("cuStreamSynchronize", stream)
        ok(destroy, stream)
    done.append(destroy)
for destroy in ("cuStreamDestroy", "cuStreamDestroy_v2"):
    thread = threading.Thread(target=work, args=(destroy,))
    thread.start(); thread.join()
launches(function, None, 1)
ok("cuCtxSynchronize")
answer(done)
"""
    )
    assert done == ["cuStreamDestroy", "cuStreamDestroy_v2"]
    assert share.machine is not None
    busy = share.machine.report().cards[0].busy_ns
    assert busy >= 41 * 2_000_000
    assert share.usage().cards[0].gpu_time_ns >= 0.8 * busy


def test_a_child_of_a_process_that_asked_first_counts_for_itself(share: Share) -> None:
    """The parent calls every kind of allocator before there is a driver to answer; its child then uses them all."""
    child, parent = share.run(
        BEGIN
        + """
class Shape(C.Structure):
    _fields_ = [("width", size), ("height", size), ("depth", size), ("format", C.c_int), ("channels", uint), ("flags", uint)]
def every():
    said, pointer, handle = [], u64(), u64()
    said.append(call("cuMemAllocAsync", ref(pointer), size(10 * MIB), None))
    said.append(call("cuMemCreate", ref(handle), size(10 * MIB), ref(Properties(1, 0, Location(1, 0))), u64(0)))
    array, graph, green = P(), P(), P()
    said.append(call("cuArray3DCreate_v2", ref(array), ref(Shape(16, 16, 0, 0x20, 1, 0))))
    said.append(call("cuGreenCtxCreate", ref(green), None, 0, 1))
    said.append(call("cuGraphCreate", ref(graph), 0))
    executable = P()
    said.append(call("cuGraphInstantiateWithFlags", ref(executable), graph, u64(0)))
    address = u64()
    said.append(call("cuMemAddressReserve", ref(address), size(10 * MIB), size(0), u64(0), u64(0)))
    said.append(call("cuMemMap", address, size(10 * MIB), size(0), handle, u64(0)))
    said.append(call("cuMemUnmap", address, size(10 * MIB)))
    said.append(call("cuMemRelease", handle))
    said.append(call("cuMemFreeAsync", pointer, None))
    said.append(call("cuArrayDestroy", array))
    said.append(call("cuGreenCtxDestroy", green))
    return said
before = every()
child = os.fork()
if child == 0:
    context = begin()
    start = info()[0]
    said = every()
    ok("cuStreamSynchronize", None)
    launches(kernel("spin_1us"))
    ok("cuCtxSynchronize")
    sys.exit(0 if said == [0] * len(said) and start - info()[0] == 64 << 10 else 1)
status = os.waitpid(child, 0)[1]
begin()
answer([status, [info()[0], set(before)  <= {1, 3, 201, 400}]])
"""
    )
    assert child == 0
    assert parent == [LIMIT - 64 * MIB, True]
