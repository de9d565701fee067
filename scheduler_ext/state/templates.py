"""Nodes that do not exist yet, as an autoscaler describes them: what cards they would come with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from scheduler_ext.protocol.reasons import ExtenderReason
from scheduler_ext.state import objects
from vcuda.spec.errors import Reason
from vcuda.spec.inventory import Card, label_value
from vcuda.spec.names import Names
from vcuda.spec.request import CardFilter
from vcuda.spec.units import BLOCK_BYTES, CORES_PER_CARD, parse_quantity

_MOST_CARDS = 64


class Template(NamedTuple):
    """A node as it would be when it is new. `problem`: why nothing can be said of it, a reason and a message."""

    cards: tuple[Card, ...]
    cpu_milli: int
    memory_bytes: int
    labels: Mapping[str, str]
    problem: str | None = None


def read(data: Mapping[str, Any], names: Names, models: Iterable[str], accepted: CardFilter) -> Template:
    """Cards by the inventory copied from a node of the same group, else by allocatable resources and model label.

    A label is not a model's whole name: it stands for that one of `models`, or of those that a pod names, whose label
    it is.
    """
    seen = objects.node(data, names)
    # A new node's cards are other ones, and well.
    cards = tuple(
        replace(card, uuid=f"new-{place}", healthy=True, links=_renamed(card, seen.cards))
        for place, card in enumerate(seen.cards)
    )
    found = Template(cards, seen.cpu_milli, seen.memory_bytes, seen.labels)
    if cards:
        return found
    cores, blocks = (_whole(data, name) for name in (names.core, names.memory))
    count = cores // CORES_PER_CARD
    if not cores:
        way_out = f"give the autoscaler's template {names.core} and {names.memory}"
        return found._replace(problem=f"{ExtenderReason.NO_INVENTORY}: its allocatable has no {names.core}; {way_out}")
    if not 1 <= count <= _MOST_CARDS or blocks < count:
        amounts = f"{cores} {names.core} and {blocks} {names.memory}"
        rule = f"are no 1 to {_MOST_CARDS} cards of {CORES_PER_CARD} cores with memory"
        return found._replace(problem=f"{Reason.INVALID_INVENTORY}: its allocatable {amounts} {rule}")
    label = seen.labels.get(names.model_label)
    if not isinstance(label, str) or not label:
        if accepted != CardFilter():
            lacks = f"it has no label {names.model_label}, and the pod accepts certain models only"
            return found._replace(problem=f"{Reason.CARD_NOT_ALLOWED}: {lacks}")
        label = ""
    known = (*models, *sorted(accepted.include), *sorted(accepted.exclude))
    model = next((name for name in known if label_value(name) == label), label)
    size = blocks // count * BLOCK_BYTES
    return found._replace(cards=tuple(Card(f"new-{place}", place, model, size) for place in range(count)))


def _renamed(card: Card, cards: tuple[Card, ...]) -> tuple[tuple[str, int], ...]:
    places = {one.uuid: place for place, one in enumerate(cards)}
    return tuple((f"new-{places[peer]}", rank) for peer, rank in card.links if peer in places)


def _whole(data: Mapping[str, Any], resource: str) -> int:
    """An allocatable amount; 0 for what is none."""
    status = data.get("status")
    amounts = status.get("allocatable") if isinstance(status, Mapping) else None
    number, divisor = parse_quantity(amounts.get(resource) if isinstance(amounts, Mapping) else None) or (
        0,
        1,
    )
    return min(max(number // divisor, 0), 2**31)
