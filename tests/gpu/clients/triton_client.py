"""A Triton kernel, compiled at run time and launched through Triton's own launcher."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def mixed(x_pointer, y_pointer, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton reads every name in it
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_pointer + at, mask=at < count)
    tl.store(y_pointer + at, x * 2 + tl.exp(-x), mask=at < count)


def main() -> dict[str, Any]:
    x = torch.linspace(0, 1, 100_003, device="cuda")
    y = torch.empty_like(x)
    for _ in range(100):
        mixed[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    right = bool(torch.allclose(y, x * 2 + torch.exp(-x)))
    return {"right": right, "digest": hashlib.sha256(y.cpu().numpy().tobytes()).hexdigest()}


print(json.dumps(main()))
