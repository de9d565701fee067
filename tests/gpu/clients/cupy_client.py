"""A CuPy program: fills its share through the pool named on the command line (`plain`, `pool`, `async`, `managed`), recovers, computes."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import cupy

MIB = 1 << 20
KERNEL = cupy.ElementwiseKernel("float32 x, float32 y", "float32 z", "z = x * y + sin(x)", "mixed")
POOLS = {
    "plain": lambda: None,
    "pool": cupy.cuda.MemoryPool,
    "async": cupy.cuda.MemoryAsyncPool,
    "managed": lambda: cupy.cuda.MemoryPool(cupy.cuda.malloc_managed),
}
OUT_OF_MEMORY = 2


def fill() -> tuple[int, bool]:
    held = []
    try:
        while True:
            held.append(cupy.ones(64 * MIB, dtype=cupy.uint8))
    except cupy.cuda.memory.OutOfMemoryError:
        return 64 * len(held), True
    except cupy.cuda.runtime.CUDARuntimeError as error:  # what a program without a pool is told
        return 64 * len(held), error.status == OUT_OF_MEMORY


def main(allocator: str) -> dict[str, Any]:
    pool = POOLS[allocator]()
    cupy.cuda.set_allocator(pool.malloc if pool else None)
    _, total = cupy.cuda.runtime.memGetInfo()
    reached, refused = fill()
    if pool:
        cupy.cuda.Device().synchronize()
        pool.free_all_blocks()
    x = cupy.arange(1 << 18, dtype=cupy.float32) / 1000
    made = KERNEL(x, x[::-1].copy())
    squares = x[: 512 * 512].reshape(512, 512) @ x[: 512 * 512].reshape(512, 512)
    found = hashlib.sha256(cupy.asnumpy(made).tobytes() + cupy.asnumpy(squares).tobytes()).hexdigest()
    return {"total_mib": total // MIB, "reached_mib": reached, "refused": refused, "digest": found}


print(json.dumps(main(sys.argv[1])))
