"""Live resize: what the extender granted a running container becomes its limits, as soon as its memory allows it."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from manager.allocate.allocator import Allocator
from manager.allocations.accounting import pod_use
from manager.allocations.record import Allocation
from manager.config.settings import Settings
from manager.errors import Reason, Refusal
from manager.kube.api import Pod
from manager.kube.writer import ApiWriter
from vcuda.kube.objects import uid_of
from vcuda.logs import fields
from vcuda.spec import resize
from vcuda.spec.names import Names
from vcuda.spec.request import Kind
from vcuda.spec.resize import Answer, Target

log = logging.getLogger(__name__)


class Resizer:
    """Compares what each pod was granted with what it has. Each outcome is told once, as an event on the pod."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        names: Names,
        allocator: Allocator,
        api_writer: ApiWriter,
        pods: Callable[[], Sequence[Pod]],
        done: Callable[[], None],
    ) -> None:
        """`pods`: as the watch has shown them last; `see` comes after. `done`: after a change, to report it soon."""
        self._settings, self._names = settings, names
        self._allocator, self._api_writer, self._pods, self._done = allocator, api_writer, pods, done
        self._told: dict[str, tuple[Answer, str]] = {}  # by pod
        # By pod, the number of the answer that its shares follow; replaced, never changed: others read it unlocked.
        self.carried_out: Mapping[str, int] = {}
        # The watch and the housekeeping come at the same time. `pods` are asked for with it, so that no older object is
        # obeyed after a newer one: the extender has answered otherwise since, and believes our report of that.
        self._lock = threading.Lock()

    def look(self) -> None:
        """All pods again: those whose memory had to shrink first, and those that had no share yet."""
        known = {item.pod_uid for item in self._allocator.allocations}
        with self._lock:
            self._told = {uid: told for uid, told in self._told.items() if uid in known}
            if pods := self._pods():
                shown = {uid_of(pod) for pod in pods}
                self.carried_out = {uid: number for uid, number in self.carried_out.items() if uid in shown}
            for pod in pods:
                self._obey(pod)

    def see(self, pod: Pod) -> None:
        """One pod as the watch shows it."""
        with self._lock:
            self._obey(pod)

    def _obey(self, pod: Pod) -> None:
        answer = resize.read(pod, self._names)
        if answer is not None and answer.granted:
            self._resize(pod, answer)

    def _resize(self, pod: Pod, answer: Answer) -> None:
        """All that a pod was granted, or nothing of it: what grows may have what shrinks."""
        mine = self._allocator.shown_by(pod)
        wanted = {item.key: _after(item, answer.granted.get(item.container)) for item in mine}
        changes = [(item, wanted[item.key]) for item in mine if wanted[item.key] != item]
        if not changes:
            if mine and self.carried_out.get(uid_of(pod)) != answer.number:
                self._note(pod, answer)
                self._done()
            return
        try:
            for before, _ in changes:
                self._require_sense(before, answer.granted[before.container])
            _require_goal([wanted[item.key] for item in mine], answer)
            waits = self._allocator.resize(changes)
        except Refusal as refusal:
            if refusal.reason in (Reason.STATE_UNWRITABLE, Reason.REGION_UNAVAILABLE):
                message = f"it is resized when this node can write it down: {refusal.message}"
                self._tell(changes[0][0], answer, pod, "ResizeWaits", message)
            elif refusal.reason != Reason.BUSY:  # else it is looked at again, and nothing has been decided
                self._tell(changes[0][0], answer, pod, "ResizeRefused", refusal.message)
            return
        if waits is not None:
            container, beyond = waits
            self._tell(
                changes[0][0],
                answer,
                pod,
                "ResizeWaits",
                f"container {container} uses {-(-beyond // 2**20)} MiB more than its new limit; it is resized when it "
                "has freed them",
            )
            return
        self._note(pod, answer)
        done = (f"container {before.container}: {_said(before)} → {_said(after)}" for before, after in changes)
        self._tell(changes[0][0], answer, pod, "ResizeCompleted", "; ".join(done))
        self._told.pop(changes[0][0].pod_uid, None)
        self._allocator.reconcile(pod)
        self._done()

    def _note(self, pod: Pod, answer: Answer) -> None:
        self.carried_out = {**self.carried_out, uid_of(pod): answer.number}

    def _require_sense(self, before: Allocation, target: Target) -> None:
        """What no extender of ours grants, or this node's operator does not want."""
        least, most = self._settings().smallest_memory, self._settings().oversell_limit
        blocks, oversold = target.share.memory_blocks, before.oversell_blocks
        if before.whole or before.kind is Kind.INIT or [share.uuid for share in before.shares] != [target.share.uuid]:
            why = "it has not one share of that card"
        elif blocks < least:
            why = f"a share has at least {least} blocks here (--smallest-memory)"
        elif most and blocks < before.shares[0].memory_blocks and oversold > most * blocks:
            why = f"it has {oversold} blocks in all, here at most {most * blocks} for {blocks} (--oversell-limit)"
        else:
            return
        raise Refusal(Reason.SHARE_TOO_SMALL, f"container {before.container} can't be resized: {why}")

    def _tell(self, item: Allocation, answer: Answer, pod: Pod, reason: str, message: str) -> None:
        if self._told.get(item.pod_uid) == (answer, reason):
            return
        self._told[item.pod_uid] = answer, reason
        log.info("%s: %s: %s", item.name, reason, message, extra=fields(item.fields, reason=reason))
        metadata = pod["metadata"]
        about = {
            "kind": "Pod",
            "namespace": item.namespace,
            "name": item.pod_name,
            "uid": str(metadata.get("uid", "")),
        }
        self._api_writer.event(about, "Normal" if reason == "ResizeCompleted" else "Warning", reason, message)


def _require_goal(pod: Sequence[Allocation], answer: Answer) -> None:
    """Raise Refusal where a pod would have more than was granted to it in all: the grant took it for smaller."""
    cards, use = {target.share.uuid for target in answer.granted.values()}, pod_use(pod)
    for uuid in sorted(cards & use.keys()):
        (cores, blocks), (most_cores, most_blocks) = use[uuid], answer.goal.get(uuid, (0, 0))
        if cores > most_cores or blocks > most_blocks:
            raise Refusal(
                Reason.CALLS_DISAGREE,
                f"the pod was granted {most_cores} cores, {most_blocks} blocks of card {uuid} in all and would have "
                f"{cores} cores, {blocks} blocks; ask again",
            )


def _after(before: Allocation, target: Target | None) -> Allocation:
    """With the amounts that were granted. An elastic limit that is not named stays, and so does having none."""
    if target is None:
        return before
    elastic = before.elastic or before.core_limit > before.shares[0].cores
    cores = target.share.cores
    limit = target.core_limit or (before.core_limit if elastic else cores)
    hidden = elastic and target.core_limit is None and limit <= cores
    return dataclasses.replace(before, shares=(target.share,), core_limit=limit, elastic=hidden)


def _said(item: Allocation) -> str:
    (share,) = item.shares
    up_to = f" (up to {item.core_limit})" if item.core_limit > share.cores else ""
    return f"{share.cores} cores{up_to}, {share.memory_blocks} blocks"
