"""How much of the processors other programs took while one of ours ran: what tells whether its times can be trusted."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

NOTABLE_PERCENT = 10.0
# The host takes processors away for milliseconds at a time, which a share of a few milliseconds feels: less of it counts.
NOTABLE_STOLEN_PERCENT = 0.5
_STEAL = 7  # of the fields of /proc/stat


class Elsewhere:
    """Counts from where it is made; children count as ours once they have been waited for."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.monotonic(), _busy_seconds(), _own_seconds()
        self._stolen = _stolen_seconds()

    def stolen_percent(self) -> float:
        """Of all processors' time since then, what the host gave to others while something here wanted to run."""
        capacity = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        return 100 * min(1.0, (_stolen_seconds() - self._stolen) / capacity) if capacity > 0 else 0.0

    def percent(self) -> float:
        """Of all processors' time since then, what neither this process nor its children used; stolen time counts."""
        capacity = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        others = _busy_seconds() - self._busy - (_own_seconds() - self._own)
        return 100 * min(1.0, max(0.0, others / capacity)) if capacity > 0 else 0.0


def _ticks() -> list[int]:
    """Of all processors since boot: user, nice, system, idle, iowait, irq, softirq, steal (proc(5), /proc/stat)."""
    return [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]


def _busy_seconds() -> float:
    ticks = _ticks()
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _stolen_seconds() -> float:
    return _ticks()[_STEAL] / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    mine, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return mine.ru_utime + mine.ru_stime + children.ru_utime + children.ru_stime
