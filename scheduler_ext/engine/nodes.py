"""What becomes of the book when a node is shown: its cards, and what its manager reports of pods."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from scheduler_ext.engine.cache import SchedulerCache
from scheduler_ext.engine.held import Held
from scheduler_ext.engine.intake import Intake
from scheduler_ext.engine.resizes import Resizes
from scheduler_ext.state import objects
from scheduler_ext.state.notices import Notice
from scheduler_ext.state.pace import Pace
from scheduler_ext.state.pods import Source
from vcuda.logs import fields
from vcuda.spec import resize
from vcuda.spec.bookings import Report, Use
from vcuda.spec.errors import Reason
from vcuda.spec.placement import MOST_BLOCKS
from vcuda.spec.units import CORES_PER_CARD

_TOLD_SECONDS = 300.0  # between two words about reports of a node that can't be read
_log = logging.getLogger(__name__)


class Nodes:
    """What the watch of nodes feeds."""

    def __init__(self, cache: SchedulerCache, pods: Intake, resizes: Resizes, held: Held) -> None:
        self._cache, self._pods, self._resizes, self._held = cache, pods, resizes, held
        self._refused: dict[str, float] = {}  # nodes with a report that can't be read, and when that was last told
        self._pace = Pace(cache.clock)
        self._late: dict[str, tuple[str, int]] = {}  # by node: its newest report, which is read later

    def see_node(self, data: Mapping[str, Any]) -> str:
        """See Engine.see_node."""
        seen, cluster, quotas = objects.node(data, self._cache.names), self._cache.cluster, self._cache.quotas
        known = cluster.described(seen.name)
        # A manager writes its report there with every pod that comes or goes: mostly only that is new.
        as_before = known is not None and known.cards == seen.cards and quotas.labels(seen.name) == seen.labels
        with contextlib.nullcontext() if as_before else quotas.recounted(seen.name):
            quotas.describe(seen.name, seen.labels, seen.cards)
            cluster.set_node(seen.name, seen.cards, seen.cpu_milli, seen.memory_bytes, seen.problem)
        self._cache.plugins.set_node(seen.name, seen.plugins)
        if not as_before:
            self._cache.unschedulable.free()
        self._see_report(seen.name, seen.bookings, objects.version(data))
        self._cache.note("node", node=data)
        return seen.name

    def _see_report(self, node: str, text: object, version: int) -> None:
        """At once, or where reading those of this node takes too much, the newest one a little later."""
        if isinstance(text, str) and not self._pace.may(node):
            self._late[node] = text, version
            return
        self._late.pop(node, None)
        with self._pace.of(node):
            report, wrong = objects.report(text)
            if wrong:
                self._refuse_report(node, wrong)
            else:
                before, back = self._cache.reports.get(node), self._held.went_back(node, version)
                report = self._bounded(node, report)
                self._take_report(node, report, back=back)
                self._held.look(node, before, back=back)

    def _bounded(self, node: str, report: Report | None) -> Report | None:
        """A manager that lies gives no pod more than the node has: the quotas of namespaces count what it says."""
        known = self._cache.cluster.described(node)
        total = {card.uuid: card.memory_blocks for card in (known.cards if known is not None else None) or ()}
        most = max(total.values(), default=MOST_BLOCKS)

        def bounded(use: Use) -> Use:
            cards = sorted(use, key=lambda uuid: uuid not in total)[: len(total)] if len(use) > len(total) > 0 else use
            return {
                uuid: (min(use[uuid][0], CORES_PER_CARD), min(use[uuid][1], total.get(uuid, most))) for uuid in cards
            }

        if report is None or all(bounded(use) == use for use in report.pods.values()):
            return report
        return replace(report, pods={uid: bounded(use) for uid, use in report.pods.items()})

    def late(self) -> list[str]:
        """The nodes whose newest report was not read yet."""
        self._pace.forget_idle()
        return list(self._late)

    def read_late(self, node: str) -> None:
        """If that is its turn now."""
        if node in self._late:
            self._see_report(node, *self._late[node])

    def _refuse_report(self, node: str, problem: str) -> None:
        """A report that can't be read lets go of nothing: the last one that could be stays in force."""
        now = self._cache.clock()
        if now - self._refused.get(node, -math.inf) < _TOLD_SECONDS:
            return
        self._refused[node] = now
        text = f"node {node}: {problem}; the last one that could be read stays in force"
        reason = Reason.INVALID_INVENTORY
        _log.warning("%s", text, extra=fields(node=node, reason=reason))
        self._cache.notices.put(Notice("Node", "", node, node, reason, text))

    def _take_report(self, node: str, report: Report | None, *, back: bool = False) -> None:
        """What its owner could have written is replaced by what the pod was given. `back`: it lets go of nothing."""
        pods = self._cache.pods
        if report is None:
            self._cache.reports.pop(node, None)
            self._lose_ended(node)
            return
        before, self._cache.reports[node] = self._cache.reports.get(node), report
        if not back:
            self._lose_ended(node, report.pods)
        if report != before and not back:  # its manager is alive, and says that they go on
            for uid in self._cache.ended.keys() & report.pods.keys():
                if (record := pods.get(uid)) is not None and record.node == node:
                    self._cache.ended[uid] = self._cache.clock()
        for uid, use in report.pods.items() if self._cache.cards_known(node) else ():
            record = pods.get(uid)
            if record is None or record.node != node or record.source is not Source.ANNOTATION:
                continue
            cards = resize.most(use, self._cache.resizing.get(uid, {}))
            if record.usage.cards != cards:
                self._pods.distrust(record)
            usage = record.usage._replace(cards=cards, unplaced=False)
            if usage != record.usage:
                self._cache.unschedulable.free()
            pods.put(replace(record, usage=usage, source=Source.MANAGER))
        self._resizes.report(node, report)

    def _lose_ended(self, node: str, reported: Collection[str] = ()) -> None:
        """Free what pods held that have ended, but for those that the node's manager still reports."""
        for uid in self._cache.ended.keys() - reported:
            if (record := self._cache.pods.get(uid)) is not None and record.node == node:
                self._pods.lose_pod(uid)

    def lose_node(self, name: str) -> None:
        before = self._cache.reports.pop(name, None)
        self._cache.differences.pop(name, None)
        self._refused.pop(name, None)
        self._late.pop(name, None)
        self._cache.plugins.set_node(name, frozenset())
        self._lose_ended(name)
        self._held.went_back(name, 0)
        self._held.look(name, before)
        with self._cache.quotas.recounted(name):
            self._cache.quotas.forget_node(name)
            self._cache.cluster.remove_node(name)
        self._cache.note("node_gone", name=name)
