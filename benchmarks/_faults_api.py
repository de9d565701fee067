"""The stand-in API server failing on purpose and knowing the truth: which cards are held, by what was really written.

Faults are drawn from a seed: errors, answers that come too late or never, before or after the write was done, watches that break
off or start too late.
"""

from __future__ import annotations

import collections
import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from localcluster.apiserver.errors import ApiError
from localcluster.apiserver.faults import Fault, Request
from localcluster.apiserver.server import Server
from localcluster.apiserver.store import Change
from vcuda.spec import placement, request
from vcuda.spec.errors import SpecError
from vcuda.spec.names import Names
from vcuda.spec.units import CORES_PER_CARD

NAMES = Names()
Object = dict[str, Any]
_BEAT_S = 0.02
_HISTORY = 4000  # changes that a watch can go back


@dataclass
class Truth:
    """What the cards really hold, from what bound pods carry. Every entry of `findings` is a fault of the extender."""

    blocks: dict[str, int] = field(default_factory=dict)  # capacity by card
    nodes: dict[str, str] = field(default_factory=dict)  # card → node
    held: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    since: dict[str, float] = field(default_factory=dict)  # pod → when it was bound, on the clock of `bind`

    def bind(self, pod: Object) -> None:
        """A pod was bound: add what its placement says, and look whether any card has more than it can hold."""
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        try:
            asked = request.parse_pod(pod, NAMES)
            chosen = placement.decode(pod["metadata"]["annotations"][NAMES.placement])
            placement.check(chosen, asked)
        except (SpecError, KeyError) as error:
            self.findings.append(f"pod {name} was bound with a wrong placement: {error!r}")
            return
        use = placement.peak_use(asked, chosen)
        self.held[uid], self.since[uid] = use, time.time()
        for card in use:
            if self.nodes.get(card) != pod["spec"]["nodeName"]:
                self.findings.append(f"pod {name} was given card {card}, which is not on its node")
            cores, blocks = self.on(card)
            if cores > CORES_PER_CARD or blocks > self.blocks.get(card, 0):
                decided = float(pod["metadata"]["annotations"].get(NAMES.predicate_time, "nan")) / 1e9
                others = [
                    f"{time.time() - self.since[one]:.1f}"
                    for one, its in self.held.items()
                    if card in its and one in self.since and one != uid
                ]
                self.findings.append(
                    f"card {card} is booked twice: {cores} cores, {blocks} blocks with pod {name}, decided "
                    f"{time.time() - decided:.1f} s before; others are bound for {', '.join(others)} s"
                )

    def on(self, card: str) -> tuple[int, int]:
        uses = [use[card] for use in self.held.values() if card in use]
        return sum(cores for cores, _ in uses), sum(blocks for _, blocks in uses)

    def places(self, cores: int, blocks: int | None) -> int:
        """How many pods of one container that asks for this have room at once, on cards that are all well."""
        whole: collections.Counter[str] = collections.Counter()
        shares = 0
        for card, size in self.blocks.items():
            used_cores, used_blocks = self.on(card)
            whole[self.nodes[card]] += not (used_cores or used_blocks)
            if blocks is not None:
                shares += min((CORES_PER_CARD - used_cores) // cores, (size - used_blocks) // blocks)
        return shares if blocks is not None else sum(free // (cores // CORES_PER_CARD) for free in whole.values())


class Faults:
    """Draws a fault per request. `rate`: how many of a hundred requests fail while `on`."""

    def __init__(self, seed: int, rate: float, late_s: float) -> None:
        self._dice, self._rate = random.Random(seed), rate
        self._kinds = {
            "500": Fault(500),
            "503": Fault(503),
            "409": Fault(409),
            "late, done": Fault(done=True, late_s=late_s),
            "late, not done": Fault(504, late_s=late_s),
            "cut, done": Fault(0, done=True),
            "cut, not done": Fault(0),
        }
        self._lock = threading.Lock()
        self.on = False
        self.tally: collections.Counter[str] = collections.Counter()

    def draw(self) -> Fault | None:
        with self._lock:
            if not self.on or self._dice.random() >= self._rate / 100:
                return None
            kind = self._dice.choice(list(self._kinds))
            self.tally[kind] += 1
            return self._kinds[kind]

    def watch_seconds(self) -> float:
        """How long until the watches of a resource break."""
        with self._lock:
            return self._dice.uniform(0.2, 6.0)

    def forgets(self) -> bool:
        """Watches break: whether what they missed is gone for good (410)."""
        with self._lock:
            self.tally["watches dropped"] += 1
            forgets = self._dice.random() < 0.3
            self.tally["watches too old (410)"] += forgets
            return forgets


class Api(Server):
    """The stand-in API server; `truth` follows each change of a pod."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(token="t", history=_HISTORY)
        self.faults, self.truth = faults, Truth()
        self.bindings = 0
        self.longest_stall_s = 0.0  # for which this process did not get to run
        self.hook = self._fault
        self.store("pods").on_change = self._follow
        self.start()
        threading.Thread(target=self._beat, daemon=True).start()
        for plural in ("nodes", "pods"):
            threading.Thread(target=self._break, args=(plural,), daemon=True).start()

    def _fault(self, request: Request) -> Fault | None:
        self.bindings += request.path.endswith("/binding")
        return None if request.watches else self.faults.draw()

    def _beat(self) -> None:
        while not self.stopping:
            began = time.monotonic()
            time.sleep(_BEAT_S)
            self.longest_stall_s = max(self.longest_stall_s, time.monotonic() - began - _BEAT_S)

    def _break(self, plural: str) -> None:
        while not self.stopping:
            time.sleep(self.faults.watch_seconds())
            if self.faults.on:
                self.break_watches(plural, forget=self.faults.forgets())

    def _follow(self, change: Change) -> None:
        before, pod = change.before, change.after
        if pod is None or pod["status"].get("phase") in ("Succeeded", "Failed"):
            self.truth.held.pop(change.last["metadata"]["uid"], None)
        elif before is not None and pod["spec"].get("nodeName") and not before["spec"].get("nodeName"):
            self.truth.bind(pod)

    def waiting(self) -> list[Object]:
        return [pod for key, pod in self.pods().items() if not pod["spec"].get("nodeName") and "/p" in key]

    def has_room(self) -> list[str]:
        """The waiting pods for which there is room, by what the cards really hold; of a gang, if all that wait have a place."""
        with self.operations.lock:
            bound: set[str] = set()
            waiting: dict[str, list[Object]] = {}
            for pod in self.pods().values():
                gang = pod["metadata"].get("annotations", {}).get(NAMES.gang, "")
                if pod["spec"].get("nodeName"):
                    bound.add(gang)
                else:
                    waiting.setdefault(gang, []).append(pod)
            found = []
            for gang, pods in waiting.items():
                # Once a member is bound, each of the others counts by itself.
                together = int(gang.split("/")[1]) if gang and gang not in bound else 1
                if len(pods) < together:
                    continue  # it waits for pods that are not there
                for pod in pods:
                    limits = pod["spec"]["containers"][0]["resources"]["limits"]
                    blocks = int(limits[NAMES.memory]) if NAMES.memory in limits else None
                    if self.truth.places(int(limits[NAMES.core]), blocks) >= together:
                        found.append(pod["metadata"]["name"])
            return found

    def delete(self, plural: str, key: str) -> None:
        """Delete an object, if it is still there."""
        with contextlib.suppress(KeyError):
            self.remove(plural, key)

    def change(self, key: str, edit: Callable[[Object], None]) -> None:
        """Replace a pod, if it is still there, by what `edit` makes of a copy."""
        with self.operations.lock:
            if (pod := self.pod(key)) is not None:
                edit(pod)
                self.put("pods", pod)

    def pod(self, key: str) -> Object | None:
        try:
            return self.find("pods", key)
        except ApiError:
            return None

    def pods(self) -> dict[str, Object]:
        """All by "namespace/name", to be read only."""
        found = self.store("pods").list(None)
        return {f"{pod['metadata']['namespace']}/{pod['metadata']['name']}": pod for pod in found}
