"""A share as a container sees it, for tests: shims, real driver behind the alias, region, and clients run inside."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.simulated import python
from vcuda import region
from vcuda._build import native
from vcuda.driver import layout
from vcuda.sim import Machine

LIB = Path(native.__file__).resolve().parents[1] / "lib"
SECONDS = 60
MIB = 1 << 20

# What every client program begins with: the driver by its usual name, calls that return the CUresult.
PRELUDE = """
import ctypes as C, json, os, sys, time
MIB = 1 << 20
OUT_OF_MEMORY = 2
cu = C.CDLL("libcuda.so.1")
u64, size = C.c_uint64, C.c_size_t
def answer(value):
    print(json.dumps(value), flush=True)
def call(name, *arguments):
    return getattr(cu, name)(*arguments)
def ok(name, *arguments):
    result = call(name, *arguments)
    if result:
        sys.exit(f"{name}: CUresult {result}")
def info():
    free, total = size(), size()
    ok("cuMemGetInfo_v2", C.byref(free), C.byref(total))
    return [free.value, total.value]
def begin(device=0):
    context = C.c_void_p()
    ok("cuInit", 0)
    ok("cuCtxCreate_v2", C.byref(context), 0, device)
    return context
def alloc(count, name="cuMemAlloc_v2", *more):
    pointer = u64()
    result = call(name, C.byref(pointer), size(count), *more)
    return result, pointer
def fill(count, name="cuMemAlloc_v2", *more):
    held = []
    while True:
        result, pointer = alloc(count, name, *more)
        if result:
            return result, held
        held.append(pointer)
class Location(C.Structure):
    _fields_ = [("type", C.c_int), ("id", C.c_int)]
class Properties(C.Structure):
    _fields_ = [("type", C.c_int), ("handles", C.c_int), ("location", Location), ("pointer", C.c_void_p),
                ("flags", C.c_ubyte * 8)]
"""


def beside_refusals(said: str) -> str:
    """Standard error without the line that explains the first refusal of a process (test_shim_refusals.py)."""
    return "".join(line for line in said.splitlines(keepends=True) if not line.startswith("vcuda: refused "))


@dataclass(frozen=True)
class Share:
    """One container: `lib64` with the shims, `region_directory` with limits and usage."""

    folder: Path
    machine: Machine | None = None

    @property
    def lib64(self) -> Path:
        return self.folder / "lib64"

    @property
    def region_directory(self) -> Path:
        return self.folder / "vcuda"

    def environment(self, **more: str) -> dict[str, str]:
        machine = self.machine.environment() if self.machine else {}
        return {**os.environ, **machine, "LD_LIBRARY_PATH": str(self.lib64), **more}

    def start(self, code: str, *arguments: str, **more: str) -> subprocess.Popen[str]:
        """Start Python `code` with the prelude's names as a client of the share."""
        return subprocess.Popen(
            python(PRELUDE + textwrap.dedent(code), *arguments),
            env=self.environment(**more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, *arguments: str, errors: str = "", **more: str) -> Any:
        """Run `code` to its end; return the last thing it gave to `answer(...)`. Its stderr must be `errors`, and may explain a refusal."""
        process = self.start(code, *arguments, **more)
        output, said = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, said
        assert beside_refusals(said) == errors
        return json.loads(output.splitlines()[-1]) if output else None

    def usage(self) -> region.Usage:
        return region.read_usage(self.region_directory)


def end(process: subprocess.Popen[str]) -> None:
    """Let a client that waits for its input end by itself, as programs do. Raises TimeoutExpired, the client killed."""
    try:
        process.communicate(timeout=SECONDS)
    finally:
        process.kill()


def lay_out(folder: Path, cuda: Path, nvml: Path | None, machine: Machine | None = None) -> Share:
    """Make a share's library folder around the given real libraries, without a region."""
    share = Share(folder, machine)
    (share.lib64 / "drv").mkdir(parents=True)
    for name, real in (("cuda", cuda), ("nvidia-ml", nvml)):
        shutil.copy(LIB / "shim" / f"lib{name}.so.1", share.lib64)
        (share.lib64 / f"lib{name}.so").symlink_to(f"lib{name}.so.1")
        if real is not None:
            (share.lib64 / "drv" / f"lib{name}-driver.so.1").symlink_to(real)
    return share


def simulated(folder: Path, machine: Machine, cards: Sequence[region.CardLimit] | None) -> Share:
    """A share of a simulated machine's cards; None: without a region."""
    cuda, nvml = (
        machine.library_folder / f"{name}.so.{machine.driver_version}" for name in ("libcuda", "libnvidia-ml")
    )
    share = lay_out(folder, cuda, nvml, machine)
    layout.fit(share.lib64)
    if cards is not None:
        share.region_directory.mkdir()
        region.create(share.region_directory, cards)
    return share


def limit(machine: Machine, index: int = 0, memory_bytes: int = 256 * MIB, **more: Any) -> region.CardLimit:
    """Half of one of the machine's cards, with a small memory limit."""
    card = machine.cards[index]
    values: dict[str, Any] = {"cores": 50, "core_limit": 50, **more}
    return region.CardLimit(card.uuid, card.minor, memory_bytes, **values)
