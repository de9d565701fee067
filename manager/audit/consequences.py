"""What follows from a finding: an event on the pod, and what the policies say."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from manager.allocations.record import Allocation
from manager.config.settings import Settings
from manager.errors import Refusal
from manager.kube.writer import ApiWriter
from manager.regions.regions import Regions

_BYPASSES = {"MemoryUnaccounted", "DriverWithoutShim", "GpuTimeOverLimit"}
Tell = Callable[[Allocation, str, str], None]  # of a container: the event's reason, and its message


class Consequences:
    """Where audits tell what they found, and the inventory which card is ill."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        allocations: Callable[[], Sequence[Allocation]],
        api_writer: ApiWriter,
    ) -> None:
        self._settings, self._allocations, self._api_writer = settings, allocations, api_writer
        self._evicted: dict[str, set[str]] = {}  # by card that is ill: the UIDs of pods that were told to go

    def tell(self, item: Allocation, reason: str, message: str) -> None:
        """An event of its pod, of a claim's all; of a bypass what `--audit-policy` says, too."""
        for name, uid in item.pods:
            self._api_writer.pod_event(item.namespace, name, uid, reason, message)
        policy = self._settings().audit_policy if reason in _BYPASSES else "report"
        if policy == "refuse":
            Regions.refuse(item)
        if policy == "evict":
            self._evict(item)

    def joined(self, namespace: str, name: str, uid: str, why: Refusal) -> None:
        """A pod that uses a claim which was prepared before it came would have been refused.

        An event, and by `--audit-policy` its eviction; the claim's other pods keep what they have.
        """
        self._api_writer.pod_event(namespace, name, uid, why.reason, why.message)
        if self._settings().audit_policy == "evict":
            self._api_writer.evict(namespace, name, uid)

    def health_changed(self, uuid: str, why: str) -> None:
        """A card is ill, or well again (no `why`); "" is all of them. An event for the node.

        If it is ill also events for the pods on this card; by `--dead-card-policy` their eviction, once, whatever else
        is found to be wrong with it then.
        """
        node = self._settings().node_name
        what = f"card {uuid}" if uuid else "all cards"
        about = {"kind": "Node", "name": node, "uid": node}  # kubelet's own events name it so, too
        if not why:
            self._evicted.pop(uuid, None)
            self._api_writer.event(about, "Normal", "CardHealthy", f"{what} can take shares again")
            return
        self._api_writer.event(about, "Warning", "CardUnhealthy", f"{what}: {why}")
        for item in self._allocations():
            if any(share.uuid == uuid for share in item.shares):
                self.tell(item, "CardUnhealthy", f"card {uuid}: {why}")
                if self._settings().dead_card_policy == "evict":
                    told = self._evicted.setdefault(uuid, set())
                    self._evict(item, told)
                    told.update(uid for _, uid in item.pods)

    def _evict(self, item: Allocation, but: Collection[str] = ()) -> None:
        for name, uid in item.pods:
            if uid not in but:
                self._api_writer.evict(item.namespace, name, uid)
