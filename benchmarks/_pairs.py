"""Two ways to run the same program, one after the other in turns: the ratio of each pair, and their median."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Paired:
    """What the second way got done as part of the first: the median over the pairs, and the extremes."""

    what: str
    native_per_second: float
    of_native: float
    lowest: float
    highest: float
    pairs: int


def paired(what: str, native: Callable[[], float], share: Callable[[], float], count: int) -> Paired:
    """Run both `count` times, native first in every other pair; each returns what it got done per second.

    Raises ValueError for less than one pair.
    """
    if count < 1:
        raise ValueError(f"{count} pairs tell nothing")
    ratios, rates = [], []
    for turn in range(count):
        if turn % 2:
            got, base = share(), native()
        else:
            base, got = native(), share()
        rates.append(base)
        ratios.append(got / base)
    middle = statistics.median
    return Paired(what, middle(rates), middle(ratios), min(ratios), max(ratios), count)
