"""Claims in the book: one region for each request, all of a claim's requests or none, and its file for the runtime."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

from manager.allocate.book import Book
from manager.allocations.accounting import as_pods, by_pod, pod_use
from manager.allocations.record import Allocation, ClaimUse
from manager.cards.device_nodes import NodeProblem
from manager.cards.driver import NodeCard
from manager.cards.inventory import Inventory
from manager.config.settings import Settings
from manager.container.claim_specs import ClaimSpecs
from manager.container.driver_dir import DriverDirKeeper
from manager.errors import Reason, Refusal
from manager.limits.driver_limits import DriverLimits
from vcuda.logs import fields
from vcuda.quoted import quoted
from vcuda.spec import errors
from vcuda.spec.claims import AllocatedClaim, RequestShares
from vcuda.spec.request import Kind
from vcuda.spec.units import CORES_PER_CARD

log = logging.getLogger(__name__)


class Claims:
    """Books claims and lets them go; both may come again at any time, also after a kill in between."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        inventory: Inventory,
        book: Book,
        driver_dir: DriverDirKeeper,
        specs: ClaimSpecs,
        limits: DriverLimits,
    ) -> None:
        self._settings, self._inventory, self._book = settings, inventory, book
        self._driver_dir, self.specs, self._limits = driver_dir, specs, limits

    def restore(self) -> None:
        """Take away what a kill has left beside the book."""
        self.specs.remove_others({item.pod_uid for item in self._book.allocations if item.claim is not None})

    # Booking.

    def book(self, claim: AllocatedClaim, requests: Sequence[RequestShares]) -> tuple[Allocation, ...]:
        """Give a claim what its allocation says, in place of what it had; what it has already stays as it is.

        In the order in which a kill leaves nothing that is not found again: regions, the state, the runtime's file.
        Raises Refusal; then the claim has what it had.
        """
        self._book.called()
        snapshot = self._inventory.snapshot
        cards = {item.card.uuid: item for item in snapshot.cards}
        driver = self._driver_dir.current()
        items = self.allocations(claim, requests)
        with_cards = [(item, [cards[share.uuid] for share in item.shares]) for item in items]
        for _, own in with_cards:
            try:
                self._inventory.device_nodes(own)
            except NodeProblem as problem:
                raise Refusal(Reason.DEVICE_NODES_MISSING, str(problem)) from problem
        with self._book.locked():
            before = {item.key: item for item in self._book.index.of_pod(claim.uid)}
            new = [item for item in items if not _same(before.get(item.key), item)]
            if new:
                self._permit(new, with_cards)
                self._require_room(claim, items, cards)
            put = [_kept(before.get(item.key), item) for item in items]
            gone = [item for key, item in before.items() if key not in {item.key for item in items}]
            self._write(put, gone, before)
            try:
                self._limit(put)
                self.specs.write(with_cards, driver, self._settings())
            except (Refusal, NodeProblem) as error:
                self._undo(put, before)
                raise (
                    error if isinstance(error, Refusal) else Refusal(Reason.DEVICE_NODES_MISSING, str(error))
                ) from error
            changed = (
                {share.uuid for item in [*put, *before.values()] for share in item.shares} if new or gone else set()
            )
            self._book.reshare(changed)
            for item in put:  # nothing tells of the container's start
                if item in new:
                    self._book.regions.adopt(item)
                else:
                    self._book.regions.ensure(item, self._book.neighbours(item).shared(item))
        for item in new:
            shares = ", ".join(
                f"{share.cores} cores, {share.memory_blocks} blocks of {share.uuid}" for share in item.shares
            )
            log.info("%s: %s", item.name, shares, extra=fields(item.fields))
        return tuple(put)

    def allocations(self, claim: AllocatedClaim, requests: Sequence[RequestShares]) -> list[Allocation]:
        """What a claim is to have, one for each request; nothing is booked by it. Raises Refusal."""
        cards = {item.card.uuid: item for item in self._inventory.snapshot.cards}
        mirror = str(self._driver_dir.current().directory)
        return [self._allocation(claim, request, cards, mirror) for request in requests]

    def _allocation(
        self, claim: AllocatedClaim, request: RequestShares, cards: dict[str, NodeCard], mirror: str
    ) -> Allocation:
        return Allocation(
            pod_uid=claim.uid,
            namespace=claim.namespace,
            pod_name=claim.name,
            container=request.name,
            kind=Kind.APP,
            cores=sum(share.cores for share in request.shares),
            memory_blocks=sum(share.memory_blocks for share in request.shares),
            core_limit=request.core_limit,
            oversell_blocks=request.oversell_blocks,
            priority=str(request.priority),
            shares=request.shares,
            minors={share.uuid: cards[share.uuid].card.minor for share in request.shares},
            region=str(self._book.regions.path_for(claim.uid, request.name)),
            mirror=mirror,
            created_ns=time.time_ns(),
            claim=ClaimUse(claim.pods, request.whole),
        )

    def _permit(self, new: Sequence[Allocation], with_cards: Sequence[tuple[Allocation, Sequence[NodeCard]]]) -> None:
        """Raise Refusal for cards that are ill, and for what this node's operator does not want."""
        settings = self._settings()
        problems = dict(self._inventory.snapshot.problems)
        for item in new:
            least = min(share.memory_blocks for share in item.shares)
            if ill := [share.uuid for share in item.shares if share.uuid in problems or "" in problems]:
                why = problems.get(ill[0]) or problems[""]
                raise Refusal(errors.Reason.UNHEALTHY_CARD, f"card {ill[0]} is unhealthy: {why}")
            if not item.whole and least < settings.smallest_memory:
                raise Refusal(
                    Reason.SHARE_TOO_SMALL,
                    f"request {quoted(item.container)} has {least} blocks of 256 MiB, this node gives no share below "
                    f"{settings.smallest_memory}, because a CUDA context needs as much; ask for more, or lower "
                    "--smallest-memory",
                )
            if settings.oversell_limit and item.oversell_blocks > settings.oversell_limit * least:
                raise Refusal(
                    Reason.OVERSELL_FORBIDDEN,
                    f"oversell gives request {quoted(item.container)} {item.oversell_blocks} blocks in all, this node "
                    f"at most {settings.oversell_limit * least} for {least}; ask for fewer, or raise --oversell-limit",
                )
        for item, cards in with_cards:
            if not item.whole:
                self._limits.require(cards)

    def _limit(self, items: Sequence[Allocation]) -> None:
        """Have the driver hold the pods' memory, too, whose control groups are there by now. Raises Refusal."""
        users = {uid for item in items for _, uid in item.pods}
        theirs = [item for item in self._book.allocations if any(uid in users for _, uid in item.pods)]
        for uid, pod in by_pod(as_pods(theirs)).items():
            if uid in users:
                self._limits.prepare(pod)

    def _require_room(self, claim: AllocatedClaim, items: Sequence[Allocation], cards: dict[str, NodeCard]) -> None:
        """The last line of defence: whoever allocated may have counted wrong, or known less than we."""
        others = self._book.index.booked_by_others(claim.uid)
        for uuid, (cores, blocks) in pod_use(items).items():
            used_cores, used_blocks = others.get(uuid, (0, 0))
            free_cores, free_blocks = CORES_PER_CARD - used_cores, cards[uuid].card.memory_blocks - used_blocks
            if cores > free_cores or blocks > free_blocks:
                short = errors.Reason.INSUFFICIENT_CORES if cores > free_cores else errors.Reason.INSUFFICIENT_MEMORY
                holders = sorted({item.name for item in self._book.index.on_cards({uuid}) if item.pod_uid != claim.uid})
                beside = f" beside {', '.join(holders[:5])}" if holders else ""
                raise Refusal(
                    short,
                    f"its allocation gives it {cores} cores and {blocks} blocks of card {uuid}, which has {free_cores} "
                    f"and {free_blocks}{beside}; delete the pod, so that it is allocated anew",
                )

    def _write(
        self, put: Sequence[Allocation], gone: Sequence[Allocation], before: dict[tuple[str, str], Allocation]
    ) -> None:
        """Regions and state; nothing of it where a Refusal is raised."""
        made: list[Allocation] = []
        try:
            for item in put:
                if not _same(before.get(item.key), item) or not self._book.regions.exists(item):
                    self._book.regions.create(item, self._book.neighbours(item).shared(item))
                    made.append(item)
                self._book.index[item.key] = item
            if gone or any(before.get(item.key) != item for item in put):
                self._book.save(put, [item.key for item in gone])
        except BaseException:
            self._put_back(put, before)
            for item in made:
                self._book.regions.remove(item)
            raise
        for item in gone:
            del self._book.index[item.key]
            self._book.regions.remove(item)

    def _undo(self, put: Sequence[Allocation], before: dict[tuple[str, str], Allocation]) -> None:
        """After the state was saved: say there what it said before."""
        self._put_back(put, before)
        try:
            self._book.save([*before.values()], [item.key for item in put if item.key not in before])
        except Refusal as refusal:
            # It stays booked until kubelet asks again or lets it go: nobody else gets it meanwhile.
            log.warning("%s", refusal.message, extra=fields(put[0].fields, reason=refusal.reason))
            for item in put:
                self._book.index[item.key] = item
            return
        for item in put:
            if not _same(before.get(item.key), item):
                self._book.regions.remove(item)

    def _put_back(self, put: Sequence[Allocation], before: dict[tuple[str, str], Allocation]) -> None:
        for item in put:
            self._book.index.pop(item.key, None)
        for key, item in before.items():
            self._book.index[key] = item

    def used_by(self, uid: str, pods: tuple[tuple[str, str], ...]) -> None:
        """Note which pods, by name and UID, may use a claim now. Raises Refusal."""
        with self._book.locked():
            before = [item for item in self._book.index.of_pod(uid) if item.claim is not None and item.pods != pods]
            if not before:
                return
            after = [dataclasses.replace(item, claim=ClaimUse(pods, item.whole)) for item in before]
            for item in after:
                self._book.index[item.key] = item
            try:
                self._book.save(after)
            except Refusal:
                for item in before:
                    self._book.index[item.key] = item
                raise

    # Letting go.

    def release(self, uid: str) -> tuple[Allocation, ...]:
        """Forget a claim, which may never have been known; returns what it had.

        Raises Refusal; then it may be asked again.
        """
        self._book.called()
        with self._book.locked():
            gone = [item for item in self._book.index.of_pod(uid) if item.claim is not None]
            try:
                self.specs.remove(uid)
            except Refusal as refusal:
                if gone:
                    raise
                log.warning(
                    "%s", refusal.message, extra=fields(uid=uid, reason=refusal.reason)
                )  # it names regions that are not there
            if not gone:
                return ()
            self._book.save([], [item.key for item in gone])
            for item in gone:
                del self._book.index[item.key]
            for item in gone:
                self._book.regions.remove(item)
            self._book.reshare({share.uuid for item in gone for share in item.shares})
        for item in gone:
            log.info("%s is unprepared; its share is free", item.name, extra=fields(item.fields))
        return tuple(gone)


def _same(before: Allocation | None, after: Allocation) -> bool:
    """Whether the region of one serves the other."""
    return (
        before is not None
        and dataclasses.replace(
            before, mirror=after.mirror, created_ns=after.created_ns, claim=after.claim, minors=after.minors
        )
        == after
    )


def _kept(before: Allocation | None, after: Allocation) -> Allocation:
    """What was booked at first, of the pods that it is for now."""
    if before is None or not _same(before, after):
        return after
    return dataclasses.replace(after, created_ns=before.created_ns)
