"""A claim that kubelet wants prepared: read from the API server, understood, booked, answered."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from manager.allocate.allocator import ENDING_LOOK_S, ENDING_S, NO_ROOM
from manager.allocate.claims import Claims
from manager.allocate.find_pod import Presence
from manager.allocations.accounting import AllocationView, by_pod
from manager.allocations.record import Allocation
from manager.cards import protocols
from manager.cards.inventory import Inventory
from manager.config.settings import Settings
from manager.config.values import DRA
from manager.container.response import in_the_way
from manager.errors import Reason, Refusal
from manager.kube.api import Kube, Pod
from manager.kube.pods import claims_of, volume_paths
from manager.observe.metrics import Metrics
from manager.proto import dra_pb2 as api
from vcuda.kube.errors import KubeError
from vcuda.kube.objects import ended, name_of, uid_of
from vcuda.logs import fields
from vcuda.quoted import quoted
from vcuda.spec import errors
from vcuda.spec.claims import AllocatedClaim, RequestShares, parse_claim, shares_of
from vcuda.spec.devices import device_name
from vcuda.spec.errors import SpecError
from vcuda.spec.inventory import Card
from vcuda.spec.names import Names

READ_TIMEOUT_S = 5.0
# Kubelet unprepares by itself, after containers have ended; only what it has lost is collected.
ABSENT_GRACE_S = 60.0
# Claims that wait at once for the room of others whose containers still end; each has a thread of the server.
MOST_WAITING = 24
# A claim's UID names files of ours.
TellPod = Callable[[str, str, str, Refusal], None]  # namespace, name and UID of a pod
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")

log = logging.getLogger(__name__)


class Preparer:
    """Prepares claims and unprepares them; any number at a time. Both raise Refusal."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        names: Names,
        inventory: Inventory,
        kube: Kube,
        claims: Claims,
        view: AllocationView,
        pods: Callable[[], Sequence[Pod] | None],
        presence: Callable[[], Presence | None],
        metrics: Metrics,
        tell: TellPod,
    ) -> None:
        """`pods`: the node's, by the watch; `presence`: which of them kubelet and the API server know now.

        `tell`: of a pod that uses a prepared claim and would have been refused.
        """
        self._settings, self._names, self._inventory, self._kube = settings, names, inventory, kube
        self._claims, self._view, self._pods, self._presence, self._metrics = claims, view, pods, presence, metrics
        self._tell = tell
        self._absent_since: dict[str, float] = {}  # by claim UID
        self._told: dict[str, str] = {}  # by pod UID, what is wrong with it
        self._waiting = threading.BoundedSemaphore(MOST_WAITING)

    def prepare(self, namespace: str, name: str, uid: str, until: float) -> list[api.Device]:
        """What kubelet is to give the containers that name the claim.

        `until`: when its call's time for reading is over (monotonic): a stalled API server must not cost the answer.
        """
        reason, began = "", time.monotonic()
        try:
            found = self._read(namespace, name, uid, until)
            began = time.monotonic()
            claim = parse_claim(found, self._names)
            return self._prepare(claim, until)
        except SpecError as error:
            reason = str(error.reason)
            raise Refusal.of(error) from error
        except Refusal as refusal:
            reason = refusal.reason
            raise
        finally:
            self._metrics.prepared(reason, time.monotonic() - began)

    def unprepare(self, uid: str) -> None:
        """Let go of what a claim has, if it has anything."""
        self._check(uid)
        self._claims.release(uid)

    def lost(self, known: Collection[str], regions: Path) -> list[Allocation]:
        """What the state has lost: claims of this node's pods that have regions there, but none of them is `known`.

        `known`: UIDs; `regions`: their folder. What can't be told is logged, left out.
        """
        there = {folder.name for folder in regions.iterdir()} - set(known) if regions.is_dir() else set()
        if not there:
            return []
        found: dict[tuple[str, str], Allocation] = {}
        try:
            for pod in self._kube.pods(READ_TIMEOUT_S):
                for name in claims_of(pod) if not ended(pod) else ():
                    item = self._kube.claim(name_of(pod)[0], name, READ_TIMEOUT_S)
                    if item is not None and uid_of(item) in there:
                        found.update({one.key: one for one in self._as_allocated(item)})
        except KubeError as error:
            log.warning("claims that the state does not know can't be read: %s", error)
        for one in found.values():
            log.warning("%s was not in the state; rebuilt from its claim", one.name, extra=fields(one.fields))
        return [*found.values()]

    def _as_allocated(self, item: Mapping[str, Any]) -> list[Allocation]:
        try:
            claim = parse_claim(item, self._names)
            requests = shares_of(claim, self._settings().node_name, self._cards(claim))
            return [one for one in self._claims.allocations(claim, requests) if Path(one.region).is_dir()]
        except (SpecError, Refusal) as error:
            log.warning("claim %s is not in the state, and can't be rebuilt: %s", "/".join(name_of(item)), error)
            return []

    def collect(self) -> None:
        """Let go of claims that kubelet has forgotten to unprepare, and note who else uses those that are there."""
        groups = by_pod(item for item in self._view.allocations if item.claim is not None)
        self._absent_since = {uid: since for uid, since in self._absent_since.items() if uid in groups}
        if not groups:
            return
        started = time.monotonic()
        seen = self._presence()
        if seen is None:
            return
        here = seen.present - seen.ended
        self._check_joined({(item.namespace, item.pod_name) for item, *_ in groups.values()}, here)
        watched = _users(self._pods() or ())
        for uid, (item, *_) in groups.items():
            now = [user for user in watched.get((item.namespace, item.pod_name), ()) if user[1] in here]
            if not {*now} <= {*item.pods}:
                try:
                    now = now if self._is_named(uid, item) else []
                except KubeError as error:
                    log.debug("who uses %s can't be told while its claim can't be read: %s", item.name, error)
                    continue
            users = tuple(dict.fromkeys([*(user for user in item.pods if user[1] in here), *now]))
            if users:
                self._absent_since.pop(uid, None)
                self._note(uid, users)
            elif started - self._absent_since.setdefault(uid, started) >= ABSENT_GRACE_S:
                self._end(uid, item, here)

    def _is_named(self, uid: str, item: Allocation) -> bool:
        """Whether the claim's name still means it: another one of the same name has other users. Raises KubeError."""
        found = self._kube.claim(item.namespace, item.pod_name, READ_TIMEOUT_S)
        return found is not None and uid_of(found) == uid

    def _release_namesakes(self, claim: AllocatedClaim) -> None:
        """Let go of claims that had this one's name before it and that no pod here can be using any more.

        Raises Refusal.
        """
        named = (claim.namespace, claim.name)
        old = by_pod(
            item
            for item in self._view.allocations
            if item.claim is not None and (item.namespace, item.pod_name) == named and item.pod_uid != claim.uid
        )
        seen = self._presence() if old else None
        if seen is None or not seen.certain:
            return
        here, watched = seen.present - seen.ended, {*_users(self._pods() or ()).get(named, ())} - {*claim.pods}
        for uid, (item, *_) in old.items():
            if not any(user in here for _, user in (*item.pods, *watched)):
                log.warning(
                    "%s is let go: its claim was made again, and none of its pods is here",
                    item.name,
                    extra=fields(item.fields),
                )
                self._claims.release(uid)

    def _note(self, uid: str, users: tuple[tuple[str, str], ...]) -> None:
        try:
            self._claims.used_by(uid, users)
        except Refusal as refusal:
            log.warning("%s", refusal.message, extra=fields(uid=uid, reason=refusal.reason))

    def _end(self, uid: str, item: Allocation, here: Collection[str]) -> None:
        """Let go of a claim none of whose pods is here any more, unless the API server says that others have it."""
        try:
            found = self._kube.claim(item.namespace, item.pod_name, READ_TIMEOUT_S)
            pods = parse_claim(found, self._names).pods if found is not None and uid_of(found) == uid else ()
        except KubeError as error:
            if error.status != 403 or DRA in self._settings().protocols:
                log.debug("%s is kept while its claim can't be read: %s", item.name, error)
                return
            pods = ()  # who serves no claims has no right to read them either, and no pod here names this one
        except SpecError:  # it has lost its allocation, or never was of this form
            pods = ()
        try:
            if any(user in here for _, user in pods):
                self._claims.used_by(uid, pods)
            else:
                log.warning(
                    "%s is used by no pod of this node, and kubelet has not unprepared it",
                    item.name,
                    extra=fields(item.fields),
                )
                self._claims.release(uid)
        except Refusal as refusal:
            log.warning("%s", refusal.message, extra=fields(item.fields, reason=refusal.reason))

    @staticmethod
    def _check(uid: str) -> None:
        if _UID.fullmatch(uid) is None:
            raise Refusal(Reason.CLAIM_CHANGED, f"{quoted(uid, 80)} is no UID of a claim")

    def _read(self, namespace: str, name: str, uid: str, until: float) -> Mapping[str, Any]:
        self._check(uid)
        what = f"claim {namespace:.64}/{name:.64}"
        left = until - time.monotonic()
        if left <= 0:
            raise Refusal(
                Reason.CLAIM_UNREADABLE,
                f"{what} was not read: the call's other claims have taken all its time; kubelet tries again by itself",
            )
        try:
            found = self._kube.claim(namespace, name, min(READ_TIMEOUT_S, left))
        except KubeError as error:
            raise Refusal(
                Reason.CLAIM_UNREADABLE, f"{what} can't be read: {error}; kubelet tries again by itself"
            ) from error
        if found is None:
            raise Refusal(Reason.CLAIM_CHANGED, f"{what} is gone from the API server; recreate the pod")
        if uid_of(found) != uid:
            raise Refusal(
                Reason.CLAIM_CHANGED,
                f"{what} has the UID {uid_of(found)}, kubelet asks for {uid}: it was deleted and made again; recreate "
                "the pod",
            )
        return found

    def _prepare(self, claim: AllocatedClaim, until: float) -> list[api.Device]:
        if not claim.results:
            raise Refusal(
                errors.Reason.INVALID_CLAIM, f"its allocation has no device of {self._names.driver}; recreate the pod"
            )
        self._check_pods(claim, until)
        requests = shares_of(claim, self._settings().node_name, self._cards(claim))
        self._check_held(claim, requests)
        self._release_namesakes(claim)
        items = {item.container: item for item in self._book(claim, requests, until)}
        return _devices(claim, items, self._claims.specs.device_id)

    def _book(self, claim: AllocatedClaim, requests: Sequence[RequestShares], until: float) -> tuple[Allocation, ...]:
        """Book it, and wait where its room is that of pods that are gone and whose containers still end.

        A pod that is deleted without a grace period loses its claim at once, and kube-scheduler gives the room to the
        next one; kubelet lets go of it when the containers have ended, and tries a refused one again after a minute.
        Raises Refusal.
        """
        until = min(until, time.monotonic() + ENDING_S)
        while True:
            try:
                return self._claims.book(claim, requests)
            except Refusal as refusal:
                if refusal.reason not in NO_ROOM or not self._is_ending(claim, requests):
                    raise
                if time.monotonic() + ENDING_LOOK_S > until or not self._waiting.acquire(blocking=False):
                    raise
            try:
                time.sleep(ENDING_LOOK_S)
            finally:
                self._waiting.release()

    def _is_ending(self, claim: AllocatedClaim, requests: Sequence[RequestShares]) -> bool:
        """Whether a claim is in the way that kubelet has yet to let go of: the watch knows none of its pods."""
        pods = self._pods()
        if pods is None:
            return False
        here, cards = {uid_of(pod) for pod in pods}, {share.uuid for one in requests for share in one.shares}
        return any(
            item.claim is not None
            and item.pod_uid != claim.uid
            and not cards.isdisjoint(share.uuid for share in item.shares)
            and not any(uid in here for _, uid in item.pods)
            for item in self._view.allocations
        )

    def _cards(self, claim: AllocatedClaim) -> dict[str, Card]:
        """By their devices' names, those that claims get, and those that this one has from before."""
        settings, asked, has = self._settings(), {item.device for item in claim.results}, self._has(claim)
        found: dict[str, Card] = {}
        for item in self._inventory.snapshot.cards:
            name = device_name(item.card.uuid)
            if protocols.of_claims(settings, item) or item.card.uuid in has:
                found[name] = item.card
            elif name in asked:
                raise Refusal(
                    errors.Reason.CARD_NOT_ALLOWED,
                    f"card {item.card.uuid} is offered by the device plugin on this node, not to claims (--protocols, "
                    "--dra-cards); delete the pod, so that the claim is allocated anew",
                )
        return found

    def _has(self, claim: AllocatedClaim) -> set[str]:
        """UUIDs of the cards that it has from before."""
        return {share.uuid for item in self._view.allocations if item.pod_uid == claim.uid for share in item.shares}

    def _check_held(self, claim: AllocatedClaim, requests: Sequence[RequestShares]) -> None:
        """A card serves one protocol: such are not offered, but a scheduler may know older slices. Raises Refusal."""
        new = {share.uuid for one in requests for share in one.shares} - self._has(claim)
        for item in self._view.allocations:
            if item.claim is None and (held := new & {share.uuid for share in item.shares}):
                raise Refusal(
                    errors.Reason.CARD_NOT_ALLOWED,
                    f"{item.name} still has a share of card {min(held)} from the device plugin; delete the claim's "
                    "pod, so that the claim is allocated anew, or wait until the other one has ended",
                )

    def _users_of(self, claim: AllocatedClaim, until: float) -> list[Pod]:
        """The pods that a claim is reserved for, as far as they are on this node. Raises Refusal."""
        users = {uid for _, uid in claim.pods}
        if not users:
            raise Refusal(
                Reason.CLAIM_CHANGED, "it is reserved for no pod (status.reservedFor); kubelet tries again by itself"
            )
        found = [pod for pod in self._pods() or () if uid_of(pod) in users]
        if len(found) == len(users):
            return found
        try:  # the watch may lag behind kubelet's, or be broken
            pods = self._kube.pods(max(0.1, min(READ_TIMEOUT_S, until - time.monotonic())))
        except KubeError as error:
            raise Refusal(
                Reason.CLAIM_UNREADABLE,
                f"the volumes of the pods that it is reserved for can't be read: {error}; kubelet tries again",
            ) from error
        return [pod for pod in pods if uid_of(pod) in users]

    def _check_pods(self, claim: AllocatedClaim, until: float) -> None:
        """What a container has besides must not hide the claim's region, nor be hidden by it. Raises Refusal."""
        for pod in self._users_of(claim, until):
            self._check_pod(pod, claim.name)

    def _check_pod(self, pod: Pod, claim: str) -> None:
        called = claims_of(pod).get(claim)
        for container in _containers(pod):
            name, resources = quoted(container.get("name"), 80), _part(container, "resources")
            named = {item.get("name") for item in resources.get("claims") or () if isinstance(item, Mapping)}
            if called in named and {self._names.core, self._names.memory} & _part(resources, "limits").keys():
                raise Refusal(
                    errors.Reason.INVALID_POD,
                    f"container {name} asks for {self._names.core} or {self._names.memory} and names claim "
                    f"{quoted(claim, 80)}, too: a container has its shares by one of both. Ask for all of them in "
                    "claims (one may have several requests), or use two containers; then make the pod anew",
                )
            hides = in_the_way(volume_paths(pod, str(container.get("name"))))
            if hides is not None:
                raise Refusal(
                    Reason.MOUNT_IN_THE_WAY,
                    f"container {name} mounts a volume at {quoted(hides, 120)}, which would hide its limits or our "
                    "library; mount it elsewhere",
                )

    def _check_joined(self, claims: Collection[tuple[str, str]], here: Collection[str]) -> None:
        """Look at pods that use prepared claims, by namespace and name: kubelet asks for a claim's first pod alone."""
        found: dict[str, str] = {}
        for pod in self._pods() or ():
            (namespace, name), uid = name_of(pod), uid_of(pod)
            for claim in claims_of(pod) if uid in here else ():
                if (namespace, claim) not in claims:
                    continue
                try:
                    self._check_pod(pod, claim)
                except Refusal as refusal:
                    found[uid] = refusal.message
                    if self._told.get(uid) != refusal.message:
                        log.warning("pod %s/%s joined claim %s: %s", namespace, name, claim, refusal)
                        self._metrics.joined(refusal.reason)
                        self._tell(namespace, name, uid, refusal)
        self._told = found


def _containers(pod: Pod) -> list[Mapping[str, Any]]:
    """All of a pod's. Raises Refusal for what is none: it would be passed over, with whatever hides our limits."""
    spec = _part(pod, "spec")
    found = [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]
    if not all(isinstance(one, Mapping) for one in found):
        raise Refusal(
            errors.Reason.INVALID_POD,
            f"pod {quoted('/'.join(name_of(pod)), 160)} lists a container that is not an object; make the pod anew",
        )
    return found


def _part(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = whole.get(name)
    return value if isinstance(value, Mapping) else {}


def _users(pods: Sequence[Pod]) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """Name and UID of the pods that use a claim, by its namespace and name."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for pod in pods:
        namespace, name = name_of(pod)
        for claim in claims_of(pod):
            found.setdefault((namespace, claim), []).append((name, uid_of(pod)))
    return found


def _devices(
    claim: AllocatedClaim, items: Mapping[str, Allocation], device_id: Callable[[Allocation], str]
) -> list[api.Device]:
    """One for each result; the runtime's device, which is the whole request's, goes with its first."""
    found, told = [], set()
    for result in claim.results:
        first = result.request not in told
        told.add(result.request)
        found.append(
            api.Device(
                request_names=[result.request],
                pool_name=result.pool,
                device_name=result.device,
                cdi_device_ids=[device_id(items[result.request])] if first else [],
                share_id=result.share_id or None,
            )
        )
    return found
