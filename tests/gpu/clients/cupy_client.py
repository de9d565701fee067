"""A CuPy program: fills its share through the pool named on the command line (`plain`, `pool`, `async`, `managed`), recovers, computes."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import cupy

MIB = 1 << 20
KERNEL = cupy.ElementwiseKernel("float32 x, float32 y", "float32 z", "z = x * y + sin(x)", "mixed")
ALLOCATORS = {
    "plain": lambda: cupy.cuda.set_allocator(None),
    "pool": lambda: cupy.cuda.set_allocator(cupy.cuda.MemoryPool().malloc),
    "async": lambda: cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc),
    "managed": lambda: cupy.cuda.set_allocator(cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc),
}


def fill() -> tuple[int, bool]:
    held = []
    try:
        while True:
            held.append(cupy.ones(64 * MIB, dtype=cupy.uint8))
    except cupy.cuda.memory.OutOfMemoryError:
        return 64 * len(held), True


def main(allocator: str) -> dict[str, Any]:
    ALLOCATORS[allocator]()
    _, total = cupy.cuda.runtime.memGetInfo()
    reached, refused = fill()
    cupy.get_default_memory_pool().free_all_blocks()
    ALLOCATORS[allocator]()  # the pool that held it all is gone
    x = cupy.arange(1 << 18, dtype=cupy.float32) / 1000
    made = KERNEL(x, x[::-1].copy())
    squares = x[: 512 * 512].reshape(512, 512) @ x[: 512 * 512].reshape(512, 512)
    found = hashlib.sha256(cupy.asnumpy(made).tobytes() + cupy.asnumpy(squares).tobytes()).hexdigest()
    return {"total_mib": total // MIB, "reached_mib": reached, "refused": refused, "digest": found}


print(json.dumps(main(sys.argv[1])))
