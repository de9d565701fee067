"""An engine whose inputs and decisions are recorded, in their order under the engine's lock."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from scheduler_ext.engine.core import locked
from scheduler_ext.engine.engine import Engine
from scheduler_ext.lab.recording import Recorder
from scheduler_ext.protocol.extender_v1 import Verdict
from scheduler_ext.protocol.reasons import ROW_CODES
from scheduler_ext.state.pods import State

DELETED, EXPIRED = "deleted", "expired"


class RecordedEngine(Engine):
    """An engine that hands events to a recorder; that costs a decision a few microseconds and never waits."""

    def __init__(self, recorder: Recorder, *args: Any, **options: Any) -> None:
        """`args`, `options`: those of Engine."""
        self._recorder = recorder
        super().__init__(*args, **options)

    @locked
    def see_node(self, data: Mapping[str, Any]) -> str:
        name = super().see_node(data)
        self._recorder.put({"kind": "node", "node": data})
        return name

    @locked
    def lose_node(self, name: str) -> None:
        super().lose_node(name)
        self._recorder.put({"kind": "node_gone", "name": name})

    @locked
    def keep_nodes(self, names: Collection[str]) -> None:
        for name in set(self._cluster.index) - set(names):
            self._recorder.put({"kind": "node_gone", "name": name})
        super().keep_nodes(names)

    @locked
    def see_quotas(self, config_map: Mapping[str, Any] | None) -> None:
        super().see_quotas(config_map)
        data = (config_map or {}).get("data")
        self._recorder.put({"kind": "quotas_changed", "data": data})

    @locked
    def see_pod(self, pod: Mapping[str, Any]) -> str:
        uid = str(pod["metadata"]["uid"])
        before = self._ledger.get(uid)
        super().see_pod(pod)
        after = self._ledger.get(uid)
        if after is not None and after is not before and after.state is State.CONFIRMED:
            self._recorder.put({"kind": "pod", "at_ns": self._wall_clock(), "pod": pod})
        return uid

    def _gone(self, uid: str, why: str) -> None:
        self._recorder.put({"kind": "gone", "at_ns": self._wall_clock(), "uid": uid, "why": why})

    @locked
    def lose_pod(self, uid: str) -> None:
        super().lose_pod(uid)  # a complete list and the end of a pod come here too
        self._gone(uid, DELETED)

    @locked
    def expire(self) -> int:
        before = [record.uid for record in self._ledger.pending() if record.state is State.ASSUMED]
        expired = super().expire()
        for uid in before if expired else ():
            if self._ledger.get(uid) is None:
                self._gone(uid, EXPIRED)
        return expired

    @locked
    def filter(self, pod: Mapping[str, Any], names: Sequence[str]) -> Verdict:
        start = time.perf_counter()
        verdict = super().filter(pod, names)
        event = {
            "kind": "filter", "at_ns": self._wall_clock(), "seconds": time.perf_counter() - start, "pod": pod,
            "offered": names, "node": verdict.chosen,
        }  # fmt: skip
        if verdict.refusal is not None:
            event["reasons"] = {str(verdict.refusal[0]): len(names)}
        elif verdict.chosen is None:
            counts: dict[str, int] = {}
            for code in verdict.codes or ():
                counts[str(ROW_CODES[code])] = counts.get(str(ROW_CODES[code]), 0) + 1
            event["reasons"] = counts
        self._recorder.put(event, 1 + len(names))
        return verdict

    @locked
    def end_bind(self, uid: str, outcome: State | None) -> None:
        record = self._ledger.get(uid)
        super().end_bind(uid, outcome)
        if record is not None:
            result = outcome.value if outcome is not None else "released"
            self._recorder.put(
                {
                    "kind": "bind",
                    "at_ns": self._wall_clock(),
                    "uid": uid,
                    "node": record.node,
                    "result": result,
                }
            )
