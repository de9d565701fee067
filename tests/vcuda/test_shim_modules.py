"""Code on the card counts: what loading a module took by the card's own books is charged, refused, given back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import share as shares
from tests.support.share import MIB, Share
from vcuda.sim import Machine, SimCard

LIMIT = 70 * MIB
KIB = 1024

# Images of about 200 KB: PTX, and the same inside a fat binary; the simulated card charges both in steps of 64 KiB.
IMAGES = """
import struct
text = b".version 8.0\\n.target sm_80\\n.address_size 64\\n.visible .entry spin()\\n{ ret; }\\n" + b"// padding\\n" * 18000 + b"\\0"
entry = struct.pack("<HHIQIIHHIII", 1, 0x101, 64, len(text), 0, 0, 0, 8, 80, 0, 0).ljust(64, b"\\0") + text
fat = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry)) + entry
images = {"ptx": text, "fat": fat}
def load(image, name="cuModuleLoadData", *more):
    module = C.c_void_p()
    return call(name, C.byref(module), image, *more), module
"""


@pytest.fixture
def share(tmp_path: Path) -> Share:
    machine = Machine.create(tmp_path / "machine", [SimCard()])
    return shares.simulated(tmp_path / "share", machine, [shares.limit(machine, memory_bytes=LIMIT)])


def truth(share: Share) -> int:
    assert share.machine
    return share.machine.report().cards[0].used_bytes


@pytest.mark.parametrize("kind", ["ptx", "fat", "file"])
def test_modules_fill_the_share_and_no_more(share: Share, tmp_path: Path, kind: str) -> None:
    process = share.start(
        IMAGES
        + """
begin()
start = info()[0]
name, image = "cuModuleLoadData", images.get(sys.argv[1])
if not image:
    path = sys.argv[2].encode()
    open(path, "wb").write(text)
    name, image = "cuModuleLoad", path
held = []
while True:
    result, module = load(image, name)
    if result:
        break
    held.append(module)
answer([start, result, len(held), info()[0], module.value])
sys.stdin.readline()
for module in held:
    ok("cuModuleUnload", module)
answer(info()[0])
""",
        kind,
        str(tmp_path / "image.ptx"),
    )
    assert process.stdin and process.stdout
    line = process.stdout.readline()
    assert line, process.communicate(timeout=60)[1]
    start, result, count, left, refused = json.loads(line)
    used = truth(share)
    end, said = process.communicate("\n", timeout=60)
    assert (result, refused) == (2, None)
    assert start == LIMIT - 64 * MIB
    assert count == start // (256 * KIB)
    assert (left, used) == (start - count * 256 * KIB, 64 * MIB + count * 256 * KIB)
    assert int(end) == start, said
    assert truth(share) == 0


def test_a_full_share_has_no_room_for_a_module_and_nothing_stays_of_one_that_fails(share: Share) -> None:
    outcome = share.run(
        IMAGES
        + """
context = begin()
before = info()
failed = [load(b"no image at all\\0")[0] != 0, info() == before]
held = fill(2 * MIB)[1]
refused = [load(images[kind])[0] for kind in images]
for pointer in held:
    ok("cuMemFree_v2", pointer)
full = info() == before
loaded = load(images["ptx"])[0]
left = before[0] - info()[0]
answer([failed, refused, full, loaded, left])
"""
    )
    assert outcome == [[True, True], [2, 2], True, 0, 256 * KIB]


def test_code_goes_with_its_context(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine", [SimCard()])
    share = shares.simulated(tmp_path / "share", machine, [shares.limit(machine, memory_bytes=256 * MIB)])
    free = share.run(
        IMAGES
        + """
first = begin()
before = info()[0]
second = begin()
assert load(images["fat"])[0] == 0
ok("cuCtxDestroy_v2", second)
ok("cuCtxSetCurrent", first)
answer(before - info()[0])
"""
    )
    assert free == 0


def test_a_library_loads_and_unloads_without_a_trace(share: Share) -> None:
    outcome = share.run(
        IMAGES
        + """
begin()
before = info()
library, zero = C.c_void_p(), C.c_uint(0)
for kind in images:
    ok("cuLibraryLoadData", C.byref(library), images[kind], None, None, zero, None, None, zero)
    ok("cuLibraryUnload", library)
answer(info() == before)
"""
    )
    assert outcome is True


def test_a_neighbour_at_work_is_not_taken_for_code(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine", [SimCard()])
    share = shares.simulated(tmp_path / "share", machine, [shares.limit(machine, memory_bytes=256 * MIB)])
    other = shares.simulated(tmp_path / "other", machine, [shares.limit(machine, memory_bytes=512 * MIB)])
    neighbour = other.start("""
        import threading
        begin()
        answer("ready")
        end = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), end.set()), daemon=True).start()
        while not end.is_set():
            pointer = alloc(100 * MIB)[1]
            ok("cuMemFree_v2", pointer)
    """)
    assert neighbour.stdout and neighbour.stdout.readline() == '"ready"\n'
    taken, failed = share.run(
        IMAGES
        + """
begin()
before = info()[0]
failed = [load(images["fat"])[0] for _ in range(300)]
answer([before - info()[0], sum(failed)])
"""
    )
    neighbour.communicate("", timeout=60)
    assert failed == 0
    assert taken <= 300 * 256 * KIB
