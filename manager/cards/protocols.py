"""Whose a card is: the device plugin's or the claims'. Never both's: each counts what it gives, and knows no other."""

from __future__ import annotations

import dataclasses

from manager.cards.driver import NodeCard
from manager.cards.inventory import Snapshot
from manager.config.settings import Settings
from manager.config.values import DEVICE_PLUGIN, DRA
from manager.errors import UnusableSettings


def check(settings: Settings) -> None:
    """Raise UnusableSettings for settings that leave open whose a card is, or would give one to both."""
    both = settings.protocols == {DEVICE_PLUGIN, DRA}
    if both and not settings.dra_cards:
        raise UnusableSettings(
            "--protocols=device-plugin,dra offers each card one way: name those that claims get by --dra-cards, or "
            "choose one protocol"
        )
    if settings.dra_cards and not both:
        raise UnusableSettings(
            "--dra-cards says which cards claims get beside the device plugin: add --protocols=device-plugin,dra, or "
            "leave it out, for all cards are of the one protocol"
        )


def of_claims(settings: Settings, item: NodeCard) -> bool:
    """Whether claims get this card; else the device plugin has it."""
    if DRA not in settings.protocols:
        return False
    named = settings.dra_cards & {item.card.uuid, item.physical_uuid}
    return bool(named) or DEVICE_PLUGIN not in settings.protocols


def plugins_part(settings: Settings, snapshot: Snapshot) -> Snapshot:
    """What the device plugin offers of a node."""
    cards = tuple(item for item in snapshot.cards if not of_claims(settings, item))
    return snapshot if cards == snapshot.cards else dataclasses.replace(snapshot, cards=cards)
