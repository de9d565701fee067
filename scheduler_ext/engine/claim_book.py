"""The book of claims (DRA): the cards that nodes offer for them, what each was given and what it is expected to get.

A book of its own: a node may serve both protocols, and a card belongs to one. A namespace's quotas count both books.
Not locked: the engine's lock covers it.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import orjson

from scheduler_ext.engine.cache import SchedulerCache
from scheduler_ext.state import claims
from scheduler_ext.state.claims import Given, Key, SeenClaim, SeenSlice
from scheduler_ext.state.cluster import Cluster, Usage
from scheduler_ext.state.pods import PodCache, Record, State
from scheduler_ext.state.unschedulable import Unseen
from vcuda.spec import device_classes
from vcuda.spec.device_classes import DeviceClass
from vcuda.spec.errors import Reason
from vcuda.spec.inventory import MOST_CARDS, Card
from vcuda.spec.units import CORES_PER_CARD


@dataclass(frozen=True, slots=True)
class Assumed:
    """For which pod a claim is expected to be allocated, and until when on our clock.

    `gang`: that is its gang's deadline. `reserved`: a place in one, not asked for yet.
    """

    pod_uid: str
    until: float
    gang: bool
    reserved: bool


class _Open(NamedTuple):
    """A claim that is not allocated. `text`: see open_spec; `named`: its classes, `meant`: as it was read with them."""

    uid: str
    text: bytes
    named: tuple[str, ...]
    meant: tuple[DeviceClass | None, ...]


class ClaimBook:
    """`pods`: what is booked, by claim: CONFIRMED where it is allocated, ASSUMED where that is only expected."""

    def __init__(self, cache: SchedulerCache) -> None:
        self._cache = cache
        self.cluster = Cluster()
        self.quotas = cache.quotas.beside(self.cluster)
        self.pods = PodCache(self.cluster, changed=self.quotas.count, unheard=cache.unschedulable.free)
        cache.quotas.pair(cache.pods, self.quotas, self.pods)
        self._slices: dict[str, SeenSlice] = {}
        self._devices: dict[str, dict[str, Card]] = {}  # by node and name
        self._traits: dict[str, dict[str, Mapping[str, Any]]] = {}  # of cards, by node and UUID
        self._claims: dict[Key, SeenClaim] = {}
        self._others: set[Key] = set()  # claims that are none of ours
        self._open: dict[Key, _Open] = {}  # ours or not: another word of a class may change that
        self._classes: dict[str, DeviceClass] = {}
        self.extended: dict[str, set[str]] = {}  # classes that may mean our cards, by their extended resources
        self._named: collections.Counter[str] = collections.Counter()  # how many classes have an extendedResourceName
        self._there: dict[str, dict[str, SeenClaim]] = {}  # allocated claims by node and UID
        self._assumed: dict[str, Assumed] = {}  # by the claim's UID
        self._assumed_for: dict[str, set[str]] = {}  # … the claims' UIDs by their pod's

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

    def slices(self) -> list[str]:
        return list(self._slices)

    def _read_pool(self, node: str) -> None:
        """The slices of the newest generation are the pool, once all are there; until then what was known stays."""
        there = [one for one in self._slices.values() if one.node == node]
        newest = max((one.generation for one in there), default=0)
        current = [one for one in there if one.generation == newest]
        if there and len(current) < current[0].slices:
            return
        devices = {name: card for one in current for name, card in one.cards.items()}
        self._traits[node] = {uuid: its for one in current for uuid, its in one.traits.items()}
        with self.quotas.recounted(node):
            self._offer(node, devices)
        for claim in list(self._there.get(node, {}).values()):
            self._book(claim)

    def _offer(self, node: str, devices: dict[str, Card]) -> None:
        if not devices:
            self._devices.pop(node, None)
            self._traits.pop(node, None)
            self.cluster.remove_node(node)
        elif len({card.uuid for card in devices.values()}) != len(devices) or len(devices) > MOST_CARDS:
            self._devices.pop(node, None)
            self.cluster.set_node(node, (), 0, 0, Reason.INVALID_INVENTORY)
        else:
            self._devices[node] = devices
            self.cluster.set_node(node, tuple(devices.values()), 0, 0)

    def see_class(self, seen: DeviceClass) -> None:
        """Claims of it that are not allocated are read again when they are asked about."""
        self.lose_class(seen.name)
        self._classes[seen.name] = seen
        if seen.extended:
            self._named[seen.extended] += 1
        for resource in device_classes.resources_of(seen, self._cache.names):
            self.extended.setdefault(resource, set()).add(seen.name)

    def lose_class(self, name: str) -> None:
        old = self._classes.pop(name, None)
        if old is not None and old.extended:
            self._named[old.extended] -= 1
            if not self._named[old.extended]:
                del self._named[old.extended]
        for resource in () if old is None else device_classes.resources_of(old, self._cache.names):
            self.extended[resource].discard(name)
            if not self.extended[resource]:
                del self.extended[resource]

    def classes(self) -> list[str]:
        return list(self._classes)

    def see_claim(self, data: Mapping[str, Any]) -> str:
        """Returns its namespace and name as one key."""
        names = self._cache.names
        seen = claims.claim_of(data, names)
        if not (seen.uid and seen.name):
            raise ValueError("a claim without a UID or a name")
        there = self._open.get(seen.key), self._claims.get(seen.key)
        if any(one is not None and one.uid != seen.uid for one in there):
            self.lose_claim(*seen.key)
        self._open.pop(seen.key, None)
        old = self._claims.get(seen.key)
        if seen.given is None:
            spec, text, named = claims.open_spec(data, names)
            seen = claims.asking(seen, spec, names, self._classes)
            self._open[seen.key] = _Open(seen.uid, text, named, self._meant(named))
        self._file(seen)
        if old is None or old.given != seen.given:
            if old is not None:
                self._unbook(old)
            self._book(seen)
        return "/".join(seen.key)

    def _meant(self, named: Iterable[str]) -> tuple[DeviceClass | None, ...]:
        return tuple(map(self._classes.get, named))

    def _file(self, seen: SeenClaim) -> None:
        """What is assumed for a claim stays, also where its class has become another's: kube-scheduler may use it."""
        if seen.ours:
            self._others.discard(seen.key)
            self._claims[seen.key] = seen
        else:  # while it has our devices it is
            self._claims.pop(seen.key, None)
            self._others.add(seen.key)

    def lose_claim(self, namespace: str, name: str) -> None:
        key = (namespace, name)
        self._others.discard(key)
        before, old = self._open.pop(key, None), self._claims.pop(key, None)
        if old is not None:
            self._unbook(old)
        for one in (before, old):
            if one is not None:
                self.give_up(one.uid)

    def keys(self) -> list[Key]:
        """Of all claims, ours or not."""
        return [*self._claims, *self._others]

    def _unbook(self, claim: SeenClaim) -> None:
        """Take back what an allocated claim holds."""
        for node in {one.node for one in claim.given or ()}:
            self.pods.release(_booking(claim, node))
            there = self._there.get(node, {})
            if there.pop(claim.uid, None) is not None and not there:
                del self._there[node]

    def _book(self, claim: SeenClaim) -> None:
        """Book what a claim was given, in place of what was assumed for it; of an open one that stays."""
        if claim.given is None:
            return
        self.give_up(claim.uid)
        use: dict[str, dict[str, tuple[int, int]]] = {}
        for one in claim.given:
            self._there.setdefault(one.node, {})[claim.uid] = claim
            card = self._devices.get(one.node, {}).get(one.device)
            if card is not None:
                _add(use.setdefault(one.node, {}), card, one)
        for node, its in use.items():
            self._put(_booking(claim, node), claim, node, its, State.CONFIRMED)

    def _put(self, uid: str, claim: SeenClaim, node: str, use: Mapping[str, tuple[int, int]], state: State) -> None:
        self.pods.put(Record(uid, claim.namespace, claim.name, node, Usage(dict(use)), state, self._cache.clock()))

    # --- what is expected ---

    def claim(self, namespace: str, name: str) -> SeenClaim | None:
        """One of ours, as its classes mean it now."""
        key = (namespace, name)
        before = self._open.get(key)
        if before is not None and (meant := self._meant(before.named)) != before.meant:
            seen = SeenClaim(before.uid, namespace, name, None)
            self._file(claims.asking(seen, orjson.loads(before.text), self._cache.names, self._classes))
            self._open[key] = before._replace(meant=meant)
        return self._claims.get(key)

    def seen(self, namespace: str, name: str) -> bool:
        """Whether the watch has shown a claim, ours or not."""
        return (namespace, name) in self._claims or (namespace, name) in self._others

    def knows_class(self, name: str) -> bool:
        """Whether the watch has shown a class, or it is the one of our driver's name."""
        return name in self._classes or name == self._cache.names.driver

    def may_be_ours(self, resource: str) -> bool:
        """Whether a class of our cards may stand behind an extended resource, on a node that has none of its own."""
        return resource in self.extended or resource not in self._named

    def knows(self, kind: str, name: str) -> bool:
        """Whether a watch has shown something; see Unseen."""
        if kind == "claim":
            namespace, _, own = name.partition("/")
            return self.seen(namespace, own)
        if kind == "class":
            return self.knows_class(name)
        return name in self._named or (kind == "resource" and name in self._cache.plugins)

    def unseen_of(self, namespace: str, name: str) -> Unseen:
        """What of a claim no watch has shown: itself, or classes that it names."""
        if not self.seen(namespace, name):
            return frozenset({("claim", f"{namespace}/{name}")})
        there = self._open.get((namespace, name))
        named = () if there is None else there.named
        return frozenset(("class", one) for one in named if not self.knows_class(one))

    def on(self, node: str) -> Iterator[tuple[SeenClaim, Usage]]:
        """What is allocated on a node, and what that books there."""
        for old in self._there.get(node, {}).values():
            record = self.pods.get(_booking(old, node))
            if record is not None:
                yield self._claims.get(old.key, old), record.usage

    def difference(self, claim: SeenClaim) -> str | None:
        """What has lasted of what a manager says otherwise of a claim; see Comparison."""
        nodes = sorted({one.node for one in claim.given or ()})
        found = (self._cache.differences.get(node, {}).get(claim.uid) for node in nodes)
        return next((one.text for one in found if one is not None and one.told), None)

    def assumed(self, uid: str) -> Assumed | None:
        """What is assumed for a claim."""
        return self._assumed.get(uid)

    def records(self, claim: SeenClaim) -> Iterator[Record]:
        """What is booked for a claim, by node."""
        nodes = {one.node for one in claim.given} if claim.given is not None else {""}
        for node in sorted(nodes):
            record = self.pods.get(_booking(claim, node) if claim.given is not None else claim.uid)
            if record is not None:
                yield record

    def assume(
        self, claim: SeenClaim, pod_uid: str, row: int, *, deadline: float | None = None, reserved: bool = False
    ) -> None:
        """Book the cards that kube-scheduler takes: the first that fit, in the order of the slices.

        `deadline`: its gang's, on our clock.
        """
        node, cards = self.cluster.names[row], self.cluster.cards[row]
        use: dict[str, tuple[int, int]] = {}
        accepted = np.zeros(self.cluster.usable.shape[1], np.bool_)
        traits = self._traits.get(node, {})
        accepted[: len(cards)] = [
            claims.selected(claim.selectors, card, traits.get(card.uuid, {}), self._cache.names) for card in cards
        ]
        for wish in claim.wishes:
            fits = (
                self.cluster.usable[row]
                & accepted
                & (self.cluster.free_cores[row] >= wish.step.cores)
                & (self.cluster.free_blocks[row] >= wish.blocks(self.cluster.total_blocks[row]))
            )
            for column in np.flatnonzero(fits)[: wish.step.cards].tolist():
                _add(use, cards[column], Given(node, "", wish.step.cores, wish.blocks(cards[column].memory_blocks)))
            # Of a claim with several requests each sees what those before it have taken.
            self._put(claim.uid, claim, node, use, State.ASSUMED)
        self._no_more_assumed(claim.uid)
        until = self._cache.clock() + self._cache.expiry_seconds if deadline is None else deadline
        self._assumed[claim.uid] = Assumed(pod_uid, until, deadline is not None, reserved)
        self._assumed_for.setdefault(pod_uid, set()).add(claim.uid)

    def _no_more_assumed(self, uid: str) -> bool:
        old = self._assumed.pop(uid, None)
        if old is not None:
            claims = self._assumed_for[old.pod_uid]
            claims.discard(uid)
            if not claims:
                del self._assumed_for[old.pod_uid]
        return old is not None

    def give_up(self, uid: str) -> None:
        """Take back what was assumed for a claim."""
        if self._no_more_assumed(uid):
            self.pods.release(uid)

    def lose_pod(self, uid: str) -> None:
        """Nothing is assumed for a pod any more."""
        for claim in list(self._assumed_for.get(uid, ())):
            self.give_up(claim)

    def late(self, among: Collection[str] | None = None) -> list[str]:
        """What kube-scheduler did not allocate after all, and what gangs hold whose deadline has passed; by claim."""
        now = self._cache.clock()
        found = ((claim, self._assumed.get(claim)) for claim in (list(self._assumed) if among is None else among))
        return [claim for claim, one in found if one is not None and one.until < now]

    def deadline(self, pods: Iterable[str]) -> float | None:
        """When the gang of some pods gives back what is assumed for it; None where nothing is."""
        of = (self._assumed[claim] for uid in pods for claim in self._assumed_for.get(uid, ()))
        return min((one.until for one in of if one.gang), default=None)

    def expected(self) -> set[str]:
        """The pods, by UID, for which anything is assumed."""
        return set(self._assumed_for)

    def reserved_nodes(self) -> set[str]:
        """Where places are kept for pods of gangs that have not asked for them yet."""
        found = (self.pods.get(uid) for uid, one in self._assumed.items() if one.reserved)
        return {record.node for record in found if record is not None}

    def figures(self) -> dict[str, float]:
        given = sum(1 for one in self._claims.values() if one.given is not None)
        rows = np.arange(len(self.cluster))
        usable = self.cluster.usable[rows]
        return {
            "claims_allocated": given,
            "claims_assumed": len(self._assumed),
            "claim_cards": int(usable.sum()),
            "claim_free_cores": int(np.where(usable, np.maximum(self.cluster.free_cores[rows], 0), 0).sum()),
        }


def _booking(claim: SeenClaim, node: str) -> str:
    """What an allocated claim holds on a node is booked under this: who forges a status may name several nodes."""
    return f"{claim.uid}@{node}"


def _add(use: dict[str, tuple[int, int]], card: Card, given: Given) -> None:
    cores, blocks = use.get(card.uuid, (0, 0))
    use[card.uuid] = (
        cores + (CORES_PER_CARD if given.cores is None else given.cores),
        blocks + (card.memory_blocks if given.blocks is None else given.blocks),
    )
