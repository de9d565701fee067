"""What the API server shows of nodes, pods and quotas, and what no watch shows: time that passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any, TypeVar

from scheduler_ext.engine.intake import Wishes
from scheduler_ext.engine.parts import BETWEEN, Parts
from scheduler_ext.scoring import quotas
from scheduler_ext.state import objects
from scheduler_ext.state.pod_texts import KnownPod
from scheduler_ext.state.pods import State

_LOST_AT_ONCE = 128  # of what a list does not show any more
_T = TypeVar("_T")


class Watched(Parts):
    """What the watches feed."""

    def event(self, line: bytes) -> tuple[str, Mapping[str, Any], str] | None:
        """What has become of a pod, the pod and its version, if the line has the usual form. For one thread."""
        read = None if self._pod_events is None else self._pod_events.read(line)
        return None if read is None else (*read, read[1].version)

    def synced(self, kind: str) -> None:
        """The first complete list of "nodes" or "pods" is in."""
        with self._lock:
            self._intake.synced(kind)
            if not self.cache.unsynced:
                self._claims.recall()
        if self.cache.workload.aside and not self.cache.unsynced:
            with self._lock:
                self.cache.typical()  # the first version, of what has come: no request is to wait for it

    def expect_late_writes(self, seconds: float) -> None:
        """Decide nothing for so long while pods wait that waited when we began: a dead extender may have bound them."""
        self._intake.expect_late_writes(seconds)

    def expect_quotas(self) -> None:
        """Decide nothing until the quotas are known."""
        self._intake.expect_quotas()

    def see_node(self, data: Mapping[str, Any]) -> str:
        """Take in a Node as listed or watched. Returns its name."""
        with self._lock:
            return self._nodes.see_node(data)

    def lose_node(self, name: str) -> None:
        with self._lock:
            self._nodes.lose_node(name)

    def keep_nodes(self, names: Collection[str]) -> None:
        """A complete list of nodes was seen: forget all others."""
        self._lose_others(list(self.cache.cluster.index), set(names), self._nodes.lose_node)

    def _lose_others(self, there: Sequence[_T], listed: Set[_T], lose: Callable[[_T], None]) -> None:
        """Forget of those there what is not listed, a few at a time: of 48,000 pods that is 0.4 s."""
        gone = [one for one in there if one not in listed]
        for start in range(0, len(gone), _LOST_AT_ONCE):
            with self._lock:
                for one in gone[start : start + _LOST_AT_ONCE]:
                    lose(one)
            time.sleep(BETWEEN)

    def see_quotas(self, config_map: Mapping[str, Any] | None) -> None:
        """Take in the ConfigMap of quotas, None if there is none.

        Raises InvalidQuotas; then the last valid ones stay.
        """
        try:
            counted = quotas.parse(config_map)
        except quotas.InvalidQuotas as error:
            with self._lock:
                self._intake.refuse_quotas(config_map or {}, str(error))
            raise
        with self._lock:
            self.cache.quotas.expect(counted)
        more = True
        while more:
            with self._lock:
                more = self.cache.quotas.count_some()
                if not more:
                    self._intake.see_quotas(config_map)
            if more:
                time.sleep(BETWEEN)

    def see_pod(self, pod: Mapping[str, Any]) -> str:
        """Take in a Pod as listed or watched. Returns its UID.

        A pod without a node keeps what we assumed for it, whatever its annotations say, unless it is being deleted.
        """
        wishes = self._intake.wishes(pod)
        with self._lock:
            self._events += 1
            if isinstance(pod, KnownPod) and self._intake.see_known(pod, wishes):
                return pod.uid  # it has no claims, and has had none
            return self._see_pod(pod, wishes)

    def _see_pod(self, pod: Mapping[str, Any], wishes: Wishes | None) -> str:
        uid = self._intake.see_pod(pod, wishes)
        self._claims.see_pod(uid, pod)
        self._templates.see_pod(uid, pod)
        return uid

    def read_pod(self, pod: Mapping[str, Any]) -> None:
        """Take in a Pod with a node that was read by itself: the watch may be behind, and still show it without one."""
        wishes = self._intake.wishes(pod)
        with self._lock:
            known = self.cache.pods.get(objects.uid(pod))
            if known is not None and known.state is State.CONFIRMED:
                return  # the watch was faster
            if self._intake.is_as_written(pod):
                self._bindings.end(objects.uid(pod), State.BOUND)
            else:
                self._intake.expect_in_watch(self._see_pod(pod, wishes))

    def lose_pod(self, uid: str, last: Mapping[str, Any] | None = None) -> None:
        """The pod is gone; `last`: as a watch showed it then. What stays booked is said by Held."""
        with self._lock:
            self._events += 1
            self._intake.pod_gone(uid, last)
            self._claims.lose_pod(uid)
            self._templates.lose_pod(uid)

    def pods_cut(self) -> None:
        """The watch of pods has ended: what it tells next, or a list, kube-scheduler may have seen before."""
        with self._lock:
            self._intake.behind(True)

    def pods_followed(self) -> None:
        """The watch of pods has begun again, or goes on behind a long silence."""
        with self._lock:
            self._intake.behind(False)

    def keep_pods(self, uids: Collection[str], listed_since: float, *, restored: bool = False) -> None:
        """A complete list of pods, begun at `listed_since` on our clock, was seen: release all others.

        What was assumed or bound after the list began may be missing from it, and stays. `restored`: the API server has
        gone back; nobody deleted the others.
        """
        known = set(uids)
        with self._lock:
            self._intake.keep_waiting(known, listed_since)
        self._lose_others(
            self.cache.pods.uids(),
            known,
            lambda uid: self._intake.lose_unlisted(uid, listed_since, restored=restored),
        )
        self._lose_others(self._claims.users(), known, self._claims.lose_pod)
        self._lose_others(self._templates.users(), known, self._templates.lose_pod)

    def expire(self) -> int:
        """Release assumed placements whose Bind never came, and what is kept for nominations that never came.

        Returns how many.
        """
        with self._lock:
            late = self._claim_book.late()
            self._claims.count_lapsed(late)
        for start in range(0, len(late), _LOST_AT_ONCE):
            with self._lock:
                for claim in self._claim_book.late(late[start : start + _LOST_AT_ONCE]):
                    self._claim_book.give_up(claim)
            time.sleep(BETWEEN)
        with self._lock:
            return self._intake.expire()

    def read_late(self) -> None:
        """Read the reports of nodes that cost too much; see Intake."""
        with self._lock:
            late = self._nodes.late()
        for node in late:
            with self._lock:
                self._nodes.read_late(node)
            time.sleep(BETWEEN)
