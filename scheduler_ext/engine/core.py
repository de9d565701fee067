"""The extender's one decision maker, as everybody else sees it."""

from __future__ import annotations

from typing import Any

from scheduler_ext.engine.questions import Questions
from scheduler_ext.engine.requests import Requests
from scheduler_ext.engine.searches import Searches
from scheduler_ext.engine.to_write import ToWrite
from scheduler_ext.engine.watched_claims import WatchedClaims
from vcuda.spec.names import Names
from vcuda.spec.request import Policy


class Engine(Requests, Searches, WatchedClaims, ToWrite, Questions):
    """Thread-safe; no method but `score_next` waits for anything but the lock, and none does I/O.

    Each method belongs to one of these faces, by who calls it; all of them work on the same parts (Parts). `options`:
    those of SchedulerCache.
    """

    def __init__(self, names: Names, policy: Policy = Policy.FGD, **options: Any) -> None:
        super().__init__(names, policy, **options)
        self.metrics.watch_figures(self.figures)
