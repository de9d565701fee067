"""What a card's driver takes for each kind of memory, natively: `python -m benchmarks.card_memory [--driver …] [--json FILE]`.

Each row is one step and how much less is free after it, in KiB: what the memory account and the simulated driver have to know. On the
simulated card it shows what the simulator does in the same steps. Run it alone: a neighbour's memory would be counted too.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _machine, _usable
from vcuda.runs.errors import RunError
from vcuda.sim import Machine

MIB = 1 << 20
TIMEOUT_SECONDS = 120
Step = tuple[str, Callable[[], object]]
KERNEL = """.version 7.0
.target sm_70
.address_size 64
.visible .entry k(.param .u64 none) {
  .local .align 8 .b8 frame[FRAME];
  .reg .pred %skip; .reg .u64 %value; .reg .u64 %place;
  ld.param.u64 %value, [none];
  setp.eq.u64 %skip, %value, 0;
  @%skip bra end;
  mov.u64 %place, frame;
  add.u64 %place, %place, %value;
  st.local.u64 [%place], %value;
  ld.local.u64 %value, [%place+8];
  st.global.u64 [%value], %value;
end:
  ret;
}
"""
TINY = ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry k(){ret;}\n"
GLOBAL = ".version 7.0\n.target sm_70\n.address_size 64\n.visible .global .b8 g[SIZE];\n.visible .entry k(){ret;}\n"


class Steps:
    """The steps, kind by kind; each is taken when its second half is called. Only in the process that measures."""

    def __init__(self) -> None:
        # Loads libcuda.so.1.
        from cuda.bindings import driver

        self.driver: Any = driver
        self.kept: list[Any] = []
        self.location = driver.CUmemLocation()
        self.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE

    def __iter__(self) -> Iterator[Step]:
        for kind in (self.plain, self.arrays, self.physical, self.pools, self.code, self.settings):
            yield from kind()

    def ok(self, result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise SystemExit(f"CUresult {int(result[0])}")
        return result[1] if len(result) == 2 else result[1:]

    def keep(self, what: str, make: Callable[..., Any], *arguments: object, count: int = 1) -> Step:
        return what, lambda: self.kept.extend(self.ok(make(*arguments)) for _ in range(count))

    def do(self, what: str, call: Callable[..., Any], *arguments: object, count: int = 1) -> Step:
        return what, lambda: [self.ok(call(*arguments)) for _ in range(count)]

    def drop(self, what: str, free: Callable[[Any], Any]) -> Step:
        def all_of_them() -> None:
            while self.kept:
                self.ok(free(self.kept.pop()))

        return what, all_of_them

    def plain(self) -> Iterator[Step]:
        d = self.driver
        yield self.keep("a second context", d.cuCtxCreate, None, 0, self.ok(d.cuDeviceGet(0)))
        yield self.drop("  destroyed", d.cuCtxDestroy)
        for size in (1, MIB, MIB + 1, 2 * MIB + 1, 5 * MIB):
            yield self.keep(f"cuMemAlloc of {size} bytes", d.cuMemAlloc, size)
            yield self.keep("  another", d.cuMemAlloc, size)
            yield self.drop("  both freed", d.cuMemFree)
        yield self.keep("8,192 of 1 byte", d.cuMemAlloc, 1, count=8192)
        yield self.drop("  freed", d.cuMemFree)
        yield self.keep("cuMemAllocManaged of 32 MiB", d.cuMemAllocManaged, 32 * MIB, 1)
        yield self.drop("  freed", d.cuMemFree)

    def _array(self, width: int, height: int, bits: int, channels: int, depth: int = 0) -> Any:
        d = self.driver
        about = d.CUDA_ARRAY3D_DESCRIPTOR()
        about.Width, about.Height, about.Depth, about.NumChannels = width, height, depth, channels
        names = {8: "UNSIGNED_INT8", 16: "UNSIGNED_INT16", 32: "FLOAT"}
        about.Format = getattr(d.CUarray_format, f"CU_AD_FORMAT_{names[bits]}")
        return d.cuArray3DCreate(about)

    def arrays(self) -> Iterator[Step]:
        for bits, channels in ((8, 1), (8, 2), (16, 1), (8, 4), (32, 1), (16, 4), (32, 2), (32, 4)):
            what = f"an array of 32 x 32, {channels} x {bits} bits"
            yield self.keep(what, self._array, 32, 32, bits, channels)
        yield self.keep("an array of 32, 4 x 32 bits", self._array, 32, 0, 32, 4)
        yield self.keep("an array of 8 x 8 x 8, 4 x 32 bits", self._array, 8, 8, 32, 4, 8)
        yield self.drop("  all destroyed", self.driver.cuArrayDestroy)
        for side in (200, 256, 300, 362, 512, 700, 1000):
            yield self.keep(f"an array of {side} x {side}, 4 x 32 bits", self._array, side, side, 32, 4)
            yield self.drop("  destroyed", self.driver.cuArrayDestroy)

    def physical(self) -> Iterator[Step]:
        d = self.driver
        kind = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        about = d.CUmemAllocationProp()
        about.type, about.location = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, self.location
        about.requestedHandleTypes = kind
        files: list[int] = []
        yield self.keep("cuMemCreate of 6 MiB", d.cuMemCreate, 6 * MIB, about, 0)
        yield (
            "  exported",
            lambda: files.append(int(self.ok(d.cuMemExportToShareableHandle(self.kept[0], kind, 0)))),
        )
        yield self.keep("  imported", lambda: d.cuMemImportFromShareableHandle(files[0], kind))
        yield self.drop("  both released", d.cuMemRelease)
        yield "  the file closed", lambda: os.close(files.pop())

    def _make_pool(self, made: list[Any], about: Any) -> None:
        made.append(self.ok(self.driver.cuMemPoolCreate(about)))

    def pools(self) -> Iterator[Step]:
        d = self.driver
        for title, most in (("a pool", 0), ("a pool of 64 MiB at most", 64 * MIB)):
            about = d.CUmemPoolProps()
            about.allocType, about.location = (
                d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED,
                self.location,
            )
            about.maxSize = most
            made: list[Any] = []
            yield title, functools.partial(self._make_pool, made, about)
            for size in (1, 20 * MIB, 33 * MIB):
                yield self.keep(f"  {size} bytes of it", d.cuMemAllocFromPoolAsync, size, made[0], 0)
            yield self.drop("  freed", lambda pointer: d.cuMemFreeAsync(pointer, 0))
            yield self.do("  trimmed", d.cuMemPoolTrimTo, made[0], 0)
            yield self.do("  destroyed", d.cuMemPoolDestroy, made[0])

    def code(self) -> Iterator[Step]:
        d = self.driver
        yield self.keep("200 modules of one small kernel", d.cuModuleLoadData, TINY.encode(), count=200)
        yield (
            "  their kernels looked up",
            lambda: [self.ok(d.cuModuleGetFunction(each, b"k")) for each in self.kept],
        )
        yield self.drop("  unloaded", d.cuModuleUnload)
        for size in (1000, 3 * MIB):
            text = GLOBAL.replace("SIZE", str(size)).encode()
            yield self.keep(f"a module with a variable of {size} bytes", d.cuModuleLoadData, text)
            yield self.drop("  unloaded", d.cuModuleUnload)
        for frame in (1024, 4096):
            text = KERNEL.replace("FRAME", str(frame)).encode()
            what = f"a module whose kernel has {frame} bytes of local memory"
            yield self.keep(what, d.cuModuleLoadData, text)
            yield "  one thread of it launched", self._launch
            yield self.drop("  unloaded", d.cuModuleUnload)

    def _launch(self) -> None:
        function = self.ok(self.driver.cuModuleGetFunction(self.kept[0], b"k"))
        arguments = ((0,), (ctypes.c_uint64,))
        self.ok(self.driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0))

    def settings(self) -> Iterator[Step]:
        d = self.driver
        for count in (1, 1, 14, 48, 64):
            yield self.do(f"{count} more streams", d.cuStreamCreate, 1, count=count)
        for kib in (2, 8, 1):
            limit = d.CUlimit.CU_LIMIT_STACK_SIZE
            yield self.do(f"the stack limit set to {kib} KiB", d.cuCtxSetLimit, limit, kib << 10)
        limit = d.CUlimit.CU_LIMIT_MALLOC_HEAP_SIZE
        yield self.do("the heap limit set to 64 MiB", d.cuCtxSetLimit, limit, 64 * MIB)


def measure() -> list[tuple[str, int]]:
    """In a process that was led to one card: each step, and the KiB it took."""
    from cuda.bindings import driver as d

    d.cuInit(0)
    d.cuCtxSetCurrent(d.cuDevicePrimaryCtxRetain(d.cuDeviceGet(0)[1])[1])
    free, total = (int(value) for value in d.cuMemGetInfo()[1:])
    rows = [("the first context", (total - free) >> 10)]
    context = d.cuCtxGetCurrent()[1]
    for what, step in Steps():
        before = int(d.cuMemGetInfo()[1])
        step()
        d.cuCtxSetCurrent(context)
        d.cuCtxSynchronize()
        rows.append((what, (before - int(d.cuMemGetInfo()[1])) >> 10))
    return rows


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="card_memory", description="What a driver takes for each kind of memory.")
    parser.add_argument("--driver", choices=("auto", "real", "simulated"), default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args(arguments)
    card, version, environment = "simulated", "", {}
    with tempfile.TemporaryDirectory(prefix="vcuda-card-memory-") as folder:
        try:
            found = _usable.find(24 << 30, alone=True)
            card, version, environment = found.card.model, found.version, found.environment()
        except RunError as error:
            if options.driver == "real":
                print(f"card_memory: {error}", file=sys.stderr)
                return 1
        if card == "simulated" or options.driver == "simulated":
            card, environment = "simulated", Machine.create(Path(folder, "machine")).environment()
        result = subprocess.run(
            [
                sys.executable,
                "-c",
                "import json; from benchmarks import card_memory as m; print(json.dumps(m.measure()))",
            ],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    if result.returncode != 0:
        print("card_memory: the measuring process failed; its message is above", file=sys.stderr)
        return 1
    rows = json.loads(result.stdout.splitlines()[-1])
    about = {**_machine.describe(), "card": card, **({"driver": version} if version else {})}
    print(_machine.line(about))
    print(*(f"{what:58}{kib:>12,} KiB" for what, kib in rows), sep="\n")
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
