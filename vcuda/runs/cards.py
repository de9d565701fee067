"""The machine's cards as NVML tells them, in NVML's order; MIG instances are cards of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pynvml

from vcuda.driver import nvml
from vcuda.runs.errors import RunError
from vcuda.spec.inventory import Card


def discover(library: Path) -> tuple[Card, ...]:
    """Ask the NVML at `library`. Raises RunError with NVML's own words; a card that does not answer is unhealthy."""
    try:
        nvml.load(library)
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
        instances = nvml.mig_instances(handle) if nvml.mig_enabled(handle) else []
        return [_card(instance, handle) for instance in instances] if instances else [_card(handle, handle)]
    except pynvml.NVMLError_GpuIsLost:
        return []


def _card(handle: Any, physical: Any) -> Card:
    return Card(
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        minor=pynvml.nvmlDeviceGetMinorNumber(physical),
        model=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=nvml.memory_bytes(handle),
    )
