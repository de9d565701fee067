"""What people are to be told: differences between two books, and events that wait to be sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# Reasons of events.
BOOKING_DIFFERS = "BookingDiffers"
CARD_OVERBOOKED = "CardOverbooked"
RESIZE_REFUSED = "ResizeRefused"
REASONS = (BOOKING_DIFFERS, CARD_OVERBOOKED, RESIZE_REFUSED)


class Notice(NamedTuple):
    """An event on an object: a warning, with a reason for programs and a message for people."""

    kind: str  # Pod or Node
    namespace: str
    name: str
    uid: str
    reason: str
    message: str


@dataclass(slots=True)
class Difference:
    """What a node's manager says of a pod otherwise than we; `since` when on our clock. `told`: it has lasted."""

    text: str
    since: float
    told: bool = False
