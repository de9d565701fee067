"""The extender's bookings beside what each node's manager reports: what differs for a while is told."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scheduler_ext.engine.cache import SchedulerCache
from scheduler_ext.engine.claim_book import ClaimBook
from scheduler_ext.engine.claims import Claims
from scheduler_ext.state.notices import BOOKING_DIFFERS, Difference, Notice
from scheduler_ext.state.pods import Record, State
from vcuda.logs import fields
from vcuda.spec.bookings import Report, Use

_PATIENCE = 60.0  # seconds: pods come and go in a manager's report some seconds after they do in the API server's
_log = logging.getLogger(__name__)


def _said(use: Use) -> str:
    return ", ".join(f"{cores} cores and {blocks} blocks of {uuid}" for uuid, (cores, blocks) in sorted(use.items()))


class _Booked(NamedTuple):
    """A pod or a claim with something of a node's cards. `runs`: a pod that has it, so that the manager gave it."""

    kind: str
    namespace: str
    name: str
    use: Use
    runs: bool


class Comparison:
    """Compares node by node, pods and claims. What a report does not name is a difference once its pod runs: before, it
    may not have been admitted yet.
    """

    def __init__(self, cache: SchedulerCache, book: ClaimBook, claims: Claims) -> None:
        self._cache, self._book, self._claims = cache, book, claims
        self._agreed: dict[str, tuple[int, int, Report]] = {}  # by node: what there was to compare

    def nodes(self) -> list[str]:
        """Those with a report, or with a difference left."""
        reports = self._cache.reports
        if len(self._agreed) > len(reports):
            self._agreed = {node: agreed for node, agreed in self._agreed.items() if node in reports}
        return list(reports.keys() | self._cache.differences.keys())

    def look(self, nodes: Sequence[str]) -> None:
        """Compare some nodes, and tell what has differed long enough."""
        for node in nodes:
            before, report = self._agreed.get(node), self._cache.reports.get(node)
            # To compare 40,000 shares takes 0.1 s: only where anything has changed.
            if before is None or before[:2] != self._changed(node) or before[2] is not report:
                self._look(node)
        self._cache.metrics.differences.set(
            sum(one.told for found in self._cache.differences.values() for one in found.values())
        )

    def _changed(self, node: str) -> tuple[int, int]:
        clusters = self._cache.cluster, self._book.cluster
        rows = [(one, one.index.get(node)) for one in clusters]
        shares, claims = (-1 if row is None else int(one.changed[row]) for one, row in rows)
        return shares, claims

    def _shares(self, node: str) -> dict[str, _Booked]:
        found = {}
        for uid, usage in self._cache.cluster.bookings(node).items():
            record = self._cache.pods.get(uid)
            if record is not None and record.state is State.CONFIRMED:
                found[uid] = _Booked("Pod", record.namespace, record.name, usage.cards, record.runs)
        return found

    def _allocated(self, node: str) -> dict[str, _Booked]:
        return {
            claim.uid: _Booked(
                "ResourceClaim", claim.namespace, claim.name, usage.cards, any(map(self._claims.runs, claim.users))
            )
            for claim, usage in self._book.on(node)
        }

    def _look(self, node: str) -> None:
        cache, report = self._cache, self._cache.reports.get(node)
        before, now = cache.differences.pop(node, {}), cache.clock()
        if report is None:
            self._agreed.pop(node, None)
            return
        shares, claims = self._shares(node), self._allocated(node)
        texts = self._differing(node, "pod", shares, report.pods)
        if report.claims is not None:
            texts |= self._differing(node, "claim", claims, report.claims)
        unnamed = {uid: one for uid, one in shares.items() if one.use and uid not in report.pods}
        unnamed |= {uid: one for uid, one in claims.items() if uid not in (report.claims or {})}
        for uid, one in unnamed.items():
            if one.runs and report.complete and uid not in cache.resizing:
                texts[uid] = f"gpu-manager of node {node} reports nothing for it, booked is {_said(one.use)}"
        found: dict[str, Difference] = {}
        for uid, text in texts.items():
            old = before.get(uid)
            different = found[uid] = old if old is not None and old.text == text else Difference(text, now)
            if not different.told and now - different.since >= _PATIENCE:
                different.told = True
                self._tell(node, uid, shares.get(uid) or claims.get(uid), text)
        if found:
            cache.differences[node] = found
        # Whoever is not named yet may begin to run, which changes no booking.
        if found or (unnamed and report.complete):
            self._agreed.pop(node, None)
        else:
            self._agreed[node] = *self._changed(node), report

    def _differing(
        self, node: str, what: str, booked: Mapping[str, _Booked], reported: Mapping[str, Use]
    ) -> dict[str, str]:
        """What a report names with other cards than are booked."""
        found = {}
        for uid, use in reported.items():
            one = booked.get(uid)
            if one is not None and (uid in self._cache.resizing or dict(one.use) == use):
                continue
            said = f"gpu-manager of node {node} reports {_said(use)}"
            if one:
                found[uid] = f"{said}, booked is {_said(one.use) or 'nothing'}"
            elif node in self._cache.gone.get(uid, ()):
                found[uid] = f"{said} for {what} {uid}, which is not bound there: that stays booked"
            else:
                found[uid] = f"{said} for {what} {uid}, which holds nothing here"
        return found

    def of(self, record: Record | None) -> str | None:
        """What has lasted of what the manager of a pod's node says otherwise."""
        if record is None:
            return None
        one = self._cache.differences.get(record.node, {}).get(record.uid)
        return one.text if one is not None and one.told else None

    def _tell(self, node: str, uid: str, one: _Booked | None, text: str) -> None:
        pod = {"pod": f"{one.namespace}/{one.name}", "uid": uid} if one is not None and one.kind == "Pod" else {}
        _log.warning("%s", text, extra=fields(pod, node=node, reason=BOOKING_DIFFERS))
        about = ("Node", "", node, node) if one is None else (one.kind, one.namespace, one.name, uid)
        self._cache.notices.put(Notice(*about, BOOKING_DIFFERS, text))
