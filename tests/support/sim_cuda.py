"""Run driver-API clients (cuda-bindings, unmodified) of a simulated machine in processes of their own, for tests."""

from __future__ import annotations

import json
import subprocess
import textwrap
from collections.abc import Sequence
from typing import Any

from tests.support import simulated
from vcuda.sim import Machine

SECONDS = 60
PRELUDE = """
import ctypes, json, os, sys, threading, time
from cuda.bindings import driver as cu

def ok(result):
    if int(result[0]):
        raise SystemExit(f"{result[0]!r}")
    return result[1] if len(result) == 2 else result[1:]

def answer(value):
    print(json.dumps(value), flush=True)

def context(device=0):
    ok(cu.cuInit(0))
    made = ok(cu.cuDevicePrimaryCtxRetain(ok(cu.cuDeviceGet(device))))
    ok(cu.cuCtxSetCurrent(made))
    return made

def created(device=0):
    # By the symbol: the bindings would call it by the signature of newer drivers.
    made = ctypes.c_void_p()
    assert ctypes.CDLL("libcuda.so.1").cuCtxCreate_v2(ctypes.byref(made), 0, device) == 0
    return cu.CUcontext(made.value)

def kernel(*names):
    text = ".version 8.0\\n.target sm_80\\n.address_size 64\\n" + "".join(
        f".visible .entry {name}(.param .u64 a, .param .u32 n) {{ ret; }}\\n" for name in names
    )
    module = ok(cu.cuModuleLoadData(text.encode() + b"\\0"))
    found = [ok(cu.cuModuleGetFunction(module, name.encode())) for name in names]
    return found[0] if len(found) == 1 else found

def launch(function, stream=0, blocks=1):
    ok(cu.cuLaunchKernel(function, blocks, 1, 1, 32, 1, 1, 0, stream, 0, 0))

def used():
    free, total = ok(cu.cuMemGetInfo())
    return total - free

"""
# After the prelude: fill() and wrong() of memory by kernels (vcuda/sim/src/cuda/cu_touch.c). wrong() gives the number of words
# that are not what fill() left; `step` is the distance between the words that are touched.
TOUCH = """
def touching():
    names = {"sim_fill": 4, "sim_check": 5}
    text = ".version 8.0\\n.target sm_80\\n.address_size 64\\n" + "".join(
        f".visible .entry {name}({', '.join(f'.param .u64 p{i}' for i in range(count))}) {{ ret; }}\\n"
        for name, count in names.items()
    )
    library = ok(cu.cuLibraryLoadData(text.encode() + b"\\0", None, None, 0, None, None, 0))
    return [cu.CUfunction(int(ok(cu.cuLibraryGetKernel(library, name.encode())))) for name in names]

def touch(which, stream, *values):
    global touchers
    touchers = globals().get("touchers") or touching()
    ok(cu.cuLaunchKernel(touchers[which], 1, 1, 1, 32, 1, 1, 0, stream, (values, (ctypes.c_uint64,) * len(values)), 0))

def fill(pointer, size, step=65536, seed=7):
    touch(0, 0, pointer, size, step, seed)

def captured_fill(pointer, size, stream):
    touch(0, stream, pointer, size, 65536, 7)

def wrong(pointer, size, step=65536, seed=7):
    counter = ctypes.c_uint64(0)
    ok(cu.cuMemHostRegister(ctypes.addressof(counter), 8, 0))
    touch(1, 0, pointer, size, step, seed, ctypes.addressof(counter))
    ok(cu.cuMemHostUnregister(ctypes.addressof(counter)))
    return counter.value
"""


def script(code: str) -> list[str]:
    """The command line of a client that runs `code` after the prelude."""
    return simulated.python(PRELUDE + textwrap.dedent(code))


def run(machine: Machine, code: str, *, wrapper: Sequence[str] = (), **more: str) -> Any:
    """Run `code` against the machine; return what it gave to `answer(...)`, None if nothing."""
    result = subprocess.run(
        [*wrapper, *script(code)],
        env=simulated.environment(machine, **more),
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert result.returncode == 0, f"{result.returncode}: {result.stderr}"
    return json.loads(result.stdout) if result.stdout.strip() else None


def start(machine: Machine, code: str, **more: str) -> subprocess.Popen[str]:
    """Start a client; the caller reads its answers line by line and ends it."""
    return subprocess.Popen(
        script(code),
        env=simulated.environment(machine, **more),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
