"""Classes of waiting pods that are to be scored for all nodes before kube-scheduler asks."""

from __future__ import annotations

import collections
import threading

from scheduler_ext.state.shape import Shape

_MOST = 64  # pods; kube-scheduler asks about the others before their turn would come


class Ahead:
    """By UID, one class each: the last that its pod had. Thread-safe; the newest pod comes first.

    It takes what one watch of all pods shows, so taking in a pod is cheap whatever its owner does.
    """

    def __init__(self) -> None:
        self._classes: collections.OrderedDict[str, Shape] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._some = threading.Event()

    def put(self, uid: str, shape: Shape) -> None:
        with self._lock:
            self._classes[uid] = shape
            self._classes.move_to_end(uid)
            if len(self._classes) > _MOST:
                self._classes.popitem(last=False)
            self._some.set()

    def drop(self, uid: str) -> None:
        """It has a node, or is gone."""
        with self._lock:
            self._classes.pop(uid, None)

    def __contains__(self, uid: str) -> bool:
        return uid in self._classes

    def take(self, seconds: float) -> Shape | None:
        """The next class, waiting for one so long."""
        if not self._some.wait(seconds):
            return None
        with self._lock:
            shape = self._classes.popitem()[1] if self._classes else None
            if not self._classes:
                self._some.clear()
            return shape
