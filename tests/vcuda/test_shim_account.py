"""Arrays, contexts, managed memory and calls that are wrong: never is less charged than the card holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import books, same
from tests.support.share import Share


@pytest.fixture
def share(tmp_path: Path) -> Share:
    return books.share_of_one_card(tmp_path)


@pytest.fixture
def both(tmp_path: Path) -> Share:
    return books.share_of_two_cards(tmp_path)


TILES = """
class Tile(C.Structure):
    _fields_ = [("resource_type", C.c_int), ("resource", P), ("subresource_type", C.c_int), ("padding", C.c_int),
                ("box", uint * 8), ("operation", C.c_int), ("handle_type", C.c_int), ("handle", u64), ("offset", u64),
                ("devices", uint), ("flags", uint), ("reserved", uint * 2)]
class Shape(C.Structure):
    _fields_ = [("width", size), ("height", size), ("depth", size), ("format", C.c_int), ("channels", uint), ("flags", uint)]
"""


def test_a_sparse_array_lets_go_of_what_lies_within_a_place_whatever_sizes_places_have(share: Share) -> None:
    """Beside the account: a list of what was mapped, of which each call ends all that lies within its place."""
    answered = books.within(
        share,
        TILES
        + """
import random
begin()
arrays = [made("cuArray3DCreate_v2", ref(Shape(64 * 12, 64 * 12, 0, 0x20, 1, 0x40))) for _ in range(2)]
wrong, chance, kept = [], random.Random(7), []
def change(array, x, y, width, height, handle):
    box = (uint * 8)(0, 0, 64 * x, 64 * y, 0, 64 * width, 64 * height, 1)
    operation = 1 if handle else 2
    ok("cuMemMapArrayAsync", (Tile * 1)(Tile(0, arrays[array], 0, 0, box, operation, 0, handle or 0, 0, 1, 0)), 1, None)
    kept[:] = [(a, b, c, d, e) for a, b, c, d, e in kept
               if (a, b >= x, c >= y, b + d <= x + width, c + e <= y + height) != (array, True, True, True, True)]
for step in range(700):
    # The first are as large as an array: what comes later is much smaller.
    width, height = (12, 12) if step < 2 or step % 100 == 50 else (chance.randint(1, 4), chance.randint(1, 3))
    array, x, y = step % 2, chance.randint(0, 12 - width), chance.randint(0, 12 - height)
    handle = u64()
    mapped = step < 2 or chance.random() < 0.7
    if mapped:
        ok("cuMemCreate", ref(handle), size(2 * MIB), ref(Properties(1, 0, Location(1, 0))), u64(0))
    change(array, x, y, width, height, handle.value)
    if mapped:
        ok("cuMemRelease", handle)
        kept.append((array, x, y, width, height))
    ok("cuCtxSynchronize")
    if free() != 960 - 2 * len(kept):
        wrong.append([step, free(), 960 - 2 * len(kept)])
most = len(kept)
for array in arrays:
    ok("cuArrayDestroy", array)
answer([wrong[:5], most > 10, free()])
""",
    )
    assert answered == [[], True, 960]


def test_memory_in_a_sparse_array_ends_with_the_arrays_context_not_with_the_current_one(share: Share) -> None:
    answered = books.within(
        share,
        TILES
        + """
owner = begin()
arrays, results = [], []
for _ in range(6):
    array = made("cuArray3DCreate_v2", ref(Shape(16384, 16384, 0, 0x20, 1, 0x40)))
    current = P()
    if call("cuCtxCreate_v2", ref(current), 0, 0):
        results.append("no context")
        break
    handle = u64()
    result = call("cuMemCreate", ref(handle), size(256 * MIB), ref(Properties(1, 0, Location(1, 0))), u64(0))
    results.append(result)
    if result == 0:
        box = (uint * 8)(0, 0, 0, 0, 0, 8192, 8192, 1)
        ok("cuMemMapArrayAsync", (Tile * 1)(Tile(0, array, 0, 0, box, 1, 0, handle, 0, 1, 0)), 1, None)
        ok("cuMemRelease", handle)
    ok("cuCtxDestroy_v2", current)
    ok("cuCtxSetCurrent", owner)
answer([results, free()])
""",
    )
    assert answered == [[0, 0, 0, 2, 2, 2], 192]


def test_threads_that_each_make_a_context_pay_for_one_each(share: Share) -> None:
    """Nobody has said what a context costs: it is measured, by one thread at a time."""
    answered = share.run(
        """
import threading
ok("cuInit", 0)
threads = [threading.Thread(target=lambda: call("cuCtxCreate_v2", C.byref(C.c_void_p()), 0, 0)) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
context = C.c_void_p()
ok("cuCtxCreate_v2", C.byref(context), 0, 0)
answer(info()[0] // MIB)
"""
    )
    assert answered == 1024 - 9 * 64


def test_mipmaps_and_small_arrays_cost_what_they_take(share: Share) -> None:
    answered = books.within(
        share,
        """
class Shape(C.Structure):
    _fields_ = [("width", size), ("height", size), ("depth", size), ("format", C.c_int), ("channels", uint), ("flags", uint)]
begin()
mipmap = made("cuMipmappedArrayCreate", ref(Shape(4096, 4096, 0, 0x20, 1, 0)), 13)
after_mipmap = 960 - free()
ok("cuMipmappedArrayDestroy", mipmap)
arrays = [made("cuArray3DCreate_v2", ref(Shape(100 + number % 100, 150 + number % 90, 0, 0x20, 1, 0))) for number in range(835)]
after_arrays = 960 - free()
for array in arrays:
    ok("cuArrayDestroy", array)
answer([after_mipmap, after_arrays, free()])
""",
    )
    assert isinstance(answered, list)
    mipmap, arrays, empty = answered
    assert 85 <= mipmap <= 88 and arrays <= 220 and empty == 960


def test_calls_that_cannot_succeed_answer_what_the_driver_answers(share: Share) -> None:
    assert same.answers(
        share,
        """
class Shape(C.Structure):
    _fields_ = [("width", size), ("height", size), ("depth", size), ("format", C.c_int), ("channels", uint), ("flags", uint)]
ok("cuInit", 0); context = P(); ok("cuCtxCreate_v2", ref(context), 0, 0)
huge, pointer, pitch = size(1 << 62), u64(), size()
first, second, array = size(), size(), P()
def captured_alloc(bytes):
    stream = made("cuStreamCreate", 0)
    ok("cuStreamBeginCapture_v2", stream, 0)
    result, graph = call("cuMemAlloc_v2", ref(pointer), bytes), P()
    return result, call("cuStreamEndCapture", stream, ref(graph))
answer([
    call("cuMemAlloc_v2", None, huge), call("cuMemAlloc_v2", ref(pointer), size(0)),
    call("cuMemAllocManaged", ref(pointer), huge, 77), call("cuMemAllocManaged", None, huge, 1),
    call("cuMemAllocPitch_v2", ref(pointer), ref(pitch), huge, size(2), 5),
    call("cuMemAllocPitch_v2", ref(pointer), None, huge, size(2), 4),
    call("cuMemAllocAsync", None, huge, None), call("cuMemAllocAsync", ref(pointer), size(0), None),
    call("cuMemCreate", ref(pointer), size((1 << 62) + 1), ref(Properties(1, 0, Location(1, 0))), u64(0)),
    call("cuArray3DCreate_v2", ref(array), ref(Shape(1 << 40, 1 << 20, 0, 0x20, 1, 0))),
    call("cuArray3DCreate_v2", ref(array), ref(Shape(1 << 16, 1 << 16, 0, 0x20, 3, 0))),
    call("cuMipmappedArrayCreate", ref(array), ref(Shape(1 << 16, 1 << 16, 0, 0x20, 1, 0)), 0),
    call("cuCtxSetLimit", 1, size(1 << 46)), call("cuCtxSetLimit", 99, size(1 << 46)),
    call("cuMemGetInfo_v2", ref(first), None), call("cuMemGetInfo_v2", None, ref(second)), call("cuMemGetInfo_v2", None, None),
    *(call(name, ref(pointer), size(1 << 47), *more) for name, more in (
        ("cuMemAlloc_v2", ()), ("cuMemAllocAsync", (None,)), ("cuMemAllocManaged", (1,)))),
    captured_alloc(size(1 << 40)), captured_alloc(size((1 << 64) - 1)),
    call("cuMemFree_v2", u64(12345)), call("cuMemFree_v2", u64(0)), call("cuMemFreeAsync", u64(12345), None),
    call("cuMemRelease", u64(12345)), call("cuMemUnmap", u64(1 << 40), size(1 << 40)), call("cuMemPoolDestroy", None),
])
""",
    )


def test_memory_that_is_freed_twice_or_is_not_ours_changes_no_figure(share: Share) -> None:
    assert share.run(
        same.PRELUDE
        + books.TOOLS
        + """
begin()
pointer, handle = alloc(100 * MIB)[1], u64()
ok("cuMemCreate", ref(handle), size(50 * MIB), ref(Properties(1, 0, Location(1, 0))), u64(0))
before = free()
ok("cuMemFree_v2", pointer); ok("cuMemRelease", handle)
results = [call("cuMemFree_v2", pointer), call("cuMemRelease", handle), call("cuMemFree_v2", u64(pointer.value + 4096)),
           call("cuMemFreeAsync", pointer, None)]
answer([before, free(), 0 in results])
"""
    ) == [810, 960, False]
    assert share.usage().cards[0].memory_peak_bytes <= books.LIMIT


def test_managed_memory_that_moves_between_cards_is_charged_on_both(both: Share) -> None:
    answered = books.within(
        both,
        """
begin()
other, context = P(), P()
ok("cuDevicePrimaryCtxRetain", ref(other), 1)
ok("cuCtxGetCurrent", ref(context))
ok("cuCtxSetCurrent", other)
filled = len(fill(100 * MIB)[1])
ok("cuCtxSetCurrent", context)
results = []
for _ in range(9):
    result, pointer = alloc(100 * MIB, "cuMemAllocManaged", 1)
    if result == 0:
        ok("cuMemPrefetchAsync", pointer, size(100 * MIB), 1, None)
    results.append(result)
ok("cuCtxSynchronize")
answer([filled, results])
""",
    )
    assert answered == [9, [2] * 9]
    assert both.run(
        same.PRELUDE
        + "begin()\nbefore = info()\n"
        + 'for _ in range(20):\n    ok("cuMemFree_v2", alloc(100 * MIB, "cuMemAllocManaged", 1)[1])\nanswer(info() == before)'
    )
