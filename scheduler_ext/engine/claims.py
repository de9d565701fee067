"""Which node the claims (DRA) of a waiting pod get.

kube-scheduler alone allocates claims, and takes the first card of a node that fits. Which node that is matters for
packing, which of its cards hardly does (docs/extender.md, "Claims"); so the filter lets one node through, the one whose
first card is the best, and books what kube-scheduler will take there until the claim's status says what it took. What
is booked is only our knowledge: where it is wrong, or we are away, a claim still gets no more than a card has.

kube-scheduler binds these pods, too, so a refusal by this filter is all that holds one back. In a namespace with a
quota only what fits by our book passes; of a gang no pod passes before all exist and have a place.

Not locked: the engine's lock covers it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from scheduler_ext.engine.cache import SchedulerCache
from scheduler_ext.engine.claim_book import ClaimBook
from scheduler_ext.engine.waking import Book
from scheduler_ext.planning.evidence import ClaimStatus
from scheduler_ext.protocol.extender_v1 import Verdict
from scheduler_ext.protocol.reasons import FITS, AnyReason, ExtenderReason
from scheduler_ext.scoring import exact_search, placing, scores
from scheduler_ext.scoring.scores import Scores
from scheduler_ext.scoring.typical_pods import Typical, Workload
from scheduler_ext.state import claims, objects, unschedulable
from scheduler_ext.state.claims import SeenClaim, Wish
from scheduler_ext.state.cluster import Ints
from scheduler_ext.state.decisions import Decision, counted, packed
from scheduler_ext.state.shape import Shape
from scheduler_ext.state.unschedulable import Needs, Unschedulable, Unseen
from vcuda.kube.objects import ended
from vcuda.printable import printable
from vcuda.quoted import quoted
from vcuda.spec import request
from vcuda.spec.claims import asks_as_extended, classes_as_extended, maybe_of_classes
from vcuda.spec.errors import InvalidRequest, Reason
from vcuda.spec.gang import Gang, may_name
from vcuda.spec.request import CardFilter, PodRequest, Policy
from vcuda.spec.units import CORES_PER_CARD

_MOST_STEPS = 64  # of all claims of a pod; each costs a step of placing on every node
_AT_ONCE = 2048  # claims of a gang that are looked at in one go; to book one takes as long as to look at _BOOKED
_BOOKED = 16
_EXPLAINED = 256  # nodes that are looked at for why there is no room


@dataclass(frozen=True, slots=True)
class _User:
    """A pod with claims. `claims`: by name, those that have been made; `unmade`: there will be more."""

    uid: str
    namespace: str
    name: str
    claims: tuple[str, ...]
    unmade: bool
    gang: Gang | None
    policy: Policy
    cpu_milli: int
    memory_bytes: int
    runs: bool


class _Refused:
    """Refuses a pod, and remembers what may pass; see Unschedulable."""

    def __init__(
        self, cache: SchedulerCache, decision: Callable[..., Decision], again: Callable[..., Unschedulable]
    ) -> None:
        self._cache, self._decision, self._again = cache, decision, again

    def __call__(self, reason: AnyReason, message: str) -> Verdict:
        self._cache.decisions.add(self._decision(refusal=(reason, message)))
        return Verdict(refusal=(reason, message))

    def unseen(self, reason: AnyReason, message: str, what: Unseen) -> Verdict:
        if what:
            self._cache.unschedulable.put(self._again(reason, Needs.SIGHT, unseen=what))
        return self(reason, message)

    def no_room(self, reason: AnyReason, message: str, shape: Shape | None = None) -> Verdict:
        self._cache.unschedulable.put(self._again(reason, Needs.ROOM, shape=shape))
        return self(reason, message)


class NotScored(Exception):
    """Many nodes are to be scored first, by Engine.score_claims, or many places of a gang are; nothing was booked."""


class _Choice(NamedTuple):
    """`row`: the best one; else which quota closed those that fit, or "", and why others do not: of some nodes."""

    row: int | None
    quota: str = ""
    counts: Mapping[AnyReason, int] = {}


class Claims:
    """Answers filter for pods with claims, and says how far their claims are."""

    def __init__(self, cache: SchedulerCache, book: ClaimBook) -> None:
        self._cache, self._book = cache, book
        self.cluster = book.cluster
        self._scores, self.workload = Scores(allowed=scores.first_fitting), Workload()
        self._users: dict[str, _User] = {}  # by UID
        self._gangs: dict[tuple[str, str], dict[str, _User]] = {}  # by namespace and name, then UID
        self._refused_before: set[str] = set()  # pods that an extender has refused that is gone, until the lists are in
        self._counted: set[str] = set()  # pods that have counted as demand
        self._maybe: tuple[Mapping[str, Any], dict[str, object]] = {}, {}  # the last pod's

    # --- the pods that have claims ---

    def see_pod(self, uid: str, pod: Mapping[str, Any]) -> None:
        """Follow a pod as the watch shows it; _User is what of it matters here."""
        spec = pod.get("spec")
        if not isinstance(spec, (dict, Mapping)) or not spec.get("resourceClaims"):
            return
        if ended(pod):
            self.lose_pod(uid)
            return
        try:
            user = self._user(pod)
        except InvalidRequest:  # filter says so
            return
        self._forget(uid)
        self._users[uid] = user
        if not objects.place(pod):
            self._cache.waiting.show_claims(pod, user.claims)
            if "pods" in self._cache.unsynced and objects.unschedulable(pod):
                self._refused_before.add(uid)
        if user.gang is not None and user.gang.size > 1:
            self._gangs.setdefault((user.namespace, user.gang.name), {})[uid] = user

    def _user(self, pod: Mapping[str, Any]) -> _User:
        """Raises InvalidRequest for annotations that are malformed."""
        metadata, asked = pod["metadata"], self._asked(pod)
        made = tuple(claims.names_of_claims(pod))
        cpu, memory = objects.pod_requests(pod)
        uid, namespace, name = (str(metadata.get(key) or "") for key in ("uid", "namespace", "name"))
        return _User(
            uid, namespace, name, made, claims.unmade(pod), asked.gang, asked.policy or self._cache.policy, cpu, memory,
            objects.runs(pod),
        )  # fmt: skip

    def _asked(self, pod: Mapping[str, Any]) -> PodRequest:
        """What the annotations of a pod with claims say: those of pods with a share."""
        names = self._cache.names
        one = {"name": "claims", "resources": {"limits": {names.core: CORES_PER_CARD}}}
        return request.parse_pod({"metadata": pod["metadata"], "spec": {"containers": [one]}}, names)

    def lose_pod(self, uid: str) -> None:
        self._forget(uid)
        self._counted.discard(uid)
        self._book.lose_pod(uid)

    def recall(self) -> None:
        """The first lists are in: of whom an extender that is gone has refused it is known now what its claims ask."""
        for user in map(self._users.__getitem__, self._refused_before):
            with contextlib.suppress(InvalidRequest):
                shape = self._shape(user, self._waiting(user))
                if shape.steps and user.uid not in self._cache.unschedulable:  # it may have asked for a share, too
                    known = user.uid, user.namespace or "default", user.name, shape, self._cache.clock()
                    self._cache.unschedulable.put(unschedulable.before(*known, of_claims=True))
        self._refused_before.clear()

    def _forget(self, uid: str) -> None:
        self._refused_before.discard(uid)
        old = self._users.pop(uid, None)
        if old is not None and old.gang is not None:
            members = self._gangs.get((old.namespace, old.gang.name), {})
            members.pop(uid, None)
            if not members:
                self._gangs.pop((old.namespace, old.gang.name), None)

    def users(self) -> list[str]:
        """The pods with claims, by UID."""
        return list(self._users)

    def runs(self, uid: str) -> bool:
        """Whether kubelet has started a pod with claims."""
        return uid in self._users and self._users[uid].runs

    def asks_as_extended(self, pod: Mapping[str, Any], nodes: Sequence[str]) -> bool:
        """Whether a pod asks for devices that may be ours by the extended resource of a DeviceClass."""
        if not all(map(self._book.knows_class, classes_as_extended(pod))):
            return True
        doubtful = self._doubtful(pod)
        if doubtful and ("deviceclasses" in self._cache.unsynced or len(self._having(doubtful, nodes)) < len(nodes)):
            return True
        return asks_as_extended(pod, self._cache.names, self._book.extended, doubtful) is not None

    def _having(self, resources: Sequence[str], nodes: Sequence[str]) -> Sequence[str]:
        """The nodes whose device plugins have all of some resources."""
        return self._cache.plugins.among(nodes, resources) if resources else nodes

    def _doubtful(self, pod: Mapping[str, Any]) -> list[str]:
        """The extended resources behind which a class of our cards may stand, where a quota or a gang depends on it.

        kube-scheduler asks only about pods whose resources it knows. On a node that has one allocatable it takes a
        device plugin's, and makes no claim; on every other one it knows a class.
        """
        if not self._depended_on(pod):
            return []
        all_of_them = "deviceclasses" in self._cache.unsynced
        return [one for one in self._maybe_of_classes(pod) if all_of_them or self._book.may_be_ours(one)]

    def _maybe_of_classes(self, pod: Mapping[str, Any]) -> dict[str, object]:
        """Worked out once for a filter, which asks several times with one object of its own."""
        if self._maybe[0] is not pod:
            self._maybe = pod, maybe_of_classes(pod, self._cache.names)
        return self._maybe[1]

    def _depended_on(self, pod: Mapping[str, Any]) -> bool:
        """Whether a quota or a gang may depend on what a pod asks."""
        namespace = str(pod["metadata"].get("namespace") or "")
        counted = "quotas" in self._cache.unsynced or self._book.quotas.of(namespace)
        return bool(counted) or may_name(pod, self._cache.names)

    def unseen(self, pod: Mapping[str, Any], nodes: Sequence[str]) -> Unseen:
        """What kube-scheduler knows of a pod's claims, or of classes of these, that our watch has not shown."""
        namespace, book = str(pod["metadata"].get("namespace") or ""), self._book
        named = {("class", one) for one in classes_as_extended(pod)}
        doubtful = self._doubtful(pod)
        if nodes and not self._having(doubtful, nodes):
            named |= {("named" if one in self._cache.plugins else "resource", one) for one in doubtful}
        those = (book.unseen_of(namespace, name) for name in claims.names_of_claims(pod))
        return frozenset({one for one in named if not book.knows(*one)}.union(*those))

    def _not_shown(self, pod: Mapping[str, Any], unseen: Unseen, why: str) -> str:
        """Which of it, who asks for it and the way out."""
        kind, name = min(unseen)
        if kind == "claim":
            what, way_out = f"claim {printable(name)}", "kubectl get resourceclaims"
        else:
            what, way_out = f"DeviceClass {printable(name)}", "kubectl get deviceclasses"
            asking = classes_as_extended(pod)
            if kind != "class":
                what, asking = f"a DeviceClass for {printable(name)}", self._maybe_of_classes(pod)
                way_out += "), or on nodes that have some allocatable (what another scheduler extender gives can be "
                way_out += "asked for in a namespace without a quota, outside of gangs"
            if name in asking:
                what += f", for which container {quoted(asking[name])} asks"
        way_out = f"the pod passes once it is there ({way_out})"
        return f"the watch has not yet shown {what}, and {why} leaves no guess; {way_out}"

    def book(self) -> Book:
        """What Waking looks at."""
        return Book(self.cluster, self._scores, self._book.quotas, self.typical)

    # --- deciding ---

    def score_some(self, pod: Mapping[str, Any]) -> bool:
        """See Engine.score_claims."""
        try:
            user = self._user(pod)
            shape = self._shape(user, self._waiting(user))
        except InvalidRequest:
            return False
        return bool(shape.steps) and self._scores.warm(shape, self.cluster, self.typical())

    def deciding(
        self, pod: Mapping[str, Any], names: Sequence[str], *, briefly: bool = False
    ) -> Generator[None, None, Verdict | None]:
        """See Engine.filter_claims. It stops where the lock may be let go of for a while."""
        doubtful = self._doubtful(pod)
        having = self._having(doubtful, names)
        if 0 < len(having) < len(names):
            # The others are refused: with a class behind it kube-scheduler would make the claim there.
            found = yield from self._deciding(pod, having, doubtful, briefly)
            return Verdict(passed=having) if found is None else found
        return (yield from self._deciding(pod, names, doubtful if having else (), briefly))

    def _deciding(
        self, pod: Mapping[str, Any], names: Sequence[str], plugged: Collection[str], briefly: bool
    ) -> Generator[None, None, Verdict | None]:
        """`plugged`: extended resources that device plugins have on all these nodes."""
        metadata = pod["metadata"]
        uid, namespace, name = (str(metadata.get(key) or "") for key in ("uid", "namespace", "name"))
        decision = partial(
            Decision, uid, namespace, name, self._cache.wall_clock(), self._cache.cluster.clock, len(names)
        )

        self._cache.unschedulable.drop(uid)
        refused = _Refused(self._cache, decision, partial(self._again, uid, namespace or "default", name, names))
        if self._cache.leaves(pod):
            return refused(ExtenderReason.NO_SUCH_POD, f"pod {namespace}/{name} is gone or is being deleted")
        counted_here = bool(self._book.quotas.of(namespace))
        try:
            user = self._user(pod)
            in_gang = user.gang is not None and user.gang.size > 1
            others_too = self._book.extended if counted_here or in_gang else {}
            problem = asks_as_extended(pod, self._cache.names, others_too, plugged)
            if problem is not None:
                raise problem
            waiting = self._waiting(user)
            shape = self._shape(user, waiting)
        except InvalidRequest as error:
            return refused(error.reason, error.message)
        doubt = next(((claim.name, claim.doubt) for claim in waiting if claim.doubt is not None), None)
        if doubt is not None and (counted_here or in_gang):
            return refused.unseen(doubt[1].reason, f"claim {doubt[0]}: {doubt[1].message}", self.unseen(pod, names))
        if (counted_here or in_gang) and (unseen := self.unseen(pod, names)):
            why = f"the quota of namespace {printable(namespace)}" if counted_here else "its gang"
            return refused.unseen(ExtenderReason.NOT_SYNCED, self._not_shown(pod, unseen, why), unseen)
        if not shape.steps:
            return None if doubt is None else self._left(names, decision(counts={}), refused.no_room)
        rows = self._rows(names)
        self._follow(names, rows)
        others = self._others_of_gang(user)
        if briefly and (
            self._scores.far_behind(shape, self.cluster, self.typical())
            or sum(len(one.claims) for one in others if isinstance(one, _User)) * _BOOKED > _AT_ONCE
        ):
            raise NotScored
        if uid not in self._counted:
            self._counted.add(uid)
            self.workload.observe(shape)
        if isinstance(others, str):
            return refused.unseen(ExtenderReason.GANG_INCOMPLETE, others, self._unseen_of_gang(user))
        deadline = self._deadline(user, others)
        choice = self._take(user, waiting, rows, deadline=deadline)
        if choice.row is None:
            several = [one for claim in waiting for one in claim.open_requests]
            if choice.quota:
                return refused.no_room(ExtenderReason.QUOTA_EXCEEDED, choice.quota + _of_alternatives(several), shape)
            if not others and not counted_here:
                # kube-scheduler found room: what is booked here may be older than what it knows.
                return self._left(names, decision(counts=choice.counts), refused.no_room)
            reason = next(iter(choice.counts), ExtenderReason.UNKNOWN_NODE)
            why = "its gang" if others else "its namespace's quota"
            known = f"no card has room as far as claims are known here, and {why} leaves no guess"
            return refused.no_room(reason, known + _of_alternatives(several), shape)
        node = self.cluster.names[choice.row]
        lacking = yield from self._reserve(others, names, deadline)
        if lacking:
            for claim in waiting:
                self._book.give_up(claim.uid)
            gang = printable(f"{namespace}/{user.gang.name if user.gang is not None else ''}")
            size = len(others) + 1
            message = f"gang {gang} needs {size} places at once, {size - lacking} are there now"
            return refused.no_room(ExtenderReason.GANG_DOES_NOT_FIT, message, shape)
        self._cache.decisions.add(decision(node=node))
        return Verdict(node)

    def _again(
        self, uid: str, namespace: str, name: str, names: Sequence[str], reason: AnyReason, needs: Needs, *,
        shape: Shape | None = None, unseen: Unseen = frozenset(),
    ) -> Unschedulable:  # fmt: skip
        return Unschedulable(
            uid, namespace, name, str(reason), needs, self._cache.clock(), shape,
            packed(self._rows(names), len(self.cluster)), self.cluster.clock, of_claims=True, unseen=unseen,
        )  # fmt: skip

    def _left(
        self, names: Sequence[str], decision: Decision, refused: Callable[[AnyReason, str], Verdict]
    ) -> Verdict | None:
        """All nodes are left to kube-scheduler, but those of which it can't know: where places are kept for a gang."""
        kept = self._book.reserved_nodes()
        open_ = tuple(one for one in names if one not in kept)
        if not open_:
            return refused(
                ExtenderReason.GANG_DOES_NOT_FIT,
                "no card has room but where places are kept for the pods of a gang, for "
                f"{self._cache.gang_seconds:.0f} s at most",
            )
        self._cache.decisions.add(decision)
        return None if len(open_) == len(names) else Verdict(passed=open_)

    def _waiting(self, user: _User) -> list[SeenClaim]:
        """A pod's claims that are not allocated. Raises InvalidRequest if no card can ever give one."""
        found = {one.uid: one for name in user.claims if (one := self._book.claim(user.namespace, name)) is not None}
        waiting = [one for one in found.values() if one.given is None]
        for claim in waiting:
            if claim.problem is not None:
                raise InvalidRequest(claim.problem.reason, f"claim {claim.name}: {claim.problem.message}")
        return waiting

    def _shape(self, user: _User, waiting: Sequence[SeenClaim]) -> Shape:
        """The class of a pod with claims, whose annotation may choose a policy. Raises InvalidRequest."""
        wishes: list[Wish] = [wish for claim in waiting for wish in claim.wishes]
        if len(wishes) > _MOST_STEPS:
            raise InvalidRequest(
                Reason.INVALID_POD, f"its claims ask for {len(wishes)} shares; a pod may have {_MOST_STEPS}"
            )
        steps = tuple(wish.step for wish in wishes)
        asked = {claim.selectors for claim in waiting}
        models = self._accepted(asked.pop()) if len(asked) == 1 else CardFilter()
        cpu, memory = user.cpu_milli, user.memory_bytes
        parts = tuple(len(claim.wishes) for claim in waiting) if len(waiting) > 1 else ()
        return Shape(steps, user.policy, models, cpu_milli=cpu, memory_bytes=memory, parts=parts)

    def _accepted(self, selectors: Sequence[str]) -> CardFilter:
        """Of the models that there are; one that there is not, where none is accepted."""
        if not selectors:
            return CardFilter()
        names, models = self._cache.names, self.cluster.models
        some = frozenset(model for model in models if claims.may_be_selected(selectors, model, names))
        return CardFilter() if len(some) == len(models) else CardFilter(include=some or frozenset({""}))

    def _rows(self, names: Sequence[str]) -> Ints:
        return np.fromiter((self.cluster.index.get(one, -1) for one in names), np.int64, len(names))

    def _follow(self, names: Sequence[str], rows: Ints) -> None:
        """The nodes' free cpu and memory are counted in the other book, which sees all pods."""
        there = self._cache.rows(names)
        both = (rows >= 0) & (there >= 0)
        main = self._cache.cluster
        self.cluster.take_over(rows[both], main.free_cpu[there[both]], main.free_memory[there[both]])

    def _take(
        self, user: _User, waiting: Sequence[SeenClaim], rows: Ints, *, deadline: float | None, reserved: bool = False
    ) -> _Choice:
        """Choose a node for claims of a pod among some rows, and assume them there. Raises InvalidRequest."""
        shape = self._shape(user, waiting)
        for claim in waiting:
            self._book.give_up(claim.uid)
        rows = rows[rows >= 0]
        if not len(rows):
            return _Choice(None)
        closed, quota = np.zeros(len(rows), np.bool_), ""
        table = self._scores.table(shape, self.cluster, self.typical())
        if self._book.quotas.of(user.namespace):
            closed, quota = self._book.quotas.closed(user.namespace, table, rows)
        row = scores.cheapest(table, self.cluster, rows[~closed])
        if row is None:
            return _Choice(None, quota, {} if quota else self._counts(shape, rows[:_EXPLAINED]))
        for claim in waiting:
            self._book.assume(claim, user.uid, row, deadline=deadline, reserved=reserved)
        return _Choice(row)

    def _counts(self, shape: Shape, rows: Ints) -> dict[AnyReason, int]:
        """How many nodes have which reason. The scores know only the first card that fits, so not why none does."""
        accepted = scores.allowed_cards(shape, self.cluster, rows)
        plan = placing.plan(shape, self.cluster.view(rows), accepted, self.typical())
        problem = self.cluster.code[rows]
        return counted(np.where(problem == FITS, plan.code, problem))

    # --- gangs ---

    def _unseen_of_gang(self, user: _User) -> Unseen:
        members = self._gangs.get((user.namespace, user.gang.name), {}) if user.gang is not None else {}
        those = (self._book.unseen_of(user.namespace, name) for one in members.values() for name in one.claims)
        return frozenset[tuple[str, str]]().union(*those)

    def _others_of_gang(self, user: _User) -> list[_User] | str:
        """Who else must have a place before this pod may pass; or why it may not pass yet."""
        gang = user.gang
        if gang is None or gang.size == 1:
            return []
        members = {user.uid: user} | {
            uid: one for uid, one in self._gangs.get((user.namespace, gang.name), {}).items() if uid != user.uid
        }
        if any(self._has_all(one) for one in members.values()):
            return []  # all had a place once
        called = f"gang {printable(f'{user.namespace}/{gang.name}')}"
        size = max(one.gang.size for one in members.values() if one.gang is not None)
        if len(members) < size:
            return f"{called} has {len(members)} of its {size} pods with claims; none passes before all exist"
        unmade = [one for one in members.values() if one.unmade or not self._all_seen(one)]
        if unmade:
            return f"{called}: the claims of pod {unmade[0].name} have not been made yet; none passes before all are"
        doubts = (doubt for one in members.values() if (doubt := self._doubt(one)))
        if why := next(doubts, ""):
            return f"{called}: {why}"
        return [one for one in members.values() if one.uid != user.uid][: size - 1]

    def _doubt(self, user: _User) -> str:
        """Of which claim of a pod it can't be told what it asks, and why; "": of none."""
        ours = [self._book.claim(user.namespace, name) for name in user.claims]
        return next((f"claim {one.name}: {one.doubt}" for one in ours if one is not None and one.doubt), "")

    def _all_seen(self, user: _User) -> bool:
        return all(self._book.seen(user.namespace, name) for name in user.claims)

    def _has_all(self, user: _User) -> bool:
        """Whether all claims of a pod are allocated."""
        ours = [self._book.claim(user.namespace, name) for name in user.claims]
        return not user.unmade and any(ours) and all(one is None or one.given is not None for one in ours)

    def _deadline(self, user: _User, others: Sequence[_User]) -> float | None:
        """When what is assumed for a gang is given back that is not allocated; None for a pod that comes by itself."""
        if not others:
            return None
        known = self._book.deadline([user.uid, *(one.uid for one in others)])
        return self._cache.clock() + self._cache.gang_seconds if known is None else known

    def _reserve(
        self, others: Sequence[_User], names: Sequence[str], deadline: float | None
    ) -> Generator[None, None, int]:
        """Places for the others of a gang, or none new. Returns how many could not be had."""
        made: list[SeenClaim] = []
        budget, rows, left = exact_search.Budget(), self._rows(names), _AT_ONCE
        for at, one in enumerate(others):
            if left <= 0:
                yield
                left, rows = _AT_ONCE, self._rows(names)  # they may be others
            try:
                open_ = [claim for claim in self._waiting(one) if self._book.assumed(claim.uid) is None]
                with self._scores.one_budget(budget):
                    found = not open_ or self._take(one, open_, rows, deadline=deadline, reserved=True).row is not None
            except InvalidRequest:
                found = False
            if not found:
                self._cache.metrics.gangs.labels("refused").inc()
                for number, claim in enumerate(made, 1):
                    self._book.give_up(claim.uid)
                    if number % (_AT_ONCE // _BOOKED) == 0:
                        yield
                return len(others) - at
            made += open_
            left -= 1 + len(one.claims) + _BOOKED * len(open_)
        if made:
            self._cache.metrics.gangs.labels("reserved").inc()
        return 0

    def count_lapsed(self, late: Collection[str]) -> None:
        """Count the gangs that lose places with what was assumed for some claims."""
        of_gangs = [one.pod_uid for uid in late if (one := self._book.assumed(uid)) is not None and one.gang]
        users = [user for uid in of_gangs if (user := self._users.get(uid)) is not None]
        gangs = {(user.namespace, user.gang.name) for user in users if user.gang is not None}
        self._cache.metrics.gangs.labels("lapsed").inc(len(gangs))

    # --- what can be asked about it ---

    def typical(self) -> Typical:
        """What pods with claims are expected to ask."""
        return self.workload.typical(self.cluster, self._cache.clock())

    def status(self, uid: str) -> list[ClaimStatus]:
        """How far a pod's claims are, in its order; none for a pod without."""
        user = self._users.get(uid)
        return [] if user is None else [self._status(user, name) for name in user.claims]

    def _status(self, user: _User, name: str) -> ClaimStatus:
        claim = self._book.claim(user.namespace, name)
        if claim is None:
            state = "foreign" if self._book.seen(user.namespace, name) else "missing"
            return ClaimStatus(name, state, None, {}, "")
        records = list(self._book.records(claim))
        node = records[0].node if records else next((one.node for one in claim.given or ()), None)
        cards = {uuid: amounts for record in records for uuid, amounts in record.usage.cards.items()}
        state = "waiting" if not records else "assumed"
        if claim.given is not None:
            state = "allocated"
        elif claim.problem is not None:
            state = "impossible"
        elif claim.doubt is not None and not records:
            state = "undecided"
        why = claim.problem or claim.doubt
        problem = "" if why is None else str(why)
        return ClaimStatus(name, state, node, cards, problem, self._book.difference(claim))


def _of_alternatives(requests: Sequence[str]) -> str:
    """What a refusal adds for a claim whose requests have alternatives: why so much counted, and the way out."""
    if not requests:
        return ""
    return (
        f"; request {quoted(requests[0])} has alternatives, of which the most of each amount counts until one is "
        "given: leave out those that do not fit, or ask for one of them exactly"
    )
