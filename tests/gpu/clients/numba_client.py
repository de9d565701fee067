"""A numba-cuda program, a client of the driver API: `memory` runs into the limit and goes on, `kernel` compiles one and computes."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import numpy
from numba import cuda
from numba.cuda.cudadrv.driver import CudaAPIError

MIB = 1 << 20


@cuda.jit
def mixed(x: Any, y: Any) -> None:
    at = cuda.grid(1)
    if at < x.size:
        y[at] = 2 * x[at] + 1


def memory() -> dict[str, Any]:
    total = cuda.current_context().get_memory_info().total
    held, error = [], 0
    try:
        while len(held) < 1 << 14:
            held.append(cuda.device_array(64 * MIB, dtype=numpy.uint8))
    except CudaAPIError as refused:
        error = int(refused.code)
    reached = 64 * len(held)
    held.clear()
    cuda.current_context().deallocations.clear()
    data = numpy.arange(1 << 20, dtype=numpy.float32)
    intact = bool((cuda.to_device(data).copy_to_host() == data).all())
    return {"total_mib": total // MIB, "reached_mib": reached, "error": error, "intact": intact}


def kernel() -> dict[str, Any]:
    x = numpy.arange(10_000, dtype=numpy.float32)
    y = cuda.to_device(numpy.zeros_like(x))
    mixed[100, 128](cuda.to_device(x), y)
    made = y.copy_to_host()
    return {"digest": hashlib.sha256(made.tobytes()).hexdigest(), "right": bool((made == 2 * x + 1).all())}


print(json.dumps({"memory": memory, "kernel": kernel}[sys.argv[1]]()))
