"""Feeds the containers' overhead into their limits: one reading of the driver for this and for the bypass audit.

A container that lies about its ledger makes its own overhead larger, and so its own quota smaller. Cards that do not
say who holds what are not measured; a sample that fails leaves the last figure.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from manager.allocations.record import Allocation
from manager.audit.owners import Key, Owners
from manager.cards.driver import CardProcess
from vcuda import region
from vcuda.kube.worker import Worker
from vcuda.logs import fields
from vcuda.overhead import Meter, Questions
from vcuda.region import CardUsage, Usage
from vcuda.spec.units import BLOCK_BYTES

# Nobody may keep the daemon busy with questions; shims ask ten times a second at most.
_PAUSE_S = 0.01
_BETWEEN_SAMPLES_S = 0.001
_BETWEEN_ANSWERS_S = 0.1  # to one container
_FOLLOW_S = 1.0
_LOOK_S = 10.0
_MOST_ALARMS = 8
_SUSPECT_S = 1.0  # between two samples of a container that damages its account, or holds more than it may

log = logging.getLogger(__name__)


class Overhead:
    """Measures all containers when told to, and one when it asks."""

    def __init__(
        self,
        *,
        processes: Callable[[str], Sequence[CardProcess] | None],
        usage: Callable[[Allocation], Usage | None],
        allocations: Callable[[], Sequence[Allocation]],
        owners: Owners,
        alarm: Callable[[], None] = lambda: None,
    ) -> None:
        """`processes` of a card by its UUID, None if it does not say; `allocations`: those of the node now.

        `alarm` is called when a container damages its account or holds more than it may: an audit is due.
        """
        self._alarm = alarm
        self._suspects: dict[Key, int] = {}  # how often each was found so
        self._damages: dict[Key, int] = {}
        self._next_suspects = 0.0
        self._processes = processes
        self._usage = usage
        self._allocations = allocations
        self._owners = owners
        self._lock = threading.Lock()
        self._meter = Meter()
        self._held: dict[str, Sequence[CardProcess]] = {}
        self._written: dict[Key, list[int]] = {}
        self._answered: dict[Key, float] = {}
        self._questions = Questions()
        self._stopping = threading.Event()
        self._ended = os.eventfd(0, os.EFD_CLOEXEC)  # readable when it stops: wakes the poll
        self._poll = select.poll()
        self._poll.register(self._ended, select.POLLIN)
        if self._questions.descriptor >= 0:
            self._poll.register(self._questions.descriptor, select.POLLIN)
        self._followed: Sequence[Allocation] = ()
        self._files: dict[str, Path] = {}
        self._next_look = 0.0
        self.worker = Worker("overhead", self._answer)

    def start(self) -> None:
        """Answer questions in a thread."""
        self.worker.start()

    def stop(self) -> None:
        self._stopping.set()
        self.worker.stop()
        os.eventfd_write(self._ended, 1)
        self.worker.join(2 * _FOLLOW_S)
        self._questions.close()
        os.close(self._ended)

    def held(self, uuid: str) -> Sequence[CardProcess] | None:
        """The processes of a card in the last `sample`; None if it did not say."""
        return self._held.get(uuid)

    def sample(self, allocations: Sequence[Allocation], cards: Iterable[str]) -> None:
        """Measure all containers on these cards once. Never raises."""
        with self._lock:
            if any(self._held.values()):
                self._held = self._measure(allocations, allocations, cards)
            else:  # an idle node's ledgers are not read; who comes now is measured the next time
                self._held = self._read(cards)
            idle = set() if any(self._held.values()) else self._held.keys()
            self._meter.keep(
                [(item.key, share.uuid) for item in allocations for share in item.shares if share.uuid not in idle]
            )
            known = {item.key for item in allocations}
            for gone in (self._suspects.keys() | self._damages.keys()) - known:
                self._suspects.pop(gone, None)
                self._damages.pop(gone, None)
            self._written = {key: figures for key, figures in self._written.items() if key in known}
            self._write(allocations)

    def _read(self, cards: Iterable[str]) -> dict[str, Sequence[CardProcess]]:
        return {uuid: found for uuid in cards if (found := self._processes(uuid)) is not None}

    def _measure(
        self, measured: Sequence[Allocation], beside: Sequence[Allocation], cards: Iterable[str]
    ) -> dict[str, Sequence[CardProcess]]:
        """`beside`: all containers that a process could belong to instead."""
        before = {item.key: self._usage(item) for item in measured}
        held = self._read(cards)
        owners = self._owners.among(beside, {key: usage for key, usage in before.items() if usage is not None})
        sums: dict[tuple[Key, str], int | None] = {}
        for uuid, processes in held.items():
            for process in processes:
                key = owners.container(process.pid, uuid)
                if key is not None:
                    sum_now = sums.get((key, uuid), 0)
                    unknown = sum_now is None or process.memory_bytes is None
                    sums[key, uuid] = None if unknown else (sum_now or 0) + (process.memory_bytes or 0)
        for item in measured:
            first, second = before[item.key], self._usage(item)
            self._suspect(item, second, sums)
            if item.whole:
                continue
            if first is None or second is None:  # its own doing: what can't be read counts nothing
                first = second = Usage(tuple(CardUsage(uuid=share.uuid) for share in item.shares), ())
            if [card.uuid for card in first.cards] != [card.uuid for card in second.cards]:
                continue  # made anew meanwhile
            for old, new in zip(first.cards, second.cards, strict=True):
                held_bytes = sums.get((item.key, new.uuid), 0)
                if new.uuid in held and held_bytes is not None:
                    self._meter.take((item.key, new.uuid), old, new, held_bytes)
        return held

    def _suspect(self, item: Allocation, usage: Usage | None, sums: Mapping[tuple[Key, str], int | None]) -> None:
        """Note whether the container has damaged its account, or holds more than it may."""
        damaged = usage is None or any(card.hidden_bytes for card in usage.cards)
        refusals = 0 if usage is None else usage.account_damaged
        damaged |= refusals > self._damages.get(item.key, 0)
        self._damages[item.key] = refusals
        over = any(
            (sums.get((item.key, share.uuid)) or 0) > max(share.memory_blocks, item.oversell_blocks) * BLOCK_BYTES
            for share in item.shares
        )
        if (damaged or over) and not item.whole:
            self._suspects[item.key] = self._suspects.get(item.key, 0) + 1
        else:
            self._suspects.pop(item.key, None)

    def _watch_suspects(self) -> None:
        """A sample of each of them, and an audit soon: of one that stays suspect the ordinary rounds know."""
        with self._lock:
            suspects = dict(self._suspects)
        if not suspects or time.monotonic() < self._next_suspects:
            return
        self._next_suspects = time.monotonic() + _SUSPECT_S
        young = any(times <= _MOST_ALARMS for times in suspects.values())
        self._answer_all({"/".join(key) for key in suspects})
        if young:
            self._alarm()

    def _write(self, allocations: Iterable[Allocation], *, always: bool = False) -> None:
        for item in allocations:
            figures = [self._meter.figure((item.key, share.uuid)) for share in item.shares]
            if item.whole or (not always and self._written.get(item.key) == figures):
                continue
            try:
                region.write_overhead(item.region, figures)
                self._written[item.key] = figures
            except (OSError, region.RegionError) as error:
                log.debug("the overhead of %s can't be written: %s", item.name, error, extra=fields(item.fields))

    # Questions.

    def _answer(self) -> None:
        """Follow the usage files of who is there now, and answer for a while."""
        allocations = self._allocations()
        changed = allocations != self._followed
        if changed:
            self._files = {
                "/".join(item.key): Path(item.region) / region.USAGE_NAME for item in allocations if not item.whole
            }
        # A file that is made anew while the old one is still mapped leaves no sign: those are looked for now and then.
        missing = self._questions.followed < len(self._files)
        if changed or missing or time.monotonic() >= self._next_look:
            self._questions.follow(self._files)
            self._followed, self._next_look = allocations, time.monotonic() + _LOOK_S
        end = time.monotonic() + _FOLLOW_S
        while (left := end - time.monotonic()) > 0 and not self._stopping.is_set():
            if self._poll.poll(1000 * left):
                self._answer_all(self._questions.read())
                time.sleep(_PAUSE_S)
            self._watch_suspects()

    def _answer_all(self, asked: set[str]) -> None:
        everyone = self._allocations()
        now = time.monotonic()
        self._answered = {key: when for key, when in self._answered.items() if now - when < _BETWEEN_ANSWERS_S}
        for item in everyone:
            if "/".join(item.key) not in asked or item.key in self._answered:
                continue
            self._answered[item.key] = now
            with self._lock:
                uids = {uid for _, uid in item.pods}
                pod = [other for other in everyone if uids & {uid for _, uid in other.pods}] or [item]
                cards = [share.uuid for share in item.shares]
                self._measure([item], pod, cards)
                time.sleep(_BETWEEN_SAMPLES_S)  # two samples that agree move the figure at once
                self._measure([item], pod, cards)
                self._write([item], always=True)
