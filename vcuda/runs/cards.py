"""The machine's cards as NVML tells them, in NVML's order; MIG instances are cards of their own."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pynvml

from vcuda.runs.errors import RunError
from vcuda.spec.inventory import Card


def discover(library: Path) -> tuple[Card, ...]:
    """Ask the NVML at `library`. Raises RunError with NVML's own words; a card that does not answer is unhealthy."""
    try:
        # pynvml looks for its library by name only; the one named here wins if it is loaded already.
        pynvml.nvmlLib = ctypes.CDLL(str(library))
        pynvml.nvmlInit()
    except (OSError, pynvml.NVMLError) as error:
        raise RunError(f"the driver's {library} does not work: {error}; does nvidia-smi?") from error
    try:
        count = pynvml.nvmlDeviceGetCount()
        return tuple(card for index in range(count) for card in _cards_at(index))
    except pynvml.NVMLError as error:
        raise RunError(f"the driver can't list its cards: {error}; does nvidia-smi?") from error
    finally:
        pynvml.nvmlShutdown()


def _cards_at(index: int) -> list[Card]:
    """The card at an index of NVML, or its MIG instances. A card that can't be opened has no name to book: left out."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        instances = _mig_instances(handle)
        return [_card(instance, handle) for instance in instances] if instances else [_card(handle, handle)]
    except pynvml.NVMLError_GpuIsLost:
        return []


def _mig_instances(handle: Any) -> list[Any]:
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:  # most cards know no MIG
        return []
    if current != pynvml.NVML_DEVICE_MIG_ENABLE:
        return []
    found = []
    for position in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            found.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, position))
        except pynvml.NVMLError_NotFound:
            continue
    return found


def _card(handle: Any, physical: Any) -> Card:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    reserved = 0
    try:
        # Version 2 tells what the driver keeps for itself: no tenant can ever have it.
        reserved = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).reserved
    except (pynvml.NVMLError, AttributeError):
        reserved = 0
    return Card(
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        minor=pynvml.nvmlDeviceGetMinorNumber(physical),
        model=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=max(0, memory.total - reserved),
    )
