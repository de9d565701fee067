"""spread: the emptiest node, and on it the emptiest card."""

from __future__ import annotations

import numpy as np

from scheduler_ext.scoring.policies.base import Rest
from scheduler_ext.scoring.typical_pods import Typical
from scheduler_ext.state.cluster import Bools, Floats, View

_NODE_FIRST = 1000.0  # a node's mean rest decides down to 1/1000 card, the card breaks ties


def _mean_rest(view: View, now: Floats) -> Floats:
    cards = np.maximum(view.usable.sum(axis=1), 1)
    mean: Floats = now.sum(axis=1) / cards
    return mean


def one_card(view: View, before: Rest, after: Rest, _taken: Bools, _typical: Typical) -> Floats:
    now, then = view.worth(before.cores, before.blocks), view.worth(after.cores, after.blocks)
    return -_NODE_FIRST * _mean_rest(view, now)[:, None] - then


def several_cards(view: View, before: Rest, _after: Rest, _taken: Bools, _typical: Typical) -> Floats:
    return -_NODE_FIRST * _mean_rest(view, view.worth(before.cores, before.blocks))
