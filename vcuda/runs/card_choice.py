"""Which cards a run gets, and the refusal that says who holds what. Pure: cards and bookings in, cards out."""

from __future__ import annotations

import functools
import pwd
import time
from collections.abc import Sequence
from dataclasses import dataclass

from vcuda.printable import printable
from vcuda.region import CardLimit
from vcuda.runs.booking import Booking, Share
from vcuda.runs.errors import RunError
from vcuda.spec import inventory
from vcuda.spec.units import CORES_PER_CARD, format_bytes


@dataclass(frozen=True)
class RunRequest:
    """What a run asks of each of its cards. `memory_bytes` None: a whole card's own; `devices` empty: any card.

    `oversell_bytes`: what it may hold in all, beyond `memory_bytes` as managed memory; 0: no more than these.
    """

    cores: int
    core_limit: int
    memory_bytes: int | None
    cards: int = 1
    devices: tuple[str, ...] = ()
    oversell_bytes: int = 0

    @property
    def text(self) -> str:
        memory = "all its memory" if self.memory_bytes is None else format_bytes(self.memory_bytes)
        return f"{self.cores} cores and {memory}"


@dataclass(frozen=True)
class CardRoom:
    """A card and what bookings leave of it."""

    index: int
    card: inventory.Card
    bookings: tuple[Booking, ...]

    @property
    def shares(self) -> tuple[Share, ...]:
        return tuple(share for entry in self.bookings if (share := entry.on(self.card.uuid)))

    @property
    def free_cores(self) -> int:
        return CORES_PER_CARD - sum(share.cores for share in self.shares)

    @property
    def free_bytes(self) -> int:
        return self.card.memory_bytes - sum(share.memory_bytes for share in self.shares)

    def takes(self, request: RunRequest) -> bool:
        memory = self.card.memory_bytes if request.memory_bytes is None else request.memory_bytes
        return self.card.healthy and request.cores <= self.free_cores and memory <= self.free_bytes

    def share(self, request: RunRequest) -> Share:
        memory = self.card.memory_bytes if request.memory_bytes is None else request.memory_bytes
        whole = request.memory_bytes is None
        return Share(
            self.card.uuid,
            self.card.minor,
            request.cores,
            request.core_limit,
            memory,
            whole,
            request.oversell_bytes,
        )


def rooms(cards: Sequence[inventory.Card], bookings: Sequence[Booking]) -> list[CardRoom]:
    """The cards in NVML's order, each with the bookings on it."""
    return [
        CardRoom(index, card, tuple(entry for entry in bookings if entry.on(card.uuid)))
        for index, card in enumerate(cards)
    ]


def choose(available: Sequence[CardRoom], request: RunRequest) -> tuple[CardRoom, ...]:
    """The cards of the run: the named ones, else the fullest that fit (so that the others stay whole).

    Raises RunError that names, for each card in question, what is free and who holds the rest.
    """
    if not available:
        raise RunError("this machine has no NVIDIA card; --sim uses simulated ones")
    candidates = [_named(available, device) for device in request.devices] or list(available)
    if len({room.card.uuid for room in candidates}) != len(candidates):
        raise RunError("--device names one card twice")
    fitting = [room for room in candidates if room.takes(request)]
    needed = len(request.devices) or request.cards
    if len(fitting) < needed:
        raise RunError(_refusal(candidates, request, needed))
    if request.devices:
        return tuple(fitting)
    fitting.sort(key=lambda room: (room.free_cores, room.free_bytes, room.index))
    return tuple(sorted(fitting[:needed], key=lambda room: room.index))


def limits(entry: Booking, everyone: Sequence[Booking]) -> tuple[CardLimit, ...]:
    """What the region of `entry` must say while `everyone` is booked.

    Idle time is lent between the runs of one user, whose arbiter sees them all. Beside another user's run the limit is
    hard: two arbiters that do not see each other would both lend the same idle time.
    """
    found = []
    for share in entry.shares:
        others = [other for other in everyone if other.name != entry.name and other.on(share.uuid)]
        strangers = any(other.user_id != entry.user_id for other in others)
        found.append(
            CardLimit(
                uuid=share.uuid,
                minor=share.minor,
                memory_bytes=max(share.memory_bytes, share.oversell_bytes),
                physical_bytes=share.memory_bytes if share.oversell_bytes > share.memory_bytes else None,
                cores=share.cores,
                core_limit=share.cores if strangers else share.core_limit,
                whole=share.whole,
                shared=bool(others),
            )
        )
    return tuple(found)


def describe(entry: Booking, share: Share) -> str:
    """One line about who holds a share."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.since))
    command = printable(short(entry.command))
    amount = f"{share.cores} cores, {format_bytes(share.memory_bytes)}"
    return f"pid {entry.pid} of {user_name(entry.user_id)} since {since}: {amount}: {command:.80}"


def short(command: str) -> str:
    """The command with its program's name instead of the path."""
    program, space, rest = command.partition(" ")
    return program.rpartition("/")[2] + space + rest


@functools.cache
def user_name(user_id: int) -> str:
    """The number itself for a user without a name."""
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return f"user {user_id}"


def _named(available: Sequence[CardRoom], device: str) -> CardRoom:
    """The card with this index or UUID; the start of a UUID is enough if no other card shares it."""
    if device.isascii() and device.isdigit():
        matching = [room for room in available if str(room.index) == (device.lstrip("0") or "0")]
    else:
        matching = [room for room in available if room.card.uuid.lower().startswith(device.lower())]
    if len(matching) == 1:
        return matching[0]
    known = ", ".join(f"card {room.index} ({room.card.uuid})" for room in available)
    what = "is no card of this machine" if not matching else "is the start of several cards' UUIDs"
    raise RunError(f"--device {device:.60} {what}; it has {known}")


def _refusal(candidates: Sequence[CardRoom], request: RunRequest, needed: int) -> str:
    if needed > len(candidates):
        head = f"{needed} cards are asked for, each with {request.text} free; there are {len(candidates)}:"
    elif len(candidates) == 1:
        head = f"the card does not have {request.text} free:"
    elif needed == 1:
        head = f"no card has {request.text} free:"
    else:
        head = f"fewer than {needed} of these cards have {request.text} free:"
    lines = [head]
    for room in candidates:
        free = f"{room.free_cores} of {CORES_PER_CARD} cores"
        memory = f"{format_bytes(max(0, room.free_bytes))} of {format_bytes(room.card.memory_bytes)}"
        health = "" if room.card.healthy else " (the card does not answer)"
        lines.append(f"  card {room.index} {room.card.uuid} {room.card.model}: {free} and {memory} free{health}")
        lines += [f"    {describe(entry, share)}" for entry in room.bookings if (share := entry.on(room.card.uuid))]
    return "\n".join(lines)
