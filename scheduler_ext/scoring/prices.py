"""What cards and their free parts are worth to the pods that are expected: values of free parts, rents of cards.

A card is cut into shares like a roll of paper into strips. For a mix of wanted sizes the linear relaxation of that
problem (Gilmore and Gomory 1961) needs the fewest cards, and its dual gives each size a price, in cards, such that no
way to fill a card is worth more than one card. The value of a free part is the most that fits into it at those prices.
What a share takes beyond its own value is what the best packing of the expected pods loses by placing it there.

The rent of a sort of cards, a model on nodes of one size, is how much of it the expected pods would ask for if each
kind spread evenly over the sorts that it can use: cards that choosy or large pods depend on are dear to those that
could go elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scheduler_ext.state.cluster import Bools, Floats, Ints
from vcuda.spec.units import CORES_PER_CARD

_MOST_SIZES = 32
_MOST_STEPS = 64  # of the simplex method; every step's prices are usable, the last ones are the best
_EPSILON = 1e-9
_MOST_RENT = 2.0  # like stranding: a sort that many depend on is no reason to waste as much as a fifth of another card


def _values(sizes: list[int], prices: list[float]) -> tuple[list[float], list[int]]:
    """Per free amount 0…100: the most value that fits; and for a whole card, how many of each size make it up.

    Plain numbers: with a few dozen sizes that is several times faster than arrays.
    """
    pairs = list(zip(sizes, prices, range(len(sizes)), strict=True))
    value, last = [0.0] * (CORES_PER_CARD + 1), [-1] * (CORES_PER_CARD + 1)
    for free in range(1, CORES_PER_CARD + 1):
        best, chosen = value[free - 1], -1
        for size, price, position in pairs:
            if size > free:
                break
            if value[free - size] + price > best + _EPSILON:
                best, chosen = value[free - size] + price, position
        value[free], last[free] = best, chosen
    counts, free = [0] * len(sizes), CORES_PER_CARD
    while free > 0:
        if last[free] < 0:
            free -= 1
        else:
            counts[last[free]] += 1
            free -= sizes[last[free]]
    return value, counts


def values(wanted: Mapping[int, float]) -> Floats:
    """The value in cards of a card's free hundredths 0…100, [101], for shares wanted by size (1…99) and weight.

    A whole free card is worth 1, also if no share is wanted. Column generation over the patterns of one card, each
    found by a knapsack over the hundredths; the basis holds as many patterns as there are sizes.
    """
    frequent = sorted(wanted, key=lambda size: (-wanted[size], size))[:_MOST_SIZES]
    sizes = sorted(frequent)
    value = [0.0] * CORES_PER_CARD + [1.0]
    if not sizes:
        return np.array(value)
    demand = np.array([wanted[size] for size in sizes], np.float64)
    patterns = np.diag([float(CORES_PER_CARD // size) for size in sizes])
    for _ in range(_MOST_STEPS):
        prices = np.maximum(np.linalg.solve(patterns.T, np.ones(len(sizes))), 0.0)
        value, counts = _values(sizes, prices.tolist())
        if value[CORES_PER_CARD] <= 1.0 + _EPSILON:
            break
        amounts = np.linalg.solve(patterns, demand)
        change = np.linalg.solve(patterns, np.array(counts, np.float64))
        rising = change > _EPSILON
        leaves = np.where(rising, np.maximum(amounts, 0.0) / np.where(rising, change, 1.0), np.inf).argmin()
        patterns[:, leaves] = counts
    return np.array(value) / value[CORES_PER_CARD]


def rents(wanted: Floats, accepted: Bools, supply: Ints) -> Floats:
    """Per sort, in cards per card, 0…2, and 0 for the least wanted: `wanted` [n] cards by kinds that accept sorts
    [n, sorts], of which there are `supply` [sorts] cards. Kinds that no card can serve are left out.
    """
    there = (accepted * supply).sum(axis=1)
    served = there > 0
    total = wanted[served].sum()
    if not total:
        return np.zeros(len(supply))
    parts = wanted[served] / total / (there[served] / supply.sum())
    density: Floats = (accepted[served] * parts[:, None]).sum(axis=0)
    least = density[supply > 0].min()
    return np.where(supply > 0, np.clip(density - least, 0.0, _MOST_RENT), 0.0)
