"""The allocations of a node, with what every call of kubelet asks of them kept up to date: with hundreds of them counting anew took longest."""

from __future__ import annotations

from collections.abc import Collection, ItemsView, Iterable, Iterator, Mapping, MutableMapping, ValuesView

from manager.allocations import accounting
from manager.allocations.accounting import Use
from manager.allocations.record import Allocation

Key = tuple[str, str]


class AllocationIndex(MutableMapping[Key, Allocation]):
    """Allocations by key, in the order in which they were made. Changed under the allocator's lock; `snapshot` may be read without."""

    def __init__(self, allocations: Iterable[Allocation] = ()) -> None:
        self._items: dict[Key, Allocation] = {}
        self._pods: dict[str, dict[Key, Allocation]] = {}
        self._cards: dict[str, dict[Key, Allocation]] = {}
        self._holdings: dict[Key, frozenset[str]] = {}
        self._uses: dict[str, Use] = {}
        self._total: dict[str, tuple[int, int]] = {}
        self.snapshot: tuple[Allocation, ...] = ()
        """All of them now; another object after every change."""
        for allocation in allocations:
            self[allocation.key] = allocation

    def __getitem__(self, key: Key) -> Allocation:
        return self._items[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def values(self) -> ValuesView[Allocation]:
        return self._items.values()

    def items(self) -> ItemsView[Key, Allocation]:
        return self._items.items()

    def __setitem__(self, key: Key, allocation: Allocation) -> None:
        before = self._items.get(key)
        self._items[key] = allocation
        self._holdings[key] = frozenset(allocation.held)
        self._pods.setdefault(allocation.pod_uid, {})[key] = allocation
        for share in before.shares if before is not None else ():
            self._cards[share.uuid].pop(key, None)
        for share in allocation.shares:
            self._cards.setdefault(share.uuid, {})[key] = allocation
        self._changed(allocation.pod_uid)

    def __delitem__(self, key: Key) -> None:
        allocation = self._items.pop(key)
        del self._holdings[key]
        pod = self._pods[allocation.pod_uid]
        del pod[key]
        if not pod:
            del self._pods[allocation.pod_uid]
        for share in allocation.shares:
            self._cards[share.uuid].pop(key, None)
        self._changed(allocation.pod_uid)

    def _changed(self, pod_uid: str) -> None:
        before: Use = self._uses.pop(pod_uid, {})
        mine = self._pods.get(pod_uid)
        after: Use = accounting.pod_use(tuple(mine.values())) if mine else {}
        if after:
            self._uses[pod_uid] = after
        for uuid in before.keys() | after.keys():
            (cores, blocks), old, new = (of.get(uuid, (0, 0)) for of in (self._total, before, after))
            self._total[uuid] = (cores - old[0] + new[0], blocks - old[1] + new[1])
        self.snapshot = tuple(self._items.values())

    # What is kept.

    @property
    def holdings(self) -> Mapping[Key, frozenset[str]]:
        """Which resources out of "core" and "memory" each container holds."""
        return self._holdings

    @property
    def pods(self) -> Collection[str]:
        """UIDs of the pods that have an allocation."""
        return self._pods.keys()

    def of_pod(self, pod_uid: str) -> tuple[Allocation, ...]:
        return tuple(self._pods.get(pod_uid, {}).values())

    def on_cards(self, uuids: Collection[str]) -> list[Allocation]:
        """The allocations with a share of one of these cards, each once."""
        found: dict[Key, Allocation] = {}
        for uuid in uuids:
            found.update(self._cards.get(uuid, {}))
        return list(found.values())

    def booked_by_others(self, pod_uid: str) -> Use:
        """What all pods but this one book, each with its peak."""
        own = self._uses.get(pod_uid)
        if not own:
            return self._total
        return {
            uuid: (cores - own.get(uuid, (0, 0))[0], blocks - own.get(uuid, (0, 0))[1])
            for uuid, (cores, blocks) in self._total.items()
        }
