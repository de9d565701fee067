"""Choosing cards when no extender did: pure comparators in a map, one selection.

A share goes to the fullest card that fits (or the emptiest, by the pod's policy); one whole card is taken where it
tears the fewest links between free cards; several are the best connected set.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vcuda.spec import fit
from vcuda.spec.errors import DoesNotFit, Reason
from vcuda.spec.fit import CardState
from vcuda.spec.inventory import Card
from vcuda.spec.placement import CardShare, share_of
from vcuda.spec.request import ContainerRequest, PodRequest, Policy

# Sets of cards beyond this number are not all compared; 8 of 16 cards are 12,870 sets.
_MAX_SETS = 15_000

_Key = Callable[[CardState], tuple[Any, ...]]


def _fullest(state: CardState) -> tuple[Any, ...]:
    return state.free_cores, state.free_blocks, state.card.minor


def _emptiest(state: CardState) -> tuple[Any, ...]:
    return -state.free_cores, -state.free_blocks, state.card.minor


SHARE_ORDER: Mapping[Policy | None, _Key] = {
    None: _fullest,
    Policy.FGD: _fullest,
    Policy.BINPACK: _fullest,
    Policy.TOPOLOGY: _fullest,
    Policy.SPREAD: _emptiest,
}


def choose(request: PodRequest, container: ContainerRequest, states: Sequence[CardState]) -> tuple[CardShare, ...]:
    """The container's card shares. Raises DoesNotFit, saying why each card was passed over."""
    fitting = []
    reasons: Counter[Reason] = Counter()
    for state in states:
        reason = _why_not(request, container, state)
        if reason is None:
            fitting.append(state)
        else:
            reasons[reason] += 1
    if len(fitting) < container.card_count:
        raise _does_not_fit(container, len(states), len(fitting), reasons)
    if not container.whole:
        chosen = [min(fitting, key=SHARE_ORDER[request.policy])]
    else:
        chosen = _whole(fitting, container.card_count)
    return tuple(share_of(container, state.card) for state in chosen)


def allowed(request: PodRequest, card: Card) -> bool:
    """Whether the pod accepts a card by its model and UUID."""
    return request.models.allows(card.model) and request.uuids.allows(card.uuid)


def _why_not(request: PodRequest, container: ContainerRequest, state: CardState) -> Reason | None:
    if not allowed(request, state.card):
        return Reason.CARD_NOT_ALLOWED
    return fit.why_not(state, container)


def _does_not_fit(container: ContainerRequest, cards: int, fitting: int, reasons: Counter[Reason]) -> DoesNotFit:
    if not cards:
        return DoesNotFit(Reason.NO_CARDS, "this node has no cards")
    if container.whole and set(reasons) - {Reason.UNHEALTHY_CARD, Reason.CARD_NOT_ALLOWED}:
        reason = Reason.INSUFFICIENT_WHOLE_CARDS
    else:
        reason = reasons.most_common(1)[0][0] if reasons else Reason.INSUFFICIENT_WHOLE_CARDS
    details = ", ".join(f"{count} {name}" for name, count in sorted(reasons.items()))
    return DoesNotFit(
        reason,
        f"container {container.name!r} asks for {container.cores} cores and {container.memory_blocks} blocks; "
        f"{fitting} of {cards} cards could take it ({details or 'no other card'})",
    )


def _rank(card: Card, peer: Card) -> int:
    return max(dict(card.links).get(peer.uuid, 0), dict(peer.links).get(card.uuid, 0))


def _whole(free: Sequence[CardState], count: int) -> list[CardState]:
    """The set with the most closeness inside; among equals the one that leaves the rest best connected."""
    ordered = sorted(free, key=lambda state: state.card.minor)
    ranks = {
        (first.card.uuid, second.card.uuid): _rank(first.card, second.card)
        for first, second in itertools.permutations(ordered, 2)
    }

    def score(some: Iterable[CardState]) -> tuple[Any, ...]:
        chosen = tuple(some)
        names = {state.card.uuid for state in chosen}
        inside = sum(ranks[a.card.uuid, b.card.uuid] for a, b in itertools.combinations(chosen, 2))
        nodes = len({state.card.numa_node for state in chosen})
        torn = sum(rank for (a, b), rank in ranks.items() if a in names and b not in names)
        return -inside, nodes, torn, tuple(state.card.minor for state in chosen)

    sets = itertools.islice(itertools.combinations(ordered, count), _MAX_SETS)
    return list(min(sets, key=score))
