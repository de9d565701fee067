"""Where the GPU tests run: the first real card of this machine, else a simulated one; and what speaks against a card."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import _usable
from vcuda.runs.errors import RunError
from vcuda.sim import Machine

MIB = 1 << 20
NEEDED_MIB = 5 * 1024  # two shares of the tests, their contexts, and a native client beside them


@dataclass(frozen=True)
class Place:
    """One card: the words that lead `vcuda run` to it and the environment that leads a native client there."""

    name: str
    real: bool
    uuid: str
    words: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    driver_version: str = ""
    remarks: tuple[str, ...] = ()


@functools.cache
def real() -> tuple[Place | None, str]:
    """The first real card that can be used, or why there is none."""
    try:
        found = _usable.find(NEEDED_MIB * MIB)
    except RunError as error:
        return None, str(error)
    words, name = ("--device", found.card.uuid), found.card.model
    place = Place(name, True, found.card.uuid, words, found.environment(), found.version, found.remarks)
    return place, ""


def simulated(folder: Path) -> Place:
    """A card of a simulated machine in `folder`, made there."""
    machine = Machine.create(folder)
    return Place("simulated card", False, machine.cards[0].uuid, (f"--sim={folder}",), dict(machine.environment()))


def describe() -> list[str]:
    """The card, its driver, and what else uses it: lines for the head of a run."""
    place, why_not = real()
    if place is None:
        return [f"card: none ({why_not}); clients of the driver API run on a simulated one"]
    return [f"card: {place.name} {place.uuid}, driver {place.driver_version}", *place.remarks]
