"""GPU time by NVML's utilization of processes, against what their containers were charged, and against their limits.

NVML rounds and lags, so no limit is ever set by it: who is apart from its charges is told, and who stays above its
limit too, which the operator's policy may end. Cards and containers that NVML says nothing of are left out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set

from manager.allocations.record import Allocation
from manager.audit.consequences import Tell
from manager.audit.overhead import Overhead
from manager.audit.owners import Key, Owners
from manager.cards.driver import ProcessUtilization
from manager.cards.inventory import Inventory
from manager.config.settings import Settings
from manager.regions.regions import Regions
from vcuda.kube.worker import Worker
from vcuda.logs import fields

TURN_S = 1.0
WINDOW_S = 10.0
# Twice NVML's longest sample period (a second, nvml.h), so that a process it does not name was idle.
_SAMPLES_S = 2.0
# A reading lags by up to a sample period, and a tenant's peak may lie at a window's edge: only what stays is told.
LASTING_WINDOWS = 2
_LEAST_TURNS = 5

log = logging.getLogger(__name__)

At = tuple[Key, str]


class Drift:
    """Reads NVML every turn, compares at the end of each window, tells once what lasts."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        inventory: Inventory,
        overhead: Overhead,
        regions: Regions,
        allocations: Callable[[], Sequence[Allocation]],
        tell: Tell,
        owners: Owners,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`inventory` says what the driver saw, `overhead` who was on the cards, `regions` what was charged; `tell` is
        called once per onset.
        """
        self._settings, self._inventory, self._overhead, self._regions = settings, inventory, overhead, regions
        self._allocations, self._tell, self._whose, self._clock = allocations, tell, owners, clock
        self.turn_s = TURN_S
        self.window_s = WINDOW_S
        # NVML's less the charged hundredths of the last window, by container and card UUID; without those that can't be
        # told.
        self.found: Mapping[At, float] = {}
        self._times: dict[At, int] = {}
        self._times_over: dict[At, int] = {}
        self._began = 0.0
        self._before: dict[At, int] = {}
        self._turns: dict[str, int] = {}
        self._sums: dict[str, dict[int, float]] = {}
        self._owners: dict[int, Key | None] = {}
        self._stopping = threading.Event()
        self._looked = threading.Event()
        self.worker = Worker("drift", self._turn)

    def start(self) -> None:
        """Compare in a thread."""
        self.worker.start()

    def looked(self) -> None:
        """Somebody has looked who is on the cards: before that, there is nothing to compare on an idle node."""
        self._looked.set()

    def stop(self) -> None:
        self._stopping.set()
        self.worker.stop()
        self._looked.set()
        self.worker.join(1.0)

    def _turn(self) -> None:
        if self._before:
            self._stopping.wait(self.turn_s)
        else:
            self._looked.wait()
            self._looked.clear()
        if not self._stopping.is_set():
            self.turn()

    def turn(self) -> None:
        """Read NVML once; at the end of a window compare and begin the next one.

        Never raises for what a tenant or the driver does.
        """
        allocations = self._allocations()
        if not self._before:
            self._begin(allocations)
            if not self._before:
                self.found, self._times, self._times_over = {}, {}, {}
            return
        self._read(allocations)
        if self._clock() - self._began >= self.window_s:
            self._compare(allocations)
            self._begin(allocations)

    def _in_use(self, allocations: Sequence[Allocation]) -> set[str]:
        """UUIDs of shared-out cards on which somebody is, or may be: an idle node's NVML and ledgers are not read."""
        cards = {share.uuid for item in allocations for share in item.shares}
        return {uuid for uuid in cards if (held := self._overhead.held(uuid)) is None or held}

    def _charged(self, allocations: Sequence[Allocation], cards: Set[str]) -> Iterator[tuple[Allocation, str]]:
        for item in allocations:
            for share in item.shares:
                if share.uuid in cards and self._regions.metered(item, share.uuid):
                    yield item, share.uuid

    def _times_charged(self, allocations: Sequence[Allocation], cards: Set[str]) -> dict[At, int]:
        charged = list(self._charged(allocations, cards))
        usages = {item.key: self._regions.usage(item) for item, _ in charged}
        found = {}
        for item, uuid in charged:
            usage = usages[item.key]
            for card in usage.cards if usage is not None else ():
                if card.uuid == uuid:
                    found[item.key, uuid] = card.gpu_time_ns
        return found

    def _begin(self, allocations: Sequence[Allocation]) -> None:
        """A card to which the first process comes within a window is compared from the next one on."""
        self._before = self._times_charged(allocations, self._in_use(allocations))
        self._began = self._clock()
        self._turns, self._sums, self._owners = {}, {}, {}

    def _read(self, allocations: Sequence[Allocation]) -> None:
        since_us = int((time.time() - _SAMPLES_S) * 1e6)
        for uuid in self._cards():
            samples = self._inventory.utilization(uuid, since_us)
            if samples is None:
                continue
            self._turns[uuid] = self._turns.get(uuid, 0) + 1
            sums = self._sums.setdefault(uuid, {})
            for pid, percent in _by_process(samples).items():
                sums[pid] = sums.get(pid, 0.0) + percent
        self._own(allocations, {pid for sums in self._sums.values() for pid in sums})  # before any of them ends

    def _cards(self) -> set[str]:
        return {uuid for _, uuid in self._before}

    def _own(self, allocations: Sequence[Allocation], pids: Set[int]) -> None:
        """Of all cards at once: hundreds of ledgers are read for it."""
        unknown = pids - self._owners.keys()
        if unknown:
            usages = {item.key: usage for item in allocations if (usage := self._regions.usage(item)) is not None}
            owners = self._whose.among(allocations, usages)
            self._owners.update({pid: owners.container(pid) for pid in unknown})

    def _compare(self, allocations: Sequence[Allocation]) -> None:
        passed_s = self._clock() - self._began
        after = self._times_charged(allocations, self._cards())
        seen = self._seen(allocations)
        compared: dict[At, tuple[float, float]] = {}
        for at, charged_ns in after.items():
            before_ns = self._before.get(at)
            if at in seen and before_ns is not None and charged_ns >= before_ns:
                compared[at] = seen[at], (charged_ns - before_ns) / passed_s / 1e7
        self.found = {at: by_driver - charged for at, (by_driver, charged) in compared.items()}
        apart = [at for at, off in self.found.items() if abs(off) > self._settings().drift_tolerance]
        self._times = {at: self._times.get(at, 0) + 1 for at in apart}
        self._compare_with_limits(allocations, seen, passed_s)
        for item in allocations:
            for at, times in self._times.items():
                if at[0] == item.key and times == LASTING_WINDOWS:
                    by_driver, charged = compared[at]
                    message = (
                        f"container {item.container} was charged {charged:.0f} hundredths of card {at[1]} over "
                        f"{passed_s:.0f} s, and NVML saw "
                        f"{by_driver:.0f}: its GPU time is not what its shim counts; its limits are left as they are"
                    )
                    log.warning(
                        "%s: %s", item.name, message, extra=fields(item.fields, uuid=at[1], reason="GpuTimeDrift")
                    )
                    self._tell(item, "GpuTimeDrift", message)

    def _compare_with_limits(
        self, allocations: Sequence[Allocation], seen: Mapping[At, float], passed_s: float
    ) -> None:
        """Whoever writes its own credit into its usage file may be charged all that it takes: only the driver's figures
        show it.
        """
        times = {}
        for item, uuid in self._charged(allocations, self._cards()):
            at = item.key, uuid
            limit = max(item.core_limit, *(share.cores for share in item.shares if share.uuid == uuid))
            if seen.get(at, 0.0) <= limit + self._settings().drift_tolerance:
                continue
            times[at] = self._times_over.get(at, 0) + 1
            if times[at] == LASTING_WINDOWS:
                message = (
                    f"container {item.container} may use {limit} hundredths of card {uuid}, and NVML saw "
                    f"{seen[at]:.0f} over "
                    f"{passed_s:.0f} s: nothing in it limits its GPU time any more; what becomes of its pod says "
                    "--audit-policy"
                )
                log.warning(
                    "%s: %s", item.name, message, extra=fields(item.fields, uuid=uuid, reason="GpuTimeOverLimit")
                )
                self._tell(item, "GpuTimeOverLimit", message)
        self._times_over = times

    def _seen(self, allocations: Sequence[Allocation]) -> dict[At, float]:
        """Hundredths of a card by container, of those that NVML's process lists have; none of a card on which it named
        nobody.
        """
        found: dict[At, float] = {}
        told = {uuid: sums for uuid, sums in self._sums.items() if sums and self._turns[uuid] >= _LEAST_TURNS}
        present = {uuid: {process.pid: 0.0 for process in self._overhead.held(uuid) or ()} for uuid in told}
        self._own(allocations, {pid for pids in present.values() for pid in pids})
        for uuid, sums in told.items():
            for pid, total in {**present[uuid], **sums}.items():
                key = self._owners.get(pid)
                if key is not None:
                    found[key, uuid] = found.get((key, uuid), 0.0) + total / self._turns[uuid]
        return found


def _by_process(samples: Sequence[ProcessUtilization]) -> dict[int, float]:
    """Percent by PID: the mean of each process's samples."""
    found: dict[int, list[int]] = {}
    for sample in samples:
        found.setdefault(sample.pid, []).append(sample.percent)
    return {pid: sum(values) / len(values) for pid, values in found.items()}
