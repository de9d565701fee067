"""Python's garbage collection and its lock, set so that neither keeps a request waiting.

A full collection looks at every object that can be part of a cycle: 0.3 s with 95,000 pods, in which nothing else
runs. Nearly all of ours live long and are in no cycle. So what has survived three looks is not looked at again, until
there is twice as much as after the last look at everything: then that is repeated, in case there is garbage among it.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

_THRESHOLDS = (700, 3, 2)  # new objects before a look; so 3 * 4 * 700 in the largest: 3 ms
_FEW = 400_000  # of Python's blocks of memory; to look at as many takes 0.1 s
_COUNTED_EVERY = 60.0  # seconds; to count a million takes 1 ms
# Who takes Python's lock back after a call of C waits so long for a thread that computes; a filter does several times.
_SWITCH_SECONDS = 0.0005


class _Collector:
    def __init__(self) -> None:
        self._after_all = 0  # blocks that there were after the last look at everything
        self._all = False  # the next one is
        self._counted = 0.0

    def look_at_all(self) -> None:
        self._all = True
        gc.unfreeze()

    def looked(self, phase: str, what: dict[str, Any]) -> None:
        if phase != "stop" or what["generation"] != 2:
            return
        gc.freeze()
        now = time.monotonic()
        if self._all:
            self._all, self._after_all, self._counted = False, sys.getallocatedblocks(), now
        elif now - self._counted > _COUNTED_EVERY:
            self._counted = now
            if sys.getallocatedblocks() > 2 * self._after_all + _FEW:
                self.look_at_all()


_collector = _Collector()


def begin() -> None:
    """For a process that serves."""
    if _collector.looked not in gc.callbacks:
        gc.callbacks.append(_collector.looked)
    gc.set_threshold(*_THRESHOLDS)
    sys.setswitchinterval(_SWITCH_SECONDS)


def look_at_all() -> None:
    """Now, when nobody waits: the objects that stay have been made. Nothing happens in a process that has not begun."""
    if _collector.looked in gc.callbacks:
        _collector.look_at_all()
        gc.collect()
        gc.collect()  # of nothing: Python lets a quarter of what the last one found come before the next
