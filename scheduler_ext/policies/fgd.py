"""fgd: fragmentation gradient descent, the default policy.

The idea is that of "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent"
(ATC'23): the fragmentation of a node is the part of its free cards that a typical pod, drawn from the workload's
distribution, could not use; a pod goes where it increases the cluster's expected fragmentation least.
For one typical pod m and one node: if m does not fit the node at all (cards, cpu or memory), every free part is a fragment;
else only the rests of those cards that are too small for m are.

Ours on top: a typical pod finds a node usable as long as one of it fits, even if the node's cpu and memory will run out
long before its cards do. So a node's free cards beyond those that its free cpu and memory could serve, at the typical
pods' mean need per card, count as stranded, and stranding cards costs as much as fragmenting them. On the public trace that
is worth 1.2 points of allocation.
"""

from __future__ import annotations

import numpy as np

from scheduler_ext.cluster import Bools, Floats, Ints, View
from scheduler_ext.policies.base import Rest, worth
from scheduler_ext.workload import Typical
from vcuda.spec.units import CORES_PER_CARD

# Between equal gradients the fuller card and node win: it keeps whole cards and empty nodes together.
_TIE_CARD = 1e-3
_TIE_NODE = 1e-5


def _takes(view: View, cores: Ints, blocks: Ints, typical: Typical) -> Bools:
    """[k, cards, m]: whether each card, in the given state, can take (one card of) each typical pod."""
    share = (cores[..., None] >= typical.cores) & (blocks[..., None] >= typical.blocks)
    untouched = (cores == CORES_PER_CARD) & (blocks == view.total_blocks)
    fits: Bools = np.where(typical.whole, untouched[..., None], share) & view.usable[..., None]
    if typical.allowed is not None:
        fits &= typical.allowed[view.model]
    return fits


def _hosts(rest: Rest, typical: Typical) -> Bools:
    """[k, m]: whether the node's cpu and memory suffice for each typical pod."""
    hosts: Bools = (rest.cpu[:, None] >= typical.cpu_milli) & (rest.memory[:, None] >= typical.memory_bytes)
    return hosts


def _fragments(view: View, rest: Rest, typical: Typical) -> tuple[Floats, Floats, Bools, Ints, Floats]:
    value = worth(view, rest.cores, rest.blocks)
    takes = _takes(view, rest.cores, rest.blocks, typical)
    count = takes.sum(axis=1)
    useful = (value[..., None] * takes).sum(axis=1)
    possible = (count >= typical.cards) & _hosts(rest, typical)
    expected = value.sum(axis=1) - (useful * possible * typical.weight).sum(axis=1)
    return expected, value, takes, count, useful


def _stranded(free: Floats, cpu: Ints, memory: Ints, typical: Typical) -> Floats:
    """Of a node's free cards (in cards), those that its cpu and memory could not serve."""
    served = np.minimum(cpu / typical.cpu_per_card, memory / typical.memory_per_card)
    return np.maximum(0.0, free - np.maximum(served, 0.0))


def fragmentation(view: View, rest: Rest, typical: Typical) -> Floats:
    """[k]: how many cards' worth of each node's free cards the expected typical pod can't use."""
    return _fragments(view, rest, typical)[0]


def one_card(view: View, before: Rest, after: Rest, _taken: Bools, typical: Typical) -> Floats:
    now, value, takes, count, useful = _fragments(view, before, typical)
    then_value = worth(view, after.cores, after.blocks)
    then_takes = _takes(view, after.cores, after.blocks, typical)
    # Only card g changes: correct the node's sums by it instead of summing all cards again for every g.
    then_useful = useful[:, None] - value[..., None] * takes + then_value[..., None] * then_takes
    then_count = count[:, None] - takes + then_takes
    possible = (then_count >= typical.cards) & _hosts(after, typical)[:, None]
    free = value.sum(axis=1, keepdims=True) - value + then_value
    then = free - (then_useful * possible * typical.weight).sum(axis=2)
    stranded = _stranded(value.sum(axis=1), before.cpu, before.memory, typical)
    then_stranded = _stranded(free, after.cpu[:, None], after.memory[:, None], typical)
    gradient = then - now[:, None] + then_stranded - stranded[:, None]
    cost: Floats = gradient + _TIE_CARD * then_value + _TIE_NODE * free
    return cost


def several_cards(view: View, before: Rest, after: Rest, _taken: Bools, typical: Typical) -> Floats:
    now, value, *_ = _fragments(view, before, typical)
    then, then_value, *_ = _fragments(view, after, typical)
    free: Floats = then_value.sum(axis=1)
    stranded = _stranded(value.sum(axis=1), before.cpu, before.memory, typical)
    return then - now + _stranded(free, after.cpu, after.memory, typical) - stranded + _TIE_NODE * free
