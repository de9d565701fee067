"""Claims (DRA): their cards, what is booked for them, and which node a waiting pod's claims get.

kube-scheduler alone allocates claims, and takes the first card of a node that fits. Which node that is matters for
packing, which of its cards hardly does (docs/extender.md, "Claims"); so the filter lets one node through, the one whose
first card is the best, and books what kube-scheduler will take there until the claim's status says what it took. What
is booked is only our knowledge: where it is wrong, or we are away, a claim still gets no more than a card has.

A book of its own: a node may serve both protocols, and a card belongs to one. Not locked: the engine's lock covers it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from scheduler_ext.engine.cache import SchedulerCache
from scheduler_ext.protocol.extender_v1 import Verdict
from scheduler_ext.scoring import scores
from scheduler_ext.scoring.scores import Scores
from scheduler_ext.scoring.typical_pods import Workload
from scheduler_ext.state import claims, objects
from scheduler_ext.state.claims import Given, Key, SeenClaim, SeenSlice, Wish
from scheduler_ext.state.cluster import Cluster, Ints, Usage
from scheduler_ext.state.decisions import Decision
from scheduler_ext.state.shape import Shape
from vcuda.spec import request
from vcuda.spec.errors import InvalidRequest, Reason
from vcuda.spec.inventory import MOST_CARDS, Card
from vcuda.spec.units import CORES_PER_CARD

_MOST_STEPS = 64  # of all claims of a pod; each costs a step of placing on every node


@dataclass(frozen=True, slots=True)
class _Assumed:
    """Where kube-scheduler is expected to allocate a claim, and for which pod."""

    node: str
    pod_uid: str
    since: float


class Claims:
    """What the engine knows of claims."""

    def __init__(self, cache: SchedulerCache) -> None:
        self._cache = cache
        self.cluster = Cluster()
        self._scores, self._workload = Scores(allowed=scores.first_fitting), Workload()
        self._slices: dict[str, SeenSlice] = {}
        self._devices: dict[str, dict[str, Card]] = {}  # by node and name
        self._claims: dict[Key, SeenClaim] = {}
        self._others: set[Key] = set()  # claims that are none of ours
        self._there: dict[str, dict[str, SeenClaim]] = {}  # allocated claims by node and UID
        self._assumed: dict[str, _Assumed] = {}  # by the claim's UID
        self._counted: set[str] = set()  # claims that have counted as demand

    # --- what the watches show ---

    def see_slice(self, data: Mapping[str, Any]) -> str:
        seen, name = claims.slice_of(data, self._cache.names), str(data["metadata"]["name"])
        old = self._slices.pop(name, None)
        if seen is not None:
            self._slices[name] = seen
        if seen != old:
            for node in {one.node for one in (seen, old) if one is not None}:
                self._read_pool(node)
        return name

    def lose_slice(self, name: str) -> None:
        old = self._slices.pop(name, None)
        if old is not None:
            self._read_pool(old.node)

    def keep_slices(self, names: Collection[str]) -> None:
        for name in self._slices.keys() - set(names):
            self.lose_slice(name)

    def _read_pool(self, node: str) -> None:
        """The slices of the newest generation are the pool, once all are there; until then what was known stays."""
        there = [one for one in self._slices.values() if one.node == node]
        newest = max((one.generation for one in there), default=0)
        current = [one for one in there if one.generation == newest]
        if there and len(current) < current[0].slices:
            return
        devices = {name: card for one in current for name, card in one.cards.items()}
        if not devices:
            self._devices.pop(node, None)
            self.cluster.remove_node(node)
        elif len({card.uuid for card in devices.values()}) != len(devices) or len(devices) > MOST_CARDS:
            self._devices.pop(node, None)
            self.cluster.set_node(node, (), 0, 0, Reason.INVALID_INVENTORY)
        else:
            self._devices[node] = devices
            self.cluster.set_node(node, tuple(devices.values()), 0, 0)
        for claim in list(self._there.get(node, {}).values()):
            self._book(claim)

    def see_claim(self, data: Mapping[str, Any]) -> str:
        """Returns its namespace and name as one key."""
        seen = claims.claim_of(data, self._cache.names)
        if not (seen.uid and seen.name):
            raise ValueError("a claim without a UID or a name")
        old = self._claims.get(seen.key)
        if old is not None and old.uid != seen.uid:
            self._forget(old)
            old = None
        if not seen.ours:
            if old is not None:  # of another DeviceClass: ours while it has our devices
                self._forget(old)
            self._others.add(seen.key)
        else:
            self._others.discard(seen.key)
            self._claims[seen.key] = seen
            if old is None or old.given != seen.given:
                if old is not None:
                    self._unbook(old)
                self._book(seen)
        return "/".join(seen.key)

    def lose_claim(self, namespace: str, name: str) -> None:
        self._others.discard((namespace, name))
        old = self._claims.get((namespace, name))
        if old is not None:
            self._forget(old)

    def keep_claims(self, keys: Collection[str]) -> None:
        for key in [*self._claims, *self._others]:
            if "/".join(key) not in keys:
                self.lose_claim(*key)

    def _forget(self, claim: SeenClaim) -> None:
        self._unbook(claim)
        self._give_up(claim.uid)
        self._counted.discard(claim.uid)
        del self._claims[claim.key]

    def _unbook(self, claim: SeenClaim) -> None:
        """Take back what an allocated claim holds."""
        for node in {one.node for one in claim.given or ()}:
            self.cluster.release(claim.uid, node)
            there = self._there.get(node, {})
            if there.pop(claim.uid, None) is not None and not there:
                del self._there[node]

    def _give_up(self, uid: str) -> None:
        """Take back what was assumed for a claim."""
        assumed = self._assumed.pop(uid, None)
        if assumed is not None:
            self.cluster.release(uid, assumed.node)

    def _book(self, claim: SeenClaim) -> None:
        """Book what a claim was given, in place of what was assumed for it; of an open one that stays."""
        if claim.given is None:
            return
        self._give_up(claim.uid)
        use: dict[str, dict[str, tuple[int, int]]] = {}
        for one in claim.given:
            self._there.setdefault(one.node, {})[claim.uid] = claim
            card = self._devices.get(one.node, {}).get(one.device)
            if card is not None:
                _add(use.setdefault(one.node, {}), card, one)
        for node, its in use.items():
            self.cluster.book(claim.uid, node, Usage(its))

    # --- deciding ---

    def unseen(self, pod: Mapping[str, Any]) -> bool:
        """Whether kube-scheduler knows a claim of the pod that our watch has not shown."""
        namespace = str(pod["metadata"].get("namespace") or "")
        return any(
            (namespace, name) not in self._claims and (namespace, name) not in self._others
            for name in claims.names_of_claims(pod)
        )

    def filter(self, pod: Mapping[str, Any], names: Sequence[str]) -> Verdict | None:
        """See Engine.filter_claims."""
        metadata = pod["metadata"]
        uid, namespace, name = (str(metadata.get(key) or "") for key in ("uid", "namespace", "name"))
        mine = {one.uid: one for each in claims.names_of_claims(pod) if (one := self._claims.get((namespace, each)))}
        waiting = [one for one in mine.values() if one.given is None]
        decision = partial(
            Decision, uid, namespace, name, self._cache.wall_clock(), self._cache.cluster.clock, len(names)
        )
        try:
            for claim in waiting:
                if claim.problem is not None:
                    raise InvalidRequest(claim.problem.reason, f"claim {claim.name}: {claim.problem.message}")
            shape = self._shape(pod, [wish for claim in waiting for wish in claim.wishes])
        except InvalidRequest as error:
            self._cache.decisions.add(decision(refusal=(error.reason, error.message)))
            return Verdict(refusal=(error.reason, error.message))
        if not shape.steps:
            return None
        if waiting[0].uid not in self._counted:
            self._counted.add(waiting[0].uid)
            self._workload.observe(shape)
        for claim in waiting:
            self._give_up(claim.uid)
        rows = np.fromiter((self.cluster.index.get(one, -1) for one in names), np.int64, len(names))
        self._follow(names, rows)
        table = self._scores.table(shape, self.cluster, self._workload.typical(self.cluster, self._cache.clock()))
        row = scores.cheapest(table, self.cluster, rows)
        if row is None:
            return None  # kube-scheduler found room: what is booked here may be older than what it knows
        node = self.cluster.names[row]
        self._assume(uid, row, waiting)
        self._cache.decisions.add(decision(node=node))
        return Verdict(node)

    def _shape(self, pod: Mapping[str, Any], wishes: Sequence[Wish]) -> Shape:
        """The class of a pod with claims, whose annotation may choose a policy."""
        if len(wishes) > _MOST_STEPS:
            raise InvalidRequest(
                Reason.INVALID_POD, f"its claims ask for {len(wishes)} shares; a pod may have {_MOST_STEPS}"
            )
        names = self._cache.names
        one = {"name": "claims", "resources": {"limits": {names.core: CORES_PER_CARD}}}
        asked = request.parse_pod({"metadata": pod["metadata"], "spec": {"containers": [one]}}, names)
        policy = asked.policy or self._cache.policy
        cpu, memory = objects.pod_requests(pod)
        return Shape(tuple(wish.step for wish in wishes), policy, cpu_milli=cpu, memory_bytes=memory)

    def _follow(self, names: Sequence[str], rows: Ints) -> None:
        """The nodes' free cpu and memory are counted in the other book, which sees all pods."""
        there = self._cache.rows(names)
        both = (rows >= 0) & (there >= 0)
        main = self._cache.cluster
        self.cluster.take_over(rows[both], main.free_cpu[there[both]], main.free_memory[there[both]])

    def _assume(self, pod_uid: str, row: int, waiting: Sequence[SeenClaim]) -> None:
        """Book the cards that kube-scheduler takes: the first that fit, in the order of the slices."""
        node, cards, now = self.cluster.names[row], self.cluster.cards[row], self._cache.clock()
        for claim in waiting:
            use: dict[str, tuple[int, int]] = {}
            for wish in claim.wishes:
                fits = (
                    self.cluster.usable[row]
                    & (self.cluster.free_cores[row] >= wish.step.cores)
                    & (self.cluster.free_blocks[row] >= wish.blocks(self.cluster.total_blocks[row]))
                )
                for column in np.flatnonzero(fits)[: wish.step.cards].tolist():
                    _add(use, cards[column], Given(node, "", wish.step.cores, wish.blocks(cards[column].memory_blocks)))
                # Of a claim with several requests each sees what those before it have taken.
                self.cluster.book(claim.uid, node, Usage(dict(use)))
            self._assumed[claim.uid] = _Assumed(node, pod_uid, now)

    def lose_pod(self, uid: str) -> None:
        for claim in [key for key, one in self._assumed.items() if one.pod_uid == uid]:
            self._give_up(claim)

    def expire(self) -> None:
        """What kube-scheduler did not allocate after all."""
        limit = self._cache.clock() - self._cache.expiry_seconds
        for claim in [key for key, one in self._assumed.items() if one.since < limit]:
            self._give_up(claim)

    def figures(self) -> dict[str, float]:
        given = sum(1 for one in self._claims.values() if one.given is not None)
        return {"claims_allocated": given, "claims_assumed": len(self._assumed)}


def _add(use: dict[str, tuple[int, int]], card: Card, given: Given) -> None:
    cores, blocks = use.get(card.uuid, (0, 0))
    use[card.uuid] = (
        cores + (CORES_PER_CARD if given.cores is None else given.cores),
        blocks + (card.memory_blocks if given.blocks is None else given.blocks),
    )
