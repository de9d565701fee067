"""Writes side by side, a namespace each: one whose writes are slow, refused or not answered delays no other's.

Whoever may say what is allowed in one namespace (a webhook, a quota) can have its writes refused, or hang for ever.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import NamedTuple

from scheduler_ext.sync.backoff import Backoff
from vcuda.kube.errors import ApiError, KubeError

_log = logging.getLogger(__name__)
_MOST = 16  # namespaces at a time, whose writes take no longer than usual; and as many of those known for others
_USUAL_SECONDS = 1.0  # that a write takes; what takes longer holds up nobody from then on
_MOST_WRITES = 128  # under way, with those that take longer than that for the first time: each is a thread
_MOST_SLOW = 4096  # namespaces that are known for slow writes; beyond that the oldest counts as usual
_IN_A_ROW = 3  # refusals of a namespace, of different things, before the rest of it waits


def _nothing() -> None:
    """Nobody minds."""


class _Lane(NamedTuple):
    """A namespace's write under way. `behind`: its last one was slow, or not taken. `since`: on our clock."""

    behind: bool
    since: float


class Task(NamedTuple):
    """One write. `write` raises KubeError where it was not taken; `left` is called instead if it was not even tried."""

    namespace: str
    key: Hashable
    what: str
    write: Callable[[], object]
    left: Callable[[], object] = _nothing


def in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="lane", daemon=True).start()


class Lanes:
    """`offer` is called by one thread, and does not wait. Of a namespace one write is under way at a time.

    What is not taken is not tried again before its pause is over, which grows; nor is anything of a namespace of which
    nothing is. `may`: asked right before each write; `failed` is told of every refusal, for a metric, and so is the log
    unless it is to be `quiet`.
    """

    def __init__(
        self,
        failed: Callable[[], object] = lambda: None,
        *,
        may: Callable[[], bool] = lambda: True,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[Callable[[], None]], None] = in_thread,
    ) -> None:
        self._failed, self._may, self._quiet, self._start, self._clock = failed, may, quiet, start, clock
        self._lock = threading.Lock()
        self._things = Backoff(clock=clock)
        self._namespaces = Backoff(clock=clock)
        self._running: dict[str, _Lane] = {}
        self._slow: dict[str, None] = {}  # namespaces whose last write took longer than usual, the longest ago first
        self._defect: Exception | None = None

    def closed(self) -> Collection[str]:
        """Namespaces of which nothing would be begun now."""
        with self._lock:
            found = {*self._running, *map(str, self._namespaces.waiting())}
            return found.union(self._slow, map(str, self._namespaces.known())) if self._full(behind=True) else found

    def _behind(self, namespace: str) -> bool:
        return namespace in self._slow or self._namespaces.times(namespace) > 0

    def _full(self, *, behind: bool) -> bool:
        """Whether no lane is free for a namespace whose last write was slow or not taken; or for any other one."""
        lanes, now = self._running.values(), self._clock()
        if behind:
            return sum(lane.behind for lane in lanes) >= _MOST
        soon = sum(not lane.behind and now - lane.since < _USUAL_SECONDS for lane in lanes)
        return soon >= _MOST or len(lanes) >= _MOST_WRITES

    def keep(self, keys: Collection[Hashable]) -> None:
        """Only these are still to be written: forget the pauses of all others."""
        with self._lock:
            self._things.keep(keys)

    def offer(self, tasks: Sequence[Task]) -> None:
        """Begin what may begin: who had no trouble the last time first, and of a namespace what failed least first.

        Raises what an earlier write raised that is no KubeError: a defect.
        """
        with self._lock:
            defect, self._defect = self._defect, None
            left, begun = self._sorted(tasks)
        for task in left:
            task.left()
        for namespace, mine in begun.items():
            self._start(lambda namespace=namespace, mine=mine: self._run(namespace, mine))  # type: ignore[misc]
        if defect is not None:
            raise defect

    def _sorted(self, tasks: Sequence[Task]) -> tuple[list[Task], dict[str, list[Task]]]:
        by_namespace: dict[str, list[Task]] = {}
        left, begun = list[Task](), dict[str, list[Task]]()
        for task in tasks:
            if self._things.due(task.key) and self._namespaces.due(task.namespace):
                by_namespace.setdefault(task.namespace, []).append(task)
            else:
                left.append(task)
        order = {namespace: number for number, namespace in enumerate(self._slow, 1)}
        for namespace in sorted(by_namespace, key=lambda one: (self._namespaces.times(one), order.get(one, 0))):
            mine, behind = by_namespace[namespace], self._behind(namespace)
            if namespace in self._running or self._full(behind=behind):
                left += mine
            else:
                self._running[namespace] = _Lane(behind, self._clock())
                begun[namespace] = sorted(mine, key=lambda task: self._things.times(task.key))
        return left, begun

    def _run(self, namespace: str, tasks: list[Task]) -> None:
        done, refused = 0, 0
        try:
            for task in tasks:
                if not self._may():
                    break
                done += 1
                with self._lock:
                    self._running[namespace] = self._running[namespace]._replace(since=self._clock())
                try:
                    task.write()
                except KubeError as error:
                    refused += 1
                    self._refused(task, error)
                    slow = self._took_long(namespace)
                    if refused >= _IN_A_ROW or not isinstance(error, ApiError):
                        with self._lock:
                            self._namespaces.rest(namespace, error)
                        break
                else:
                    refused, slow = 0, self._took_long(namespace)
                    with self._lock:
                        self._things.forget(task.key)
                        self._namespaces.forget(namespace)
                if slow:  # others that are, too, have their turns
                    break
        except Exception as error:  # noqa: BLE001 - it is told by `offer`, in a thread whose failures are seen
            self._defect = error
        finally:
            for task in tasks[done:]:
                task.left()
            with self._lock:
                del self._running[namespace]

    def _took_long(self, namespace: str) -> bool:
        """Remember whether a write that is over took longer than usual, which the next ones may, too."""
        with self._lock:
            self._slow.pop(namespace, None)
            slow = self._clock() - self._running[namespace].since > _USUAL_SECONDS
            if slow:
                self._slow[namespace] = None
                if len(self._slow) > _MOST_SLOW:
                    del self._slow[next(iter(self._slow))]
        return slow

    def _refused(self, task: Task, error: KubeError) -> None:
        with self._lock:
            seconds = self._things.rest(task.key, error)
        if not self._quiet:
            _log.warning("%s was not taken: %s; trying again in %.1f s", task.what, error, seconds)
        self._failed()
