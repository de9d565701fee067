"""Memory limits on the simulated card, by every allocator: never over the share in the card's own books, nothing left behind."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support import share as shares
from tests.support.share import MIB, Share
from vcuda import region
from vcuda.sim import Machine, SimCard

LIMIT = 250 * MIB  # no multiple of what pools grow by


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine.create(tmp_path / "machine", [SimCard(), SimCard()])


@pytest.fixture
def share(machine: Machine, tmp_path: Path) -> Share:
    return shares.simulated(tmp_path / "share", machine, [shares.limit(machine, memory_bytes=LIMIT)])


def truth(share: Share) -> tuple[int, int]:
    """What the card itself says: bytes used now, and the most that one process had."""
    assert share.machine
    card = share.machine.report().cards[0]
    return card.used_bytes, max((process.peak_bytes for process in card.processes), default=0)


# How each allocator takes 10 MiB, and gives it back.
ALLOCATORS = {
    "plain": ("lambda: alloc(10 * MIB)", 'lambda p: ok("cuMemFree_v2", p)'),
    "small": ("lambda: alloc(100 * 1024)", 'lambda p: ok("cuMemFree_v2", p)'),
    "odd": ("lambda: alloc(3 * MIB + 1)", 'lambda p: ok("cuMemFree_v2", p)'),
    "managed": ('lambda: alloc(10 * MIB, "cuMemAllocManaged", 1)', 'lambda p: ok("cuMemFree_v2", p)'),
    "pitched": ("pitched", 'lambda p: ok("cuMemFree_v2", p)'),
    "async": (
        'lambda: alloc(10 * MIB, "cuMemAllocAsync", None)',
        'lambda p: (ok("cuMemFreeAsync", p, None), ok("cuStreamSynchronize", None))',
    ),
    "async, per-thread stream": (
        'lambda: alloc(10 * MIB, "cuMemAllocAsync_ptsz", None)',
        'lambda p: (ok("cuMemFreeAsync_ptsz", p, None), ok("cuStreamSynchronize_ptsz", None))',
    ),
    "async, freed synchronously": (
        'lambda: alloc(10 * MIB, "cuMemAllocAsync", None)',
        'lambda p: (ok("cuMemFree_v2", p), ok("cuCtxSynchronize"))',
    ),
    "own pool": (
        'lambda: alloc(10 * MIB, "cuMemAllocFromPoolAsync", pool, None)',
        'lambda p: (ok("cuMemFreeAsync", p, None), ok("cuCtxSynchronize"))',
    ),
    "virtual": ("created", 'lambda h: ok("cuMemRelease", h)'),
    "array": ("lambda: arrayed(1000, 2000)", 'lambda h: ok("cuArrayDestroy", h)'),
    "small array": ("lambda: arrayed(100, 150)", 'lambda h: ok("cuArrayDestroy", h)'),
    "line": ("lambda: arrayed(100000, 0)", 'lambda h: ok("cuArrayDestroy", h)'),
    "array of planes": ("lambda: arrayed(500, 400, 10)", 'lambda h: ok("cuArrayDestroy", h)'),
    "mipmapped": ("lambda: arrayed(1000, 1500, 0, 12)", 'lambda h: ok("cuMipmappedArrayDestroy", h)'),
}

FILL = """
context = begin()
pool = C.c_void_p()
class PoolProperties(C.Structure):
    _fields_ = [("type", C.c_int), ("handles", C.c_int), ("location", Location), ("security", C.c_void_p),
                ("most", size), ("rest", C.c_ubyte * 56)]
ok("cuMemPoolCreate", C.byref(pool), C.byref(PoolProperties(1, 0, Location(1, 0))))
def pitched():
    pointer, pitch = u64(), size()
    return call("cuMemAllocPitch_v2", C.byref(pointer), C.byref(pitch), size(1000), size(10240), 4), pointer
def created():
    handle = u64()
    properties = Properties(1, 0, Location(1, 0))
    return call("cuMemCreate", C.byref(handle), size(10 * MIB), C.byref(properties), u64(0)), handle
class Shape(C.Structure):
    _fields_ = [("width", size), ("height", size), ("depth", size), ("format", C.c_int), ("channels", C.c_uint), ("flags", C.c_uint)]
class Flat(C.Structure):
    _fields_ = [("width", size), ("height", size), ("format", C.c_int), ("channels", C.c_uint)]
def arrayed(width, height, depth=0, levels=0):
    array, shape = C.c_void_p(), Shape(width, height, depth, 0x20, 1, 0)
    if levels:
        return call("cuMipmappedArrayCreate", C.byref(array), C.byref(shape), levels), array
    if depth:
        return call("cuArray3DCreate_v2", C.byref(array), C.byref(shape)), array
    return call("cuArrayCreate_v2", C.byref(array), C.byref(Flat(width, height, 0x20, 1))), array
take, give = {take}, {give}
if "ptsz" in {take!r}:
    give(take()[1])  # the thread's own stream takes a chunk, and keeps it
at_start = info()
rounds = []
for _ in range(2):
    held = []
    while True:
        result, pointer = take()
        if result:
            break
        held.append(pointer)
    rounds.append([result, len(held), info()[0]])
    for pointer in held:
        give(pointer)
answer({{"start": at_start, "rounds": rounds, "end": info()}})
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_an_allocator_fills_the_share_and_no_more(share: Share, allocator: str) -> None:
    take, give = ALLOCATORS[allocator]
    process = share.start(FILL.format(take=take, give=give))
    assert process.stdout
    first = process.stdout.readline()
    if process.stdout.readline() != "ready\n":
        pytest.fail(process.communicate(timeout=60)[1])
    used, peak = truth(share)
    process.communicate("", timeout=60)
    outcome = json.loads(first)
    free_at_start, total = outcome["start"]
    assert total == LIMIT
    assert LIMIT - 66 * MIB <= free_at_start <= LIMIT - 64 * MIB  # the context itself takes 64 MiB
    (result, count, left), (again, count_again, left_again) = outcome["rounds"]
    assert (result, again) == (2, 2)  # CUDA_ERROR_OUT_OF_MEMORY
    assert (count_again, left_again) == (count, left)  # what was freed can be had again, all of it
    assert left < 32 * MIB
    assert count >= (1400 if allocator == "small" else 40 if allocator == "odd" else 15)
    assert outcome["end"][0] == free_at_start
    assert peak <= LIMIT
    assert used == 64 * MIB
    assert share.usage().cards[0].memory_peak_bytes <= LIMIT
    assert share.usage().cards[0].refusals == 2


def test_virtual_memory_is_charged_until_neither_handle_nor_mapping_is_left(share: Share) -> None:
    steps = share.run("""
        begin()
        def used(): return 250 * MIB - 64 * MIB - info()[0]
        steps = []
        properties, handle, again, address = Properties(1, 0, Location(1, 0)), u64(), u64(), u64()
        ok("cuMemCreate", C.byref(handle), size(20 * MIB), C.byref(properties), u64(0)); steps.append(used())
        ok("cuMemAddressReserve", C.byref(address), size(40 * MIB), size(0), u64(0), u64(0))
        ok("cuMemMap", address, size(20 * MIB), size(0), handle, u64(0))
        ok("cuMemMap", u64(address.value + 20 * MIB), size(20 * MIB), size(0), handle, u64(0)); steps.append(used())
        ok("cuMemRelease", handle); steps.append(used())
        ok("cuMemRetainAllocationHandle", C.byref(again), C.c_void_p(address.value + 4096)); steps.append(used())
        ok("cuMemUnmap", address, size(40 * MIB)); steps.append(used())
        assert call("cuMemUnmap", address, size(40 * MIB)) != 0
        ok("cuMemRelease", again); steps.append(used())
        assert call("cuMemRelease", again) != 0; steps.append(used())
        answer(steps)
    """)
    assert steps == [20 * MIB] * 5 + [0, 0]


def test_a_context_gives_back_itself_and_what_was_allocated_in_it(share: Share) -> None:
    steps = share.run("""
        first = begin()
        second = begin()
        free = [info()[0]]
        assert alloc(30 * MIB)[0] == 0 and alloc(1000)[0] == 0
        free.append(info()[0])
        ok("cuCtxDestroy_v2", second)
        ok("cuCtxSetCurrent", first)
        free.append(info()[0])
        primary = C.c_void_p()
        ok("cuDevicePrimaryCtxRetain", C.byref(primary), 0)
        ok("cuDevicePrimaryCtxRetain", C.byref(primary), 0)
        free.append(info()[0])
        ok("cuCtxSetCurrent", primary)
        assert alloc(10 * MIB)[0] == 0
        ok("cuCtxSetCurrent", first)
        ok("cuDevicePrimaryCtxRelease_v2", 0)
        free.append(info()[0])
        ok("cuDevicePrimaryCtxRelease_v2", 0)
        free.append(info()[0])
        answer([count // MIB for count in free])
    """)
    assert steps == [122, 90, 186, 122, 112, 186]


def test_a_context_that_does_not_fit_is_refused_and_leaves_nothing(machine: Machine, tmp_path: Path) -> None:
    share = shares.simulated(tmp_path / "share", machine, [shares.limit(machine, memory_bytes=32 * MIB)])
    results = share.run("""
        ok("cuInit", 0)
        context = C.c_void_p()
        results = [call("cuCtxCreate_v2", C.byref(context), 0, 0) for _ in range(2)]
        results.append(call("cuDevicePrimaryCtxRetain", C.byref(context), 0))
        answer(results)
    """)
    assert results == [2, 2, 2]
    assert truth(share)[0] == 0
    assert share.usage().cards[0].memory_used_bytes == 0


def test_refusals_and_failed_calls_have_no_side_effects(share: Share) -> None:
    outcome = share.run("""
        begin()
        before = info()
        pointer, pitch = u64(12345), size()
        results = [
            call("cuMemAlloc_v2", C.byref(pointer), size(300 * MIB)),
            call("cuMemAlloc_v2", C.byref(pointer), size(2**64 - 1)),
            call("cuMemAllocPitch_v2", C.byref(pointer), C.byref(pitch), size(2**40), size(2**40), 4),
            call("cuMemAllocAsync", C.byref(pointer), size(300 * MIB), None),
        ]
        invalid = [call("cuMemAlloc_v2", C.byref(pointer), size(0)), call("cuMemFree_v2", u64(0xdead0000))]
        answer([results, invalid, pointer.value, info() == before])
    """)
    assert outcome == [[2, 2, 2, 2], [1, 1], 12345, True]


def test_total_memory_is_the_share_and_free_never_more_than_really_free(machine: Machine, tmp_path: Path) -> None:
    size = machine.cards[0].memory_bytes
    crowded = shares.simulated(tmp_path / "crowded", machine, [shares.limit(machine, memory_bytes=size // 2)])
    greedy = shares.simulated(tmp_path / "greedy", machine, [shares.limit(machine, memory_bytes=size)])
    neighbour = greedy.start(f"""
        begin()
        assert alloc({size // 4 * 3})[0] == 0
        answer("ready")
        sys.stdin.read()
    """)
    assert neighbour.stdout and neighbour.stdout.readline() == '"ready"\n'
    free, total, device_total = crowded.run("""
        begin()
        total = size()
        ok("cuDeviceTotalMem_v2", C.byref(total), 0)
        answer([*info(), total.value])
    """)
    neighbour.communicate("", timeout=60)
    assert (total, device_total) == (size // 2, size // 2)
    assert free <= size // 4


def test_a_whole_card_is_not_limited_below_the_card(machine: Machine, tmp_path: Path) -> None:
    limit = shares.limit(machine, memory_bytes=64 * MIB, cores=100, core_limit=100, whole=True)
    share = shares.simulated(tmp_path / "share", machine, [limit])
    result, total = share.run("begin(); answer([alloc(1024 * MIB)[0], info()[1]])")
    assert (result, total) == (0, machine.cards[0].memory_bytes)
    assert share.usage().cards[0].memory_peak_bytes >= 1024 * MIB  # counted all the same


def test_memory_of_a_card_outside_the_share_is_refused(share: Share) -> None:
    said = "vcuda: device 1 is not a card of this share: its memory is refused\n"
    assert (
        share.run(
            'ok("cuInit", 0); context = C.c_void_p(); answer(call("cuCtxCreate_v2", C.byref(context), 0, 1))',
            errors=said,
        )
        == 2
    )


def test_a_limit_changed_live_holds_from_the_next_call(share: Share) -> None:
    assert share.machine
    process = share.start("""
        begin()
        answer(fill(8 * MIB)[0])
        for line in sys.stdin:
            answer([alloc(8 * MIB)[0], info()[1] // MIB])
    """)
    assert process.stdin and process.stdout and process.stdout.readline() == "2\n"
    for megabytes, expected in ((512, 0), (128, 2)):
        region.update(share.region_directory, [shares.limit(share.machine, memory_bytes=megabytes * MIB)])
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"[{expected}, {megabytes}]\n"
    process.communicate(timeout=60)


COUNTING_DRIVER = """
#define cuCtxGetCurrent uncounted
#include "{source}"
#undef cuCtxGetCurrent
static int asked;
API cuCtxGetCurrent(handle *context) {{ asked++; return uncounted(context); }}
API countedCalls(void) {{ return asked; }}
API cuCtxDestroy_v2(handle context) {{ return context != &dummy; }}
"""


def test_an_allocation_asks_the_driver_for_memory_and_nothing_else(tmp_path: Path) -> None:
    """One of a process with one context; with a second context the current one has to be asked for."""
    card = "GPU-12345678-1234-1234-1234-123456789abc"
    source = tmp_path / "driver.c"
    null_driver = Path(__file__).resolve().parents[2] / "benchmarks/memory_null_driver.c"
    source.write_text(COUNTING_DRIVER.format(source=null_driver))
    driver = tmp_path / "libcuda.so.1"
    flags = ["-shared", "-fPIC", f'-DCARD_UUID="{card}"']
    subprocess.run(["gcc", "-O2", *flags, str(source), "-o", str(driver)], check=True)
    share = shares.lay_out(tmp_path / "share", driver, None)
    share.region_directory.mkdir()
    region.create(share.region_directory, [region.CardLimit(card, 0, 1 << 30, 90, 90, context_bytes=MIB)])
    assert share.run(
        """
driver = C.CDLL(os.environ["LD_LIBRARY_PATH"] + "/drv/libcuda-driver.so.1")
def asked():
    before = driver.countedCalls()
    for _ in range(100):
        result, pointer = alloc(4096)
        assert result == 0
        ok("cuMemFree_v2", pointer)
    return driver.countedCalls() - before
begin()
alone = asked()
begin()
answer([alone, asked()])
"""
    ) == [0, 100]
