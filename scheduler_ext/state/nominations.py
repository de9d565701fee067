"""What preemption was told to free for which pod, so that the freed cards are kept for it until it takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler_ext.state.pods import Record


@dataclass(frozen=True, slots=True)
class Kept:
    """`record`: what to book for the pod on its node, in state NOMINATED, once a victim goes. `victims`: by UID."""

    record: Record
    victims: tuple[str, ...]


class Nominations:
    """The answers to preempt, by preemptor and node. Not locked: the engine's lock covers it."""

    def __init__(self) -> None:
        self._plans: dict[str, dict[str, Kept]] = {}
        self._by_victim: dict[str, set[tuple[str, str]]] = {}
        self._shown: set[str] = set()

    def remember(self, uid: str, plans: Mapping[str, Kept]) -> None:
        """In place of what was remembered for the pod."""
        self.forget(uid)
        if not plans:
            return
        self._plans[uid] = dict(plans)
        for node, plan in plans.items():
            for victim in plan.victims:
                self._by_victim.setdefault(victim, set()).add((uid, node))

    def forget(self, uid: str) -> None:
        """The pod was decided, is gone, or waits no more."""
        self._shown.discard(uid)
        for node, plan in self._plans.pop(uid, {}).items():
            for victim in plan.victims:
                waiting = self._by_victim.get(victim, set())
                waiting.discard((uid, node))
                if not waiting:
                    self._by_victim.pop(victim, None)

    def plan(self, uid: str, node: str) -> Kept | None:
        return self._plans.get(uid, {}).get(node)

    def plans(self, uid: str) -> Mapping[str, Kept]:
        """Per node what was answered for a pod."""
        return self._plans.get(uid, {})

    def freed_by(self, victim: str) -> list[Kept]:
        """What is to be kept, for whom, when this pod goes."""
        return [self._plans[uid][node] for uid, node in sorted(self._by_victim.get(victim, ()))]

    def show(self, uid: str) -> None:
        """The API server has shown the pod's nomination: from now on its absence means that it was taken back."""
        self._shown.add(uid)

    def shown(self, uid: str) -> bool:
        return uid in self._shown

    def older(self, limit: float) -> list[str]:
        """Pods whose plans were made before `limit` (monotonic seconds) and whose nomination was never shown."""
        return [
            uid
            for uid, plans in self._plans.items()
            if uid not in self._shown and all(plan.record.since < limit for plan in plans.values())
        ]
