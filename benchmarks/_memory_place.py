"""Where the memory programs run: a simulated card with its own books, or a real one with NVML's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import pynvml

from benchmarks import _usable
from vcuda.driver import context_cost
from vcuda.sim import Machine, SimCard

MIB = 1 << 20
SIMULATED_CONTEXT_BYTES = 64 * MIB


class Place(Protocol):
    """One card: how a program finds it natively, and how many bytes of it are in use, told by whoever owns the books.

    `context_bytes`: what one context takes; `told_context_bytes`: what shares are told of it, 0 to let them find out.
    """

    uuid: str
    minor: int
    library: Path  # the driver's libcuda.so.1
    context_bytes: int
    told_context_bytes: int
    exact_books: bool  # whether they count what the ledger counts, to the byte

    def environment(self) -> dict[str, str]: ...

    def used_bytes(self) -> int: ...


class SimulatedPlace:
    """A machine of its own with one simulated card."""

    exact_books = True
    # Given: measuring it is no part of these figures.
    context_bytes = told_context_bytes = SIMULATED_CONTEXT_BYTES

    def __init__(self, folder: Path) -> None:
        self._machine = Machine.create(folder / "machine", [SimCard()])
        card = self._machine.cards[0]
        self.uuid, self.minor = card.uuid, card.minor
        self.library = self._machine.library_folder / "libcuda.so.1"

    def environment(self) -> dict[str, str]:
        return {**os.environ, **self._machine.environment()}

    def used_bytes(self) -> int:
        return self._machine.report().cards[0].used_bytes


class NvmlBooks:
    """What NVML says is in use of a card, beyond what was so when this was made."""

    def __init__(self, uuid: str) -> None:
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self._before = 0
        self._before = self.used_bytes()

    def used_bytes(self) -> int:
        """May be below zero where another user gave memory back meanwhile."""
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used) - self._before


class RealPlace:
    """A real card; in use is what NVML says beyond what was so before the first program: contexts cost what the driver takes for them."""

    exact_books = False

    def __init__(self, found: _usable.Usable) -> None:
        self._found = found
        self.uuid, self.minor = found.card.uuid, found.card.minor
        self.library = found.driver.cuda
        self.context_bytes = found.context_bytes
        # As gpu-manager and `vcuda run` measure it.
        self.told_context_bytes = context_cost.measure(
            found.driver.cuda, found.driver.nvml, self.uuid, self.environment()
        )
        self._books = NvmlBooks(self.uuid)

    def environment(self) -> dict[str, str]:
        return {**os.environ, **self._found.environment()}

    def used_bytes(self) -> int:
        return self._books.used_bytes()
