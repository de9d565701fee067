"""Placement policies: pure functions from card states to costs, in one map. No policy holds state or does I/O."""

from __future__ import annotations

from scheduler_ext.scoring.policies import binpack, fgd, spread, topology
from scheduler_ext.scoring.policies.base import Scorer
from vcuda.spec.request import Policy

SCORERS: dict[Policy, Scorer] = {
    Policy.FGD: Scorer(fgd.one_card, fgd.several_cards, reads_workload=True),
    Policy.BINPACK: Scorer(binpack.one_card, binpack.several_cards),
    Policy.SPREAD: Scorer(spread.one_card, spread.several_cards),
    Policy.TOPOLOGY: Scorer(topology.one_card, topology.several_cards),
}
