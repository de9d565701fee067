"""binpack: the fullest card that fits, on the fullest node."""

from __future__ import annotations

from scheduler_ext.scoring.policies.base import Rest
from scheduler_ext.scoring.typical_pods import Typical
from scheduler_ext.state.cluster import Bools, Floats, View

_CARD_FIRST = 1000.0  # more than any node's rest in cards: the card decides, the node breaks ties


def one_card(view: View, before: Rest, after: Rest, _taken: Bools, _typical: Typical) -> Floats:
    now, then = view.worth(before.cores, before.blocks), view.worth(after.cores, after.blocks)
    cost: Floats = then * _CARD_FIRST + now.sum(axis=1, keepdims=True) + then - now
    return cost


def several_cards(view: View, _before: Rest, after: Rest, _taken: Bools, _typical: Typical) -> Floats:
    rest: Floats = view.worth(after.cores, after.blocks).sum(axis=1)
    return rest
