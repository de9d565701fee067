"""What an engine is made of: the cache, what works on it, and the one lock around both."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from scheduler_ext.engine.bindings import Bindings
from scheduler_ext.engine.cache import SchedulerCache
from scheduler_ext.engine.choose import Chooser
from scheduler_ext.engine.claim_book import ClaimBook
from scheduler_ext.engine.claims import Claims
from scheduler_ext.engine.comparison import Comparison
from scheduler_ext.engine.filter import Filter
from scheduler_ext.engine.gangs import GangPlaces
from scheduler_ext.engine.held import Held
from scheduler_ext.engine.intake import Intake
from scheduler_ext.engine.nodes import Nodes
from scheduler_ext.engine.preemption import Preemption
from scheduler_ext.engine.resizes import Resizes
from scheduler_ext.engine.simulation import Simulation
from scheduler_ext.engine.templates import Templates
from scheduler_ext.engine.waking import Book, Waking
from scheduler_ext.state.pod_texts import PodTexts
from vcuda.spec.names import Names
from vcuda.spec.request import Policy

BETWEEN = 0.001  # seconds; a lock that is let go of and taken at once is seen free by nobody else


class Parts:
    """What Engine's faces work on. A part neither locks nor waits: a face holds `_lock` around what it asks of one.

    `options`: those of SchedulerCache.
    """

    def __init__(self, names: Names, policy: Policy = Policy.FGD, **options: Any) -> None:
        self.cache = cache = SchedulerCache(names, policy, **options)
        self.names, self.metrics = cache.names, cache.metrics
        self._lock = threading.Lock()
        self._events = 0  # of pods, so far
        chooser = Chooser(cache)
        self._gangs = GangPlaces(cache, chooser)
        self._preemption = Preemption(cache, self._gangs)
        self._simulation = Simulation(cache, chooser)
        self._resizes = Resizes(cache)
        self._claim_book = ClaimBook(cache)
        self._claims, self._templates = Claims(cache, self._claim_book), Templates(cache)
        shares = Book(cache.cluster, cache.scores, cache.quotas, cache.typical)
        self._waking = Waking(cache, self._lock, shares, self._claims.book(), self._claim_book)
        self._comparison = Comparison(cache, self._claim_book, self._claims)
        # A recording holds more of each pod.
        texts = partial(PodTexts, names, cache.kinds) if cache.journal is None else None
        self._requests = None if texts is None else texts("Pod", only=True, beside=("Nodes", "NodeNames"))
        self._pod_events = None if texts is None else texts("object")
        held = Held(cache)
        self._intake = Intake(cache, self._gangs, self._preemption, self._resizes, held)
        self._nodes = Nodes(cache, self._intake, self._resizes, held)
        self._filter = Filter(cache, chooser, self._gangs, self._intake, held)
        self._bindings = Bindings(cache, chooser, self._filter, held)

    def not_ready(self) -> str | None:
        """Why nothing can be decided yet, or None."""
        return self.cache.not_ready()
