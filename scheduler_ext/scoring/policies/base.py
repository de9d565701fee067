"""What a policy sees and answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from scheduler_ext.scoring.typical_pods import Typical
from scheduler_ext.state.cluster import Bools, Floats, Ints, View


class Rest(NamedTuple):
    """What is left: [k, cards] per card, [k] per node."""

    cores: Ints
    blocks: Ints
    cpu: Ints
    memory: Ints


# (view, before, after, taken, typical) → cost. `taken` [k, cards]: the cards that the container may take (one_card) or takes
# (several_cards). For one_card, `after` holds in column g the state of card g if card g is taken, all other cards
# being as before; the answer is [k, cards]. For several_cards, `after` is the state after the choice; the answer
# is [k]. Lower is better; values of impossible cards are ignored.
Score = Callable[[View, Rest, Rest, Bools, Typical], Floats]


class Scorer(NamedTuple):
    """A policy. `reads_workload`: its scores change when the typical pods do."""

    one_card: Score
    several_cards: Score
    reads_workload: bool = False
