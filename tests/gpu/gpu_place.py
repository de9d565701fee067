"""Where the GPU tests run: the first real card of this machine, else a simulated one; and what speaks against a card."""

from __future__ import annotations

import functools
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pynvml

from vcuda.runs import cards, driver
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


@functools.cache
def real() -> tuple[Place | None, str]:
    """The first real card that can be used, or why there is none."""
    try:
        found = driver.find(os.environ.get("LD_LIBRARY_PATH", "").split(":"))
        card = next(iter(cards.discover(found.nvml)), None)
    except RunError as error:
        return None, str(error)
    if card is None:
        return None, "the driver lists no card"
    if not card.healthy:
        return None, f"{card.model} {card.uuid} does not answer"
    why_not, version = _looked_at(card.uuid)
    if why_not:
        return None, f"{card.model}: {why_not}"
    place = Place(
        card.model, True, card.uuid, ("--device", card.uuid), {"CUDA_VISIBLE_DEVICES": card.uuid}, version
    )
    return place, ""


def simulated(folder: Path) -> Place:
    """A card of a simulated machine in `folder`, made there."""
    machine = Machine.create(folder)
    return Place(
        "simulated card", False, machine.cards[0].uuid, (f"--sim={folder}",), dict(machine.environment())
    )


def describe() -> list[str]:
    """The card, its driver, and what else uses it: lines for the head of a run."""
    place, why_not = real()
    if place is None:
        return [f"card: none ({why_not}); clients of the driver API run on a simulated one"]
    lines = [f"card: {place.name} {place.uuid}, driver {place.driver_version}"]
    others = _others(place.uuid)
    if others:
        lines.append(f"beside us on the card: {others}; shares are compared with what a program gets alone")
    if _mps_is_there():
        lines.append("an MPS server runs on this machine: time slices are not what the shares expect")
    return lines


def _looked_at(uuid: str) -> tuple[str, str]:
    """What speaks against using the card, and the driver's version."""
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        free_mib = pynvml.nvmlDeviceGetMemoryInfo(handle).free // MIB
        version = pynvml.nvmlSystemGetDriverVersion()
        if free_mib < NEEDED_MIB:
            return (
                f"{free_mib} MiB are free and the tests need {NEEDED_MIB} ({_others(uuid) or 'no process is shown'})",
                version,
            )
        return "", version
    except pynvml.NVMLError as error:
        return f"NVML: {error}", ""
    finally:
        pynvml.nvmlShutdown()


def _others(uuid: str) -> str:
    pynvml.nvmlInit()
    try:
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByUUID(uuid))
        return ", ".join(
            f"process {process.pid} with {(process.usedGpuMemory or 0) // MIB} MiB" for process in running
        )
    except pynvml.NVMLError:
        return ""
    finally:
        pynvml.nvmlShutdown()


def _mps_is_there() -> bool:
    result = subprocess.run(["ps", "-e", "-o", "comm="], capture_output=True, text=True, check=False)
    return "nvidia-cuda-mps" in result.stdout
