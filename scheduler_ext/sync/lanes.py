"""Writes side by side, a namespace each: one whose writes are refused, or not answered, delays its own and no other's.

Whoever may say what is allowed in one namespace (a webhook, a quota) can have its writes refused or hang for ever.
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
_MOST = 16  # namespaces at a time; of those that failed the last time half as many
_IN_A_ROW = 3  # refusals of a namespace, of different things, before the rest of it waits


def _nothing() -> None:
    """Nobody minds."""


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
        self._failed, self._may, self._quiet, self._start = failed, may, quiet, start
        self._lock = threading.Lock()
        self._things = Backoff(clock=clock)
        self._namespaces = Backoff(clock=clock)
        self._running: dict[str, bool] = {}  # namespaces, and whether they failed the last time
        self._defect: Exception | None = None

    def closed(self) -> Collection[str]:
        """Namespaces of which nothing would be begun now."""
        with self._lock:
            return {*self._running, *map(str, self._namespaces.waiting())}

    def keep(self, keys: Collection[Hashable]) -> None:
        """Only these are still to be written: forget the pauses of all others."""
        with self._lock:
            self._things.keep(keys)

    def offer(self, tasks: Sequence[Task]) -> None:
        """Begin what may begin: where the last time went well first, and of a namespace what failed least first.

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
        for namespace in sorted(by_namespace, key=self._namespaces.times):
            mine, failed = by_namespace[namespace], self._namespaces.times(namespace) > 0
            full = len(self._running) >= _MOST or (failed and sum(self._running.values()) >= _MOST // 2)
            if namespace in self._running or full:
                left += mine
            else:
                self._running[namespace] = failed
                begun[namespace] = sorted(mine, key=lambda task: self._things.times(task.key))
        return left, begun

    def _run(self, namespace: str, tasks: list[Task]) -> None:
        done, refused = 0, 0
        try:
            for task in tasks:
                if not self._may():
                    break
                done += 1
                try:
                    task.write()
                except KubeError as error:
                    refused += 1
                    self._refused(task, error)
                    if refused >= _IN_A_ROW or not isinstance(error, ApiError):
                        with self._lock:
                            self._namespaces.rest(namespace, error)
                        break
                else:
                    refused = 0
                    with self._lock:
                        self._things.forget(task.key)
                        self._namespaces.forget(namespace)
        except Exception as error:  # noqa: BLE001 - it is told by `offer`, in a thread whose failures are seen
            self._defect = error
        finally:
            for task in tasks[done:]:
                task.left()
            with self._lock:
                del self._running[namespace]

    def _refused(self, task: Task, error: KubeError) -> None:
        with self._lock:
            seconds = self._things.rest(task.key, error)
        if not self._quiet:
            _log.warning("%s was not taken: %s; trying again in %.1f s", task.what, error, seconds)
        self._failed()
