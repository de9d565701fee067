"""Every way to put a kernel on the card is charged, once, and answers what the driver answers."""

from __future__ import annotations

import re
import struct
import time
from pathlib import Path

import pytest

from tests.support import share
from vcuda._build import native
from vcuda.sim import Machine, SimCard

KERNEL_MS = 5

CLIENT = """
context = begin()
module, function = C.c_void_p(), C.c_void_p()
image = b".version 7.0\\n.target sm_70\\n.address_size 64\\n.visible .entry spin_5ms() { ret; }\\n"
ok("cuModuleLoadData", C.byref(module), image)
ok("cuModuleGetFunction", C.byref(function), module, b"spin_5ms")
ok("cuFuncSetBlockShape", function, 32, 1, 1)
class Config(C.Structure):
    _fields_ = [("grid", C.c_uint * 3), ("block", C.c_uint * 3), ("shared", C.c_uint), ("stream", C.c_void_p),
                ("attributes", C.c_void_p), ("count", C.c_uint)]
config = Config(grid=(1, 1, 1), block=(32, 1, 1))
shape = [function, 1, 1, 1, 32, 1, 1, 0]
arguments = {
    "cuLaunchKernel": [*shape, None, None, None],
    "cuLaunchCooperativeKernel": [*shape, None, None],
    "cuLaunchKernelEx": [C.byref(config), function, None, None],
    "cuLaunch": [function],
    "cuLaunchGrid": [function, 1, 1],
    "cuLaunchGridAsync": [function, 1, 1, None],
}
name = sys.argv[1]
for _ in range(4):
    ok(name, *arguments[name.removesuffix("_ptsz")])
    ok("cuCtxSynchronize")
answer("launched")
sys.stdin.readline()
"""

COPY = """
context = begin()
size_of = 8 * MIB
(_, source), (_, target) = alloc(size_of), alloc(size_of)
host = (C.c_char * size_of)()
class Side(C.Structure):
    _fields_ = [("type", C.c_uint), ("host", C.c_void_p), ("device", u64), ("array", C.c_void_p)]
class Copy2D(C.Structure):
    _fields_ = [("x", size), ("y", size), ("source", Side), ("pitch", size),
                ("x2", size), ("y2", size), ("target", Side), ("pitch2", size), ("width", size), ("height", size)]
class Copy3D(C.Structure):
    _fields_ = [("at", size * 4), ("source", Side), ("reserved", C.c_void_p), ("pitch", size), ("rows", size),
                ("at2", size * 4), ("target", Side), ("reserved2", C.c_void_p), ("pitch2", size), ("rows2", size),
                ("width", size), ("height", size), ("depth", size)]
name, to_host = sys.argv[1], sys.argv[2] == "host"
place = Side(1, C.addressof(host), 0, None) if to_host else Side(2, None, target, None)
if "2D" in name:
    copy = Copy2D(source=Side(2, None, source, None), pitch=MIB, target=place, pitch2=MIB, width=MIB, height=8)
else:
    copy = Copy3D(source=Side(2, None, source, None), pitch=MIB, rows=4, target=place, pitch2=MIB, rows2=4,
                  width=MIB, height=4, depth=2)
ok(name, C.byref(copy), *([None] if "Async" in name else []))
ok("cuCtxSynchronize")
answer("copied")
sys.stdin.readline()
"""

MULTI_DEVICE = """
context = begin()
answer([call("cuLaunchCooperativeKernelMultiDevice", None, 0, 0),
        call("cuLaunchCooperativeKernelMultiDevice", (C.c_char * 512)(), 1, 0)])
"""


@pytest.mark.parametrize(
    "name",
    [
        "cuLaunchKernel",
        "cuLaunchKernel_ptsz",
        "cuLaunchKernelEx",
        "cuLaunchKernelEx_ptsz",
        "cuLaunchCooperativeKernel",
        "cuLaunchCooperativeKernel_ptsz",
        "cuLaunch",
        "cuLaunchGrid",
        "cuLaunchGridAsync",
    ],
)
def test_every_launch_is_charged_once(name: str, tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine")
    container = share.simulated(tmp_path / "share", machine, [share.limit(machine)])
    process = container.start(CLIENT, name)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == '"launched"\n', process.communicate(timeout=share.SECONDS)
        wanted = 4 * KERNEL_MS * 1_000_000
        end = time.monotonic() + 20  # the helper settles what it saw a little later
        while time.monotonic() < end and container.usage().cards[0].gpu_time_ns < 0.9 * wanted:
            time.sleep(0.01)
        assert 0.9 * wanted <= container.usage().cards[0].gpu_time_ns <= 1.5 * wanted
    finally:
        process.communicate("\n", timeout=share.SECONDS)
    assert container.usage().cards[0].launches == 4


# Of 8 MiB; 24 us by the simulated card, whose driver moves the data between our two events, too. Where the host was held up in the call, the
# estimate is what is charged.
ESTIMATE_NS = 2_000 + 8 * 2**20 // 500
EXTENTS = ["2D_v2", "2D_v2_ptds", "2DUnaligned_v2", "2DUnaligned_v2_ptds", "2DAsync_v2", "2DAsync_v2_ptsz"]
EXTENTS += ["3D_v2", "3D_v2_ptds", "3DAsync_v2", "3DAsync_v2_ptsz"]


@pytest.mark.parametrize("name", EXTENTS)
def test_large_copies_with_extents_are_charged_on_the_card_alone(name: str, tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine")
    limit = share.limit(machine, memory_bytes=1 << 30)
    for target in ("card", "host"):
        container = share.simulated(tmp_path / target, machine, [limit])
        process = container.start(COPY, f"cuMemcpy{name}", target)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == '"copied"\n', process.communicate(timeout=share.SECONDS)
            end = time.monotonic() + (20 if target == "card" else 0)
            while time.monotonic() < end and container.usage().cards[0].gpu_time_ns == 0:
                time.sleep(0.01)
            used = container.usage().cards[0].gpu_time_ns
            assert used >= ESTIMATE_NS if target == "card" else used == 0
        finally:
            process.communicate("\n", timeout=share.SECONDS)


PEERS = """
contexts = [begin(), begin(int(sys.argv[2]))]
size_of = 8 * MIB
(_, target) = alloc(size_of)
ok("cuCtxSetCurrent", contexts[0])
(_, source) = alloc(size_of)
class Side(C.Structure):
    _fields_ = [("at", size * 4), ("type", C.c_uint), ("host", C.c_void_p), ("device", u64), ("array", C.c_void_p),
                ("context", C.c_void_p), ("pitch", size), ("rows", size)]
class Copy(C.Structure):
    _fields_ = [("source", Side), ("target", Side), ("width", size), ("height", size), ("depth", size)]
sides = [Side(type=2, device=place.value, context=context.value, pitch=MIB, rows=4)
         for place, context in zip((source, target), contexts)]
name = sys.argv[1]
extents = Copy(source=sides[0], target=sides[1], width=MIB, height=4, depth=2)
plain = [target, contexts[1], source, contexts[0], size(size_of)]
ok(name, *([C.byref(extents)] if "3D" in name else plain), *([None] if "Async" in name else []))
ok("cuCtxSynchronize")
answer("copied")
sys.stdin.readline()
"""


@pytest.mark.parametrize("other_card", [False, True], ids=["one-card", "two-cards"])
@pytest.mark.parametrize(
    "name",
    [f"cuMemcpy{kind}{suffix}" for kind in ("Peer", "3DPeer") for suffix in ("", "_ptds", "Async", "Async_ptsz")],
)
def test_copies_between_contexts_of_one_card_are_charged(name: str, other_card: bool, tmp_path: Path) -> None:
    """They were taken for copies between cards: 8.9 of 1."""
    machine = Machine.create(tmp_path / "machine", [SimCard(), SimCard()])
    limits = [share.limit(machine, card) for card in range(2)]
    container = share.simulated(tmp_path / "share", machine, limits)
    process = container.start(PEERS, name, str(int(other_card)))
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == '"copied"\n', process.communicate(timeout=share.SECONDS)
        end = time.monotonic() + (0.2 if other_card else 20)
        while time.monotonic() < end and container.usage().cards[0].gpu_time_ns == 0:
            time.sleep(0.01)
        used = sum(card.gpu_time_ns for card in container.usage().cards)
        assert used == 0 if other_card else used >= ESTIMATE_NS
    finally:
        process.communicate("\n", timeout=share.SECONDS)


# What puts work on a card and is charged otherwise, or takes no time of it.
NOT_BY_ITSELF = re.compile(r"cuLaunchHostFunc|cuMemcpy(HtoD|DtoH|HtoA|AtoH)")


def test_every_function_that_puts_work_on_a_card_passes_the_gate() -> None:
    """By name, over all that the simulated driver has; what a later one adds is told at its look-up."""
    folder = native.ROOT / "vcuda"
    table = (folder / "sim/src/cuda/cu_api.def").read_text()
    names = set(re.findall(r"^SIM_\w+\((\w+)", table, re.MULTILINE))
    gated = set(re.findall(r"^VC_HOOK\w*\((\w+)", (folder / "src/cuda/driver/work.def").read_text(), re.MULTILINE))
    working = {name for name in names if re.match(r"cu(Launch|Memcpy|Memset|MemBatch|GraphLaunch)", name)}
    assert len(working) > 100
    assert {name for name in working - gated if not NOT_BY_ITSELF.match(name)} == set()


RELOADED = """
context = begin()
def load(name):
    module, function = C.c_void_p(), C.c_void_p()
    image = b".version 7.0\\n.target sm_70\\n.address_size 64\\n.visible .entry " + name + b"() { ret; }\\n"
    ok("cuModuleLoadData", C.byref(module), image)
    ok("cuModuleGetFunction", C.byref(function), module, name)
    return module, function
def launch(function):
    ok("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, None, None, None)
again = False
while not again:
    module, function = load(b"spin_20us")
    for _ in range(40):
        launch(function)
        ok("cuCtxSynchronize")
    time.sleep(0.1)
    known = function.value
    ok("cuModuleUnload", module)
    module, function = load(b"spin_20ms")
    again = function.value == known
end, count = time.monotonic() + 0.3, 0
while time.monotonic() < end:
    launch(function)
    count += 1
answer(count)
os._exit(0)
"""


def test_a_function_under_the_handle_of_one_that_was_unloaded_is_not_taken_for_it(tmp_path: Path) -> None:
    """It was launched by the other's estimate: 27 of 10 over 4 s, and paid back later."""
    machine = Machine.create(tmp_path / "machine")
    container = share.simulated(tmp_path / "share", machine, [share.limit(machine, cores=10, core_limit=10)])
    assert int(container.run(RELOADED)) <= 5  # of 20 ms, in 0.3 s


def test_a_refused_launch_on_several_cards_costs_nothing(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine")
    limited = share.simulated(tmp_path / "limited", machine, [share.limit(machine)])
    free = share.simulated(tmp_path / "free", machine, None)
    warning = limited.run(MULTI_DEVICE)
    process = free.start(MULTI_DEVICE)
    output, _ = process.communicate(timeout=share.SECONDS)
    assert output.strip() == str(warning)
    assert limited.usage().cards[0].gpu_time_ns == 0


@pytest.mark.parametrize(("cores", "core_limit", "priority"), [(30, 20, 1), (30, 4000, 1), (30, 60, 7), (0, 0, 1)])
def test_impossible_limits_are_said_once_and_counted(
    cores: int, core_limit: int, priority: int, tmp_path: Path
) -> None:
    machine = Machine.create(tmp_path / "machine")
    container = share.simulated(tmp_path / "share", machine, [share.limit(machine)])
    limits = container.region_directory / "limits"
    content = bytearray(limits.read_bytes())
    struct.pack_into("<II", content, 192 + 64, cores, core_limit)  # vc_card_limit.cores, core_limit
    struct.pack_into("<I", content, 192 + 76, priority)
    limits.chmod(0o644)
    limits.write_bytes(content)
    process = container.start(CLIENT, "cuLaunchKernel")
    assert process.stdout is not None
    assert process.stdout.readline() == '"launched"\n', process.communicate(timeout=share.SECONDS)
    assert container.usage().limits_impossible == 1
    assert container.usage().cards[0].granted_cores == max(cores, 1)
    _, said = process.communicate("\n", timeout=share.SECONDS)
    assert said.count("make no sense") == 1 and len(said.splitlines()) == 1
