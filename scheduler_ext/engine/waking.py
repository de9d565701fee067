"""Which refused pods kube-scheduler should look at again, because what they waited for came without an API event."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable
from typing import NamedTuple

import numpy as np

from scheduler_ext.engine.cache import SchedulerCache
from scheduler_ext.engine.claim_book import ClaimBook
from scheduler_ext.scoring import scores
from scheduler_ext.scoring.quotas import Quotas
from scheduler_ext.scoring.scores import Scores
from scheduler_ext.scoring.typical_pods import Typical
from scheduler_ext.state.cluster import Cluster
from scheduler_ext.state.decisions import unpacked
from scheduler_ext.state.pods import State
from scheduler_ext.state.shape import Shape
from scheduler_ext.state.unschedulable import Needs, Unschedulable

_AT_ONCE = 16  # pods that are looked at for which the lock is held
_BETWEEN = 0.001  # seconds
_UNKNOWN = (State.BINDING, State.UNCERTAIN)


class Book(NamedTuple):
    """Cards with their scores: those of shares, or those of claims."""

    cluster: Cluster
    scores: Scores
    quotas: Quotas
    typical: Callable[[], Typical]


class Waking:
    """`shares`, `claims`: the two books. Takes the lock itself, for a few pods at a time."""

    def __init__(
        self, cache: SchedulerCache, lock: threading.Lock, shares: Book, claims: Book, claim_book: ClaimBook
    ) -> None:
        self._cache, self._lock, self._claim_book = cache, lock, claim_book
        self._books = {False: shares, True: claims}

    def take(self, most: int, closed: Collection[str] = ()) -> list[Unschedulable]:
        """Some of those who would pass now, the oldest first; each counts as woken. None of `closed` namespaces."""
        pods, found = self._cache.unschedulable, list[Unschedulable]()
        known: dict[Hashable, bool] = {}  # most pods that wait are of a few classes
        with self._lock:
            if self._cache.not_ready() is not None:
                return []
            due = pods.due()
        for start in range(0, len(due), _AT_ONCE):
            some = due[start : start + _AT_ONCE]
            for shape, of_claims in {(one.shape, one.of_claims) for one in some if one.shape is not None}:
                self._score(shape, self._books[of_claims])
            with self._lock:
                for one in some:
                    if not pods.current(one):
                        continue
                    if not self._passes(one, known):
                        pods.fits_no_more(one)
                        continue
                    rests = pods.rests(one.uid) and not pods.stays(one)
                    if len(found) == most or one.namespace in closed or rests:
                        pods.free()  # it is looked at again a little later
                        continue
                    pods.wake(one)
                    found.append(one)
                if len(found) == most:
                    pods.free()  # as are the others
                    break
            time.sleep(_BETWEEN)
        return found

    def _score(self, shape: Shape, book: Book) -> None:
        more = True
        while more:
            with self._lock:
                more = book.scores.warm(shape, book.cluster, book.typical())
            if more:
                time.sleep(_BETWEEN)

    def _passes(self, one: Unschedulable, known: dict[Hashable, bool]) -> bool:
        """Whether what it was refused for is past, as far as that can be told without deciding for it."""
        if one.needs is Needs.CERTAINTY:
            record = self._cache.pods.get(one.uid)
            return record is None or record.state not in _UNKNOWN
        if one.needs is Needs.MEMBERS:
            gang = self._cache.gangs.of(one.uid)
            return gang is None or len(gang.members) >= gang.size
        if one.needs is Needs.SIGHT:
            return all(self._claim_book.knows(*thing) for thing in one.unseen)
        if one.needs is Needs.VICTIMS:
            return True
        if one.shape is None or ((gang := self._cache.gangs.of(one.uid)) is not None and gang.places):
            return True
        book = self._books[one.of_claims]
        offered = None if one.offered is None else one.offered.tobytes()
        since = min(one.clock, int(book.cluster.born[: len(book.cluster)].max(initial=0)))  # rows that count are older
        key = one.of_claims, one.shape, one.namespace, offered, since, book.cluster.clock
        if key not in known:
            known[key] = self._fits(one, one.shape, book)
        return known[key]

    def _fits(self, one: Unschedulable, shape: Shape, book: Book) -> bool:
        rows = np.arange(len(book.cluster))
        if one.offered is not None:
            rows = unpacked(one.offered)
            rows = rows[rows < len(book.cluster)]
            rows = rows[book.cluster.born[rows] <= one.clock]  # a row may have got another node since
        if not len(rows):
            return False
        table = book.scores.table(shape, book.cluster, book.typical())
        if book.quotas.of(one.namespace):
            closed, _ = book.quotas.closed(one.namespace, table, rows)
            shut, rows = rows[closed], rows[~closed]
            if not one.of_claims and scores.cheapest(table, book.cluster, rows) is None:
                its = book.cluster, book.quotas, one.namespace, table, shut, book.typical()
                return bool(self._cache.second.look(*its)[0])
        return scores.cheapest(table, book.cluster, rows) is not None
