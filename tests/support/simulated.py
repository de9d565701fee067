"""Run clients of a simulated machine in processes of their own, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import site
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from vcuda.sim import Machine

SECONDS = 60
# Two client programs begin with this: one looks through NVML, the other holds a context, memory and a stream of work.
_PRELUDE = "import json, sys\nfrom pynvml import *\n\ndef answer(value):\n    print(json.dumps(value))\n\n"


# Packages are found, but the .pth files of editable installs and tools are not obeyed: they import forty modules in each client.
_PACKAGES = f"import sys; sys.path += {site.getsitepackages()!r}\n"


def python(code: str, *arguments: str) -> list[str]:
    """The command line of a Python that runs `code` and starts in a third of the usual time."""
    return [sys.executable, "-S", "-c", _PACKAGES + code, *arguments]


def environment(machine: Machine, **more: str) -> dict[str, str]:
    """This process's environment with the machine's, and `more` on top."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VCUDA_SIM")}
    return {**kept, **machine.environment(), **more}


def nvml(machine: Machine, code: str, *, wrapper: Sequence[str] = (), **more: str) -> Any:
    """Run Python `code` with pynvml's names against the machine; return what it gave to `answer(...)`."""
    result = subprocess.run(
        [*wrapper, *python(_PRELUDE + textwrap.dedent(code))],
        env=environment(machine, **more),
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def program(machine: Machine, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end as a client of the machine."""
    return subprocess.run(
        command, env=environment(machine), capture_output=True, text=True, check=False, timeout=SECONDS
    )


_TENANT = """
import ctypes, sys, threading, time
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    if result:
        sys.exit(f"{name}: CUresult {result}")
device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), int(sys.argv[1]))
call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(int(sys.argv[2])))
print("ready", flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), __import__("os")._exit(0)), daemon=True).start()
while int(sys.argv[3]):
    call("cuMemsetD8Async", pointer, 0, ctypes.c_size_t(int(sys.argv[2])), None)
    call("cuCtxSynchronize")
time.sleep(600)
"""


@contextlib.contextmanager
def tenant(
    machine: Machine,
    *,
    card: int = 0,
    memory_bytes: int,
    busy: bool = False,
    wrapper: Sequence[str] = (),
    **more: str,
) -> Iterator[int]:
    """A CUDA process that holds `memory_bytes` on a card (and keeps it busy with memsets); yields its PID.

    `wrapper` is a command line to run it under; the PID is then the wrapper's. `more` goes into its environment.
    """
    process = subprocess.Popen(
        [*wrapper, *python(_TENANT, str(card), str(memory_bytes), str(int(busy)))],
        env=environment(machine, **more),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout and process.stderr
    try:
        if process.stdout.readline() != "ready\n":
            raise AssertionError(process.stderr.read())
        yield process.pid
    finally:
        process.kill()
        process.wait(SECONDS)
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()
