"""Memory that is kept by something else than a pointer or a handle: multicast objects, sparse arrays, green contexts, limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import share as shares
from tests.support.share import MIB, Share
from vcuda.sim import Machine, SimCard

LIMIT = 256 * MIB


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine.create(tmp_path / "machine", [SimCard()])


@pytest.fixture
def share(machine: Machine, tmp_path: Path) -> Share:
    return shares.simulated(tmp_path / "share", machine, [shares.limit(machine, memory_bytes=LIMIT)])


HANDLES = """
class Multicast(C.Structure):
    _fields_ = [("devices", C.c_uint), ("size", size), ("types", u64), ("flags", u64)]
class Tile(C.Structure):
    _fields_ = [("resource_type", C.c_int), ("resource", C.c_void_p), ("subresource_type", C.c_int), ("padding", C.c_int),
                ("box", C.c_uint * 8), ("operation", C.c_int), ("handle_type", C.c_int), ("handle", u64), ("offset", u64),
                ("devices", C.c_uint), ("flags", C.c_uint), ("reserved", C.c_uint * 2)]
class Shape(C.Structure):
    _fields_ = [("width", size), ("height", size), ("depth", size), ("format", C.c_int), ("channels", C.c_uint), ("flags", C.c_uint)]
def create(megabytes=20):
    handle = u64()
    ok("cuMemCreate", C.byref(handle), size(megabytes * MIB), C.byref(Properties(1, 0, Location(1, 0))), u64(0))
    return handle
def multicast():
    handle = u64()
    ok("cuMulticastCreate", C.byref(handle), C.byref(Multicast(1, 40 * MIB, 0, 0)))
    return handle
def sparse():
    array = C.c_void_p()
    ok("cuArray3DCreate_v2", C.byref(array), C.byref(Shape(4096, 4096, 0, 0x20, 1, 0x40)))
    return array
def used():
    return 256 - 64 - info()[0] // MIB
steps = []
def step():
    steps.append(used())
def show():
    print(json.dumps(steps), flush=True)
    sys.stdin.readline()
"""


def steps_and_truth(share: Share, code: str) -> list[list[int]]:
    """What the ledger says after each step, in MiB, and at each `show()` what the card's own books do, without the context."""
    assert share.machine
    process = share.start(HANDLES + "begin()\n" + code)
    assert process.stdin and process.stdout
    found = []
    while line := process.stdout.readline():
        used = share.machine.report().cards[0].used_bytes // MIB - 64
        assert json.loads(line)[-1] >= used  # never less than there is
        found.append([*json.loads(line), used])
        process.stdin.write("\n")
        process.stdin.flush()
    assert process.wait(60) == 0, process.communicate(timeout=60)[1]
    return found


def test_memory_bound_to_a_multicast_object_is_charged_until_it_is_unbound(share: Share) -> None:
    found = steps_and_truth(
        share,
        """
group, memory = multicast(), create()
step()
ok("cuMulticastBindMem", group, size(0), memory, size(0), size(20 * MIB), u64(0))
ok("cuMemRelease", memory); step(); show()
assert call("cuMulticastUnbind", group, 0, size(20 * MIB), size(20 * MIB)) != 0; step()
ok("cuMulticastUnbind", group, 0, size(0), size(20 * MIB)); step(); show()
ok("cuMemRelease", group); step(); show()
""",
    )
    assert found == [[20, 20, 20], [20, 20, 20, 0, 0], [20, 20, 20, 0, 0, 0]]


def test_an_unmapping_that_fails_leaves_the_mapping_charged_and_there(share: Share) -> None:
    found = steps_and_truth(
        share,
        """
memory, address = create(), u64()
ok("cuMemAddressReserve", C.byref(address), size(40 * MIB), size(0), u64(0), u64(0))
ok("cuMemMap", address, size(20 * MIB), size(0), memory, u64(0)); ok("cuMemRelease", memory)
assert call("cuMemUnmap", address, size(40 * MIB)) != 0; step(); show()
ok("cuMemUnmap", address, size(20 * MIB)); step(); show()
""",
    )
    assert found == [[20, 20], [20, 0, 0]]


def test_two_memories_bound_to_one_place_are_both_given_back(share: Share) -> None:
    found = steps_and_truth(
        share,
        """
group, memories = multicast(), [create(), create()]
for memory in memories:
    ok("cuMulticastBindMem", group, size(0), memory, size(0), size(20 * MIB), u64(0)); ok("cuMemRelease", memory)
step(); show()
ok("cuMulticastUnbind", group, 0, size(0), size(20 * MIB)); step(); show()
memories = [create(), create()]
for memory in memories:
    ok("cuMulticastBindMem", group, size(0), memory, size(0), size(20 * MIB), u64(0)); ok("cuMemRelease", memory)
ok("cuMemRelease", group); step(); show()
""",
    )
    assert found == [[40, 40], [40, 0, 0], [40, 0, 0, 0]]


def test_memory_goes_with_the_multicast_object_that_it_is_bound_to(share: Share) -> None:
    found = steps_and_truth(
        share,
        """
group, memory, address, place = multicast(), create(), u64(), u64()
ok("cuMemAddressReserve", C.byref(address), size(20 * MIB), size(0), u64(0), u64(0))
ok("cuMemMap", address, size(20 * MIB), size(0), memory, u64(0))
ok("cuMulticastBindAddr", group, size(0), address, size(20 * MIB), u64(0))
ok("cuMemAddressReserve", C.byref(place), size(40 * MIB), size(0), u64(0), u64(0))
ok("cuMemMap", place, size(40 * MIB), size(0), group, u64(0))
ok("cuMemUnmap", address, size(20 * MIB)); ok("cuMemRelease", memory); step()
ok("cuMemRelease", group); step(); show()
ok("cuMemUnmap", place, size(40 * MIB)); step(); show()
""",
    )
    assert found == [[20, 20, 20], [20, 20, 0, 0]]


def test_memory_in_a_sparse_array_is_charged_until_the_array_lets_go_of_it(share: Share) -> None:
    found = steps_and_truth(
        share,
        """
array, memory = sparse(), [create(2), create(2)]
step()
tiles = (Tile * 2)(*(Tile(0, array.value, 0, 0, (C.c_uint * 8)(0, 0, 1024 * n, 0, 0, 1024, 512, 1), 1, 0, handle.value, 0, 1, 0)
                     for n, handle in enumerate(memory)))
ok("cuMemMapArrayAsync", tiles, 2, None)
for handle in memory:
    ok("cuMemRelease", handle)
step(); show()
tiles[0].operation, tiles[0].handle = 2, 0
ok("cuMemMapArrayAsync_ptsz", tiles, 1, None)
ok("cuCtxSynchronize"); step(); show()
ok("cuArrayDestroy", array); step(); show()
""",
    )
    assert found == [[4, 4, 4], [4, 4, 2, 2], [4, 4, 2, 0, 0]]


def test_an_imported_handle_is_not_charged_again_and_its_release_takes_nothing_away(share: Share) -> None:
    found = steps_and_truth(
        share,
        """
memory, shared, imported = u64(), C.c_int(), u64()
ok("cuMemCreate", C.byref(memory), size(20 * MIB), C.byref(Properties(1, 1, Location(1, 0))), u64(0)); step()
ok("cuMemExportToShareableHandle", C.byref(shared), memory, 1, u64(0))
ok("cuMemImportFromShareableHandle", C.byref(imported), C.c_void_p(shared.value), 1); step()
ok("cuMemRelease", imported); step()
assert call("cuMemRelease", imported) != 0; step(); show()
os.close(shared.value); ok("cuMemRelease", memory); step(); show()
""",
    )
    assert found == [[20] * 5, [20] * 4 + [0, 0]]


def test_a_green_context_is_charged_as_the_primary_context_that_it_keeps(share: Share) -> None:
    found = steps_and_truth(
        share,
        """
green, context, primary = C.c_void_p(), C.c_void_p(), C.c_void_p()
ok("cuGreenCtxCreate", C.byref(green), None, 0, 1); step(); show()
ok("cuDevicePrimaryCtxRetain", C.byref(primary), 0); step()
ok("cuCtxFromGreenCtx", C.byref(context), green)
ok("cuCtxPushCurrent_v2", context); assert alloc(10 * MIB)[0] == 0; ok("cuCtxPopCurrent_v2", C.byref(context)); step()
ok("cuDevicePrimaryCtxRelease_v2", 0); step(); show()
ok("cuGreenCtxDestroy", green); step(); show()
""",
    )
    assert found == [[64, 64], [64, 64, 74, 74, 74], [64, 64, 74, 74, 0, 0]]


def test_a_green_context_that_does_not_fit_leaves_nothing(machine: Machine, tmp_path: Path) -> None:
    share = shares.simulated(tmp_path / "small", machine, [shares.limit(machine, memory_bytes=32 * MIB)])
    green = 'call("cuGreenCtxCreate", C.byref(C.c_void_p()), None, 0, 1)'
    assert share.run(f'ok("cuInit", 0); answer([{green}, {green}])') == [2, 2]
    assert machine.report().cards[0].used_bytes == 0
    assert share.usage().cards[0].memory_used_bytes == 0


def test_limits_of_a_context_are_charged_beyond_their_defaults_and_die_with_it(share: Share) -> None:
    # 108 processors with 2048 threads: 216 MiB for each KiB of stack. Heap 8 MiB and printf 1 MiB by default.
    found = steps_and_truth(
        share,
        """
context = C.c_void_p()
ok("cuCtxGetCurrent", C.byref(context))
def limited(limit, value):
    return call("cuCtxSetLimit", limit, size(value))
results = [limited(2, 40 * MIB)]; step()
results.append(limited(2, 16 * MIB)); step()
results.append(limited(1, 3 * MIB)); step()
results.append(limited(0, 1024 + 256)); step(); show()
results += [limited(2, 200 * MIB), limited(0, 4096), limited(5, 1)]; step()
value = size()
ok("cuCtxGetLimit", C.byref(value), 2)
assert (results, value.value) == ([0, 0, 0, 0, 2, 2, 0], 16 * MIB)
results = [limited(2, 8 * MIB), limited(1, 0), limited(0, 1024)]; step(); show()
assert results == [0, 0, 0] and limited(2, 28 * MIB) == 0
ok("cuCtxDestroy_v2", context)
context = begin()
step(); show()
""",
    )
    assert found == [
        [32, 8, 10, 64, 54],  # heap and buffer are taken by the next launch
        [32, 8, 10, 64, 64, 0, 0],
        [32, 8, 10, 64, 64, 0, 0, 0],
    ]


def test_small_arrays_of_all_sizes_never_take_more_than_the_share(share: Share) -> None:
    found = steps_and_truth(
        share,
        """
import random
class Flat(C.Structure):
    _fields_ = [("width", size), ("height", size), ("format", C.c_int), ("channels", C.c_uint)]
def arrayed(width, height):
    array = C.c_void_p()
    return call("cuArrayCreate_v2", C.byref(array), C.byref(Flat(width, height, 0x20, 1))), array
chance, held = random.Random(1), []
for round in range(3):
    refused = 0
    while refused < 20:  # larger ones find no place before smaller ones do
        result, array = arrayed(chance.choice([30, 100, 300]), chance.choice([0, 30, 100, 300, 800]))
        refused += result == 2
        if not result:
            held.append(array)
    step(); show()
    chance.shuffle(held)
    for array in held[: len(held) // 2]:
        ok("cuArrayDestroy", array)
    del held[: len(held) // 2]
    step(); show()
for array in held:
    ok("cuArrayDestroy", array)
step(); show()
""",
    )
    assert found[0][0] == 192
    assert found[-1][-2:] == [0, 0]


def test_one_tiny_array_is_charged_the_chunk_that_it_opens(share: Share) -> None:
    found = steps_and_truth(
        share,
        """
class Flat(C.Structure):
    _fields_ = [("width", size), ("height", size), ("format", C.c_int), ("channels", C.c_uint)]
array = [C.c_void_p() for _ in range(3)]
for one in array:
    ok("cuArrayCreate_v2", C.byref(one), C.byref(Flat(64, 0, 0x20, 1))); step()
show()
for one in array:
    ok("cuArrayDestroy", one); step()
show()
""",
    )
    assert found == [[2, 2, 2, 2], [2, 2, 2, 2, 2, 0, 0]]


@pytest.mark.parametrize("order", ["plain memory first", "arrays of another shape first"])
def test_a_chunk_that_a_small_array_keeps_stays_charged_when_its_neighbours_go(share: Share, order: str) -> None:
    """Each chunk holds one array and one other thing, of the same size to the driver; `steps_and_truth` compares with its books."""
    other = {
        "plain memory first": ("alloc(MIB)[1]", 'ok("cuMemFree_v2", one)'),
        "arrays of another shape first": ("array(256, 1024)", 'ok("cuArrayDestroy", one)'),
    }[order]
    found = steps_and_truth(
        share,
        f"""
def array(width, height):
    made = C.c_void_p()
    ok("cuArray3DCreate_v2", C.byref(made), C.byref(Shape(width, height, 0, 0x20, 1, 0)))
    return made
pairs = [({other[0]}, array(512, 512)) for _ in range(8)]
step(); show()
for one, _ in pairs:
    {other[1]}
step(); show()
for _, one in pairs[1:]:
    ok("cuArrayDestroy", one)
step(); show()
ok("cuArrayDestroy", pairs[0][1]); step(); show()
""",
    )
    assert [steps[-1] for steps in found] == [16, 16, 2, 0]  # MiB, by the card's books
    assert [steps[-2] for steps in found][1:] == [16, 2, 0]  # and by the ledger's, when only arrays are left


def test_mipmaps_of_shapes_that_share_chunks_are_never_charged_less_than_they_take(share: Share) -> None:
    found = steps_and_truth(
        share,
        """
import random
chance = random.Random(3)
held = []
for number in range(300):
    if held and (chance.random() < 0.4 or number > 270):
        name, one = held.pop(chance.randrange(len(held)))
        ok(name, one)
    else:
        made = C.c_void_p()
        shape = Shape(chance.choice((1, 60, 500)), chance.choice((1, 30, 250)), 0, 0x20, 1, 0)
        if chance.random() < 0.5:
            ok("cuMipmappedArrayCreate", C.byref(made), C.byref(shape), chance.randrange(1, 5))
            held.append(("cuMipmappedArrayDestroy", made))
        else:
            ok("cuArray3DCreate_v2", C.byref(made), C.byref(shape))
            held.append(("cuArrayDestroy", made))
    step(); show()
""",
    )
    assert len(found) == 300 and max(steps[-1] for steps in found) > 10


MAPPED = """
def tile(array, handle, operation=1, kind=0):
    box = (C.c_uint * 8)(0, 0, 0, 0, 0, 1024, 512, 1)
    return (Tile * 1)(Tile(0, array.value if array else None, kind, 0, box, operation, 0, handle, 0, 1, 0))
context, array = C.c_void_p(), sparse()
ok("cuCtxGetCurrent", C.byref(context))
memory = create(2)
ok("cuMemMapArrayAsync", tile(array, memory.value), 1, None)
ok("cuMemRelease", memory); step(); show()
"""


def test_memory_that_leaves_a_sparse_array_stays_charged_until_its_stream_got_there(share: Share) -> None:
    found = steps_and_truth(
        share,
        MAPPED
        + """
stream, module, function = C.c_void_p(), C.c_void_p(), C.c_void_p()
ok("cuStreamCreate", C.byref(stream), 1)
text = b".version 8.0\\n.target sm_80\\n.address_size 64\\n.visible .entry spin_900s() { ret; }\\n"
ok("cuModuleLoadData", C.byref(module), text); ok("cuModuleGetFunction", C.byref(function), module, b"spin_900s"); step()
ok("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, stream, None, None)
ok("cuMemMapArrayAsync", tile(array, 0, operation=2), 1, stream); step(); show()
""",
    )
    assert [line[:-1] for line in found] == [
        [2],
        [2, 5, 5],
    ]  # a stream takes two, the kernel's code a part of the third


def test_memory_in_a_sparse_array_goes_with_the_arrays_context(share: Share) -> None:
    found = steps_and_truth(
        share,
        MAPPED
        + """
wrong = call("cuMemMapArrayAsync", tile(array, 12345), 1, None); step()
assert wrong != 0
ok("cuCtxDestroy_v2", context)
begin(); step(); show()
""",
    )
    assert [line[:-1] for line in found] == [[2], [2, 2, 0]]


def test_arrays_are_charged_as_a_card_lays_them_out(tmp_path: Path) -> None:
    """An H100 keeps small arrays of different texel sizes in different chunks, and rows in blocks of 128."""
    machine = Machine.create(tmp_path / "machine", [SimCard(knobs={"texels": 1})])
    share = shares.simulated(tmp_path / "share", machine, [shares.limit(machine, memory_bytes=LIMIT)])
    found = steps_and_truth(
        share,
        """
class Flat(C.Structure):
    _fields_ = [("width", size), ("height", size), ("format", C.c_int), ("channels", C.c_uint)]
def array(side, format, channels):
    made = C.c_void_p()
    ok("cuArrayCreate_v2", C.byref(made), C.byref(Flat(side, side, format, channels)))
    return made
assert alloc(1)[0] == 0
u8, u16, f32 = 1, 2, 0x20
for side, format, channels in (
    (32, u8, 1), (32, u8, 2), (32, u8, 4), (32, u16, 4), (32, f32, 4), (512, f32, 4), (700, f32, 4), (1000, f32, 4), (362, f32, 4)):
    array(side, format, channels); step()
show()
array(64, u8, 1); step(); show()  # as large as the 32 x 32 of four bytes
""",
    )
    assert found == [[4, 6, 8, 10, 12, 16, 26, 42, 46, 46], [4, 6, 8, 10, 12, 16, 26, 42, 46, 48, 48]]


def test_exported_memory_is_charged_until_no_descriptor_and_no_handle_is_left(share: Share) -> None:
    """A process that exports to itself: what comes back by an import, also by another descriptor's number, is the same memory."""
    found = steps_and_truth(
        share,
        """
def exported():
    handle, shared = u64(), C.c_int()
    ok("cuMemCreate", C.byref(handle), size(20 * MIB), C.byref(Properties(1, 1, Location(1, 0))), u64(0))
    ok("cuMemExportToShareableHandle", C.byref(shared), handle, 1, u64(0))
    return handle, shared.value
def imported(shared):
    handle = u64()
    ok("cuMemImportFromShareableHandle", C.byref(handle), C.c_void_p(shared), 1)
    return handle
handle, shared = exported(); step()
ok("cuMemRelease", handle); step(); show()  # the descriptor keeps it
other = os.dup(shared); os.close(shared); step(); show()
handle = imported(other); step()
os.close(other); step(); show()  # the import keeps it
ok("cuMemRelease", handle); step(); show()
results = []
for _ in range(30):  # 600 MiB, were it free
    result, handle, shared = 0, u64(), C.c_int()
    result = call("cuMemCreate", C.byref(handle), size(20 * MIB), C.byref(Properties(1, 1, Location(1, 0))), u64(0))
    results.append(result)
    if not result:
        ok("cuMemExportToShareableHandle", C.byref(shared), handle, 1, u64(0)); ok("cuMemRelease", handle)
        imported(shared.value); os.close(shared.value)
assert results == [0] * 9 + [2] * 21, results
step(); show()
""",
    )
    assert found[0] == [20, 20, 20]
    assert found[1][2:] == [20, 20]
    assert found[2][3:] == [20, 20, 20]
    assert found[3][5:] == [0, 0]
    assert found[4][6:] == [180, 180]
