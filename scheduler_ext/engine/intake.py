"""What becomes of the book when pods and quotas are shown; and what no watch shows, the expiry of assumptions."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from typing import Any

from scheduler_ext.engine import garbage
from scheduler_ext.engine.cache import SchedulerCache
from scheduler_ext.engine.gangs import GangPlaces
from scheduler_ext.engine.held import Held, held
from scheduler_ext.engine.preemption import Preemption
from scheduler_ext.engine.resizes import Resizes
from scheduler_ext.state import objects, unschedulable
from scheduler_ext.state.cluster import Usage
from scheduler_ext.state.lines import Lines
from scheduler_ext.state.notices import CARD_OVERBOOKED, INVALID_QUOTAS, Notice
from scheduler_ext.state.pod_texts import KnownPod
from scheduler_ext.state.pods import ENDED_SECONDS, HELD, Record, Source, State
from scheduler_ext.state.shape import Shape, shape_of, shared
from vcuda.kube.objects import ended
from vcuda.logs import fields
from vcuda.spec import request, resize
from vcuda.spec.errors import InvalidRequest
from vcuda.spec.request import PodRequest

DELETED, EXPIRED = "deleted", "expired"
MOST_LIGHT = 3  # containers; scoring more for all nodes at once would hold up other requests
_LATE_SECONDS = 2.0  # behind a write of ours in which a watch shows it; else what it tells is late
_CATCHES_UP_SECONDS = 5.0  # since a watch has begun again, in which it tells what had happened before
_MOST_ENDED = 512  # pods that stay booked after their end: filter may look at all of them at once
_WRITTEN = (State.BINDING, State.UNCERTAIN, State.BOUND)
_log = logging.getLogger(__name__)

Wishes = tuple[PodRequest, Shape] | InvalidRequest  # the last: why no card can ever give it


class Intake:
    """What the watches of pods and of the quotas' ConfigMap feed; nodes are taken in by Nodes."""

    def __init__(
        self, cache: SchedulerCache, gangs: GangPlaces, preemption: Preemption, resizes: Resizes, held: Held
    ) -> None:
        self._cache, self._gangs, self._preemption, self._resizes = cache, gangs, preemption, resizes
        self._held = held
        self._lines = Lines(cache.clock)
        self._looked = False  # for garbage among what the first lists have left
        self._behind_until = -math.inf  # on our clock: what the watch of pods tells may be late until then

    def synced(self, kind: str) -> None:
        """See Engine.synced."""
        self._cache.unsynced.discard(kind)
        if not self._cache.unsynced & {"nodes", "pods"}:
            self._preemption.see_early()
            self._held.begin()
        if not self._cache.unsynced and not self._looked:
            self._looked = True
            self._cache.unschedulable.free()  # the places of an extender that is gone
            garbage.look_at_all()

    def expect_late_writes(self, seconds: float) -> None:
        """See Engine.expect_late_writes."""
        self._cache.inherited_until = self._cache.clock() + seconds

    # --- quotas ---

    def expect_quotas(self) -> None:
        self._cache.unsynced.add("quotas")

    def see_quotas(self, config_map: Mapping[str, Any] | None) -> None:
        """See Engine.see_quotas."""
        self._cache.quotas_invalid = False
        self._cache.note("quotas_changed", data=(config_map or {}).get("data"))
        self._cache.unschedulable.free()
        self.synced("quotas")

    def refuse_quotas(self, config_map: Mapping[str, Any], problem: str) -> None:
        """The ConfigMap of quotas can't be understood."""
        self._cache.quotas_invalid = True
        never = "quotas" in self._cache.unsynced
        text = f"{problem}; {'nothing is decided until it is valid' if never else 'the quotas of before stay in force'}"
        metadata = config_map.get("metadata", {})
        namespace, name, uid = (str(metadata.get(key, "")) for key in ("namespace", "name", "uid"))
        _log.warning("ConfigMap %s/%s: %s", namespace, name, text, extra=fields(reason=INVALID_QUOTAS))
        self._cache.notices.put(Notice("ConfigMap", namespace, name, uid, INVALID_QUOTAS, text))

    # --- pods ---

    def wishes(self, pod: Mapping[str, Any]) -> Wishes | None:
        """What a pod that waits asks for, None if no share. Needs no lock: 64 containers of a new class take 9 ms."""
        if isinstance(pod, KnownPod):
            if pod.node or not pod.kind.asks:
                return None
        elif objects.place(pod) or not request.asks_for_share(pod, self._cache.names):
            return None
        try:
            return self._cache.asked(pod)
        except InvalidRequest as error:
            return error

    def see_pod(self, pod: Mapping[str, Any], wishes: Wishes | None) -> str:
        """See Engine.see_pod."""
        uid, node = objects.uid(pod), objects.place(pod)
        self._cache.stay(uid)
        if node and not ended(pod):
            self._held.seen(uid, node)
        if ended(pod) and self._still_given(uid, node):
            self._cache.ended.setdefault(uid, self._cache.clock())
            if len(self._cache.ended) > _MOST_ENDED:
                ones = self._cache.ended
                self._give_up(next((one for one in ones if not self._alive(one)), next(iter(ones))))
        elif ended(pod) or (not node and objects.leaving(pod)):
            self.lose_pod(uid)
            self._cache.leave(uid)
        elif node:
            self._cache.ended.pop(uid, None)
            self._cache.unschedulable.drop(uid, for_good=True)
            self._cache.waiting.drop(uid)
            self._cache.ahead.drop(uid)
            self._see_bound(uid, pod, node)
            self._resizes.see(uid, pod)
        elif wishes is not None:
            self._see_waiting(uid, pod, wishes)
        return uid

    def is_as_written(self, pod: Mapping[str, Any]) -> bool:
        """Whether a pod is bound as we wrote, and not over."""
        record = self._cache.pods.get(objects.uid(pod))
        if record is None or record.written is None or ended(pod):
            return False
        return (record.node, record.written) == (objects.place(pod), objects.annotation(pod, self._cache.names))

    def expect_in_watch(self, uid: str) -> None:
        """What was seen of a pod is not of the watch, which may still tell how it was before: that is no going back."""
        record = self._cache.pods.get(uid)
        if record is not None and record.state is State.CONFIRMED:
            self._cache.pods.expect(record, self._cache.clock())

    def _still_given(self, uid: str, node: str) -> bool:
        """Whether the manager of its node says that a pod holds what is booked for it. Of a status others may say that
        it has ended; the manager lets go once its containers have no processes (manager/audit/device_cgroups.py).
        """
        record = self._cache.pods.get(uid)
        known = record is not None and record.node == node and record.state in (State.BOUND, State.CONFIRMED)
        return known and bool(self._cache.reported(node, uid))

    def see_known(self, pod: KnownPod, wishes: Wishes | None) -> bool:
        """Take in what nearly all events are: a new pod, our own write, a pod that runs; False for any other."""
        cache, uid, kind = self._cache, pod.uid, pod.kind
        record = cache.pods.get(uid)
        if pod.deleted or not kind.settled or uid in cache.gone:
            return False
        if not pod.node:
            if kind.nominated or not kind.alone or cache.unsynced or not isinstance(wishes, tuple):
                return False
            if record is not None and record.state in (State.CONFIRMED, State.NOMINATED):
                return False
            if uid in cache.waiting or cache.gangs.of(uid) is not None:
                return False
            cache.stay(uid)
            cache.waiting.show_new(uid, pod.namespace, pod.name, pod.created, wishes[0])
            if len(wishes[1].steps) <= MOST_LIGHT and cache.not_ready() is None and not cache.scores.knows(wishes[1]):
                cache.ahead.put(uid, wishes[1])
            return True
        if record is None or record.node != pod.node or uid in cache.ended:
            return False
        mark = resize.known_as(pod.placement) if pod.placement else None
        if record.state is State.CONFIRMED:
            if record.annotation != mark:
                return False
        elif not self._echo(record, pod):
            return False
        record.runs, record.annotation = pod.phase == "Running", mark
        return True

    def _echo(self, record: Record, pod: KnownPod) -> bool:
        """Whether this is our own write coming back, of a pod that is in no gang; it counts as seen then."""
        cache, uid, asked, shape = self._cache, pod.uid, record.request, record.shape
        if record.written is None or record.written != pod.placement or asked is None or shape is None:
            return False
        if asked.gang is not None:
            return False
        cache.waiting.drop(uid)
        cache.ahead.drop(uid)
        cache.inherited.discard(uid)
        cache.nominations.forget(uid)
        cache.count_demand(uid, shape)
        self._back(record)
        record.priority, record.leaving, record.movable = pod.kind.priority, False, pod.kind.movable
        return True

    def _see_waiting(self, uid: str, pod: Mapping[str, Any], wishes: Wishes) -> None:
        if "pods" in self._cache.unsynced:
            self._cache.inherited.add(uid)
        record = self._cache.pods.get(uid)
        if record is not None and record.state is State.CONFIRMED:
            self._unbind(record)
        self._preemption.see_nomination(uid, pod)
        new = uid not in self._cache.waiting
        if isinstance(wishes, InvalidRequest):
            self._cache.waiting.show(pod, wishes)
            self._gangs.lose_member(uid)
            self._cache.ahead.drop(uid)
            return
        asked, shape = wishes
        self._cache.waiting.show(pod, asked)
        if "pods" in self._cache.unsynced and objects.unschedulable(pod):
            now = self._cache.clock()
            self._cache.unschedulable.put(unschedulable.before(uid, asked.namespace, asked.name, shape, now))
        if asked:
            self._gangs.join(asked, shape, shown=True)
        # What an owner edits again and again is scored once here, then when kube-scheduler asks; heavy ones only then.
        if (new or uid in self._cache.ahead) and len(shape.steps) <= MOST_LIGHT:
            if self._cache.not_ready() is None and not self._cache.scores.knows(shape):
                self._cache.ahead.put(uid, shape)
        else:
            self._cache.ahead.drop(uid)

    def _unbind(self, record: Record) -> None:
        """No pod loses its node, unless an etcd was restored: then kubelet ends it, and it waits again."""
        _log.warning(
            "pod %s/%s was on node %s and waits again: the API server went back to an earlier state",
            record.namespace, record.name, record.node,
        )  # fmt: skip
        self._cache.pods.release(record.uid)
        self._held.unbound(record)

    def _see_bound(self, uid: str, pod: Mapping[str, Any], node: str) -> None:
        cache = self._cache
        cache.inherited.discard(uid)
        old, leaving = cache.pods.get(uid), objects.leaving(pod)
        text = objects.annotation(pod, cache.names)
        mark = None if text is None else resize.known_as(text)
        if old is not None and old.node == node and old.state is State.BOUND and old.written is None:
            self._back(old)  # it was read before (`expect_in_watch`)
        if old is not None and old.node == node and old.state is State.CONFIRMED:
            old.runs = objects.runs(pod)
            if leaving and not old.leaving:
                old.leaving = True
                cache.cluster.stir(node)
                self._preemption.make_room(uid)
            if old.annotation == mark:
                return
            if old.usage.cards:
                # What was written at Bind is what the node's manager obeyed: nobody who may edit the pod later moves
                # its booking.
                if not self._resizes.explains(old, pod):
                    self.distrust(old)
                old.annotation = mark
                return
        ours = old if old is not None and old.written is not None and (old.node, old.written) == (node, text) else None
        if ours is not None:  # our own write comes back
            asked, usage, shape, source = ours.request, ours.usage, ours.shape, Source.BIND
        else:
            asked, usage, source = self._bound_use(old, pod, node)
            shape = None
        movable = asked is not None and asked.gang is None and objects.movable(pod, cache.names)
        if asked is not None:
            shape = shape or shared(shape_of(asked, cache.policy, usage.cpu_milli, usage.memory_bytes))
            cache.count_demand(uid, shape)
        metadata, priority, runs = pod["metadata"], objects.priority(pod), objects.runs(pod)
        if ours is not None:
            self._back(ours)
            ours.annotation, ours.priority, ours.leaving, ours.movable, ours.runs = (
                mark,
                priority,
                leaving,
                movable,
                runs,
            )
        else:
            cache.pods.put(
                Record(
                    uid, str(metadata.get("namespace", "")), str(metadata.get("name", "")), node, usage,
                    State.CONFIRMED, cache.clock(), annotation=mark, priority=priority, leaving=leaving, shape=shape,
                    movable=movable, source=source, runs=runs,
                )
            )  # fmt: skip
        if old is not None and old.node != node:
            self._held.left(old)
        if source is not Source.BIND and "pods" not in cache.unsynced:
            self._tell_overbooked(uid, metadata, node, usage)
        cache.nominations.forget(uid)
        if asked is not None and asked.gang is not None:
            self._gangs.join(asked, shape_of(asked, cache.policy), shown=True)
        if leaving:
            self._preemption.make_room(uid)
        cache.note("pod", at_ns=cache.wall_clock(), pod=pod)

    def _bound_use(
        self, old: Record | None, pod: Mapping[str, Any], node: str
    ) -> tuple[PodRequest | None, Usage, Source]:
        """What a bound pod books: what we wrote for it, else what its node gave it, else what its annotation says."""
        seen = objects.bound_use(pod, self._cache.names)
        wrong = seen.wrong is not None
        usage, source = seen.usage, Source.ANNOTATION
        given = self._cache.reported(node, objects.uid(pod))
        if (
            old is not None
            and old.node == node
            and old.placement is not None
            and (old.attempted or old.state in _WRITTEN)
        ):
            wrong, usage, source = seen.usage.cards != old.usage.cards, old.usage, Source.BIND
        elif given is not None and self._cache.cards_known(node):
            wrong, usage = seen.usage.cards != given, usage._replace(cards=given, unplaced=False)
            source = Source.MANAGER
        if wrong:
            self._cache.metrics.distrusted.inc()
        return seen.request, usage, source

    def distrust(self, record: Record) -> None:
        """A pod's placement annotation does not say what it holds."""
        self._cache.metrics.distrusted.inc()
        if (left_out := self._lines.may(record.namespace)) is None:
            return
        _log.warning(
            "pod %s/%s: its placement annotation is not what its node gave it; what it holds stays booked%s",
            record.namespace, record.name, left_out,
            extra=fields(pod=f"{record.namespace}/{record.name}", uid=record.uid, node=record.node),
        )  # fmt: skip

    def _tell_overbooked(self, uid: str, metadata: Mapping[str, Any], node: str, usage: Usage) -> None:
        """A pod that came past us, with a node and a placement of its own, has taken what others hold."""
        cards = self._cache.cluster.overbooked(node, usage.cards)
        if cards:
            text = (
                f"{', '.join(cards)} of node {node} holds more than it has since this pod came, which the extender did "
                "not place; let kube-scheduler choose its node (no spec.nodeName)"
            )
            namespace, name = str(metadata.get("namespace", "")), str(metadata.get("name", ""))
            known = fields(pod=f"{namespace}/{name}", uid=uid, node=node, uuid=",".join(cards), reason=CARD_OVERBOOKED)
            _log.warning("%s", text, extra=known)
            self._cache.notices.put(Notice("Pod", namespace, name, uid, CARD_OVERBOOKED, text))

    def behind(self, cut: bool) -> None:
        """The watch of pods was cut, or has begun again and catches up."""
        self._behind_until = math.inf if cut else self._cache.clock() + _CATCHES_UP_SECONDS

    def _back(self, record: Record) -> None:
        """The watch shows our own write. Where that is late, so is what it told before, and will for a while."""
        now = self._cache.clock()
        if record.state is State.BOUND and now - record.since > _LATE_SECONDS:
            self._behind_until = max(self._behind_until, now + _CATCHES_UP_SECONDS)
            self._cache.unschedulable.free()
        self._cache.pods.confirm(record, now)

    def lose_pod(self, uid: str) -> None:
        """See Engine.lose_pod."""
        self._cache.inherited.discard(uid)
        self._cache.waiting.drop(uid)
        self._cache.ahead.drop(uid)
        self._cache.unschedulable.drop(uid, for_good=True)
        if self._cache.ended.pop(uid, None) is not None:  # kube-scheduler saw it end long ago
            self._cache.unschedulable.free()
        if (record := self._cache.pods.release(uid)) is not None:
            self._held.left(record)
            if self._cache.clock() < self._behind_until:  # who was tried at its end was refused by the book of before
                self._cache.unschedulable.free()
        self._cache.nominations.forget(uid)
        self._cache.forget_demand(uid)
        self._resizes.forget(uid)
        self._gangs.lose_member(uid)
        self._preemption.make_room(uid)
        self._gone(uid, DELETED)

    def pod_gone(self, uid: str, last: Mapping[str, Any] | None = None) -> None:
        """Its object is gone. Where its node's manager reports it, its processes may go on: see Held.

        `last`: as it was then, if a watch has shown that. Before kubelet takes an object away its status says that the
        pod has ended; whoever deletes by force does not wait for that, and what only is not there any more may be his.
        """
        record = self._cache.pods.get(uid)
        ends = last is not None and ended(last)
        by_force = record is not None and not ends and (last is None or objects.place(last) == record.node)
        self._held.deleted(uid, record, by_force=by_force)
        self.lose_pod(uid)
        self._cache.leave(uid)

    def giving_way(self) -> list[Record]:
        """What ended and just deleted pods still have, by their nodes' managers, and lose to who fits nowhere else."""
        uids = [*(uid for uid in self._cache.ended if not self._alive(uid)), *self._held.giving_way()]
        return [record for uid in uids if (record := self._cache.pods.get(uid)) is not None]

    def _alive(self, uid: str) -> bool:
        """Whether the manager of its node has seen that a pod has ended by its status, and finds processes of it."""
        record = self._cache.pods.get(uid)
        report = self._cache.reports.get(record.node) if record is not None else None
        return report is not None and uid in report.alive

    def give_way(self, uid: str) -> None:
        """Somebody fits nowhere but where what has ended, or is deleted, is still booked under this UID."""
        if not uid.startswith(HELD):
            if (record := self._cache.pods.get(uid)) is None:
                return
            self._held.know(record)
            self.lose_pod(uid)  # its end may be forged: what its manager reports is held
            uid = held(record.node, uid)
        if self._cache.pods.get(uid) is not None:
            self._held.give_way(uid)

    def _give_up(self, uid: str) -> None:
        """A pod has ended, and its place is free without its manager's word."""
        if (record := self._cache.pods.get(uid)) is not None:
            self._held.over(record)
        self.lose_pod(uid)

    def keep_waiting(self, uids: Collection[str], listed_since: float) -> None:
        """See Engine.keep_pods: all but the bookings of pods that are not listed."""
        self._cache.waiting.keep(uids)
        self._cache.unschedulable.keep(uids, listed_since)
        self._held.unlisted(uids)
        for record in self._cache.pods.pending():
            # We wrote its Binding before the list began, which shows it without a node.
            bound = record.state is State.BOUND and record.since < listed_since
            if bound and record.uid in uids and record.uid in self._cache.waiting:
                self._unbind(record)
        for uid in self._cache.gangs.missing(uids, listed_since):
            self._gangs.lose_member(uid)

    def lose_unlisted(self, uid: str, listed_since: float, *, restored: bool = False) -> None:
        """The pod is not among those that a list shows which began then."""
        record = self._cache.pods.get(uid)
        if record is None or record.state is State.RESERVED:
            return
        if record.state is State.CONFIRMED or (record.state is not State.BINDING and record.since < listed_since):
            if restored and uid not in self._cache.ended:
                self._held.restored(record)
                self.lose_pod(uid)
            else:
                self.pod_gone(uid)

    def expire(self) -> int:
        """See Engine.expire."""
        cache, limit = self._cache, self._cache.clock() - self._cache.expiry_seconds
        assumed = [record.uid for record in cache.pods.pending() if record.state is State.ASSUMED]
        late = [
            record
            for record in cache.pods.pending()
            if record.since < limit
            and (
                (record.state is State.ASSUMED and not self._gangs.in_waiting_gang(record.uid))
                or (record.state is State.NOMINATED and not cache.nominations.shown(record.uid))
            )
        ]
        for uid in cache.nominations.older(limit):
            cache.nominations.forget(uid)
        for record in late:
            cache.pods.release(record.uid)
        cache.metrics.expired.inc(len(late))
        self._give_up_ended()
        self._held.hold_again()
        self._held.grow_old()
        self._gangs.lapse()
        for uid in assumed:
            if cache.pods.get(uid) is None:
                self._gone(uid, EXPIRED)
        return len(late)

    def all_give_way(self) -> None:
        """See `give_way`: all that may."""
        for record in self.giving_way():
            self.give_way(record.uid)

    def _give_up_ended(self) -> None:
        """A manager that is dead says for ever what it said last."""
        limit = self._cache.clock() - ENDED_SECONDS
        for uid in [uid for uid, since in self._cache.ended.items() if since < limit]:
            if (record := self._cache.pods.get(uid)) is not None:
                self._cache.metrics.ended_unconfirmed.inc()
                _log.warning(
                    "pod %s/%s has ended, and gpu-manager of node %s has neither let go of its share nor said anything "
                    "new within %d s: it is free here now; see whether that manager runs",
                    record.namespace, record.name, record.node, ENDED_SECONDS,
                    extra=fields(pod=f"{record.namespace}/{record.name}", uid=uid, node=record.node),
                )  # fmt: skip
            self._give_up(uid)

    def _gone(self, uid: str, why: str) -> None:
        self._cache.note("gone", at_ns=self._cache.wall_clock(), uid=uid, why=why)
