"""Finds the pod being admitted: asks kubelet or the API server and applies the rules of `matcher`, in bounded time."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from manager.allocate import matcher
from manager.allocate.matcher import Candidate, Facts, FactsCache
from manager.allocations.accounting import AllocationIndex
from manager.errors import Reason, Refusal
from manager.kube.api import Kube, Pod
from manager.kube.pods import StaticPods, as_kubelet_knows, is_static
from manager.kubelet.pods import KubeletPods
from manager.kubelet.records import Checkpoint, Entry, PodResources, RecordsDamaged, RecordsError
from manager.process.logs import Conditions
from vcuda.kube.errors import KubeError
from vcuda.kube.objects import ended, terminal, uid_of, uids_by_name
from vcuda.spec.names import Names

# Allocate blocks kubelet's sync loop: one source may take this long, all of them together BUDGET_S.
PODS_TIMEOUT_S = 0.8
RECORDS_TIMEOUT_S = 0.3
BUDGET_S = 1.7
_LEAST_S = 0.05
# A refusal is for ever, so kubelet is asked once more where several pods may wait by the API server's list.
LAST_PATIENCE_S = 10.0
# Kubelet's list is old news after this long, even between the two calls that it makes one right after the other.
_LISTED_S = 1.0
_REFUSED_KEPT = 4096

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Presence:
    """Pods by UID: `present` to kubelet or the API server, `ended` by either; but one of which something runs is here.

    `certain`: the API server was asked, for a kubelet that has just started lists only the pods that it has looked at.
    `started`: when, by the monotonic clock.
    """

    started: float
    present: frozenset[str]
    ended: frozenset[str]
    certain: bool


def _never(_entries: list[Entry]) -> bool:
    return False


class PodFinder:
    """All look-ups for one node. `find` is called under the allocation lock, one call at a time."""

    def __init__(
        self,
        names: Names,
        device_plugin_path: Path,
        kubelet: KubeletPods | None,
        pod_resources: PodResources | None,
        kube: Kube | None,
        known: Callable[[], list[Pod] | None] = lambda: None,
        running: Callable[[], Collection[str]] = frozenset,
    ) -> None:
        """`known`: this node's pods by the API server's last word; None before its first. `running`: pods with a share
        of whose containers the kernel has processes, by UID.
        """
        self._names = names
        self._known, self._running = known, running
        self._doubted: set[str] = set()  # pods that run, whatever is said of them
        self._checkpoint = Checkpoint(device_plugin_path, names)
        self._kubelet = kubelet
        self._pod_resources = pod_resources
        self._kube = kube
        self._refused: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()
        self._last_uid: str | None = None
        self._conditions = Conditions(log)
        self._facts = FactsCache(names)
        self._kubelet_is_new = False
        self._lost: set[str] | None = None  # by a kubelet that began without its checkpoint; None: not looked at yet
        self._away = ""  # who could not tell us the pods of the last call
        self._listed: list[Pod] | None = None  # kubelet's own list, as it was for the last call
        self._begun: tuple[Candidate, list[Facts], float] | None = None  # who was answered last, when
        self._preferred: tuple[str, frozenset[str], float, list[Pod]] | None = None

    def refused(self, uid: str) -> None:
        """A refused pod stays in kubelet's list until its status has come back from the API server."""
        with self._lock:
            self._begun = None
            self._refused[uid] = None
            while len(self._refused) > _REFUSED_KEPT:
                self._refused.popitem(last=False)

    def succeeded(self, candidate: Candidate, pods: list[Facts]) -> None:
        """This pod was answered: it is no longer among those that were refused. `pods`: those of its call."""
        with self._lock:
            self._last_uid = candidate.uid
            self._refused.pop(candidate.uid, None)
            others = matcher.others_are_asked(candidate.pod, candidate.container, self._names)
            self._begun = None if others else (candidate, pods, time.monotonic())

    def kubelet_restarted(self) -> None:
        """A new kubelet admits all pods anew, in an order of its own; before it can call us."""
        with self._lock:
            self._last_uid = None
            self._kubelet_is_new, self._lost = True, None
            self._preferred = self._begun = None

    def prefer(self, resource: str, device_ids: Sequence[str]) -> None:
        """What the last call found was answered with these devices: kubelet's next one gives them."""
        with self._lock:
            self._preferred = (
                None if self._listed is None else (resource, frozenset(device_ids), time.monotonic(), self._listed)
            )

    def preferred(self, resource: str, device_ids: Sequence[str]) -> list[Pod] | None:
        """Kubelet's list of its question which devices we prefer, for the call by which it then takes just these.

        It asks both while it admits one pod, and each list costs it and us as much as the node has pods. Once only.
        """
        with self._lock:
            asked, self._preferred = self._preferred, None
        if asked is None or asked[0] != resource or time.monotonic() - asked[2] > _LISTED_S:
            return None
        return asked[3] if asked[1] == frozenset(device_ids) else None

    def pods(self, static: StaticPods, deadline: float | None = None) -> tuple[list[Pod], bool]:
        """This node's pods with kubelet's UIDs, and whether they are kubelet's own view.

        Raises Refusal. `static`: those known from before; `deadline`: on the monotonic clock.
        """
        deadline = time.monotonic() + BUDGET_S if deadline is None else deadline
        problems = []
        self._away = ""
        if self._kubelet is not None:
            try:
                pods = self._kubelet.list(_within(PODS_TIMEOUT_S, deadline))
            except KubeError as error:
                problems.append(f"kubelet's /pods: {error}")
                self._conditions.set("kubelet", f"kubelet's pods can't be had: {error}; asking the API server instead")
            else:
                self._conditions.clear("kubelet", "kubelet's pods can be had again")
                return pods, True
        if self._kube is not None:
            try:
                return as_kubelet_knows(self._kube.pods(_within(PODS_TIMEOUT_S, deadline)), static), False
            except KubeError as error:
                problems.append(f"the API server: {error}")
                # Kubelet asks the API server who we are, and so refuses us while that one is away; what it admits then,
                # both have told before.
                known = self._known()
                if known is not None:
                    self._away = "; ".join(problems)
                    return as_kubelet_knows(known, static), False
        reason = "; ".join(problems) or "neither --kubelet-url nor an API server is configured"
        raise Refusal(Reason.POD_UNKNOWN, f"the pod being admitted can't be identified: {reason}")

    def find(
        self,
        resource: str,
        count: int,
        allocations: AllocationIndex,
        deadline: float,
        listed: list[Pod] | None = None,
        *,
        patient: bool = True,
    ) -> tuple[Candidate, list[Facts]]:
        """The container that this call is for, and the facts of all pods of the node.

        Raises Refusal, soon after the deadline at latest; `patient`: LAST_PATIENCE_S later where several pods wait by
        the API server's list. `listed`: kubelet's list, where it need not be asked.
        """
        begun = self._going_on(resource, count, allocations)
        if begun is not None:
            self._listed = None
            return begun
        if listed is not None:
            with contextlib.suppress(Refusal):
                return self._find_among(listed, True, resource, count, allocations, deadline)
        pods, own_view = self.pods(allocations.static_pods, deadline)
        self._listed = pods if own_view else None
        try:
            return self._find_among(pods, own_view, resource, count, allocations, deadline)
        except Refusal as refusal:
            if own_view or not patient or self._kubelet is None or refusal.reason != Reason.POD_AMBIGUOUS:
                raise
            try:
                self._listed = pods = self._kubelet.list(LAST_PATIENCE_S)
            except KubeError as error:
                log.info("kubelet can't tell which of the pods that wait it means: %s", error)
                raise refusal from None
        return self._find_among(pods, True, resource, count, allocations, time.monotonic() + PODS_TIMEOUT_S)

    def _going_on(
        self, resource: str, count: int, allocations: AllocationIndex
    ) -> tuple[Candidate, list[Facts]] | None:
        """The container that was answered last, if it lacks just this: kubelet asks for the rest of it before all else.

        Only another plugin, asked in between, could have made kubelet give it up (kubernetes
        pkg/kubelet/cm/devicemanager, allocateContainerResources); PreStartContainer compares in any case.
        """
        with self._lock:
            begun = self._begun
        if begun is None or time.monotonic() - begun[2] > _LISTED_S:
            return None
        candidate, pods, _ = begun
        lacking = Facts.of(candidate.pod, self._names).next_container(allocations.holdings)
        return (candidate, pods) if lacking == (candidate.container, {resource: count}) else None

    def _find_among(
        self,
        pods: list[Pod],
        own_view: bool,
        resource: str,
        count: int,
        allocations: AllocationIndex,
        deadline: float,
    ) -> tuple[Candidate, list[Facts]]:
        facts = self._facts.of(pods)
        with self._lock:
            excluded = frozenset(self._refused)
            last_uid = self._last_uid

        def matching(held: matcher.Holdings, *, refused: frozenset[str], last: str | None) -> list[Candidate]:
            return matcher.candidates(
                facts, resource, count, held,
                excluded=refused, last_uid=last, skip_deleted=own_view,
            )  # fmt: skip

        found = self._forgotten(facts, allocations, matching, deadline) if self._kubelet_is_new else []
        if not found:
            found = matching(allocations.holdings, refused=excluded, last=last_uid)
        if not found:
            # A static pod that was refused comes again with its UID; a restarted kubelet admits anew what it rejected.
            found = matching(allocations.holdings, refused=frozenset(), last=last_uid)
        if not found:
            # Kubelet lost its own records and asks again for what we have given already.
            known = self._kubelet_holdings(pods, deadline)
            if known is not None:
                found = matching(known, refused=frozenset(), last=None)
        found = [dataclasses.replace(item, static=is_static(item.pod, own_view=own_view)) for item in found]
        if len(found) > 1:
            found = self._narrow(found, deadline)
        if len(found) == 1:
            return found[0], facts
        what = f"{count} {self._names.core if resource == 'core' else self._names.memory}"
        if not found and self._away:
            raise Refusal(Reason.POD_UNKNOWN, f"the pod being admitted can't be identified: {self._away}")
        if not found:
            raise Refusal(
                Reason.POD_UNKNOWN,
                f"no pod of this node waits for {what}: kubelet's records and ours disagree; recreate the pod",
            )
        several = ", ".join(sorted(candidate.name for candidate in found)[:5])
        hint = "" if own_view else "; --kubelet-url makes the identity of pods exact"
        raise Refusal(
            Reason.POD_AMBIGUOUS,
            f"{len(found)} pods wait for {what} ({several}){hint}; recreate the pod",
            tuple((*item.full_name, item.uid) for item in found),
        )

    def _forgotten(
        self,
        facts: Sequence[Facts],
        allocations: AllocationIndex,
        matching: Callable[..., list[Candidate]],
        deadline: float,
    ) -> list[Candidate]:
        """Whom a kubelet that has lost its checkpoint asks for again: of those that fit the pod that it admits first.

        It admits running pods anew, the oldest first, and would kill whom we refuse (kubernetes pkg/kubelet,
        HandlePodAdditions).
        """
        known = self._kubelet_holdings([item.pod for item in facts], deadline, damaged=True)
        if known is None:
            return []
        # A pod that we had not given everything, kubelet may have given up; what counts is what it must have recorded.
        holdings = allocations.holdings
        asked = {uid for (uid, _), held in holdings.items() if held}
        unasked = set(allocations.pods) - asked  # rebuilt from their regions alone
        ours = {
            item.uid
            for item in facts
            if item.asked
            and not item.terminal
            and item.uid in allocations.pods
            and item.uid not in self._refused
            and (item.next_container(holdings) is None or item.uid in unasked)
        }
        recorded = {uid for uid, _ in known}
        if self._lost is None:
            # A lost checkpoint has lost all: kubelet that knows one of them has it still, and then the others are no
            # matter of it.
            self._lost = set() if ours & recorded else ours
        lost = self._lost = self._lost & ours - recorded
        if not lost:
            self._kubelet_is_new, self._lost = False, None
            return []
        found = matching(known, refused=frozenset(), last=None)
        if not any(item.uid in lost for item in found):
            return []
        return [min(found, key=lambda item: (_created(item.pod), item.uid not in lost, item.name))]

    def _narrow(self, found: list[Candidate], deadline: float) -> list[Candidate]:
        """Drop candidates that hold devices by kubelet's own records, or have ended by the API server's newer view."""
        # Kubelet's list has a pod that was refused for ambiguity as long as it is not deleted. An end that the watch
        # has told is final: asking for it again would be a list of the node's pods for each call to come.
        over = {uid_of(pod) for pod in self._known() or () if terminal(pod)}
        found = [item for item in found if item.static or item.uid not in over] or found
        if len(found) == 1:
            return found
        known = self._kubelet_holdings([candidate.pod for candidate in found], deadline)
        if known is not None:
            started = {uid for uid, _ in known}
            rest = [item for item in found if item.uid not in started or item.uid == self._last_uid]
            found = rest or found
        if len(found) > 1 and self._kube is not None:
            try:
                current = {uid_of(pod): pod for pod in self._kube.pods(_within(PODS_TIMEOUT_S, deadline))}
            except KubeError as error:
                log.info("the API server can't tell which of %d pods has ended: %s", len(found), error)
            else:
                # It can't tell of a static pod, whose mirror has another UID, or is not there yet.
                found = [item for item in found if item.static or _waits(current.get(item.uid))]
        return found

    def records(self, *, answers: bool = False, enough: Callable[[list[Entry]], bool] = _never) -> list[Entry]:
        """Kubelet's records from both sources; empty if neither can be had. `answers`: with what Allocate answered.

        `enough`: whether the checkpoint alone says all that is to be known: PodResources lists every pod of the node
        with a message for each device, at every question.
        """
        return self._records(None, answers=answers, enough=enough)[0]

    def _records(
        self,
        deadline: float | None,
        *,
        answers: bool = False,
        damaged: bool = False,
        enough: Callable[[list[Entry]], bool] = _never,
    ) -> tuple[list[Entry], bool]:
        """Kubelet's records, and whether it has said anything.

        `damaged`: a checkpoint that can't be parsed counts as an empty one. `enough`: as of `records`.
        """
        found: list[Entry] = []
        heard = False
        sources: list[tuple[str, Callable[[], list[Entry]]]] = [
            ("checkpoint", lambda: self._checkpoint.list(answers=answers))
        ]
        if self._pod_resources is not None:
            pod_resources = self._pod_resources
            patience = RECORDS_TIMEOUT_S if deadline is None else _within(RECORDS_TIMEOUT_S, deadline)
            sources.append(("PodResources", lambda: pod_resources.list(patience)))
        for name, source in sources:
            if found and enough(found):
                break
            try:
                found += source()
                heard = True
            except RecordsError as error:
                heard = heard or (damaged and isinstance(error, RecordsDamaged))
                self._conditions.set(name, f"kubelet's records: {error}")
            else:
                self._conditions.clear(name)
        return found, heard

    def _kubelet_holdings(
        self, pods: list[Pod], deadline: float, *, damaged: bool = False
    ) -> dict[tuple[str, str], set[str]] | None:
        """What kubelet's records say, by UID; None if there are none.

        `damaged`: an empty or unreadable checkpoint says "nothing".
        """
        entries, heard = self._records(deadline, damaged=damaged)
        if not entries and not (damaged and heard):
            return None
        by_name = uids_by_name(pods)
        found: dict[tuple[str, str], set[str]] = {}
        for entry in entries:
            uid = entry.pod_uid or by_name.get(entry.pod, "")
            if uid:
                found.setdefault((uid, entry.container), set()).add(entry.resource)
        return found

    def presence(self, static: StaticPods, timeout: float) -> Presence | None:
        """What both servers say of this node's pods; None if nobody can say now. For garbage collection.

        `static`: those known from before.
        """
        by_kubelet: set[str] | None = None
        by_api: set[str] | None = None
        over: set[str] = set()
        started = time.monotonic()
        if self._kubelet is not None:
            try:
                pods = self._kubelet.list(timeout)
            except KubeError as error:
                log.debug("garbage collection without kubelet's pods: %s", error)
            else:
                by_kubelet = {uid_of(pod) for pod in pods}
                over |= {uid_of(pod) for pod in pods if ended(pod)}
        if self._kube is not None:
            try:
                pods = as_kubelet_knows(self._kube.pods(timeout), static)
            except KubeError as error:
                log.debug("no garbage collection while the API server is away: %s", error)
                return None
            by_api = {uid_of(pod) for pod in pods}
            over |= {uid_of(pod) for pod in pods if ended(pod)}
        if by_kubelet is None and by_api is None:
            return None
        if self._kubelet is not None and by_kubelet is None:
            by_kubelet = set(static)  # of those the API server knows mirrors only, which anybody may have deleted
        present = (by_kubelet or set()) | (by_api or set())
        running = self.running()
        self._doubt((over & running) | (running - present))
        return Presence(started, frozenset(present | running), frozenset(over - running), by_api is not None)

    def running(self) -> set[str]:
        """Pods with a share of whose containers the kernel has processes, by UID."""
        return set(self._running())

    def _doubt(self, pods: set[str]) -> None:
        """Statuses are written by whoever may (kubelet's list repeats them); a forced deletion ends no container."""
        for uid in pods:
            text = (
                f"pod {uid} has ended or is deleted by what the API server says, but processes of its containers run: "
                "what it was given stays its own until they end"
            )
            self._conditions.set(f"runs {uid}", text, {"uid": uid})
        for uid in self._doubted - pods:
            self._conditions.clear(f"runs {uid}", f"pod {uid}: what is said of it is so", {"uid": uid})
        self._doubted = pods


def _waits(pod: Pod | None) -> bool:
    return pod is not None and not terminal(pod)


def _created(pod: Pod) -> str:
    """The time as the API server writes it, which sorts as text; static pods, without one, come first."""
    return str((pod.get("metadata") or {}).get("creationTimestamp") or "")


def _within(patience: float, deadline: float) -> float:
    return max(_LEAST_S, min(patience, deadline - time.monotonic()))
