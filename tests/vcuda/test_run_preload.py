"""`vcuda run --injection=preload`: the same limits for commands that choose their own library path."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import share as shares
from tests.support.runs import Runner, wait_for
from vcuda import sim

CLIENT = """
import ctypes, json, os
cu = ctypes.CDLL("libcuda.so.1")
context, pointer, free, total = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_size_t()
assert cu.cuInit(0) == 0 and cu.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
cu.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
result = cu.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(2 << 30))
maps = open("/proc/self/maps").read()
print(json.dumps([total.value, result, "libvcuda-preload.so" in maps, "libcuda-driver" in maps or "/lib64/libcuda.so.1" in maps,
                  os.environ.get("TRITON_LIBCUDA_PATH"), os.environ["LD_PRELOAD"].split()[1:]]))
"""


@pytest.fixture
def vcuda(tmp_path: Path) -> Iterator[Runner]:
    folder = tmp_path / "machine"
    sim.Machine.create(folder, [sim.SimCard(memory_bytes=8 * 2**30)])
    runner = Runner(folder)
    yield runner
    wait_for("the end of every booking", lambda: not runner.bookings())


def test_the_command_gets_the_preload_library_and_no_shim(vcuda: Runner) -> None:
    words = ["run", "--core", "30", "--memory", "1GiB", "--injection", "preload"]
    result = vcuda.call(*words, "--", "python3", "-c", CLIENT, LD_PRELOAD="libc.so.6")
    assert (result.returncode, shares.beside_refusals(result.stderr)) == (0, "")
    assert json.loads(result.stdout) == [1 << 30, 2, True, False, None, ["libc.so.6"]]


def test_another_injection_is_refused(vcuda: Runner) -> None:
    result = vcuda.call("run", "--core", "30", "--memory", "1GiB", "--injection", "magic", "--", "true")
    assert result.returncode == 2 and "--injection" in result.stderr and "preload" in result.stderr
