"""fgd: fragmentation gradient descent, the default policy.

The idea is that of "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent"
(ATC'23): the fragmentation of a node is the part of its free cards that a typical pod, drawn from the workload's
distribution, could not use; a pod goes where it increases the cluster's expected fragmentation least.
For one typical pod m and one node: if m does not fit the node at all (cards, cpu or memory), every free part is a fragment;
else only the rests of those cards that are too small for m are.

Ours on top, in the order in which they decide:

- A share goes where it wastes least of the card: what the cut-off part was worth beyond the share's own value, at the prices
  of the best packing of the expected shares (see prices.py). Fragmentation asks whether one more pod fits into a rest, this asks
  how well the rest can be filled in the end.
- A typical pod finds a node usable as long as one of it fits, even if the node's cpu and memory will run out long before its
  cards do. So a node's free cards beyond those that its free cpu and memory could serve, at the expected pods' mean need per
  card, count as stranded, and stranding a card costs twice as much as fragmenting it: no share at all can use it.
- A card costs rent by how much pods that accept few models depend on its model.

docs/extender.md has what each is worth on the public trace.
"""

from __future__ import annotations

import numpy as np

from scheduler_ext.scoring.policies.base import Rest
from scheduler_ext.scoring.typical_pods import Typical
from scheduler_ext.state.cluster import Bools, Floats, Ints, View
from vcuda.spec.units import CORES_PER_CARD

_WASTE = 10.0  # more than a share can change of a node's fragmentation: waste decides first
_STRANDED = 2.0
# Between nearly equal gradients the fuller node and card win: it keeps whole cards and empty nodes together.
_TIE_NODE = 2e-2
_TIE_CARD = 1e-3


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
    value = view.worth(rest.cores, rest.blocks)
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


def waste(view: View, before: Rest, after: Rest, typical: Typical) -> Floats:
    """[k, cards]: what each card's taken part was worth beyond what is taken, in cards; below 0 where it fills a leftover.

    A part is as large as its scarcer half, cores or memory.
    """
    total = np.maximum(view.total_blocks, 1)

    # Not np.clip: on a few numbers it takes several times as long.
    def within(parts: Ints) -> Ints:
        return np.minimum(np.maximum(parts, 0), CORES_PER_CARD)

    def hundredths(cores: Ints, blocks: Ints) -> Ints:
        return within(np.minimum(cores, CORES_PER_CARD * blocks // total))

    cores, blocks = before.cores - after.cores, before.blocks - after.blocks
    taken = within(np.maximum(cores, -(-CORES_PER_CARD * blocks // total)))
    now, then = hundredths(before.cores, before.blocks), hundredths(after.cores, after.blocks)
    values, model = typical.values, view.model
    wasted: Floats = values[model, now] - values[model, then] - values[model, taken]
    return wasted


def one_card(view: View, before: Rest, after: Rest, _taken: Bools, typical: Typical) -> Floats:
    now, value, takes, count, useful = _fragments(view, before, typical)
    then_value = view.worth(after.cores, after.blocks)
    then_takes = _takes(view, after.cores, after.blocks, typical)
    # Only card g changes: correct the node's sums by it instead of summing all cards again for every g.
    then_useful = useful[:, None] - value[..., None] * takes + then_value[..., None] * then_takes
    then_count = count[:, None] - takes + then_takes
    possible = (then_count >= typical.cards) & _hosts(after, typical)[:, None]
    free = value.sum(axis=1, keepdims=True) - value + then_value
    then = free - (then_useful * possible * typical.weight).sum(axis=2)
    stranded = _stranded(value.sum(axis=1), before.cpu, before.memory, typical)
    then_stranded = _stranded(free, after.cpu[:, None], after.memory[:, None], typical)
    gradient = then - now[:, None] + _STRANDED * (then_stranded - stranded[:, None])
    rent = typical.rent[view.model] * (value - then_value)
    wasted = _WASTE * waste(view, before, after, typical)
    cost: Floats = wasted + gradient + rent + _TIE_NODE * free + _TIE_CARD * then_value
    return cost


def several_cards(view: View, before: Rest, after: Rest, _taken: Bools, typical: Typical) -> Floats:
    now, value, *_ = _fragments(view, before, typical)
    then, then_value, *_ = _fragments(view, after, typical)
    free: Floats = then_value.sum(axis=1)
    stranded = _stranded(value.sum(axis=1), before.cpu, before.memory, typical)
    then_stranded = _stranded(free, after.cpu, after.memory, typical)
    rent = (typical.rent[view.model] * (value - then_value)).sum(axis=1)
    cost: Floats = then - now + _STRANDED * (then_stranded - stranded) + rent + _TIE_NODE * free
    return cost
