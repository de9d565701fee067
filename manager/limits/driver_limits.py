"""Each pod's memory as a limit of the driver's on its control group, where it can (`vcuda.driver.memory_limits`).

The pod's group, not the container's: kubelet makes it before it asks PreStartContainer, and PreStartContainer is
answered before the container's own group exists. So the limit stands before any process of the pod can allocate,
without a hook in the runtime and without a race, and a start can be refused where it can't be set. What a pod's
containers may hold together is what its neighbours are promised. Where several containers share a card and the
kernel counts (dmem: every group above a process, and what it held before), each one's own group gets its own share
too, when it is seen. What was promised is in the state, where limits may stand is in `manager.limits.standing`; what
the driver says is compared with both again and again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from manager.allocations.accounting import by_pod
from manager.allocations.record import Allocation
from manager.cards.driver import NodeCard
from manager.cgroups import pods
from manager.config.settings import Settings
from manager.errors import Reason, Refusal
from manager.limits import promised
from manager.limits.possible import Limiter, impossible, no_version_2, set_and_read
from manager.limits.standing import Group, Standing
from manager.process.logs import Conditions
from vcuda.driver.memory_limits import CannotLimit, MemoryLimit
from vcuda.logs import fields

Key = tuple[str, str]
At = tuple[Key, str]  # container, card UUID
# The driver counts a group if it shows at least half of what it lists for its processes; small figures prove nothing.
_TELLING_BYTES = 64 << 20
DOUBTS = 12  # in a row: memory that comes and goes at random seems uncounted at one telling look of five at most
_OFF = "--driver-limits=off"

log = logging.getLogger(__name__)


class DriverLimits:
    """The driver's limits of this node's pods. `tell(allocation, reason, message)`.

    Whatever is decided of a pod is decided under one lock, by the allocations as they are then: no look undoes what a
    start or a resize has done since.
    """

    def __init__(
        self,
        settings: Callable[[], Settings],
        driver: Limiter,
        tell: Callable[[Allocation, str, str], None],
        standing: Standing,
    ) -> None:
        self._settings, self._driver, self._tell, self._standing = settings, driver, tell, standing
        self._lock = threading.RLock()
        self._held: dict[str, dict[At, int]] = {}  # by pod
        self._reasons: dict[str, dict[str, str]] = {}  # by pod and card ("": all), why the driver does not hold it
        self._short: dict[str, set[str]] = {}  # by pod, the cards on which the driver gives it less than its share
        self._doubts: dict[tuple[str, str], int] = {}  # by pod and card
        self._counted: dict[tuple[str, str], int] = {}  # by pod and card, bytes before the driver's list was read
        self._told: dict[str, tuple[str, str]] = {}  # by pod
        self._refused: set[str] = set()  # pods of which a container was not let start
        self._off = False
        self._why = ""
        self._conditions = Conditions(log)

    @property
    def why(self) -> str:
        """Why the driver does not hold some pod's memory as promised; "": it does, or nobody has a share."""
        return self._why

    def held(self, item: Allocation, uuid: str) -> int | None:
        """Bytes of a card that the driver lets a container, or its pod, hold; None: it limits nothing."""
        return self._held.get(item.pod_uid, {}).get((item.key, uuid))

    # Before a container starts.

    def require(self, cards: Sequence[NodeCard]) -> None:
        """Raise Refusal where limits are required and it is known beforehand that these cards can have none."""
        if self._settings().require_driver_limits and (why := impossible(self._settings(), self._driver, cards)):
            raise _refusal(why)

    def prepare(self, pod: Sequence[Allocation]) -> None:
        """Set the limits of a pod before one of its containers starts. Raises Refusal only where they are required."""
        settings = self._settings()
        if not promised.wanted(pod):
            return
        if settings.driver_limits == "off":
            failed = {"": _OFF}
        else:
            with self._lock:
                try:
                    root = settings.cgroup_root
                    failed = self._hold(pod, self._folder(pod, () if no_version_2(root) else pods.trees(root)))
                except CannotLimit as error:
                    self._held.pop(pod[0].pod_uid, None)
                    failed = self._reasons[pod[0].pod_uid] = {"": str(error)}
                self._publish()
        with self._lock:
            self._refused.discard(pod[0].pod_uid)
            if failed and settings.require_driver_limits:
                self._refused.add(pod[0].pod_uid)
                raise _refusal(min(failed.values()))

    def _folder(self, pod: Sequence[Allocation], trees: Sequence[Path]) -> Path:
        """The pod's group in kubelet's trees. Raises CannotLimit, _NoGroup."""
        uid, root = pod[0].pod_uid, self._settings().cgroup_root
        if why := no_version_2(root):
            raise CannotLimit(why)
        found = pods.of_pod(trees, uid)
        if len(found) > 1:  # its processes are in one of them, as a rule
            found = [path for path in found if pods.populated(path)] or found
        if not found:
            for uuid in promised.wanted(pod):
                self._driver.memory_limit(uuid, root)  # where the driver can't, that is the better reason
            raise _NoGroup(
                f"kubelet has made no control group for the pod below {root} (--cgroup-root; kubelet's "
                "--cgroups-per-qos)"
            )
        if len(found) > 1:
            raise CannotLimit(
                f"pod {uid} has {len(found)} control groups, {' and '.join(map(str, found))}, as after a change of "
                "kubelet's cgroup driver; remove those that are empty"
            )
        return found[0]

    def _hold(
        self,
        pod: Sequence[Allocation],
        folder: Path,
        leaves: Mapping[Key, Sequence[Path]] | None = None,
        listed: Mapping[At, int] | None = None,
        *,
        lower: bool = True,
    ) -> dict[str, str]:
        """Have the driver hold a pod, each card by itself. Returns why it can't, by card.

        `leaves`: groups of running containers, beside those that have limits already.
        """
        uid, wanted = pod[0].pod_uid, promised.wanted(pod)
        failed: dict[str, str] = {}
        stands: dict[str, MemoryLimit] = {}
        short: set[str] = set()
        for uuid, hard in wanted.items():
            now, why = self._try(uid, "", folder, uuid, hard, lower=lower)
            if now is not None:
                stands[uuid] = now
            if why:
                failed[uuid] = why
        held = {
            (item.key, uuid): stands[uuid].hard_bytes for item, uuid, _ in promised.shares_of(pod) if uuid in stands
        }
        well = wanted.keys() - failed.keys()
        for item, uuid, own in promised.apart(pod):
            groups = self._groups_of(item, leaves or {}) if uuid in well else ()
            for leaf in (path for path in groups if path.parent == folder):
                if not self._kernel_counts(leaf, uuid, stands[uuid].hard_bytes):
                    continue
                now, why = self._try(uid, item.container, leaf, uuid, own, lower=lower)
                if now is None:  # the pod's limit holds them together
                    continue
                if leaf == groups[-1]:
                    held[item.key, uuid] = now.hard_bytes
                if why:
                    failed[uuid] = why
                    short |= {uuid} if now.hard_bytes < own else set()
        short |= {uuid for uuid in failed.keys() & stands.keys() if stands[uuid].hard_bytes < wanted[uuid]}
        for group in self._standing.of(uid):  # of a claim that it had, of a whole card that it has now
            if left := group.cards.keys() - wanted.keys():
                self._lift(group, left & promised.whole_cards(pod) if pods.populated(folder) else left)
        doubtful = self._doubt(pod, stands, listed)
        self._held[uid] = {at: much for at, much in held.items() if at[1] not in doubtful}
        self._reasons[uid], self._short[uid] = {**doubtful, **failed}, short
        return failed

    def _groups_of(self, item: Allocation, leaves: Mapping[Key, Sequence[Path]]) -> Sequence[Path]:
        """A container's groups, the running one's last: of earlier starts, too, where a process does not end.

        Without a look at them the newest that has a limit is believed to be its own if somebody is in it.
        """
        seen = leaves.get(item.key, ())
        limited = [group.path for group in self._standing.of(item.pod_uid) if group.container == item.container]
        before = [path for path in limited if path not in seen and pods.populated(path)]
        return [*before, *seen]

    def _try(
        self, uid: str, container: str, path: Path, uuid: str, hard: int, *, lower: bool
    ) -> tuple[MemoryLimit | None, str]:
        """What stands for a group, and why it is not what is wanted; "": it is."""
        try:
            return self._stand(uid, container, path, uuid, hard, lower=lower), ""
        except CannotLimit as error:
            group, now = self._standing.at(path), None
            if group is not None and uuid in group.cards:
                with contextlib.suppress(CannotLimit):
                    now = self._driver.memory_limit(uuid, path)
            if now is None:
                return None, str(error)
            whom = f"container {container}" if container else "the pod"
            return now, f"{error}; it goes on holding {whom} to {now.hard_bytes} bytes, not {hard}"

    def _stand(self, uid: str, container: str, path: Path, uuid: str, hard: int, *, lower: bool) -> MemoryLimit:
        """Have a group's limit say `hard` bytes; with `lower` false, at least that. Raises CannotLimit."""
        now, ours = self._driver.memory_limit(uuid, path), self._standing.at(path)
        if ours is None or uuid not in ours.cards or now is None:  # of a group above it may be the same
            enough = False
        else:
            enough = now.hard_bytes == hard or (now.hard_bytes > hard and not lower)
        if now is None or not enough:
            if ours is not None and ours.cards.get(uuid) == hard:
                log.warning(
                    "pod %s: the driver's limit on card %s had become %s; it is set again",
                    uid,
                    uuid,
                    now,
                    extra=fields(uid=uid, uuid=uuid),
                )
            self._standing.mark(uid, container, path, uuid)
            now = set_and_read(self._driver, uuid, path, hard)
        self._standing.mark(uid, container, path, uuid).cards[uuid] = now.hard_bytes
        return now

    def _kernel_counts(self, leaf: Path, uuid: str, pod_bytes: int) -> bool:
        """Whether a container's group is a level of its own.

        The driver's own accounting, which knows one level only, shows the pod's limit there, which is more than any
        share of a card that containers divide.
        """
        group = self._standing.at(leaf)
        if group is not None and uuid in group.cards:
            return True
        try:
            now = self._driver.memory_limit(uuid, leaf)
        except CannotLimit:  # it has ended
            return False
        return now is None or now.hard_bytes != pod_bytes

    def _doubt(
        self, pod: Sequence[Allocation], stands: Mapping[str, MemoryLimit], listed: Mapping[At, int] | None
    ) -> dict[str, str]:
        """By card, why a limit holds not all of a pod: the driver's own list of processes says so.

        The list is older than `stands` and younger than `count`: what neither shows of it may have come and gone
        between them, though not at every look. A look at which next to nothing is listed proves nothing.
        """
        found = {}
        for uuid, now in stands.items():
            about = pod[0].pod_uid, uuid
            if listed is not None:
                used = sum(listed.get((item.key, uuid), 0) for item in pod)
                counted = max(now.used_bytes, self._counted.pop(about, 0))
                over = used > now.hard_bytes + _TELLING_BYTES and used > counted + _TELLING_BYTES
                if over or used > max(_TELLING_BYTES, 2 * counted):
                    self._doubts[about] = self._doubts.get(about, 0) + 1
                elif max(used, counted) > _TELLING_BYTES:
                    self._doubts[about] = 0
            if self._doubts.get(about, 0) >= DOUBTS:
                found[uuid] = (
                    "the driver counts less of a pod than it lists for its processes: they are in another control "
                    "group for it (neither dmem nor misc is handed down), or held it before there was a limit"
                )
        return found

    # Live resize.

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """No look changes a limit meanwhile: it would go by allocations that are about to change."""
        with self._lock:
            yield

    def beyond(self, pod: Sequence[Allocation]) -> int:
        """Bytes that a pod, as it is to be, or one of its containers holds beyond its limits by the driver's count."""
        most = 0
        hard = {("", uuid): much for uuid, much in promised.wanted(pod).items()}
        hard |= {(item.container, uuid): own for item, uuid, own in promised.apart(pod)}
        with self._lock:
            for group in self._standing.of(pod[0].pod_uid):
                for uuid in group.cards:
                    with contextlib.suppress(CannotLimit):
                        now = self._driver.memory_limit(uuid, group.path)
                        if now is not None and (group.container, uuid) in hard:
                            most = max(most, now.used_bytes - hard[group.container, uuid])
        return most

    def follow(self, pod: Sequence[Allocation], *, lower: bool = True) -> None:
        """Have the driver say what a running pod is to have, where it says anything of it.

        With `lower` false only where that is more. Raises Refusal where limits are required; else the next look tries
        again what could not be set, and tells it.
        """
        uid = pod[0].pod_uid
        with self._lock:
            folder = next((group.path for group in self._standing.of(uid) if not group.container), None)
            if folder is None:
                return
            failed = self._hold(pod, folder, lower=lower)
            self._publish()
        if failed and self._settings().require_driver_limits:
            raise _refusal(min(failed.values()))

    # Again and again.

    def count(self) -> None:
        """Before the driver is asked for its list of processes: what it counts of each pod. Never raises."""
        with self._lock:
            self._counted.clear()
            for group in [group for uid in self._standing.pods for group in self._standing.of(uid)]:
                for uuid in group.cards if not group.container else ():
                    with contextlib.suppress(CannotLimit):
                        if (now := self._driver.memory_limit(uuid, group.path)) is not None:
                            self._counted[group.pod_uid, uuid] = now.used_bytes

    def look(
        self,
        allocations: Callable[[], Sequence[Allocation]],
        leaves: Mapping[Key, Sequence[Path]],
        listed: Mapping[At, int],
    ) -> None:
        """Compare what stands with what was promised, and mend it. Never raises.

        `leaves`: the groups of running containers. `listed`: bytes of a card that the driver lists for a container's
        processes, without managed memory.
        """
        settings = self._settings()
        off, trees = settings.driver_limits == "off", pods.trees(settings.cgroup_root)
        with self._lock:
            self._forget(allocations)
        known = allocations()
        groups = by_pod(known)
        for uid in sorted(groups):
            with self._lock:
                if (now := allocations()) is not known:  # as they are now, each pod in turn: not all of them for each
                    known, groups = now, by_pod(now)
                pod = groups.get(uid, [])
                if pod and off:
                    self._let_go(pod, trees, leaves)
                elif pod and promised.wanted(pod):
                    self._mend(pod, trees, leaves, listed)
        self._off = off
        with self._lock:
            self._publish()

    def _mend(
        self,
        pod: Sequence[Allocation],
        trees: Sequence[Path],
        leaves: Mapping[Key, Sequence[Path]],
        listed: Mapping[At, int],
    ) -> None:
        uid = pod[0].pod_uid
        try:
            self._hold(pod, self._folder(pod, trees), leaves, listed)
        except _NoGroup:  # it has ended or has not begun, or `prepare` has given the reason
            self._held.pop(uid, None)
        except CannotLimit as error:
            self._held.pop(uid, None)
            self._reasons[uid] = {"": str(error)}
        self._judge(pod, runs=any(leaves.get(item.key) for item in pod))

    def _let_go(self, pod: Sequence[Allocation], trees: Sequence[Path], leaves: Mapping[Key, Sequence[Path]]) -> None:
        """No limits are wanted any more, also not those that nobody knows since the record was lost."""
        uid, wanted = pod[0].pod_uid, promised.wanted(pod)
        if not self._off:
            named = [(item.container, path) for item in pod for path in leaves.get(item.key, ())]
            found = [*(("", path) for path in pods.of_pod(trees, uid)), *named]
            for container, path in found:
                for uuid in wanted:
                    with contextlib.suppress(CannotLimit):
                        if self._driver.memory_limit(uuid, path) is not None:
                            self._standing.mark(uid, container, path, uuid)
        for group in self._standing.of(uid):
            self._lift(group, group.cards)
        self._held.pop(uid, None)
        self._reasons[uid] = {"": _OFF} if wanted else {}

    def _forget(self, allocations: Callable[[], Sequence[Allocation]]) -> None:
        """Pods that are gone leave no limit behind, once nobody is in their groups: a process that outlives its pod's
        record is still in the way of others.
        """
        limited, seen = list(self._standing.pods), list(self._reasons)
        present = {item.pod_uid for item in allocations()}
        for uid in limited:
            groups = self._standing.of(uid)
            if uid not in present and not any(pods.populated(group.path) for group in groups):
                for group in groups:
                    self._lift(group, group.cards)
        for uid in seen:
            if uid not in present:
                for kept in (self._reasons, self._held, self._short, self._told):
                    kept.pop(uid, None)
                self._refused.discard(uid)
                for about in [about for about in self._doubts if about[0] == uid]:
                    del self._doubts[about]

    def _lift(self, group: Group, uuids: Collection[str]) -> None:
        for uuid in list(uuids):
            try:
                if self._driver.memory_limit(uuid, group.path) is not None:
                    self._driver.limit_memory(uuid, group.path, None)
            except CannotLimit as error:
                if not group.gone:
                    log.debug("the limit of %s stays until the next look: %s", group.path, error)
                    continue
            self._standing.drop(group, [uuid])

    # Telling.

    def _judge(self, pod: Sequence[Allocation], *, runs: bool) -> None:
        """An event where a pod gets less than its share, or where it runs on without a limit that is required.

        One whose start was refused has been told so.
        """
        uid = pod[0].pod_uid
        reasons = self._reasons.get(uid, {})
        if short := self._short.get(uid):
            self._say(pod[0], "DriverLimitShort", reasons[min(short)])
        elif reasons and self._settings().require_driver_limits and (runs or uid not in self._refused):
            why = min(reasons.values())
            how = " as it should" if self._held.get(uid) else ", the shim alone does"
            self._say(pod[0], "DriverLimitLost", f"the driver does not hold its memory{how}: {why}")
        else:
            self._told.pop(uid, None)

    def _say(self, item: Allocation, reason: str, message: str) -> None:
        if self._told.get(item.pod_uid) != (reason, message):
            self._told[item.pod_uid] = reason, message
            self._tell(item, reason, message)

    def _publish(self) -> None:
        """Each reason once, however many pods it is of; it is over when the driver holds one and nobody has it left."""
        reasons = {why for pod in self._reasons.values() for why in pod.values()}
        for why in sorted(reasons):
            self._conditions.set(
                why, f"the driver does not hold the memory of all pods as it should, the shim does: {why}"
            )
        for why in self._conditions.active() if any(self._held.values()) else ():
            if why not in reasons:
                self._conditions.clear(why, f"of no pod any more: {why}")
        self._why = min(reasons, default="")


class _NoGroup(CannotLimit):
    """Kubelet has made none for the pod."""


def _refusal(why: str) -> Refusal:
    return Refusal(
        Reason.DRIVER_LIMITS_UNAVAILABLE,
        f"the driver can't hold the pod's memory, and --require-driver-limits is set: {why}",
    )
