"""The cards of this node as they are now: probed, watched for Xid errors, and healthy again after a good probe.

A card that leaves stays listed as unhealthy, so that kubelet does not shrink the node's capacity under running pods;
also over restarts, until the operator says that it was taken out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from manager.cards import device_nodes
from manager.cards.device_nodes import DeviceNode, NodeProblem
from manager.cards.driver import (
    CardProcess,
    CardSample,
    Driver,
    DriverError,
    NodeCard,
    NullDriver,
    Probe,
    ProcessUtilization,
    XidEvent,
)
from manager.cards.seen import SeenCards
from manager.config.settings import Settings
from manager.process.logs import Conditions
from vcuda.driver.memory_limits import MemoryLimit
from vcuda.driver.root import HostRoot
from vcuda.kube.worker import Worker
from vcuda.logs import fields

log = logging.getLogger(__name__)
_LONGEST_WAIT_S = 0.5  # for an event: stopping does not take the driver's whole time-out
_MOST_PENDING = 64  # events taken before a probe: a card that reports errors without end delays none


@dataclass(frozen=True)
class Snapshot:
    """One consistent view. `problems` maps a card's UUID, or "" for the whole node, to why it is unhealthy."""

    driver: str
    driver_version: str
    cards: tuple[NodeCard, ...]
    problems: tuple[tuple[str, str], ...] = ()
    cuda_version: str = ""

    @property
    def node_problem(self) -> str:
        return dict(self.problems).get("", "")

    def card(self, uuid: str) -> NodeCard | None:
        return next((item for item in self.cards if item.card.uuid == uuid), None)


# What a card's record at the API server says instead of who.
_HELD = "something past gpu-manager holds it: another device plugin, a resource claim or an MPS daemon"


class Inventory:
    """Owns the driver."""

    def __init__(
        self,
        root: HostRoot,
        open_driver: Callable[[HostRoot], Driver],
        settings: Callable[[], Settings],
        seen: SeenCards,
        *,
        on_change: Callable[[], None] = lambda: None,
        on_node_problem: Callable[[str], None] = lambda _node: None,
        on_health: Callable[[str, str], None] = lambda _uuid, _why: None,
    ) -> None:
        """`seen`: what earlier daemons of this node saw; a card of theirs that the driver does not show is missed.

        `on_change` is called, by whoever probes or watches, after the first probe and whenever the snapshot differs.

        `on_node_problem`: with the path of a device node that is missing. `on_health`: with a card's UUID, "" for all
        of the node, and why it is ill, in words for everybody; "" when it is well again.
        """
        self._root, self._open_driver, self._settings = root, open_driver, settings
        self._on_change, self._on_node_problem, self._on_health = on_change, on_node_problem, on_health
        self._driver: Driver = NullDriver("not opened yet")
        self._stale = False
        self._seen = seen
        self._known = seen.cards
        self._met: set[str] = set()  # UUIDs that the driver has shown to this daemon
        self._cuda_version = ""
        self._blocked: Mapping[str, str] = {}
        self._failures: dict[str, str] = {}  # what the last probe found
        self._xids: dict[str, tuple[int, float]] = {}
        self._xid_counts: dict[tuple[str, int, bool], int] = {}
        self._snapshot = Snapshot("", "", ())  # like none that a probe makes
        self._conditions = Conditions(log)
        self._stop = threading.Event()
        self.worker = Worker("cards", self._watch)
        self._last_probe = time.monotonic()

    @property
    def snapshot(self) -> Snapshot:
        return self._snapshot

    @property
    def xid_counts(self) -> Mapping[tuple[str, int, bool], int]:
        """Xid errors so far, by card UUID, number and whether the settings ignore it."""
        return dict(self._xid_counts)

    @property
    def probe_age_s(self) -> float:
        """Seconds since the last probe ended: far above the interval means that the driver is stuck."""
        return time.monotonic() - self._last_probe

    def block(self, reasons: Mapping[str, str]) -> None:
        """Cards, by UUID, that others have, and why; they count as unhealthy from the next probe on."""
        self._blocked = dict(reasons)

    # What the cards do now; a driver that fails does not say.

    def sample(self, uuid: str) -> CardSample | None:
        with contextlib.suppress(DriverError):
            return self._driver.sample(uuid)
        return None

    def processes(self, uuid: str) -> Sequence[CardProcess] | None:
        with contextlib.suppress(DriverError):
            return self._driver.processes(uuid)
        return None

    def utilization(self, uuid: str, since_us: int) -> Sequence[ProcessUtilization] | None:
        with contextlib.suppress(DriverError):
            return self._driver.utilization(uuid, since_us)
        return None

    def limit_memory(self, uuid: str, group: Path, hard_bytes: int | None) -> None:
        """Let the processes of a control group hold no more of a card; None: all there is. Raises CannotLimit."""
        self._driver.limit_memory(uuid, group, hard_bytes)

    def memory_limit(self, uuid: str, group: Path) -> MemoryLimit | None:
        """The limit that counts for a control group on a card. Raises CannotLimit."""
        return self._driver.memory_limit(uuid, group)

    def device_nodes(self, cards: Sequence[NodeCard]) -> tuple[DeviceNode, ...]:
        """All nodes for a container with these cards. Raises NodeProblem: then none is given."""
        try:
            return device_nodes.full_set(self._root, cards)
        except NodeProblem as problem:
            self._on_node_problem(problem.node)
            raise

    # Watching.

    def start(self) -> None:
        """Watch in a thread, after a first `probe`."""
        self.worker.start()

    def stop(self) -> None:
        self._stop.set()
        self.worker.stop()
        self.worker.join(1.0)
        self._driver.close()
        self._seen.save()

    def _watch(self) -> None:
        """One turn of watching: a probe when it is time, else a short wait for an event."""
        left = self._last_probe + self._settings().health_check_interval - time.monotonic()
        if left <= 0:
            self._take_pending()
            self.probe()
            return
        try:
            event = self._driver.wait_xid(min(left, _LONGEST_WAIT_S)) if self._driver.has_events else None
        except DriverError as error:
            self._conditions.set("events", f"waiting for Xid events failed: {error}")
            self._stop.wait(min(left, 1.0))
            return
        if event is not None:
            self._xid(event)
        elif not self._driver.has_events:
            self._stop.wait(min(left, _LONGEST_WAIT_S))

    def _take_pending(self) -> None:
        """What came while a failed wait was slept off: a probe may open the driver anew, which forgets it."""
        with contextlib.suppress(DriverError):
            for _ in range(_MOST_PENDING):
                event = self._driver.wait_xid(0.0) if self._driver.has_events else None
                if event is None:
                    return
                self._xid(event)

    def _xid(self, event: XidEvent) -> None:
        ignored = event.xid in self._settings().health_ignore_xids
        counted = event.uuid, event.xid, ignored
        self._xid_counts[counted] = self._xid_counts.get(counted, 0) + 1
        if ignored:
            log.info("card %s: Xid %d, an application's error, is ignored", *counted[:2], extra=fields(uuid=event.uuid))
            return
        log.warning(
            "card %s: Xid %d; it is unhealthy until a later probe finds it well",
            *counted[:2],
            extra=fields(uuid=event.uuid, reason="CardUnhealthy"),
        )
        self._xids[event.uuid] = (event.xid, time.monotonic())
        self._publish(self._snapshot.driver_version)

    # Probing.

    def probe(self) -> Snapshot:
        """Ask the driver and the nodes again. Never raises."""
        if isinstance(self._driver, NullDriver) or self._stale:
            self._reopen()
        failures: dict[str, str] = {}
        version = ""
        try:
            result = self._driver.probe()
        except DriverError as error:
            failures = dict.fromkeys(self._known, f"the driver does not answer: {error}")
            self._conditions.set("driver", f"the driver does not answer: {error}")
            self._stale = True
        else:
            version = result.driver_version
            failures = self._take(result)
            self._stale = bool(result.failed)  # NVML keeps a lost card lost until it is initialised again
        self._last_probe = time.monotonic()
        self._forget_xids(failures)
        return self._publish(version or self._snapshot.driver_version, failures)

    def _take(self, result: Probe) -> dict[str, str]:
        self._cuda_version = result.cuda_version or self._cuda_version
        failures = dict(result.failed)
        present = {item.card.uuid: item for item in result.cards}
        missing = {uuid: "it is gone from the driver" for uuid in self._known if uuid not in present}
        for uuid in missing:
            named = failures.get(self._known[uuid].physical_uuid)
            if named or failures:
                missing[uuid] = named or "; ".join(failures.values())
        self._known.update(present)
        self._met |= present.keys()
        if isinstance(self._driver, NullDriver):
            self._conditions.set("driver", f"no cards: {self._driver.reason}; serving without, and looking again")
            missing = dict.fromkeys(self._known, f"no driver: {self._driver.reason}")
        elif not result.failed:
            self._conditions.clear("driver", "the driver answers")
        # Deleted on purpose, an instance leaves with its parent well; and so does a card that went into MIG mode.
        gone = {uuid for uuid in missing if self._known[uuid].physical_uuid in result.physical}
        for uuid in gone | (missing.keys() & self._taken_out()):
            del self._known[uuid]
            del missing[uuid]
        self._seen.keep(result.cards, self._known)
        earlier = missing.keys() - self._met
        return missing | {uuid: f"not seen since {self._seen.since(uuid)}: {missing[uuid]}" for uuid in earlier}

    def _taken_out(self) -> set[str]:
        """Known cards and instances that the operator says are no longer in the machine."""
        named = self._settings().removed_cards
        return {uuid for uuid, item in self._known.items() if {uuid, item.physical_uuid} & named}

    def _reopen(self) -> None:
        self._driver.close()
        self._driver = self._open_driver(self._root)

    def _forget_xids(self, failures: dict[str, str]) -> None:
        """A good probe, at least one interval after the error, makes a card healthy again."""
        interval_s = self._settings().health_check_interval
        for uuid, (_, when) in list(self._xids.items()):
            if uuid not in failures and time.monotonic() - when >= interval_s:
                del self._xids[uuid]

    def _publish(self, version: str, failures: dict[str, str] | None = None) -> Snapshot:
        if failures is not None:
            self._failures = failures
        problems = dict(self._failures)
        problems.update(self._node_problems(problems))
        blocked = self._blocked
        for uuid in self._known.keys() & blocked.keys():
            problems.setdefault(uuid, blocked[uuid])
        for item in self._known.values():
            if item.physical_uuid in self._xids:
                other, xid = problems.get(item.card.uuid), f"Xid {self._xids[item.physical_uuid][0]}"
                problems[item.card.uuid] = f"{other}; {xid}" if other else xid
        cards = tuple(
            dataclasses.replace(
                item, card=dataclasses.replace(item.card, healthy=uuid not in problems, why=self._told(uuid, problems))
            )
            for uuid, item in sorted(self._known.items(), key=lambda pair: (pair[1].card.minor, pair[0]))
        )
        snapshot = Snapshot(self._driver.name, version, cards, tuple(sorted(problems.items())), self._cuda_version)
        self._report(problems)
        if snapshot != self._snapshot:
            self._snapshot = snapshot
            self._on_change()
        return snapshot

    def _told(self, uuid: str, problems: Mapping[str, str]) -> str:
        """Why a card is unhealthy, for everybody: whose pod holds it past us is nobody else's business."""
        why, held = problems.get(uuid, ""), self._blocked.get(uuid, "")
        return _HELD + why.removeprefix(held) if held and why.startswith(held) else why

    def _node_problems(self, failures: dict[str, str]) -> dict[str, str]:
        if not self._known:
            return {}
        found: dict[str, str] = {}
        majors = None
        try:
            majors = device_nodes.majors(self._root)
            device_nodes.common(self._root, majors)
        except NodeProblem as problem:
            found[""] = str(problem)
            self._on_node_problem(problem.node)
        for uuid, item in self._known.items():
            if uuid in failures:
                continue
            try:
                device_nodes.of_card(self._root, item, majors)
            except NodeProblem as problem:
                found[uuid] = str(problem)
                self._on_node_problem(problem.node)
        return found

    def _report(self, problems: dict[str, str]) -> None:
        """Each reason once, when it comes and when it goes."""
        for uuid, why in problems.items():
            what = f"card {uuid}" if uuid else "all cards of this node"
            if self._conditions.set(
                f"health:{uuid}", f"{what} unhealthy: {why}", {"uuid": uuid, "reason": "CardUnhealthy"}
            ):
                self._on_health(uuid, self._told(uuid, problems))
        for name in self._conditions.active():
            uuid = name.removeprefix("health:")
            if name.startswith("health:") and uuid not in problems:
                self._conditions.clear(
                    name, f"{f'card {uuid}' if uuid else 'this node'} is healthy again", {"uuid": uuid}
                )
                self._on_health(uuid, "")
