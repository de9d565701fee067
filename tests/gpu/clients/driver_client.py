"""A client of the driver API (cuda-bindings): fills its share, recovers, reads what it is told about its memory."""

from __future__ import annotations

import json
import sys
from typing import Any

from cuda.bindings import driver as d

MIB = 1 << 20


def ok(result: tuple[Any, ...]) -> Any:
    if result[0] != 0:
        raise SystemExit(f"CUresult {int(result[0])}")
    return result[1] if len(result) == 2 else result[1:]


def main() -> dict[str, Any]:
    ok(d.cuInit(0))
    device = ok(d.cuDeviceGet(0))
    ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(device))))
    free, total = ok(d.cuMemGetInfo())
    held = []
    while True:
        status, pointer = d.cuMemAlloc(64 * MIB)
        if status != 0:
            break
        held.append(pointer)
    error, reached = int(status), 64 * len(held)
    ok(d.cuMemFree(held.pop()))
    again, pointer = d.cuMemAlloc(32 * MIB)
    data = bytes(range(256)) * 4096
    ok(d.cuMemcpyHtoD(pointer, data, len(data)))
    back = bytearray(len(data))
    ok(d.cuMemcpyDtoH(back, pointer, len(data)))
    return {
        "devices": ok(d.cuDeviceGetCount()),
        "total_mib": total // MIB,
        "free_mib": free // MIB,
        "device_total_mib": ok(d.cuDeviceTotalMem(device)) // MIB,
        "error": error,
        "reached_mib": reached,
        "again": int(again),
        "intact": bytes(back) == data,
    }


if len(sys.argv) == 1:
    print(json.dumps(main()))
