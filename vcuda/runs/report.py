"""What a run has used when it is over, a line for each of its cards: `vcuda run --report`."""

from __future__ import annotations

import time
from pathlib import Path

from vcuda import region
from vcuda.region import CardLimit, CardUsage
from vcuda.runs.booking import Booking
from vcuda.spec.units import format_bytes


def lines(entry: Booking, folder: Path) -> list[str]:
    """From the region in `folder`, before it is deleted; never raises."""
    seconds = max(0.0, time.time() - entry.since)
    try:
        limits, used = region.read_limits(folder), region.read_usage(folder)
    except (region.RegionError, OSError) as error:
        return [f"report: what the run used can't be told: {error}"]
    return [_line(limit, card, seconds) for limit, card in zip(limits, used.cards, strict=True)]


def _line(limit: CardLimit, used: CardUsage, seconds: float) -> str:
    gpu_seconds = used.gpu_time_ns / 1e9
    cores = f"{limit.cores}-{limit.core_limit}" if limit.core_limit > limit.cores else f"{limit.cores}"
    share = f" ({100 * gpu_seconds / seconds:.0f} cores of {cores})" if seconds else ""
    time_used = f"{gpu_seconds:.3f} s of GPU time{share}"
    if _unmetered(limit) and not used.gpu_time_ns:
        time_used = "GPU time not metered, the card was its own"
    return (
        f"report: card {limit.uuid}: "
        f"peak memory {format_bytes(used.memory_peak_bytes)} of {format_bytes(limit.memory_bytes)}; "
        f"{time_used} in {seconds:.1f} s; "
        f"launches waited {used.waited_ns / 1e9:.3f} s; {used.refusals} allocations refused"
    )


def _unmetered(limit: CardLimit) -> bool:
    """As the gate decides it (vc_gate_needed in region/share.h)."""
    return limit.whole or (not limit.shared and limit.core_limit == 100)
