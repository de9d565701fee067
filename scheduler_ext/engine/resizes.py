"""Live resize: what owners ask for their running pods is booked and granted, or refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from scheduler_ext.engine.cache import SchedulerCache
from scheduler_ext.protocol.reasons import AnyReason, ExtenderReason
from scheduler_ext.state import objects
from scheduler_ext.state.notices import RESIZE_REFUSED, Notice
from scheduler_ext.state.pods import Record, Source
from vcuda.quoted import quoted
from vcuda.spec import placement, request, resize
from vcuda.spec.bookings import Report
from vcuda.spec.errors import InvalidRequest, Reason, SpecError
from vcuda.spec.placement import Placement
from vcuda.spec.request import PodRequest
from vcuda.spec.resize import Answer, Use


class Unanswered(NamedTuple):
    """An answer that the API server does not have yet, and whose it is."""

    namespace: str
    name: str
    uid: str
    answer: Answer


class _Refused(Exception):
    """Why a resize can't be; the message says what to do."""

    def __init__(self, reason: AnyReason, message: str) -> None:
        super().__init__(f"{reason}: {message}")


class Resizes:
    """Until the node's manager reports what was granted, the larger of old and new is booked (`cache.resizing`)."""

    def __init__(self, cache: SchedulerCache) -> None:
        self._cache = cache
        self._answers: dict[str, Answer] = {}  # the last for each pod
        self._found: set[str] = set()  # those whose answer we read in their status: of before a restart, or anybody's
        self._unwritten: dict[str, Unanswered] = {}
        self._held: dict[str, Use] = {}  # by pods in `cache.resizing`, before
        self._early: dict[str, Mapping[str, Any]] = {}  # seen before all nodes, pods and quotas were known

    # --- what the watches show ---

    def see(self, uid: str, pod: Mapping[str, Any]) -> None:
        """A pod that is on its node: book what was granted to it, and answer what its owner asks, once."""
        names, record = self._cache.names, self._cache.pods.get(uid)
        text, shown = objects.named(pod, names.resize), resize.read(pod, names)
        if record is None or (text is None and shown is None):
            return
        answer = self._answers.get(uid)
        if answer is None and shown is not None:
            answer = self._answers[uid] = shown
            self._found.add(uid)
            self._follow(record, answer)
        elif answer is not None and answer != shown:
            self._unwritten[uid] = Unanswered(record.namespace, record.name, uid, answer)
        if self._cache.unsynced:
            self._early[uid] = pod
            return
        if text is None or record.leaving:
            return
        ours = uid not in self._found
        self._found.discard(uid)
        if answer is not None and answer.request == resize.known_as(text) and (ours or self._grants(answer, pod, text)):
            return
        granted = answer.granted if answer is not None else {}
        try:
            new = self._decide(self._cache.pods.get(uid) or record, pod, text, granted)
        except (_Refused, SpecError) as error:
            new = Answer(resize.known_as(text), granted, str(error), answer.goal if answer is not None else {})
        before = answer or Answer("")
        same = (new.granted, new.goal) == (before.granted, before.goal)  # then a report of before says the truth of now
        new = self._answers[uid] = replace(new, number=before.number if same else resize.number_after(before))
        if new == shown:
            return
        if new.refused:
            about, said = (record.namespace, record.name, record.uid), f"{quoted(text, 80)} is refused: {new.refused}"
            self._cache.notices.put(Notice("Pod", *about, RESIZE_REFUSED, said))
        self._unwritten[uid] = Unanswered(record.namespace, record.name, uid, new)
        self._cache.note("pod", at_ns=self._cache.wall_clock(), pod=pod)

    def _grants(self, answer: Answer, pod: Mapping[str, Any], text: str) -> bool:
        """Whether an answer that stood in a status is one: who may write there can say that anything was answered.

        One that grants what is asked is, for the node obeys it; a refusal is decided again.
        """
        try:
            asked = request.parse_spec(pod, self._cache.names)
            return resize.grants(answer, text, asked, self._cache.names)
        except InvalidRequest:
            return False

    def report(self, node: str, report: Report) -> None:
        """What a node's manager gave each pod: what was granted and is there now is booked alone, else the larger.

        A report may be one of before the grant that happens to say the same amounts: then nothing has come yet.
        """
        for uid, goal in list(self._cache.resizing.items()):
            record = self._cache.pods.get(uid)
            given = report.pods.get(uid)
            if record is None or record.node != node or given is None:
                continue
            if given == goal and self._carried_out(report, uid):
                self._book(record, goal, None)
            elif (larger := resize.most(record.usage.cards, given)) != record.usage.cards:
                self._cache.pods.put(replace(record, usage=record.usage._replace(cards=larger)))

    def _carried_out(self, report: Report | None, uid: str) -> bool:
        answer = self._answers.get(uid)
        return report is not None and report.has_carried_out(uid, answer.number if answer is not None else 0)

    def explains(self, record: Record, pod: Mapping[str, Any]) -> bool:
        """Whether a pod's placement annotation says what a resize made of it."""
        chosen, asked = self._chosen(pod)
        use = placement.peak_use(asked, chosen) if chosen is not None and asked is not None else {}
        return bool(use) and use in (self._cache.resizing.get(record.uid), dict(record.usage.cards))

    def forget(self, uid: str) -> None:
        self._found.discard(uid)
        for known in (self._answers, self._unwritten, self._held, self._early, self._cache.resizing):
            known.pop(uid, None)

    # --- what is to be written ---

    def unwritten(self) -> list[Unanswered]:
        if self._early and not self._cache.unsynced:
            early, self._early = self._early, {}
            for uid, pod in early.items():
                self.see(uid, pod)
        return list(self._unwritten.values())

    def written(self, one: Unanswered) -> None:
        """The API server has it, or never will."""
        if self._unwritten.get(one.uid) == one:
            del self._unwritten[one.uid]

    # --- deciding ---

    def _chosen(self, pod: Mapping[str, Any]) -> tuple[Placement | None, PodRequest | None]:
        text = objects.annotation(pod, self._cache.names)
        try:
            asked = request.parse_spec(pod, self._cache.names)
            return (placement.decode(text) if text is not None else None), asked
        except SpecError:
            return None, None

    def _follow(self, record: Record, answer: Answer) -> None:
        """After a restart: what was granted is booked until the manager says that it is so.

        It is in the pod's status, which its owner can't write; whatever the placement annotation says by now.
        """
        goal = answer.goal
        come = record.source is Source.MANAGER and self._carried_out(self._cache.reports.get(record.node), record.uid)
        if goal and (goal != record.usage.cards or not come):
            self._book(record, resize.most(record.usage.cards, goal), goal)
            self._cache.resizing[record.uid] = goal

    def _book(self, record: Record, use: Use, goal: Use | None) -> None:
        """`goal`: what is expected from now on; None: it has come."""
        source = record.source if goal is not None else Source.MANAGER
        self._cache.pods.put(replace(record, usage=record.usage._replace(cards=use), source=source))
        if goal is None or (goal == use == record.usage.cards and record.uid not in self._cache.resizing):
            self._cache.resizing.pop(record.uid, None)
            self._held.pop(record.uid, None)
        else:
            self._held.setdefault(record.uid, dict(record.usage.cards))
            self._cache.resizing[record.uid] = goal

    def _decide(
        self, record: Record, pod: Mapping[str, Any], text: str, granted: Mapping[str, resize.Target]
    ) -> Answer:
        """Book what is asked for. Raises _Refused, InvalidRequest; then the book is as it was."""
        names = self._cache.names
        asked = request.parse_spec(pod, names)
        wishes = resize.parse(text, asked, names)
        chosen, _ = self._chosen(pod)
        has = placement.peak_use(asked, chosen) if chosen is not None else {}
        # Its sum is not enough: amounts, and cards, may have been swapped between containers.
        before = resize.promised(chosen, asked, granted) if chosen is not None else Placement()
        if not all(self._trusted(record, use) for use in (has, placement.peak_use(asked, before))):
            raise _Refused(
                Reason.INVALID_PLACEMENT,
                "the placement annotation does not say what the pod holds; gpu-manager writes it again: ask again then",
            )
        new = dict(granted)
        for name, amounts in wishes.items():
            shares = before.containers.get(name, ())
            if len(shares) != 1:
                raise InvalidRequest(Reason.INVALID_PLACEMENT, f"container {quoted(name)} has no share of one card")
            new[name] = resize.target(amounts, shares[0], granted.get(name), names)
        goal = placement.peak_use(asked, resize.applied(before, new))
        use = resize.most(has, goal)
        self._require_room(record, use)
        over = self._cache.quotas.over(record.namespace, [record.uid], record.node, use, record.usage.cards)
        if use != has and over:
            raise _Refused(ExtenderReason.QUOTA_EXCEEDED, f"{over}; free some, or raise its quota")
        self._book(record, resize.most(record.usage.cards, goal), goal)
        return Answer(resize.known_as(text), new, goal=goal)

    def _trusted(self, record: Record, use: Use) -> bool:
        """Whether a pod holds this by another's word than its owner's: during a resize two things may be true."""
        uid = record.uid
        reported = self._cache.reported(record.node, record.uid)
        return use in (reported, dict(record.usage.cards), self._held.get(uid), self._cache.resizing.get(uid))

    def _require_room(self, record: Record, use: Use) -> None:
        for uuid, (cores, blocks) in use.items():
            free = self._cache.cluster.free(record.node, uuid)
            held = record.usage.cards.get(uuid, (0, 0))
            if cores <= held[0] and blocks <= held[1]:
                continue
            if free is None:
                raise _Refused(
                    Reason.UNKNOWN_CARD,
                    f"card {uuid} is unhealthy or no longer on node {record.node}; ask again when it is well, or "
                    "recreate the pod",
                )
            for reason, wanted, booked, left, what in (
                (Reason.INSUFFICIENT_CORES, cores, held[0], free[0], "cores"),
                (Reason.INSUFFICIENT_MEMORY, blocks, held[1], free[1], "blocks"),
            ):
                if wanted - booked > max(0, left):
                    raise _Refused(
                        reason,
                        f"card {uuid} has {max(0, left)} {what} left beside the {booked} of this pod, which would need "
                        f"{wanted}; ask for less, or move a neighbour",
                    )
