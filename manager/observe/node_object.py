"""What the node object says of its cards: the annotations of the inventory and of the bookings, and the model label."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from manager.allocations.accounting import AllocationView, by_pod, pod_use, static_pods
from manager.allocations.record import Allocation
from manager.cards import protocols
from manager.cards.inventory import Inventory, Snapshot
from manager.config.settings import Settings
from manager.kube.api import Pod
from manager.kube.pods import kubelet_uid
from manager.kube.writer import ApiWriter
from vcuda.kube.objects import ended, uid_of
from vcuda.spec import bookings, inventory
from vcuda.spec.inventory import Card
from vcuda.spec.names import Names

_ALIVE_S = 30.0  # half of the extender's patience; by the wall clock, so that it goes on after a restart


class NodeObject:
    """Keeps it true."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        names: Names,
        inventory: Inventory,
        view: AllocationView,
        api_writer: ApiWriter,
        pods: Callable[[], Sequence[Pod] | None],
        resizes: Callable[[], Mapping[str, int]],
        running: Callable[[], Collection[str]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`pods`: the node's as the API server shows them. `resizes`: by pod, which answer is carried out (Resizer).

        `running`: pods with a share of whose containers the kernel has processes, by UID.
        """
        self._settings, self._names, self._inventory = settings, names, inventory
        self._view, self._api_writer, self._pods, self._resizes = view, api_writer, pods, resizes
        self._running, self._clock = running, clock
        self._told: Mapping[str, str] | None = None  # of the bookings

    def describe(self) -> None:
        """Say all."""
        everything = self._inventory.snapshot
        snapshot = protocols.plugins_part(self._settings(), everything)
        self._told = self._bookings()
        self._api_writer.describe_node(
            inventory_of(snapshot, self._names) | self._told,
            labels([item.card for item in everything.cards], self._names, self._settings().node_labels),
        )

    def look(self) -> None:
        """Say all again if the bookings have changed since."""
        if self._told is not None and self._told != self._bookings():
            self.describe()

    def _bookings(self) -> dict[str, str]:
        resizes = self._resizes()  # first: what is carried out meanwhile is reported without its number, then once more
        allocations, pods = self._view.allocations, self._pods() or ()
        return bookings_of(allocations, self._names, pods, resizes, self._alive(allocations, pods))

    def _alive(self, allocations: Sequence[Allocation], pods: Sequence[Pod]) -> dict[str, int]:
        """Pods that have ended by their status, which others may write, and have processes all the same."""
        over = [pod for pod in pods if ended(pod)]
        if not over:
            return {}
        running, static, now = self._running(), static_pods(allocations), int(self._clock() / _ALIVE_S)
        return {uid_of(pod): now for pod in over if kubelet_uid(pod, static) in running}


def inventory_of(snapshot: Snapshot, names: Names) -> dict[str, str]:
    """While nodes of the whole machine are missing no card is healthy, whatever the driver says of it."""
    cards = [item.card for item in snapshot.cards]
    if snapshot.node_problem:
        cards = [dataclasses.replace(card, healthy=False, why=snapshot.node_problem) for card in cards]
    return {names.inventory: inventory.encode(tuple(cards))}


def bookings_of(
    allocations: Sequence[Allocation],
    names: Names,
    pods: Iterable[Pod],
    resizes: Mapping[str, int],
    alive: Mapping[str, int],
) -> dict[str, str]:
    """What each pod was given and each claim has, which no owner of a pod can edit; in the order of allocation.

    By the UID of its object: of a static pod that is its mirror's, once the API server has shown it (`pods`). `alive`:
    see vcuda.spec.bookings.Report.
    """
    shares = [item for item in allocations if item.claim is None]
    static = static_pods(shares)
    mirrors = {kubelet_uid(pod, static): uid_of(pod) for pod in pods} if static else {}
    given = {mirrors.get(uid, uid): pod_use(items) for uid, items in by_pod(shares).items()}
    claims = by_pod(item for item in allocations if item.claim is not None)
    prepared = {uid: pod_use(items) for uid, items in claims.items()}
    return {names.bookings: bookings.encode(given, resizes, prepared, alive)}


def labels(cards: Sequence[Card], names: Names, extra: Sequence[tuple[str, str]]) -> Mapping[str, str | None]:
    """The commonest model, as a label value; None removes the label of a node whose cards are gone."""
    models = Counter(card.model for card in cards)
    model = min(models, key=lambda name: (-models[name], name)) if models else ""
    return {names.model_label: inventory.label_value(model) or None, **dict(extra)}
