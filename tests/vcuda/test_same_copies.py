"""A share changes nothing about what copies and sets move: every form and both default streams, small and large enough to be charged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import same
from tests.support import share as shares
from tests.support.share import MIB, Share
from vcuda.sim import Machine, SimCard

# `moved` calls one form of a copy into a cleared target, and says what is there then.
BEGIN = """
import random
context = begin()
count = int(sys.argv[1])
data = random.Random(count).randbytes(count)
source, target = alloc(count)[1], alloc(count)[1]
ok("cuMemcpyHtoD_v2", source, data, size(count))
def moved(name, *arguments):
    ok("cuMemsetD8_v2", target, C.c_ubyte(0), size(count))
    ok("cuCtxSynchronize")
    ok(name, *arguments, *([None] if "Async" in name else []))
    ok("cuCtxSynchronize")
    return read(target, count)
"""
SIZES = [4096, 5 * MIB]


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Share:
    folder: Path = tmp_path_factory.mktemp("copies")
    machine = Machine.create(folder / "machine", [SimCard()])
    return shares.simulated(folder / "share", machine, [shares.limit(machine, memory_bytes=256 * MIB)])


@pytest.mark.parametrize("count", SIZES)
def test_linear_copies_move_every_byte(share: Share, count: int) -> None:
    wrong = same.answers(
        share,
        BEGIN
        + """
wrong = []
for name in ("cuMemcpy", "cuMemcpyDtoD_v2", "cuMemcpyAsync", "cuMemcpyDtoDAsync_v2"):
    for suffix in ("", "_ptsz" if "Async" in name else "_ptds"):
        if moved(name + suffix, target, source, size(count)) != data:
            wrong.append(name + suffix)
for name in ("cuMemcpyPeer", "cuMemcpyPeerAsync"):
    for suffix in ("", "_ptsz" if "Async" in name else "_ptds"):
        if moved(name + suffix, target, context, source, context, size(count)) != data:
            wrong.append(name + suffix)
for name in ("cuMemcpyHtoD_v2", "cuMemcpyHtoDAsync_v2"):
    for suffix in ("", "_ptsz" if "Async" in name else "_ptds"):
        if moved(name + suffix, target, data, size(count)) != data:
            wrong.append(name + suffix)
answer(wrong)
""",
        str(count),
    )
    assert wrong == []


@pytest.mark.parametrize("count", SIZES)
def test_copies_with_extents_move_every_row(share: Share, count: int) -> None:
    wrong = same.answers(
        share,
        BEGIN
        + """
width, height = count // 64, 64
plane = Copy2D(source=Side(2, None, source), pitch=width, target=Side(2, None, target), pitch2=width, width=width, height=height)
unified = Copy2D(source=Side(4, None, source), pitch=width, target=Side(4, None, target), pitch2=width, width=width, height=height)
block = Copy3D(source=Side(2, None, source), pitch=width, rows=8, target=Side(2, None, target), pitch2=width, rows2=8, width=width,
               height=8, depth=8)
peers = Copy3D(source=Side(2, None, source), context=context, pitch=width, rows=8, target=Side(2, None, target), context2=context,
               pitch2=width, rows2=8, width=width, height=8, depth=8)
wrong = []
for name, given in (("cuMemcpy2D_v2", plane), ("cuMemcpy2D_v2", unified), ("cuMemcpy2DUnaligned_v2", plane),
                    ("cuMemcpy2DAsync_v2", plane), ("cuMemcpy3D_v2", block), ("cuMemcpy3DAsync_v2", block),
                    ("cuMemcpy3DPeer", peers), ("cuMemcpy3DPeerAsync", peers)):
    for suffix in ("", "_ptsz" if "Async" in name else "_ptds"):
        if moved(name + suffix, ref(given)) != data:
            wrong.append(name + suffix)
        if call(name + suffix, None, *([None] if "Async" in name else [])) != 1:
            wrong.append(name + suffix + " of nothing")
answer(wrong)
""",
        str(count),
    )
    assert wrong == []


@pytest.mark.parametrize("count", SIZES)
def test_sets_of_every_width_reach_every_element(share: Share, count: int) -> None:
    wrong = same.answers(
        share,
        BEGIN
        + """
wrong = []
for bits, kind in ((8, C.c_ubyte), (16, C.c_ushort), (32, C.c_uint)):
    element = bytes(kind(0x01020304))
    number = count // len(element)
    width = number // 64 * len(element)
    for suffix in ("_v2", "_v2_ptds", "Async", "Async_ptsz"):
        if moved(f"cuMemsetD{bits}{suffix}", target, kind(0x01020304), size(number)) != element * number:
            wrong.append([bits, suffix, 1])
        if moved(f"cuMemsetD2D{bits}{suffix}", target, size(width), kind(0x01020304), size(number // 64), size(64)) != element * number:
            wrong.append([bits, suffix, 2])
answer(wrong)
""",
        str(count),
    )
    assert wrong == []


def test_arrays_are_copied_to_and_from_and_describe_themselves(share: Share) -> None:
    got = same.answers(
        share,
        """
class Shape(C.Structure):
    _fields_ = [("width", size), ("height", size), ("depth", size), ("format", C.c_int), ("channels", uint), ("flags", uint)]
class Flat(C.Structure):
    _fields_ = [("width", size), ("height", size), ("format", C.c_int), ("channels", uint)]
context = begin()
data, back = bytes(range(256)) * 4, (C.c_ubyte * 1024)()
seen = []
for format_, channels, width in ((0x01, 1, 64), (0x10, 2, 16), (0x20, 4, 4)):  # rows of 64 bytes
    array, shape = P(), Shape(width, 16, 0, format_, channels, 0)
    ok("cuArray3DCreate_v2", ref(array), ref(shape))
    there = Copy2D(source=Side(1, C.cast(data, P)), pitch=64, target=Side(3, array=array), width=64, height=16)
    here = Copy2D(source=Side(3, array=array), target=Side(1, C.addressof(back)), pitch2=64, width=64, height=16)
    ok("cuMemcpy2D_v2", ref(there)); ok("cuMemcpy2D_v2", ref(here))
    flat, solid = Flat(), Shape()
    ok("cuArrayGetDescriptor_v2", ref(flat), array); ok("cuArray3DGetDescriptor_v2", ref(solid), array)
    seen.append([bytes(back) == data, flat.width, flat.height, solid.format == format_, solid.channels])
    ok("cuArrayDestroy", array)
mipmapped, level = P(), P()
ok("cuMipmappedArrayCreate", ref(mipmapped), ref(Shape(64, 32, 0, 0x20, 1, 0)), 3)
ok("cuMipmappedArrayGetLevel", ref(level), mipmapped, 2)
ok("cuArrayGetDescriptor_v2", ref(flat), level)
levels = [flat.width, flat.height, call("cuMipmappedArrayGetLevel", ref(P()), mipmapped, 3), call("cuArrayDestroy", level)]
ok("cuMipmappedArrayDestroy", mipmapped)
wrong = [call("cuArray3DCreate_v2", ref(array), ref(Shape(1, 1, 0, 0x99, 1, 0))), call("cuArray3DCreate_v2", ref(array), None),
         call("cuArrayCreate_v2", ref(array), None), call("cuArrayCreate_v2", ref(array), ref(Flat(0, 1, 1, 1))),
         call("cuArray3DCreate_v2", ref(array), ref(Shape(1, 1, 0, 1, 3, 0))), call("cuArray3DCreate_v2", None, ref(shape)),
         call("cuArray3DCreate_v2", ref(array), ref(Shape(1 << 20, 1, 0, 1, 1, 0))), call("cuMipmappedArrayCreate", ref(array), None, 1),
         call("cuMipmappedArrayCreate", ref(array), ref(shape), 0), call("cuMipmappedArrayGetLevel", None, None, 0)]
handles = [call("cuArrayDestroy", None), call("cuMipmappedArrayDestroy", None), call("cuArrayGetDescriptor_v2", ref(flat), None)]
answer([seen, levels, wrong, [bool(each) for each in handles]])
""",
    )
    assert got == [
        [[True, 64, 16, True, 1], [True, 16, 16, True, 2], [True, 4, 16, True, 4]],
        [16, 8, 1, 400],
        [1] * 10,
        [True] * 3,
    ]
