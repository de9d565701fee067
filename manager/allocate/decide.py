"""Which cards a container gets: the placement that it carries, obeyed or refused, or else one of our own choice."""

from __future__ import annotations

import dataclasses
import logging
import operator
import time
from collections.abc import Collection, Sequence

from manager.allocate import choose_cards
from manager.allocate.matcher import Candidate, Facts
from manager.allocations import accounting
from manager.allocations.accounting import AllocationIndex
from manager.allocations.record import Allocation
from manager.cards import protocols
from manager.cards.inventory import Inventory, Snapshot
from manager.config.settings import Settings
from manager.container.response import in_the_way
from manager.errors import Reason, Refusal
from manager.kube.pods import visible_devices, volume_paths
from manager.regions.regions import Regions
from vcuda.logs import fields
from vcuda.quoted import quoted
from vcuda.spec import errors, fit, placement
from vcuda.spec.errors import InvalidPlacement, SpecError
from vcuda.spec.names import Names
from vcuda.spec.request import ContainerRequest, PodRequest, asks_for_share, parse_pod

log = logging.getLogger(__name__)


def told_of_visible_devices(container: str, asked: str) -> str:
    """The event's text for a container that sets NVIDIA_VISIBLE_DEVICES itself."""
    return (
        f"container {container!r} sets NVIDIA_VISIBLE_DEVICES={quoted(asked, 80)}: under NVIDIA's runtime that brings "
        "cards and the real driver past its share; take it out, or set it to void"
    )


class Decider:
    """Decides and changes nothing but what it remembers of its last decision."""

    def __init__(self, names: Names, inventory: Inventory, regions: Regions) -> None:
        self._names = names
        self._inventory = inventory
        self._regions = regions
        self._last: tuple[tuple[object, ...], Allocation] | None = None

    def decide(
        self,
        candidate: Candidate,
        request: PodRequest,
        container: ContainerRequest,
        pods: Sequence[Facts],
        allocations: AllocationIndex,
        settings: Settings,
    ) -> Allocation:
        """The cards for a container that has none yet. Raises Refusal, SpecError.

        Kubelet asks for a preference first and then for the devices: while nothing has changed, the decision stands.
        """
        snapshot = self._inventory.snapshot
        basis = candidate.pod, container, pods, allocations.snapshot, snapshot, settings
        if self._last is not None and all(map(operator.is_, basis, self._last[0])):
            return dataclasses.replace(self._last[1], created_ns=time.time_ns())
        self._permit(candidate, container, settings)
        decided = self._decide(candidate, request, container, pods, allocations, snapshot, settings)
        self._last = basis, decided
        return decided

    def _permit(self, candidate: Candidate, container: ContainerRequest, settings: Settings) -> None:
        """Raise Refusal for what this node's operator does not want."""
        own, limit = container.memory_blocks, settings.oversell_limit
        if not container.whole and own < settings.smallest_memory:
            raise Refusal(
                Reason.SHARE_TOO_SMALL,
                f"container {container.name!r} asks for {own} {self._names.memory}, this node gives no share below "
                f"{settings.smallest_memory}, because a CUDA context needs as much; ask for more, or lower "
                "--smallest-memory",
            )
        if limit and container.oversell_blocks > limit * own:
            raise Refusal(
                Reason.OVERSELL_FORBIDDEN,
                f"{self._names.oversell} gives container {container.name!r} {container.oversell_blocks} blocks in all, "
                f"this node at most {limit * own} for {own}; ask for fewer, or raise --oversell-limit",
            )
        hides = in_the_way(volume_paths(candidate.pod, container.name))
        if hides is not None:
            raise Refusal(
                Reason.MOUNT_IN_THE_WAY,
                f"container {container.name!r} mounts a volume at {quoted(hides, 120)}, which would hide its limits or "
                "our library; mount it elsewhere",
            )
        asked = visible_devices(candidate.pod, container.name)
        if asked is not None and settings.visible_devices_policy == "refuse":
            raise Refusal(Reason.VISIBLE_DEVICES_SET, told_of_visible_devices(container.name, asked))

    def _decide(
        self,
        candidate: Candidate,
        request: PodRequest,
        container: ContainerRequest,
        pods: Sequence[Facts],
        allocations: AllocationIndex,
        snapshot: Snapshot,
        settings: Settings,
    ) -> Allocation:
        others, beside = allocations.booked_by_others(candidate.uid), allocations.of_pod(candidate.uid)
        mine = [item for item in snapshot.cards if not protocols.of_claims(settings, item)]
        cards = {item.card.uuid: item for item in mine}
        known = [item.card for item in mine]
        annotations = (candidate.pod.get("metadata") or {}).get("annotations") or {}
        written = annotations.get(self._names.placement)
        if written is not None:
            states = accounting.states_for(known, others, beside, container)
            chosen = placement.decode(str(written))
            placement.check(chosen, request)
            shares = chosen.containers[container.name]
            by_uuid = {state.card.uuid: state for state in states}
            for share in shares:
                if share.uuid not in by_uuid and snapshot.card(share.uuid) is not None:
                    raise Refusal(
                        errors.Reason.CARD_NOT_ALLOWED,
                        f"the placement names card {share.uuid}, which this node offers to claims (--protocols, "
                        "--dra-cards); recreate the pod",
                    )
                if share.uuid not in by_uuid:
                    raise Refusal(
                        errors.Reason.UNKNOWN_CARD,
                        f"the placement names card {share.uuid}, which this node does not have; recreate the pod",
                    )
                if not choose_cards.allowed(request, by_uuid[share.uuid].card):
                    raise Refusal(
                        errors.Reason.CARD_NOT_ALLOWED,
                        f"the placement names card {share.uuid}, which the pod's own annotations exclude: the extender "
                        f"chose no such card; recreate the pod without the annotation {self._names.placement}",
                    )
                fit.require(by_uuid[share.uuid], container)
                if share != placement.share_of(container, by_uuid[share.uuid].card):
                    raise InvalidPlacement(
                        errors.Reason.INVALID_PLACEMENT,
                        f"the placement gives {share.memory_blocks} blocks of card {share.uuid} to a whole-card "
                        "container; recreate the pod",
                    )
        else:
            reserved = self._reserved(candidate.uid, pods, allocations.pods)
            states = accounting.states_for(known, others, beside, container, reserved)
            shares = choose_cards.choose(request, container, states)
        namespace, name = candidate.full_name
        return Allocation(
            pod_uid=candidate.uid,
            namespace=namespace,
            pod_name=name,
            container=container.name,
            kind=container.kind,
            cores=container.cores,
            memory_blocks=container.memory_blocks,
            core_limit=container.core_limit,
            oversell_blocks=container.oversell_blocks,
            priority=str(request.priority),
            shares=shares,
            minors={share.uuid: cards[share.uuid].card.minor for share in shares},
            region=str(self._regions.path_for(candidate.uid, container.name)),
            mirror="",
            static=candidate.static,
            created_ns=time.time_ns(),
        )

    def _reserved(self, own_uid: str, pods: Sequence[Facts], started: Collection[str]) -> list[accounting.Use]:
        """What the extender has placed here for pods that kubelet has not admitted yet."""
        found: list[accounting.Use] = []
        for facts in pods:
            if facts.placement is None or facts.terminal or facts.uid == own_uid or facts.uid in started:
                continue
            if not asks_for_share(facts.pod, self._names):
                continue
            try:
                chosen = placement.decode(facts.placement)
                found.append(placement.peak_use(parse_pod(facts.pod, self._names), chosen))
            except SpecError as error:
                log.debug(
                    "pod %s reserves nothing: %s", facts.uid, error, extra=fields(uid=facts.uid, reason=error.reason)
                )
        return found
