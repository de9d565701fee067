"""What the example workloads share: a card through NVIDIA's CUDA driver API, and kernels that take a known time.

Nothing here knows that the card may be shared. The kernels spin on the card's own clock, so they take their time on a
real card too; the simulated one goes by their names.
"""

from __future__ import annotations

import time
from typing import Any

from cuda.bindings import driver

MIB = 1024 * 1024

_PTX = """
.version 6.0
.target sm_30
.address_size 64
{entries}
"""
_ENTRY = """
.visible .entry spin_{microseconds}us()
{{
    .reg .u64 %start, %now, %passed;
    .reg .pred %more;
    mov.u64 %start, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %passed, %now, %start;
    setp.lt.u64 %more, %passed, {nanoseconds};
    @%more bra again;
    ret;
}}
"""


class CudaError(RuntimeError):
    """A call of the driver API failed; `name` is CUDA's own, such as CUDA_ERROR_OUT_OF_MEMORY."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.name = name


def check(call: str, answer: tuple[Any, ...]) -> Any:
    """The value of a driver call, or CudaError."""
    error, *values = answer
    if error != driver.CUresult.CUDA_SUCCESS:
        raise CudaError(call, driver.CUresult(error).name)
    return values[0] if len(values) == 1 else values


class Gpu:
    """The first card that this process sees, with its primary context made current."""

    def __init__(self, *microseconds: int) -> None:
        check("cuInit", driver.cuInit(0))
        self.device = check("cuDeviceGet", driver.cuDeviceGet(0))
        self.context = check("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(self.device))
        check("cuCtxSetCurrent", driver.cuCtxSetCurrent(self.context))
        self.stream = check("cuStreamCreate", driver.cuStreamCreate(0))
        self._kernels = self._load(microseconds) if microseconds else {}

    @staticmethod
    def _load(microseconds: tuple[int, ...]) -> dict[int, Any]:
        entries = "".join(_ENTRY.format(microseconds=us, nanoseconds=us * 1000) for us in microseconds)
        image = _PTX.format(entries=entries).encode() + b"\0"
        module = check("cuModuleLoadData", driver.cuModuleLoadData(image))
        return {
            us: check("cuModuleGetFunction", driver.cuModuleGetFunction(module, f"spin_{us}us".encode()))
            for us in microseconds
        }

    def describe(self) -> str:
        name = check("cuDeviceGetName", driver.cuDeviceGetName(100, self.device))
        free, total = check("cuMemGetInfo", driver.cuMemGetInfo())
        return f"{name.split(bytes(1))[0].decode()}: {total // MIB} MiB in all, {free // MIB} MiB free"

    def allocate(self, size: int) -> int:
        """Bytes on the card. Raises CudaError."""
        return int(check("cuMemAlloc", driver.cuMemAlloc(size)))

    def launch(self, microseconds: int) -> None:
        answer = driver.cuLaunchKernel(self._kernels[microseconds], 1, 1, 1, 32, 1, 1, 0, self.stream, 0, 0)
        check("cuLaunchKernel", answer)

    def synchronize(self) -> None:
        check("cuStreamSynchronize", driver.cuStreamSynchronize(self.stream))


class Pace:
    """Prints a line every few seconds, so that a pod's log shows that it goes on."""

    def __init__(self, seconds: float = 2.0) -> None:
        self._seconds = seconds
        self._next = time.monotonic() + seconds

    def due(self) -> bool:
        if time.monotonic() < self._next:
            return False
        self._next += self._seconds
        return True
