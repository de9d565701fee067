"""The overhead of one user's runs: what NVML says they hold beside their ledgers, written into their limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pynvml

from vcuda import region
from vcuda.overhead import Meter, Questions

# NVML takes a millisecond or three per card.
PERIOD_SECONDS = 1.0
_BETWEEN_SAMPLES_S = 0.001
_BETWEEN_ANSWERS_S = 0.1


class RunOverhead:
    """Measures the runs whose region folders it is told of.

    In another PID namespace than the driver's it finds nothing: 0.
    """

    def __init__(self) -> None:
        self._meter = Meter()
        self._questions = Questions()
        self._folders: dict[str, Path] = {}
        self._next = 0.0
        self._answered = 0.0
        self._begun: set[Path] = set()
        self._driver: bool | None = None

    @property
    def descriptor(self) -> int:
        """Becomes readable when a run asks; -1: never."""
        return self._questions.descriptor

    def follow(self, folders: Mapping[str, Path]) -> None:
        """The runs that there are now, with their regions. Measures them when it is time. Never raises."""
        self._folders = dict(folders)
        self._questions.follow({name: folder / region.USAGE_NAME for name, folder in folders.items()})
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PERIOD_SECONDS
            self._sample(self._folders, always=False)

    def answer(self) -> None:
        """Measure those who ask, now: two samples that agree move a figure at once."""
        asked = self._questions.read()
        if not asked or time.monotonic() - self._answered < _BETWEEN_ANSWERS_S:
            return
        self._answered = time.monotonic()
        folders = {name: folder for name, folder in self._folders.items() if name in asked}
        self._sample(folders, always=False)
        time.sleep(_BETWEEN_SAMPLES_S)
        self._sample(folders, always=True)

    def close(self) -> None:
        self._questions.close()

    def _sample(self, folders: Mapping[str, Path], *, always: bool) -> None:
        before = {name: usage for name, folder in folders.items() if (usage := _usage(folder)) is not None}
        held: dict[str, dict[int, int] | None] = {}
        for name, first in before.items():
            for card in first.cards:
                if card.uuid not in held:
                    held[card.uuid] = self._held(card.uuid)
            second = _usage(folders[name])
            if second is None:
                continue
            namespace = _namespace()
            pids = {item.pid for item in first.processes if item.alive and item.pid_namespace == namespace}
            figures = []
            for old, new in zip(first.cards, second.cards, strict=True):
                processes = held[new.uuid]
                known = self._meter.figure((name, new.uuid))
                if processes is not None:
                    mine = sum(count for pid, count in processes.items() if pid in pids)
                    known = self._meter.take((name, new.uuid), old, new, mine)
                figures.append(known)
            self._write(folders[name], figures, always=always)

    def _write(self, folder: Path, figures: list[int], *, always: bool) -> None:
        try:
            written = [card.overhead_bytes for card in region.read_limits(folder)]
            if always or written != figures or folder not in self._begun:
                region.write_overhead(folder, figures)
                self._begun.add(folder)
        except (region.RegionError, OSError):
            return  # it has just ended

    def _held(self, uuid: str) -> dict[int, int] | None:
        """Bytes of each process on a card; None if the driver does not say."""
        if self._driver is None:
            self._driver = _optional(pynvml.nvmlInit) is not _FAILED
        handle = _optional(pynvml.nvmlDeviceGetHandleByUUID, uuid) if self._driver else _FAILED
        found = _FAILED if handle is _FAILED else _optional(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
        if found is _FAILED or any(item.usedGpuMemory is None for item in found):
            return None
        return {int(item.pid): int(item.usedGpuMemory) for item in found}


_FAILED: Any = object()


def _optional(function: Callable[..., Any], *arguments: object) -> Any:
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return _FAILED


def _usage(folder: Path) -> region.Usage | None:
    try:
        return region.read_usage(folder)
    except (region.RegionError, OSError):
        return None


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
