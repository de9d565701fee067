"""Limits of device memory that the driver itself holds, per control group: NVML since 615.

Source: NVIDIA, "MPS v3 Memory Partitioning". They hold for whoever allocates in the group, by whichever library.
Only hard ones are set: a soft limit says whom MPS may evict, which our cards are not shared with, and one that a group
leaves behind when it is removed stays counted in the groups above it for good.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml


class CannotLimit(Exception):
    """The message says why; where it is so for every group, it is the same for every group."""


@dataclass(frozen=True)
class MemoryLimit:
    """What is in force for a group: its own, or, where the driver's own accounting counts, the nearest one above it."""

    hard_bytes: int
    used_bytes: int


def put(handle: Any, group: Path, hard_bytes: int | None) -> None:
    """Set a group's limit (its folder) on a card; None: none any more. Raises CannotLimit."""
    hard = pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX if hard_bytes is None else hard_bytes
    try:
        pynvml.nvmlDeviceSetMemoryLimits_v1(handle, pynvml.c_nvmlSetMemoryLimits_v1_t(bytes(group), 0, hard))
    except pynvml.NVMLError as error:
        raise _why(error) from error


def get(handle: Any, group: Path) -> MemoryLimit | None:
    """What counts for a group on a card; None: nothing. Raises CannotLimit."""
    found = pynvml.c_nvmlGetMemoryLimits_v1_t(bytes(group))
    try:
        pynvml.nvmlDeviceGetMemoryLimits_v1(handle, found)
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_NOT_SUPPORTED:
            return None  # the driver's own accounting says so of a group that has no limit, too
        raise _why(error) from error
    if found.hardLimit == pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX:
        return None
    return MemoryLimit(int(found.hardLimit), int(found.currentUsed))


def _why(error: Any) -> CannotLimit:
    known = {
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "the driver has no limits of its own (615 has)",
        pynvml.NVML_ERROR_NOT_SUPPORTED: "the driver counts no memory of control groups here: the kernel has neither "
        "dmem nor misc, or the driver was told not to (RmMemacctMode=0)",
        pynvml.NVML_ERROR_NO_PERMISSION: "NVML lets only root set them",
        pynvml.NVML_ERROR_NOT_FOUND: "the control group is gone, or the groups above it do not hand dmem down",
    }
    if error.value in known:
        return CannotLimit(known[error.value])
    return CannotLimit(f"the driver refuses the limit: {error}")
