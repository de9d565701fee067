"""Each pod's memory as a limit of the driver's on its control group, where it can (`vcuda.driver.memory_limits`).

The pod's group, not the container's: kubelet makes it before it asks PreStartContainer, and PreStartContainer is
answered before the container's own group exists. So the limit stands before any process of the pod can allocate,
without a hook in the runtime and without a race, and a start can be refused where it can't be set. What a pod's
containers may hold together is what its neighbours are promised. Where several containers share a card and the
kernel counts (dmem: every group above a process, and what it held before), each one's own group gets its own share
too, when it is seen. What was promised is in the state; what stands in the driver is compared with it again and
again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from manager.allocations.accounting import by_pod, pod_use
from manager.allocations.record import Allocation
from manager.cards.driver import NodeCard
from manager.cgroups.pods import plain, pod_folders
from manager.config.settings import Settings
from manager.errors import Reason, Refusal
from manager.process.logs import Conditions
from vcuda.driver.memory_limits import CannotLimit, MemoryLimit
from vcuda.region import Usage
from vcuda.spec.request import Kind
from vcuda.spec.units import BLOCK_BYTES

Key = tuple[str, str]
# The driver counts a group if it shows at least half of what the ledgers say; small figures prove nothing.
_TELLING_BYTES = 64 << 20
_DOUBTS = 2

log = logging.getLogger(__name__)


class Limiter(Protocol):
    """Whoever can ask the driver."""

    def limit_memory(self, uuid: str, group: Path, hard_bytes: int | None) -> None:
        """Raises CannotLimit."""

    def memory_limit(self, uuid: str, group: Path) -> MemoryLimit | None:
        """Raises CannotLimit."""


class DriverLimits:
    """The driver's limits of this node's pods. `tell(allocation, reason, message)`; `usage`: a container's ledger."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        driver: Limiter,
        usage: Callable[[Allocation], Usage | None],
        tell: Callable[[Allocation, str, str], None],
    ) -> None:
        self._settings, self._driver, self._usage, self._tell = settings, driver, usage, tell
        self._lock = threading.Lock()
        self._folders: dict[str, Path] = {}  # of pods, by UID
        self._set: dict[str, dict[str, int]] = {}  # what stands for a pod, by card
        self._leaves: dict[Key, Path] = {}  # groups of containers that have a limit of their own
        self._doubts: dict[tuple[str, str], int] = {}
        self._off = False
        self._told: dict[str, str] = {}
        self._found: dict[tuple[Key, str], int] = {}
        self._conditions = Conditions(log)

    @property
    def why(self) -> str:
        """Why the shim is alone with the memory of some pod or all; "": it is not, or nobody has a share."""
        return next(iter(self._conditions.active().values()), "")

    def held(self, item: Allocation, uuid: str) -> int | None:
        """Bytes of a card that the driver lets a container, or its pod, hold; None: it limits nothing."""
        return self._found.get((item.key, uuid))

    # Before a container starts.

    def require(self, cards: Sequence[NodeCard]) -> None:
        """Raise Refusal where limits are required and it is known beforehand that these cards can have none."""
        if self._settings().require_driver_limits and (why := impossible(self._settings(), self._driver, cards)):
            raise _refusal(why)

    def prepare(self, pod: Sequence[Allocation]) -> None:
        """Set the limits of a pod before one of its containers starts. Raises Refusal only where they are required."""
        uid, wanted = pod[0].pod_uid, _wanted(pod)
        if not wanted or self._settings().driver_limits == "off":
            return
        try:
            with self._lock:
                self._ask(wanted)
                self._apply(uid, self._folder(uid), wanted)
        except CannotLimit as error:
            self._alone(str(error))
            if self._settings().require_driver_limits:
                raise _refusal(str(error)) from error
        else:
            self._well()
            self._note(pod)

    def _ask(self, uuids: Collection[str]) -> None:
        """Whether it can be at all, before the tree of groups is gone through. Raises CannotLimit."""
        root = self._settings().cgroup_root
        if not (root / "cgroup.controllers").exists():
            raise CannotLimit(_no_version_2(self._settings()))
        for uuid in uuids:
            self._driver.memory_limit(uuid, root)

    def _folder(self, uid: str) -> Path:
        known = self._folders.get(uid)
        if known is not None and known.is_dir():
            return known
        root = self._settings().cgroup_root
        for _, folder in pod_folders(root, {plain(uid)}):
            self._folders[uid] = folder
            return folder
        raise CannotLimit(
            f"kubelet has made no control group for pod {uid} below {root} (--cgroup-root; kubelet's --cgroups-per-qos)"
        )

    def _apply(self, uid: str, folder: Path, wanted: Mapping[str, int], *, lower: bool = True) -> None:
        """Raises CannotLimit."""
        for uuid, hard in wanted.items():
            now = self._driver.memory_limit(uuid, folder)
            if now is None or now.hard_bytes != hard:
                if not lower and now is not None and now.hard_bytes > hard:
                    continue
                self._driver.limit_memory(uuid, folder, hard)
                now = self._driver.memory_limit(uuid, folder)
                if now is None or now.hard_bytes != hard:
                    raise CannotLimit(f"{hard} bytes were set for {folder}, and the driver says {now}")
            self._set.setdefault(uid, {})[uuid] = hard

    # Live resize.

    def beyond(self, pod: Sequence[Allocation]) -> int:
        """Bytes that a pod, as it is to be, holds beyond its limits by the driver's count; 0 where it has none."""
        most = 0
        with self._lock:
            folder, stands = self._standing(pod)
            if folder is None:
                return 0
            for uuid, hard in _wanted(pod).items():
                try:
                    now = self._driver.memory_limit(uuid, folder) if uuid in stands else None
                except CannotLimit:
                    continue
                most = max(most, now.used_bytes - hard if now is not None else 0)
        return most

    def follow(self, pod: Sequence[Allocation], *, lower: bool = True) -> None:
        """Have the driver say what a running pod is to have, if it says anything of it. Raises Refusal.

        With `lower` false only where that is more.
        """
        uid = pod[0].pod_uid
        try:
            with self._lock:
                folder, stands = self._standing(pod)
                if folder is None or not stands or not folder.is_dir():
                    return
                self._apply(uid, folder, _wanted(pod), lower=lower)
                for item in pod:
                    if (leaf := self._leaves.get(item.key)) is not None and leaf.is_dir():
                        self._own(item, leaf, lower=lower)
        except CannotLimit as error:
            raise _refusal(str(error)) from error
        self._note(pod)

    def _standing(self, pod: Sequence[Allocation]) -> tuple[Path | None, Mapping[str, int]]:
        """The pod's group, and what stands for it; also what a daemon before this one has set."""
        uid = pod[0].pod_uid
        try:
            folder = self._folder(uid)
            for uuid in _wanted(pod) if uid not in self._set else ():
                if (now := self._driver.memory_limit(uuid, folder)) is not None:
                    self._set.setdefault(uid, {})[uuid] = now.hard_bytes
        except CannotLimit:
            return None, {}
        return folder, self._set.get(uid, {})

    def _own(self, item: Allocation, leaf: Path, *, lower: bool = True) -> None:
        """A container's own group. Raises CannotLimit."""
        for share in item.shares:
            now, hard = self._driver.memory_limit(share.uuid, leaf), share.memory_blocks * BLOCK_BYTES
            if now is not None and (now.hard_bytes == hard or (now.hard_bytes > hard and not lower)):
                continue
            self._driver.limit_memory(share.uuid, leaf, hard)

    # Again and again.

    def look(self, allocations: Callable[[], Sequence[Allocation]], groups: Mapping[Key, Path]) -> None:
        """Compare what stands with what was promised, and mend it. Never raises. `groups`: of running containers."""
        settings, pods = self._settings(), by_pod(allocations())
        off = settings.driver_limits == "off"
        if off and not self._off:  # a daemon before this one may have set some
            with self._lock:
                for mine in pods.values():
                    self._standing(mine)
        self._off = off
        self._release({} if off else pods)
        if off or not pods:
            self._conditions.clear("limits") if not pods else self._alone("--driver-limits=off")
            return
        shared = [item for pod in pods.values() for item in pod if not item.whole]
        if not (settings.cgroup_root / "cgroup.controllers").exists():
            if shared:
                self._alone(_no_version_2(settings))
            return
        lacking = {plain(uid): uid for uid in pods if uid not in self._folders or not self._folders[uid].is_dir()}
        with self._lock:
            for uid in lacking.values():
                self._forget(uid)
            for name, folder in pod_folders(settings.cgroup_root, lacking):
                self._folders[lacking[name]] = folder
        why = ""
        for uid in sorted(pods.keys() & self._folders.keys()):  # of several reasons always the same one is told
            pod = by_pod(allocations()).get(uid)  # it may have been resized meanwhile
            try:
                if pod:
                    with self._lock:
                        self._mend(uid, pod, groups)
            except CannotLimit as error:
                if not self._folders.get(uid, Path("/nowhere")).is_dir():
                    continue  # it ended meanwhile
                why = why or str(error)
                self._lost(uid, pods[uid], str(error))
                if error.lasting:
                    break
            else:
                self._told.pop(uid, None)
                self._note(pod or ())
        if why:
            self._alone(why)
        elif self._set:
            self._well()

    def _mend(self, uid: str, pod: Sequence[Allocation], groups: Mapping[Key, Path]) -> None:
        """Raises CannotLimit."""
        folder, wanted = self._folders[uid], _wanted(pod)
        stands = self._set.setdefault(uid, {})
        for uuid, hard in wanted.items():
            now = self._driver.memory_limit(uuid, folder)
            if now is not None and now.hard_bytes in (stands.get(uuid), hard):
                stands[uuid] = now.hard_bytes
                self._doubt(uid, uuid, now, pod)
            else:
                if uuid in stands:
                    log.warning("pod %s: the driver's limit on card %s had become %s; it is set again", uid, uuid, now)
                self._apply(uid, folder, {uuid: hard})
        together = [item for item in pod if not item.whole and item.kind is not Kind.INIT]
        for item in together if len(together) > 1 else ():
            if (leaf := groups.get(item.key)) is not None and self._kernel_counts(item, leaf, stands):
                self._own(item, leaf)
                self._leaves[item.key] = leaf

    def _kernel_counts(self, item: Allocation, leaf: Path, stands: Mapping[str, int]) -> bool:
        """Whether a container's group is a level of its own.

        The driver's own accounting, which knows one level only, shows the pod's limit there.
        """
        known = [self._driver.memory_limit(share.uuid, leaf) for share in item.shares]
        return self._leaves.get(item.key) == leaf or all(
            now is None or now.hard_bytes != stands.get(share.uuid)
            for now, share in zip(known, item.shares, strict=True)
        )

    def _doubt(self, uid: str, uuid: str, now: MemoryLimit, pod: Sequence[Allocation]) -> None:
        """A limit that counts nobody is none. Raises CannotLimit."""
        ledger = 0
        for item in pod:
            usage = self._usage(item)
            ledger += sum(
                card.memory_used_bytes - card.managed_bytes
                for card in (usage.cards if usage else ())
                if card.uuid == uuid
            )
        doubts = self._doubts.get((uid, uuid), 0) + 1 if ledger > max(_TELLING_BYTES, 2 * now.used_bytes) else 0
        self._doubts[uid, uuid] = doubts
        if doubts >= _DOUBTS:
            raise CannotLimit(
                f"the driver counts next to nothing in {self._folders[uid]}, whose processes hold memory: "
                "they are in another group for it (neither dmem nor misc is handed down to this one), or held it "
                "before it had a limit"
            )

    def _release(self, pods: Mapping[str, object]) -> None:
        """Pods that are gone leave no limit behind; mostly their groups, and the limits with them, are gone already."""
        with self._lock:
            for uid in [uid for uid in self._set if uid not in pods]:
                folder = self._folders.get(uid)
                leaves = [leaf for key, leaf in self._leaves.items() if key[0] == uid]
                for uuid in self._set[uid]:
                    for group in (*leaves, *((folder,) if folder is not None else ())):
                        if group.is_dir():
                            try:
                                self._driver.limit_memory(uuid, group, None)
                            except CannotLimit as error:
                                log.debug("the limit of %s stays: %s", group, error)
                self._forget(uid)
            for uid in [uid for uid in self._folders if uid not in pods]:
                self._forget(uid)

    def _forget(self, uid: str) -> None:
        self._folders.pop(uid, None)
        self._set.pop(uid, None)
        self._told.pop(uid, None)
        for mine in [key for key in self._leaves if key[0] == uid]:
            del self._leaves[mine]
        for one in [one for one in self._doubts if one[0] == uid]:
            del self._doubts[one]
        for at in [at for at in self._found if at[0][0] == uid]:
            del self._found[at]

    # Telling.

    def _note(self, pod: Sequence[Allocation]) -> None:
        for item in pod:
            stands = self._set.get(item.pod_uid, {})
            for share in item.shares if not item.whole else ():
                own = share.memory_blocks * BLOCK_BYTES if item.key in self._leaves else stands.get(share.uuid)
                if own is not None:
                    self._found[item.key, share.uuid] = own

    def _lost(self, uid: str, pod: Sequence[Allocation], why: str) -> None:
        for at in [at for at in self._found if at[0][0] == uid]:
            del self._found[at]
        if self._settings().require_driver_limits and self._told.get(uid) != why:
            self._told[uid] = why
            self._tell(pod[0], "DriverLimitLost", f"the driver does not hold its memory, the shim alone does: {why}")

    def _alone(self, why: str) -> None:
        self._conditions.set("limits", f"the shim alone holds the memory of pods, the driver does not: {why}")

    def _well(self) -> None:
        self._conditions.clear("limits", "the driver holds the memory of pods, too")


def impossible(settings: Settings, driver: Limiter, cards: Sequence[NodeCard]) -> str:
    """Why these cards can't have limits of the driver's, as far as that is known before one is set; else ""."""
    if settings.driver_limits == "off":
        return "--driver-limits=off"
    if not (settings.cgroup_root / "cgroup.controllers").exists():
        return _no_version_2(settings)
    try:
        for item in cards:
            driver.memory_limit(item.card.uuid, settings.cgroup_root)
    except CannotLimit as error:
        return str(error)
    return ""


def _no_version_2(settings: Settings) -> str:
    return f"there are no control groups of version 2 at {settings.cgroup_root} (--cgroup-root)"


def _refusal(why: str) -> Refusal:
    return Refusal(
        Reason.DRIVER_LIMITS_UNAVAILABLE,
        f"the driver can't hold the pod's memory, and --require-driver-limits is set: {why}",
    )


def _wanted(pod: Sequence[Allocation]) -> dict[str, int]:
    """Bytes by card that the pod has booked, the peak over its init containers and the rest.

    What it holds beyond that is managed memory. A card that one of its containers has whole needs no limit.
    """
    shares = [item for item in pod if not item.whole]
    whole = {share.uuid for item in pod if item.whole for share in item.shares}
    use = pod_use(shares) if shares else {}
    return {uuid: blocks * BLOCK_BYTES for uuid, (_, blocks) in use.items() if uuid not in whole and blocks}
