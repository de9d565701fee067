"""topology: several cards go where the best linked ones are free; everything else as binpack."""

from __future__ import annotations

import numpy as np

from scheduler_ext.scoring.policies import binpack
from scheduler_ext.scoring.policies.base import Rest
from scheduler_ext.scoring.typical_pods import Typical
from scheduler_ext.state.cluster import Bools, Floats, View

_LINKS_FIRST = 1000.0

one_card = binpack.one_card


def several_cards(view: View, before: Rest, after: Rest, taken: Bools, typical: Typical) -> Floats:
    pairs = taken[:, :, None] & taken[:, None, :]
    closeness: Floats = np.where(pairs, view.links, 0).sum(axis=(1, 2)) * _LINKS_FIRST
    return binpack.several_cards(view, before, after, taken, typical) - closeness
