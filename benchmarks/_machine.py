"""The machine that a benchmark ran on, as every report names it."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Any

import pynvml

import vcuda
from vcuda.runs import driver
from vcuda.runs.errors import RunError

BUSY = 0.5


def describe() -> dict[str, Any]:
    """Processor, kernel, Python, our version, how busy the machine was, and its cards or why there are none."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "?")
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "vcuda": vcuda.__version__,
        "load_average": round(os.getloadavg()[0], 2),
        "cards": _cards(),
    }


def line(machine: dict[str, Any]) -> str:
    """The description in one line, for the head of what a program prints."""
    cards = machine["cards"]
    told = ", ".join(f"{name} {value}" for name, value in machine.items() if name != "cards")
    return f"{told}, {'; '.join(cards) if cards else 'no NVIDIA card'}"


def _cards() -> list[str]:
    """Each card with its driver, its modes, and what else runs on it; empty without a driver that works."""
    try:
        found = driver.find(os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    except RunError:
        return []
    try:
        pynvml.nvmlLib = ctypes.CDLL(str(found.nvml))
        pynvml.nvmlInit()
    except (OSError, pynvml.NVMLError):
        return []
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [f"{pynvml.nvmlDeviceGetName(handle)}, driver {version}{_modes(handle)}" for handle in handles]
    except pynvml.NVMLError as error:
        return [f"a card that does not answer: {error}"]
    finally:
        pynvml.nvmlShutdown()


def _modes(handle: Any) -> str:
    """What makes figures of this card differ from those of an idle, undivided one."""
    told = ""
    try:
        if pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE:
            told += ", MIG"
    except pynvml.NVMLError:
        pass  # cards that know no MIG say so by an error
    try:
        others = len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
        return told + (f", {others} other processes on it" if others else "")
    except pynvml.NVMLError:
        return told
