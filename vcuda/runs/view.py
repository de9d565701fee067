"""What the runs of a ledger hold and use right now, for `vcuda ls` and `vcuda show`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from vcuda import region
from vcuda.runs.booking import Booking, Share
from vcuda.runs.ledger import Ledger


@dataclass(frozen=True)
class ShareView:
    """One card of a run. Figures are None where another user's region may not be read; `achieved_cores` in 1/100 card.

    `waited_percent`: of the time looked at, what launches waited, all streams together.
    `usage`: the counters since the run began, and the share in force now.
    """

    share: Share
    core_limit: int
    memory_used_bytes: int | None
    achieved_cores: float | None
    usage: region.CardUsage | None = None
    waited_percent: float | None = None


@dataclass(frozen=True)
class RunView:
    """A run with its processes that use CUDA, as far as they may be seen.

    `limits_impossible`: processes that met limits of GPU time which make no sense; None where the region may not be
    read.
    """

    booking: Booking
    shares: tuple[ShareView, ...]
    processes: tuple[region.ProcessUsage, ...]
    limits_impossible: int | None = None


def look(ledger: Ledger, interval_seconds: float) -> list[RunView]:
    """Read all living runs twice, `interval_seconds` apart, to tell the GPU time in between."""
    before = {entry.name: _cards(ledger, entry) for entry in ledger.bookings()}
    began = time.monotonic_ns()
    time.sleep(interval_seconds)
    passed = max(1, time.monotonic_ns() - began)
    return [_view(ledger, entry, before.get(entry.name, {}), passed) for entry in ledger.bookings()]


def _usage(ledger: Ledger, entry: Booking) -> region.Usage | None:
    try:
        return region.read_usage(ledger.region_folder(entry.name))
    except (region.RegionError, OSError):  # another user's, or just ended
        return None


def _cards(ledger: Ledger, entry: Booking) -> dict[str, region.CardUsage]:
    usage = _usage(ledger, entry)
    return {} if usage is None else {card.uuid: card for card in usage.cards}


def _limits_in_force(ledger: Ledger, entry: Booking) -> dict[str, int]:
    try:
        return {card.uuid: card.core_limit for card in region.read_limits(ledger.region_folder(entry.name))}
    except (region.RegionError, OSError):
        return {}


def _view(ledger: Ledger, entry: Booking, before: dict[str, region.CardUsage], passed_ns: int) -> RunView:
    usage = _usage(ledger, entry)
    now = {} if usage is None else {card.uuid: card for card in usage.cards}
    in_force = _limits_in_force(ledger, entry)
    shares = []
    for share in entry.shares:
        card = now.get(share.uuid)
        achieved = waited = None
        if card is not None and (earlier := before.get(share.uuid)) is not None:
            achieved = 100 * max(0, card.gpu_time_ns - earlier.gpu_time_ns) / passed_ns
            waited = 100 * max(0, card.waited_ns - earlier.waited_ns) / passed_ns
        used = None if card is None else card.memory_used_bytes
        shares.append(ShareView(share, in_force.get(share.uuid, share.core_limit), used, achieved, card, waited))
    processes: Sequence[region.ProcessUsage] = () if usage is None else usage.processes
    living = tuple(process for process in processes if process.alive)
    return RunView(entry, tuple(shares), living, None if usage is None else usage.limits_impossible)
