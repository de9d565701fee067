"""How the daemon itself is: what its probes answer, and what is counted of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from manager.audit.device_cgroups import Watcher
from manager.cards.inventory import Inventory
from manager.config.settings import Settings
from manager.config.values import DEVICE_PLUGIN
from manager.container.driver_dir import DriverDirKeeper
from manager.dra.node import NoClaims
from manager.kube.pods import NodePods
from manager.kube.writer import ApiWriter
from manager.observe.metrics import Counts
from manager.plugin.registration import Registrar
from manager.process import instance_lock
from manager.process.room import Room
from vcuda.kube.worker import Worker

# A probe of the driver that takes longer than this beyond its interval is stuck; so is a list that kubelet does not
# take.
STUCK_S = 30.0


class Threaded(Protocol):
    """A part that has a thread of its own."""

    worker: Worker


@dataclass(frozen=True, kw_only=True)
class Probes:
    """`threaded`: the parts whose threads the daemon needs, beside those of its claims and of the watch of pods."""

    settings: Callable[[], Settings]
    inventory: Inventory
    registrar: Registrar
    claims: NoClaims
    driver_dir: DriverDirKeeper
    room: Room
    api_writer: ApiWriter
    cgroups: Watcher
    pods: NodePods | None
    threaded: Sequence[Threaded]

    @property
    def workers(self) -> list[Worker]:
        """The threads that the daemon needs."""
        watch = [self.pods.informer.worker] if self.pods is not None else []
        return [*(part.worker for part in self.threaded), *self.claims.workers, *watch]

    def unhealthy(self) -> list[str]:
        """Reasons for which a restart may help."""
        found = []
        if self.inventory.probe_age_s > self.settings().health_check_interval + STUCK_S:
            found.append(f"the driver has not answered a probe for {self.inventory.probe_age_s:.0f} s")
        for resource, seconds in self.registrar.stalled_s().items():
            if seconds > STUCK_S:
                found.append(f"kubelet has not read the list of {resource} devices for {seconds:.0f} s")
        for resource, seconds in self.registrar.unwatched_s().items():
            if seconds > STUCK_S:
                found.append(f"kubelet has not watched the {resource} devices for {seconds:.0f} s")
        return found + [problem for worker in self.workers if (problem := worker.problem())]

    def not_ready(self) -> list[str]:
        """Reasons for which pods can't be given shares now."""
        found = self.unhealthy()
        if not self._registered:
            found.append("not registered with kubelet")
        snapshot = self.inventory.snapshot
        if snapshot.node_problem:
            found.append(snapshot.node_problem)
        if snapshot.cards and not self.driver_dir.ready:
            found.append("there is no driver directory yet")
        return found + self.room.problems

    @property
    def _registered(self) -> bool:
        """With kubelet, by all protocols that this node offers."""
        by_plugin = DEVICE_PLUGIN not in self.settings().protocols or self.registrar.registered
        return by_plugin and self.claims.registered

    def counts(self) -> Counts:
        following = instance_lock.holder(self.settings().checkpoint_path, instance_lock.NEXT)
        return Counts(
            registered=self._registered,
            registrations=self.registrar.registrations + self.claims.registrations,
            slice_writes=self.claims.slice_writes,
            restored_devices=self.cgroups.restored,
            failures={worker.name: worker.failures for worker in self.workers},
            xids=self.inventory.xid_counts,
            api_failing=self.api_writer.failing or (self.pods is not None and self.pods.informer.cut),
            folders_without_room=len(self.room.problems),
            standby_s=following.age_s if following is not None else 0.0,
        )
