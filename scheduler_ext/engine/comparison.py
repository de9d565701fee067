"""The extender's bookings beside what each node's manager reports: what differs for a while is told."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from scheduler_ext.engine.cache import SchedulerCache
from scheduler_ext.state.notices import BOOKING_DIFFERS, Difference, Notice
from scheduler_ext.state.pods import Record, State
from vcuda.logs import fields
from vcuda.spec.bookings import Report, Use

_PATIENCE = 60.0  # seconds: pods come and go in a manager's report some seconds after they do in the API server's
_log = logging.getLogger(__name__)


def _said(use: Use) -> str:
    return ", ".join(f"{cores} cores and {blocks} blocks of {uuid}" for uuid, (cores, blocks) in sorted(use.items()))


class Comparison:
    """Compares node by node. A pod that a report does not name is no difference: it may not have been admitted yet."""

    def __init__(self, cache: SchedulerCache) -> None:
        self._cache = cache
        self._agreed: dict[str, tuple[int, Report]] = {}  # by node: what there was to compare

    def nodes(self) -> list[str]:
        """Those with a report, or with a difference left."""
        reports = self._cache.reports
        if len(self._agreed) > len(reports):
            self._agreed = {node: agreed for node, agreed in self._agreed.items() if node in reports}
        return list(reports.keys() | self._cache.differences.keys())

    def _changed(self, node: str) -> int:
        row = self._cache.cluster.index.get(node)
        return -1 if row is None else int(self._cache.cluster.changed[row])

    def look(self, nodes: Sequence[str]) -> None:
        """Compare some nodes, and tell what has differed long enough."""
        for node in nodes:
            now = self._changed(node), self._cache.reports.get(node)
            before = self._agreed.get(node)
            # To compare 40,000 shares takes 0.1 s: only where anything has changed.
            if before is None or before[0] != now[0] or before[1] is not now[1]:
                self._look(node)
        self._cache.metrics.differences.set(
            sum(one.told for found in self._cache.differences.values() for one in found.values())
        )

    def _look(self, node: str) -> None:
        cache, report = self._cache, self._cache.reports.get(node, Report())
        before, now = cache.differences.pop(node, {}), cache.clock()
        booked: dict[str, Record] = {}
        for uid in cache.cluster.bookings(node):
            record = cache.pods.get(uid)
            if record is not None and record.state is State.CONFIRMED:
                booked[uid] = record
        found: dict[str, Difference] = {}
        for uid, use in report.pods.items():
            record = booked.get(uid)
            if record is not None and (record.uid in cache.resizing or dict(record.usage.cards) == use):
                continue
            said = f"gpu-manager of node {node} reports {_said(use)}"
            text = (
                f"{said}, booked is {_said(record.usage.cards) or 'nothing'}"
                if record
                else f"{said} for pod {uid}, which holds nothing here"
            )
            old = before.get(uid)
            one = found[uid] = old if old is not None and old.text == text else Difference(text, now)
            if not one.told and now - one.since >= _PATIENCE:
                one.told = True
                self._tell(node, record, text)
        if found:
            cache.differences[node] = found
            self._agreed.pop(node, None)
        else:
            self._agreed[node] = self._changed(node), report

    def of(self, record: Record | None) -> str | None:
        """What has lasted of what the manager of a pod's node says otherwise."""
        if record is None:
            return None
        one = self._cache.differences.get(record.node, {}).get(record.uid)
        return one.text if one is not None and one.told else None

    def _tell(self, node: str, record: Record | None, text: str) -> None:
        pod = {"pod": f"{record.namespace}/{record.name}", "uid": record.uid} if record else {}
        _log.warning("%s", text, extra=fields(pod, node=node, reason=BOOKING_DIFFERS))
        if record is None:
            notice = Notice("Node", "", node, node, BOOKING_DIFFERS, text)
        else:
            notice = Notice("Pod", record.namespace, record.name, record.uid, BOOKING_DIFFERS, text)
        self._cache.notices.put(notice)
