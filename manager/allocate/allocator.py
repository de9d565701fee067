"""Allocate, PreStartContainer and GetPreferredAllocation: one decision per container, booked once, then obeyed."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from manager.allocate.book import Book
from manager.allocate.decide import Decider, told_of_visible_devices
from manager.allocate.find_pod import BUDGET_S, PODS_TIMEOUT_S, PodFinder
from manager.allocate.matcher import Candidate, Facts
from manager.allocations.accounting import of_pod, pod_use, static_pods
from manager.allocations.record import Allocation, Held
from manager.cards.device_nodes import DeviceNode, NodeProblem
from manager.cards.driver import NodeCard
from manager.cards.inventory import Inventory, Snapshot
from manager.config.settings import Settings
from manager.container import response
from manager.container.cdi import CdiKeeper
from manager.container.driver_dir import DriverDirKeeper
from manager.errors import Reason, Refusal
from manager.kube.api import Pod
from manager.kube.pods import kubelet_uid, visible_devices
from manager.kube.writer import ApiWriter
from manager.kubelet import device_ids, records
from manager.limits.driver_limits import DriverLimits
from manager.proto import deviceplugin_pb2 as api
from vcuda.kube.objects import name_of, uid_of
from vcuda.logs import fields
from vcuda.spec import errors, placement
from vcuda.spec.errors import SpecError
from vcuda.spec.names import Names
from vcuda.spec.placement import CardShare
from vcuda.spec.request import ContainerRequest, PodRequest, parse_pod, parse_spec
from vcuda.spec.units import BLOCK_BYTES, CORES_PER_CARD, format_bytes

# How long a pod must be missing from kubelet's list when there is no API server to ask.
ABSENT_GRACE_S = 60.0
# Preemption: the newcomer may be asked for a moment before the watch has told that its victim is gone.
LEAVING_LOOK_S = 0.05
# A lock goes to whoever asks first when it is let go: a moment in which those that wait can.
_BETWEEN_REMOVALS_S = 0.0005
LEAVING_MARGIN_S = 0.3
# Kubelet gives a container two seconds at least (kubernetes pkg/kubelet/kuberuntime, minimumGracePeriodInSeconds). A
# victim that asks for none is out of both servers' lists meanwhile, and its successor is here. A busy runtime takes
# seconds more; each look asks kubelet for its pods.
ENDING_S, ENDING_LOOK_S = 8.0, 0.25
NO_ROOM = frozenset(
    {
        errors.Reason.INSUFFICIENT_CORES,
        errors.Reason.INSUFFICIENT_MEMORY,
        errors.Reason.INSUFFICIENT_WHOLE_CARDS,
    }
)

log = logging.getLogger(__name__)


class Allocator:
    """What kubelet's device plugin calls book."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        names: Names,
        inventory: Inventory,
        pod_finder: PodFinder,
        book: Book,
        driver_dir: DriverDirKeeper,
        api_writer: ApiWriter,
        cdi: CdiKeeper,
        limits: DriverLimits,
    ) -> None:
        self._settings, self._names, self._inventory = settings, names, inventory
        self._pod_finder, self._api_writer, self.book, self._regions = pod_finder, api_writer, book, book.regions
        self._driver_dir, self._cdi, self._limits = driver_dir, cdi, limits
        self._decider = Decider(names, inventory, book.regions)
        self._parsed: tuple[Pod, PodRequest] | None = None
        self._absent_since: dict[str, float] = {}
        self._booked: dict[
            tuple[str, str], float
        ] = {}  # since this start, by the monotonic clock: the other one may jump

    # Reading.

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """All allocations in the order in which they were made; a snapshot."""
        return self.book.allocations

    # Start.

    def reshare(self, uuid: str) -> None:
        """Write the limits of the shares of a card anew. Raises Refusal."""
        with self.book.locked():
            self.book.reshare({uuid})

    # Allocate.

    def allocate(self, resource: str, device_ids: Sequence[str]) -> api.ContainerAllocateResponse:
        """Answer one container's call for "core" or "memory". Raises Refusal; then nothing new is booked."""
        self.book.called()
        deadline, ending_by = 0.0, time.monotonic() + ENDING_S
        running: set[str] = set()
        listed = self._pod_finder.preferred(resource, device_ids)
        while True:
            with self.book.locked():
                deadline = deadline or time.monotonic() + BUDGET_S  # whoever had the lock before does not shorten it
                candidate, pods = self._pod_finder.find(resource, len(device_ids), self.book.index, deadline, listed)
                about = (*candidate.full_name, candidate.uid)
                try:
                    answer = self._allocate(resource, Held.of(device_ids), candidate, pods)
                except SpecError as error:
                    refusal = Refusal.of(error)
                except Refusal as error:
                    refusal = error
                else:
                    self._pod_finder.succeeded(candidate, pods)
                    if not candidate.static:  # those are told by their object's own UID, when the watch shows it
                        self._reconcile(candidate.pod, self.book.index.of_pod(candidate.uid))
                    return answer
                if listed is not None:
                    listed = None  # whoever is refused is by kubelet's list of now
                    continue
                leaving = self._leaving(candidate, pods) if refusal.reason in NO_ROOM else set()
                ran, running = running, leaving & self._pod_finder.running() if leaving else set()
                if running or ran:
                    deadline = time.monotonic() + BUDGET_S
                until = ending_by if running else deadline - LEAVING_MARGIN_S
                if not leaving or time.monotonic() + LEAVING_LOOK_S > until:
                    self._pod_finder.refused(candidate.uid)
                    raise Refusal(refusal.reason, f"{candidate.name}: {refusal.message}", (about,))
            if ran - running:  # the next search for pods that are gone may be half a minute away
                with contextlib.suppress(Refusal):
                    self.collect(timeout=PODS_TIMEOUT_S)
            # Without the lock: whoever frees the cards needs it.
            time.sleep(ENDING_LOOK_S if running else LEAVING_LOOK_S)

    def _leaving(self, candidate: Candidate, pods: Sequence[Facts]) -> set[str]:
        """For whose places a placed pod waits: UIDs of pods that kubelet has let go of and that are still booked."""
        annotations = (candidate.pod.get("metadata") or {}).get("annotations") or {}
        if self._names.placement not in annotations:
            return set()
        booked = {item.pod_uid for item in self.book.allocations if item.claim is None}
        return booked - {facts.uid for facts in pods}

    def _allocate(
        self, resource: str, held: Held, candidate: Candidate, pods: Sequence[Facts]
    ) -> api.ContainerAllocateResponse:
        before = self.book.index.get((candidate.uid, candidate.container))
        # What is booked is repeated as it was: annotations that were edited since are not judged.
        request = self._request(candidate.pod) if before is None else parse_spec(candidate.pod, self._names)
        container = request.container(candidate.container)
        if container is None:
            raise Refusal(Reason.POD_UNKNOWN, f"container {candidate.container!r} asks for no share")
        if before is not None:
            self._check_same(before, container)
            allocation = before
        else:
            allocation = self._decide(candidate, request, container, pods)
        cards = self._cards_of(allocation)
        if before is None and not allocation.whole:
            self._limits.require(cards)
        nodes = self._nodes(cards)
        driver = self._driver_dir.current()
        allocation = dataclasses.replace(allocation, mirror=str(driver.directory))
        answer = response.build(resource, allocation, nodes, driver, self._settings(), self._names)
        # For the memory's call too: it must not book what the other one would refuse.
        named = self._cdi.names(cards)
        if resource == "core":
            self._cdi.extend(answer, named)
        if before is None or not self._regions.exists(allocation):
            self._regions.create(allocation, self.book.neighbours(allocation).shared(allocation))
        self._book(allocation.with_held(resource, held), before)
        asked = visible_devices(candidate.pod, container.name) if before is None else None
        if asked is not None:
            message = told_of_visible_devices(container.name, asked)
            self._api_writer.pod_event(*candidate.full_name, candidate.uid, "VisibleDevicesSet", message)
        return answer

    def _book(self, allocation: Allocation, before: Allocation | None) -> None:
        self.book.index[allocation.key] = allocation
        if before is None:
            self._booked[allocation.key] = time.monotonic()
        try:
            self.book.save([allocation])
        except Refusal:
            if before is None:
                del self.book.index[allocation.key]
                self._regions.remove(allocation)
            else:
                self.book.index[allocation.key] = before
            raise
        if before is None:
            self.book.reshare({share.uuid for share in allocation.shares})
            log.info(
                "%s: %d cores, %d blocks on %s",
                allocation.name,
                allocation.cores,
                allocation.memory_blocks,
                ", ".join(share.uuid for share in allocation.shares),
                extra=fields(allocation.fields),
            )

    def _check_same(self, before: Allocation, container: ContainerRequest) -> None:
        """The second call of a container adds nothing; it must agree with the first."""
        if (before.cores, before.memory_blocks) != (container.cores, container.memory_blocks):
            raise Refusal(
                Reason.CALLS_DISAGREE,
                f"container {container.name!r} asks for {container.cores} cores and {container.memory_blocks} blocks, "
                f"but {before.cores} and {before.memory_blocks} were booked for it; recreate the pod",
            )

    def _request(self, pod: Pod) -> PodRequest:
        """Of one pod kubelet asks several times. Raises SpecError."""
        if self._parsed is None or self._parsed[0] is not pod:
            self._parsed = (pod, parse_pod(pod, self._names))
        return self._parsed[1]

    def _decide(
        self, candidate: Candidate, request: PodRequest, container: ContainerRequest, pods: Sequence[Facts]
    ) -> Allocation:
        return self._decider.decide(candidate, request, container, pods, self.book.index, self._settings())

    def _cards_of(self, allocation: Allocation) -> list[NodeCard]:
        snapshot: Snapshot = self._inventory.snapshot
        found = []
        for share in allocation.shares:
            item = snapshot.card(share.uuid)
            if item is None:
                raise Refusal(Reason.CARD_CHANGED, f"card {share.uuid} is gone from this node; recreate the pod")
            found.append(item)
        return found

    def _nodes(self, cards: Sequence[NodeCard]) -> tuple[DeviceNode, ...]:
        try:
            return self._inventory.device_nodes(cards)
        except NodeProblem as problem:
            raise Refusal(Reason.DEVICE_NODES_MISSING, str(problem)) from problem

    def reconcile(self, pod: Pod) -> None:
        """Have a pod's annotations say what was promised, if they do not and all its containers have their devices.

        What counts is our state: whoever may edit a running pod changes nothing by it.
        """
        if mine := self.shown_by(pod):
            self._reconcile(pod, mine)

    def shown_by(self, pod: Pod) -> list[Allocation]:
        """The allocations of the pod that an object of the API server shows."""
        known = self.allocations
        uid = kubelet_uid(pod, static_pods(known))
        return [item for item in known if item.pod_uid == uid]

    def _reconcile(self, pod: Pod, mine: Sequence[Allocation]) -> None:
        holdings = {(uid_of(pod), item.container): frozenset(item.held) for item in mine}
        if Facts.of(pod, self._names).next_container(holdings) is not None:
            return
        metadata = pod["metadata"]
        annotations = metadata.get("annotations") or {}
        chosen = {item.container: item.shares for item in mine}
        written: dict[str, str | None] = self._right_indices(pod, mine)
        if annotations.get(self._names.gpu_assigned) != "true":
            if not self._api_writer.annotates(uid_of(pod)):
                self._tell_assigned(pod, mine)
            written[self._names.gpu_assigned] = "true"
        if not _says(annotations.get(self._names.placement), chosen):
            # Ours, too, where no extender chose: one that comes later must find out which.
            written[self._names.placement] = placement.encode(placement.Placement(chosen))
        if written:
            # The extender waits for cards that it did not choose; for the rest nobody does.
            in_calm = written.keys() == {self._names.gpu_assigned}
            self._api_writer.annotate_pod(*name_of(pod), str(metadata.get("uid", "")), written, in_calm=in_calm)

    def _tell_assigned(self, pod: Pod, mine: Sequence[Allocation]) -> None:
        models = {item.card.uuid: item.card.model for item in self._inventory.snapshot.cards}
        said = []
        for item in mine:
            for share in item.shares:
                limit = f" (up to {item.core_limit})" if item.core_limit > share.cores else ""
                memory = format_bytes(share.memory_blocks * BLOCK_BYTES)
                card = f"card {item.minors.get(share.uuid, '?')}, {models.get(share.uuid, share.uuid)}"
                said.append(f"{item.container}: {share.cores} cores{limit}, {memory} on {card}")
        namespace, name = name_of(pod)
        about = {"kind": "Pod", "namespace": namespace, "name": name, "uid": str(pod["metadata"].get("uid", ""))}
        self._api_writer.event(about, "Normal", "ShareAssigned", "; ".join(said))

    def _right_indices(self, pod: Pod, mine: Sequence[Allocation]) -> dict[str, str | None]:
        """What to write over indices of the old names that say another card than the one given; None takes one away."""
        minors = {item.container: ",".join(str(item.minors[share.uuid]) for share in item.shares) for item in mine}
        containers = (pod.get("spec") or {}).get("containers") or ()
        right = {
            self._names.predicate_gpu_index(index): minors.get(str(container.get("name")))
            for index, container in enumerate(containers)
        }
        said = {
            name: value
            for name, value in ((pod["metadata"].get("annotations") or {}).items())
            if self._names.is_predicate_gpu_index(name)
        }
        return {name: right.get(name) for name, value in said.items() if value != right.get(name)}

    # The other calls.

    def prestart(self, resource: str, device_ids: Sequence[str]) -> None:
        """Before a container starts: is it the one these devices were given to, and is all still in place?

        Raises Refusal.
        """
        self.book.called()
        held = Held.of(device_ids)

        def mine_now() -> list[Allocation]:
            return [item for item in self.book.allocations if item.held.get(resource) == held]

        # Without the lock: kubelet may be slow, and pods are being admitted. One record that vouches settles it.
        entries = self._pod_finder.records(enough=lambda found: records.vouch(found, resource, held, mine_now()))
        with self.book.locked():
            mine = mine_now()
            if not mine:
                raise Refusal(
                    Reason.NOT_ALLOCATED,
                    f"{held.count} devices for {resource} were never given to a container of this node; recreate the "
                    "pod",
                )
            about = tuple((item.namespace, item.pod_name, item.pod_uid) for item in mine[:1])
            try:
                self._check_kubelet(entries, resource, held, mine)
                for allocation in mine:
                    self._prepare(allocation)
            except Refusal as refusal:
                raise Refusal(refusal.reason, f"{mine[0].name}: {refusal.message}", about) from refusal

    @staticmethod
    def _check_kubelet(entries: Sequence[records.Entry], resource: str, held: Held, mine: Sequence[Allocation]) -> None:
        other = records.other_holder(entries, resource, held, mine)
        if other is not None:
            raise Refusal(
                Reason.CALLS_DISAGREE,
                f"kubelet gave these devices to container {other.container!r} of pod "
                f"{other.pod_uid or '/'.join(other.pod)}, we "
                f"booked them for {mine[0].name}; recreate both pods",
            )

    def _prepare(self, allocation: Allocation) -> None:
        for item in self._cards_of(allocation):
            before = allocation.minors.get(item.card.uuid)
            if before != item.card.minor:
                raise Refusal(
                    Reason.CARD_CHANGED,
                    f"card {item.card.uuid} was /dev/nvidia{before} at admission and is /dev/nvidia{item.card.minor} "
                    "now; kubelet would hand out the old one: recreate the pod",
                )
        self._nodes(self._cards_of(allocation))
        if not Path(allocation.mirror).is_dir():
            raise Refusal(
                Reason.DRIVER_UNAVAILABLE,
                f"the driver directory {allocation.mirror} that this container mounts is gone; recreate the pod",
            )
        if self._regions.ensure(allocation, self.book.neighbours(allocation).shared(allocation)):
            log.warning(
                "the region of %s was gone; made again before the container starts",
                allocation.name,
                extra=fields(allocation.fields),
            )
        self._limits.prepare(of_pod(self.book.allocations, allocation.pod_uid))

    def preferred(self, resource: str, available: Sequence[str], must_include: Sequence[str], size: int) -> list[str]:
        """IDs of the card that the container is placed on, if that can be told; else any. IDs decide nothing."""
        self.book.called()
        try:
            with self.book.locked():
                deadline = time.monotonic() + BUDGET_S
                candidate, pods = self._pod_finder.find(resource, size, self.book.index, deadline, patient=False)
                allocation = self.book.index.get((candidate.uid, candidate.container))
                if allocation is None:
                    request = self._request(candidate.pod)
                    container = request.container(candidate.container)
                    if container is not None:
                        allocation = self._decide(candidate, request, container, pods)
                if allocation is not None:
                    chosen = device_ids.prefer(
                        available, must_include, size, device_ids.per_card(resource, allocation.shares, size)
                    )
                    if chosen is not None:
                        self._pod_finder.prefer(resource, chosen)
                        return chosen
        except (Refusal, SpecError) as error:
            log.debug("no preference for %d devices for %s: %s", size, resource, error)
        rest = [device_id for device_id in available if device_id not in set(must_include)]
        return [*must_include, *rest][:size]

    # Resize.

    def resize(self, changes: Sequence[tuple[Allocation, Allocation]]) -> tuple[str, int] | None:
        """Put allocations of one pod in place of others, live, all of them or none. Returns None when that is done.

        Else the container that waits, and the bytes that it still uses beyond its new limit. Nothing changes then, nor
        where a Refusal is raised. First the limits in force, then the state: a start after a kill in between writes
        what the state says, and the resize is asked for again.
        """
        # Who grows has its memory only once who shrinks can't take it any more.
        in_order = sorted(changes, key=lambda change: _growth(*change))
        with self.book.locked():
            for before, _ in changes:
                if self.book.index.get(before.key) != before:
                    raise Refusal(Reason.BUSY, f"{before.name} has changed meanwhile")
            self._require_room([after for _, after in changes])
            for _, after in in_order:
                if beyond := self._beyond(after):
                    return after.container, beyond
            now = of_pod(self.book.allocations, in_order[0][0].pod_uid)
            later = {after.key: after for _, after in changes}
            pod = [later.get(item.key, item) for item in now]
            with self._limits.undisturbed():
                return self._change(now, pod, in_order)

    def _change(
        self, now: Sequence[Allocation], pod: Sequence[Allocation], changes: Sequence[tuple[Allocation, Allocation]]
    ) -> tuple[str, int] | None:
        """`now`, and as it is to be: `pod`. As `resize`."""
        if beyond := self._limits.beyond(pod):
            return changes[0][1].container, beyond
        written: list[Allocation] = []
        done = False
        try:
            self._limits.follow(pod, lower=False)  # the driver must not refuse what the shim allows already
            for before, after in changes:
                self._regions.change(after, self.book.neighbours(after).shared(after))
                written.append(before)
                if beyond := self._beyond(after):  # what was allocated meanwhile
                    return after.container, beyond
            self._limits.follow(pod)
            for _, after in changes:
                self.book.index[after.key] = after
            self.book.save([after for _, after in changes])
            done = True
        finally:
            if not done:
                for before, _ in changes:
                    self.book.index[before.key] = before
                for before in reversed(written):
                    self._regions.share(before, self.book.neighbours(before).shared(before))
                with contextlib.suppress(Refusal):  # the next look mends it
                    self._limits.follow(now)
        return None

    def _beyond(self, after: Allocation) -> int:
        usage = self._regions.usage(after)
        if usage is None:
            raise Refusal(Reason.REGION_UNAVAILABLE, f"what {after.name} uses can't be read")
        limits = {card.uuid: card for card in self._regions.limits(after)}
        beyond = 0
        for card in usage.cards:
            if (limit := limits.get(card.uuid)) is None:
                continue
            used = max(card.memory_used_bytes, card.reserved_bytes)
            beyond = max(beyond, used - limit.memory_bytes)
            if limit.physical_bytes is not None:  # oversold: what is not managed memory has to be on the card
                beyond = max(beyond, used - card.managed_bytes - limit.physical_bytes)
        return beyond

    def _require_room(self, changed: Sequence[Allocation]) -> None:
        """Of one pod, beside the others' shares; what is placed here for pods to come, the extender has counted."""
        by_key, uid, name = {item.key: item for item in changed}, changed[0].pod_uid, changed[0].pod_name
        others = self.book.index.booked_by_others(uid)
        own = pod_use([by_key.get(item.key, item) for item in self.book.index.of_pod(uid)])
        for item in {item.card.uuid: item for after in changed for item in self._cards_of(after)}.values():
            uuid, blocks = item.card.uuid, item.card.memory_blocks
            held, needed = others.get(uuid, (0, 0)), own.get(uuid, (0, 0))
            if held[0] + needed[0] > CORES_PER_CARD:
                raise Refusal(
                    errors.Reason.INSUFFICIENT_CORES,
                    f"card {uuid} has {CORES_PER_CARD - held[0]} cores beside other pods, and {name} would need "
                    f"{needed[0]}",
                )
            if held[1] + needed[1] > blocks:
                raise Refusal(
                    errors.Reason.INSUFFICIENT_MEMORY,
                    f"card {uuid} has {blocks - held[1]} blocks beside other pods, and {name} would need {needed[1]}",
                )

    # Garbage.

    def collect(self, timeout: float = 5.0) -> list[Allocation]:
        """Forget containers whose pods are gone or have ended; return them."""
        if not any(item.claim is None for item in self.book.allocations):
            return []
        seen = self._pod_finder.presence(self.book.index.static_pods, timeout)
        if seen is None:
            return []
        with self.book.locked():
            now = time.monotonic()
            mine = [item for item in self.book.index.values() if item.claim is None]
            absent = {
                item.pod_uid
                for item in mine
                if item.pod_uid not in seen.present and self._booked.get(item.key, 0.0) < seen.started
            }
            self._absent_since = {uid: self._absent_since.get(uid, now) for uid in absent}
            grace = 0.0 if seen.certain else ABSENT_GRACE_S
            gone = [
                item
                for item in mine
                if item.pod_uid in seen.ended
                or (item.pod_uid in absent and now - self._absent_since[item.pod_uid] >= grace)
            ]
            if not gone:
                return []
            self.book.save([], [item.key for item in gone])
            for item in gone:
                del self.book.index[item.key]
                self._booked.pop(item.key, None)
        for item in gone:
            # One by one, so that a pod that is being admitted waits for one at most; a static pod may have come again
            # meanwhile.
            with self.book.lock:
                if item.key not in self.book.index:
                    self._regions.remove(item)
            log.info("%s is gone; its share is free", item.name, extra=fields(item.fields))
            time.sleep(_BETWEEN_REMOVALS_S)
        with self.book.lock:
            self.book.reshare({share.uuid for item in gone for share in item.shares})
        return gone


def _growth(before: Allocation, after: Allocation) -> int:
    """Blocks, negative for a share that shrinks."""
    return sum(share.memory_blocks for share in after.shares) - sum(share.memory_blocks for share in before.shares)


def _says(written: object, chosen: Mapping[str, tuple[CardShare, ...]]) -> bool:
    try:
        return isinstance(written, str) and placement.decode(written).containers == chosen
    except SpecError:
        return False
