"""Nothing stays booked of what the driver refuses, and a pool never grows past the limit on an old figure of what it holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import share as shares
from tests.support.share import MIB, Share
from tests.vcuda.test_shim_memory import ALLOCATORS, FILL
from vcuda import region
from vcuda.sim import AllocationError, Machine, SimCard

LIMIT = 256 * MIB


@pytest.fixture
def share(tmp_path: Path) -> Share:
    machine = Machine.create(tmp_path / "machine", [SimCard()])
    return shares.simulated(tmp_path / "share", machine, [shares.limit(machine, memory_bytes=LIMIT)])


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_an_allocation_that_the_driver_refuses_leaves_nothing_booked(share: Share, allocator: str) -> None:
    assert share.machine
    take, give = ALLOCATORS[allocator]
    prelude = FILL.split("rounds = []")[0].format(take=take, give=give)
    process = share.start(
        prelude
        + """
first = take()[1]
answer(info()[0])
sys.stdin.readline()
answer([take()[0], info()[0]])
second = take()
give(first), give(second[1])
answer([second[0], info() == at_start])
"""
    )
    assert process.stdin and process.stdout
    line = process.stdout.readline()
    assert line, process.communicate(timeout=60)[1]
    booked = share.usage().cards[0].ledger_bytes
    share.machine.inject(AllocationError(0))
    process.stdin.write("\n")
    process.stdin.flush()
    result, left = json.loads(process.stdout.readline())
    assert (result, left) == (2, int(line))
    output = process.stdout.readline()
    assert output == "[0, true]\n", process.communicate(timeout=60)[1]
    process.communicate(timeout=60)
    assert booked > 64 * MIB and not share.usage().processes[0].alive


def test_a_pool_that_gave_memory_back_by_itself_does_not_grow_past_the_limit(share: Share) -> None:
    """The pool has 96 MiB and is synchronised by a call that nobody charges: it keeps 66, and takes 32 more in one step."""
    process = share.start("""
        begin()
        class Shape(C.Structure):
            _fields_ = [("width", size), ("height", size), ("depth", size), ("format", C.c_int), ("channels", C.c_uint),
                        ("flags", C.c_uint)]
        array = C.c_void_p()
        ok("cuArray3DCreate_v2", C.byref(array), C.byref(Shape(1024, 1024, 0, 0x20, 1, 0x40)))
        kept = alloc(66 * MIB, "cuMemAllocAsync", None)
        freed = alloc(30 * MIB, "cuMemAllocAsync", None)
        rest = fill(2 * MIB)[1]
        ok("cuMemFreeAsync", freed[1], None)
        ok("cuArrayDestroy", array)
        answer([kept[0], freed[0], len(rest), alloc(30 * MIB, "cuMemAllocAsync", None)[0]])
        sys.stdin.read()
    """)
    assert share.machine and process.stdout
    results = process.stdout.readline()
    (client,) = share.machine.report().cards[0].processes
    process.communicate("", timeout=60)
    assert results == "[0, 0, 48, 2]\n"
    assert client.peak_bytes <= LIMIT
    assert share.usage().cards[0].memory_peak_bytes <= LIMIT


def test_a_limit_that_shrinks_below_use_frees_nothing_in_any_process(share: Share) -> None:
    """Live resizing of a container with two processes, down and up again."""
    assert share.machine
    code = """
    begin()
    held = [alloc(30 * MIB)[1] for _ in range(2)]
    answer("ready")
    for line in sys.stdin:
        result, more = alloc(10 * MIB)
        kept = [call("cuMemsetD8_v2", pointer, 1, size(MIB)) for pointer in held]
        free, total = info()
        if result == 0:
            ok("cuMemFree_v2", more)
        answer([result, sum(kept), free // MIB, total // MIB])
    """
    share_limit = shares.limit(share.machine, memory_bytes=320 * MIB)
    region.update(share.region_directory, [share_limit])
    processes = [share.start(code) for _ in range(2)]
    for process in processes:
        assert process.stdout and process.stdout.readline() == '"ready"\n'
    for megabytes, expected in (
        (320, [0, 0, 62, 320]),
        (200, [2, 0, 0, 200]),
        (250, [2, 0, 2, 250]),
        (280, [0, 0, 22, 280]),
    ):
        region.update(share.region_directory, [shares.limit(share.machine, memory_bytes=megabytes * MIB)])
        for process in processes:
            assert process.stdin and process.stdout
            process.stdin.write("\n")
            process.stdin.flush()
            result, kept, free, total = json.loads(process.stdout.readline())
            assert [result, kept, free, total] == expected
    assert share.machine.report().cards[0].used_bytes == 248 * MIB
    for process in processes:
        process.communicate(timeout=60)


def test_what_a_pool_is_told_to_give_back_is_there_for_the_others_at_once(share: Share) -> None:
    """Without another call of the process whose pool it was: a trim, and the end of a pool with memory still in use."""
    process = share.start("""
        begin()
        class PoolProperties(C.Structure):
            _fields_ = [("type", C.c_int), ("handles", C.c_int), ("location", Location), ("security", C.c_void_p),
                        ("most", size), ("rest", C.c_ubyte * 56)]
        pool, kept, freed = C.c_void_p(), u64(), u64()
        ok("cuMemPoolCreate", C.byref(pool), C.byref(PoolProperties(1, 0, Location(1, 0))))
        ok("cuMemPoolSetAttribute", pool, 4, C.byref(u64(1 << 40)))
        ok("cuMemAllocFromPoolAsync", C.byref(kept), size(10 * MIB), pool, None)
        ok("cuMemAllocFromPoolAsync", C.byref(freed), size(80 * MIB), pool, None)
        ok("cuMemFreeAsync", freed, None)
        ok("cuStreamSynchronize", None)
        for step in (lambda: None, lambda: ok("cuMemPoolTrimTo", pool, size(32 * MIB)), lambda: ok("cuMemPoolDestroy", pool)):
            step()
            answer("done")
            sys.stdin.readline()
    """)
    assert process.stdin and process.stdout
    booked = []
    for _ in range(3):
        assert process.stdout.readline() == '"done"\n', process.communicate(timeout=60)[1]
        booked.append(share.usage().cards[0].ledger_bytes // MIB - 64)
        process.stdin.write("\n")
        process.stdin.flush()
    process.communicate(timeout=60)
    assert booked == [96, 32, 10]
