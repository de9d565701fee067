"""Batches of copies, copies with attributes, decompression and arrays' own copies are charged, where they stay on the card."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.support import share
from vcuda import region

CARD = "GPU-01234567-89ab-cdef-0123-456789abcdef"
COPY_NS = 5_000_000  # gate_copy_driver.c

CLIENT = """
context = begin()
name, where, mib = sys.argv[1], sys.argv[2], int(sys.argv[3])
CARD = 1 << 41
target, source, bytes_ = u64(CARD if where == "card" else 4096), u64(CARD), size(mib * MIB)
targets, sources, sizes = (u64 * 2)(4096, target.value), (u64 * 2)(CARD, CARD), (size * 2)(1, bytes_.value)
class Operand(C.Structure):
    _fields_ = [("type", C.c_uint), ("pointer", u64), ("rest", size * 3)]
class Extents(C.Structure):
    _fields_ = [("source", Operand), ("target", Operand), ("extent", size * 3), ("order", C.c_uint), ("flags", C.c_uint)]
extents = Extents(source=Operand(2, 0), target=Operand(1, target.value), extent=(size * 3)(MIB, mib, 1))
class Block(C.Structure):
    _fields_ = [("packed", size), ("bytes", size), ("rest", C.c_char * 48)]
block = Block(1, bytes_.value)
stream, array = C.c_void_p(4096), C.c_void_p(4096)
number = C.c_uint if name in ("cuMemcpyAtoA", "cuMemcpyAtoD", "cuMemcpyDtoA") else size
many = [targets, sources, sizes, size(2), None, None, size(0)]
arguments = {
    "cuMemcpyBatchAsync": [*many, None, stream],
    "cuMemcpyBatchAsync_v2": [*many, stream],
    "cuMemcpy3DBatchAsync": [size(1), C.byref(extents), None, u64(0), stream],
    "cuMemcpy3DBatchAsync_v2": [size(1), C.byref(extents), u64(0), stream],
    "cuMemcpyWithAttributesAsync": [target, source, bytes_, None, stream],
    "cuMemcpy3DWithAttributesAsync": [C.byref(extents), u64(0), stream],
    "cuMemBatchDecompressAsync": [C.byref(block), size(1), 0, None, stream],
    "cuMemcpyAtoA": [array, number(0), array, number(0), number(bytes_.value)],
    "cuMemcpyAtoD": [C.c_uint(1) if number is C.c_uint else target, array, number(0), number(bytes_.value)],
    "cuMemcpyDtoA": [array, number(0), C.c_uint(1) if number is C.c_uint else source, number(bytes_.value)],
}
plain = name.removesuffix("_ptsz").removesuffix("_ptds")
chosen = arguments[plain] if plain in arguments else arguments[plain.removesuffix("_v2")]
for _ in range(4):
    ok(name, *chosen)
    ok("cuCtxSynchronize")
answer("copied")
sys.stdin.readline()
"""

STREAM_COPIES = (
    "cuMemcpyBatchAsync",
    "cuMemcpyBatchAsync_v2",
    "cuMemcpy3DBatchAsync",
    "cuMemcpy3DBatchAsync_v2",
    "cuMemcpyWithAttributesAsync",
    "cuMemcpy3DWithAttributesAsync",
    "cuMemBatchDecompressAsync",
)
ARRAY_COPIES = ("cuMemcpyAtoA", "cuMemcpyAtoD", "cuMemcpyDtoA")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = Path(__file__).with_name("gate_copy_driver.c")
    flags = ("-O1", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f'-DCARD_UUID="{CARD}"')
    subprocess.run(["gcc", *flags, str(source), "-o", str(path)], check=True, timeout=60)
    return path


def charged_ns(folder: Path, driver: Path, *arguments: str, wanted_ns: int) -> int:
    """What the share was charged for four copies; waits a while for `wanted_ns`, as the helper settles later."""
    container = share.lay_out(folder, driver, None)
    container.region_directory.mkdir()
    region.create(container.region_directory, [region.CardLimit(CARD, 0, 1 << 30, 50, 50)])
    process = container.start(CLIENT, *arguments)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == '"copied"\n', process.communicate(timeout=share.SECONDS)
        end = time.monotonic() + (20 if wanted_ns else 0.2)
        while time.monotonic() < end and container.usage().cards[0].gpu_time_ns < max(wanted_ns, 1):
            time.sleep(0.01)
        return container.usage().cards[0].gpu_time_ns
    finally:
        share.end(process)


@pytest.mark.parametrize(
    "name",
    [
        *(name + suffix for name in STREAM_COPIES for suffix in ("", "_ptsz")),
        *(name + suffix for name in ARRAY_COPIES for suffix in ("", "_v2", "_v2_ptds")),
    ],
)
def test_a_large_copy_on_the_card_is_charged(name: str, driver: Path, tmp_path: Path) -> None:
    wanted = int(0.9 * 4 * COPY_NS)
    assert wanted <= charged_ns(tmp_path, driver, name, "card", "8", wanted_ns=wanted) <= 6 * COPY_NS


@pytest.mark.parametrize("name", [name for name in STREAM_COPIES if "Decompress" not in name])
def test_a_copy_to_the_host_is_not(name: str, driver: Path, tmp_path: Path) -> None:
    assert charged_ns(tmp_path, driver, name, "host", "8", wanted_ns=0) == 0


def test_a_small_one_is_not(driver: Path, tmp_path: Path) -> None:
    assert charged_ns(tmp_path, driver, "cuMemcpyBatchAsync_v2", "card", "0", wanted_ns=0) == 0
