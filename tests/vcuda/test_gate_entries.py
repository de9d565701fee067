"""Every way to put a kernel on the card is charged, once, and answers what the driver answers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support import share
from vcuda.sim import Machine

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


def test_a_refused_launch_on_several_cards_costs_nothing(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine")
    limited = share.simulated(tmp_path / "limited", machine, [share.limit(machine)])
    free = share.simulated(tmp_path / "free", machine, None)
    warning = limited.run(MULTI_DEVICE)
    process = free.start(MULTI_DEVICE)
    output, _ = process.communicate(timeout=share.SECONDS)
    assert output.strip() == str(warning)
    assert limited.usage().cards[0].gpu_time_ns == 0
