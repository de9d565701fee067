"""The newest snapshot of the cards, for all streams that tell kubelet of them."""

from __future__ import annotations

import threading

from manager.cards.inventory import Snapshot


class SnapshotFeed:
    """Shown by one, waited for by many."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._snapshot: Snapshot | None = None
        self._version = 0
        self._closed = False

    def show(self, snapshot: Snapshot) -> None:
        with self._changed:
            self._snapshot = snapshot
            self._version += 1
            self._changed.notify_all()

    @property
    def snapshot(self) -> Snapshot | None:
        return self._snapshot

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def newer_than(self, version: int, timeout: float) -> tuple[int, Snapshot | None]:
        with self._changed:
            self._changed.wait_for(lambda: self._version > version or self._closed, timeout)
            return self._version, self._snapshot
