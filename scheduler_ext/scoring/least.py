"""What a pod needs of a node's cards at least, whatever the way it is placed: sums, which are compared for nothing."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from scheduler_ext.state.cluster import Bools, Ints
from scheduler_ext.state.shape import Shape
from vcuda.spec.units import CORES_PER_CARD


class Least(NamedTuple):
    """Of the containers that keep running: cores and blocks in all, places on cards, and the smallest of these."""

    cores: int
    blocks: int
    places: int
    smallest_cores: int
    smallest_blocks: int

    def lacks(self, usable: Bools, cores: Ints, blocks: Ints) -> Ints:
        """[k, 3]: of cores, blocks and places what lacks in `cores` and `blocks` [k, cards], free on usable cards."""
        cores, blocks = (np.where(usable, np.maximum(free, 0), 0) for free in (cores, blocks))
        places = np.minimum(
            cores // self.smallest_cores if self.smallest_cores else self.places,
            blocks // self.smallest_blocks if self.smallest_blocks else self.places,
        )
        there = cores.sum(axis=1), blocks.sum(axis=1), np.where(usable, places, 0).sum(axis=1)
        lacks: Ints = np.maximum(np.array(self[:3])[:, None] - np.array(there), 0).T
        return lacks


@functools.lru_cache(maxsize=256)
def least(shape: Shape) -> Least:
    """A whole card's memory is that of the card, so that here it asks for a single block."""
    ones = [
        (CORES_PER_CARD if step.whole else step.cores, 1 if step.whole else step.blocks, step.cards)
        for step in shape.steps
        if not step.init
    ]
    return Least(
        sum(cores * cards for cores, _, cards in ones),
        sum(blocks * cards for _, blocks, cards in ones),
        sum(cards for _, _, cards in ones),
        min((cores for cores, _, _ in ones), default=0),
        min((blocks for _, blocks, _ in ones), default=0),
    )
