"""What NVML says of cards, read in one way by whoever shares them out.

Functions raise pynvml.NVMLError; handles are NVML's.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pynvml


def load(library: Path | str) -> None:
    """Make this the library that pynvml calls, which by itself it would look for by name. Raises OSError."""
    pynvml.nvmlLib = ctypes.CDLL(str(library))
    pynvml._nvmlGetFunctionPointer_cache.clear()


def memory_bytes(handle: Any) -> int:
    """What tenants can ever have of a card or instance: all less the driver's own part (nvml.h, nvmlMemory_v2_t)."""
    total = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    try:
        reserved = int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).reserved)
    except (pynvml.NVMLError, AttributeError):  # drivers before 510 do not say
        return total
    return max(0, total - reserved)


def mig_enabled(handle: Any) -> bool:
    """Whether the card is in MIG mode now; cards that do not know the mode are not."""
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:
        return False
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def mig_instances(handle: Any) -> list[Any]:
    """Handles of the instances of a card in MIG mode."""
    found = []
    for place in range(int(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle))):
        try:
            found.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place))
        except pynvml.NVMLError_NotFound:
            continue  # the place is empty
    return found
