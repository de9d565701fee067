"""Long work beside short requests: how it copies nodes, goes on and ends without keeping others waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from scheduler_ext.state.cluster import Cluster

BETWEEN = 0.001  # seconds; a lock that is let go of and taken at once is seen free by nobody else
_AT_ONCE = 128  # pods that are copied in one hold; a node's own are never parted
# Each is a small part of the one before. Where nodes change faster than they are copied, the rest comes at once.
_MOST_ROUNDS = 20
_BUSY, _PAUSE = 0.001, 0.00005  # seconds without a rest, and that one takes

_local = threading.local()
_T = TypeVar("_T")


def rest() -> None:
    """Let other threads run, if this one has not rested for a while. Not for the thread that serves.

    Python asks a thread for its lock only after it has kept it for a while; one that lets go of it for each short call
    of C, and has it back before anybody else has woken up, is never asked.
    """
    if time.perf_counter() - getattr(_local, "rested", 0.0) > _BUSY:
        time.sleep(_PAUSE)
        _local.rested = time.perf_counter()


def let_go(parts: list[Any]) -> None:
    """Free what a list holds a little at a time: all at once is one step of Python's, in which nobody else runs."""
    while parts:
        parts.pop()
        rest()


def copied(
    lock: AbstractContextManager[object],
    cluster: Cluster,
    names: Callable[[], Iterable[str]],
    take: Callable[[str], None],
    last: Callable[[], _T],
    *,
    others: bool = False,
) -> _T:
    """Call `take` for each of `names`, again for those that have changed since, and `last` when none is left to copy.

    All are called under the lock, `last` in the hold of the last piece: what was taken is what is so in that moment.
    `take` may get a name that nobody knows any more. `others`: also for nodes not among `names`, once they change.
    """
    with lock:
        changed = cluster.follow()
        wanted = dict.fromkeys(names())
    todo = [*reversed(wanted)]
    rounds = 1
    try:
        while True:
            with lock:
                size = 0
                while size < _AT_ONCE or rounds > _MOST_ROUNDS:
                    if not todo:
                        rounds += 1
                        todo = [name for name in changed if others or name in wanted]
                        changed.clear()
                        if not todo:
                            return last()
                    name = todo.pop()
                    changed.discard(name)
                    size += 1 + cluster.pods_on(name)
                    take(name)
            time.sleep(BETWEEN)
    finally:
        with lock:
            cluster.unfollow(changed)
