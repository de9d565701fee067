"""This node's cards as ResourceSlices: written when something has changed, and never else.

Kubelet takes all slices of its node away when it starts, and ours when our sockets are gone for half a minute; an
informer tells.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from manager.allocations.accounting import AllocationView
from manager.cards import protocols
from manager.cards.driver import NodeCard
from manager.cards.inventory import Inventory, Snapshot
from manager.config.settings import Settings
from manager.kube.api import Kube
from manager.process.logs import Conditions
from vcuda.kube.errors import ApiError, KubeError
from vcuda.kube.informer import Handlers, Informer
from vcuda.kube.objects import path, uid_of
from vcuda.kube.worker import Worker
from vcuda.spec import devices
from vcuda.spec.devices import Effect, Taint, Version
from vcuda.spec.names import Names

KIND = "resourceslices"
_TIMEOUT_S = 5.0
_PAUSE_S = 1.0
_CONFLICTS = (404, 409)  # somebody was faster: the informer tells what is there

log = logging.getLogger(__name__)

Slice = Mapping[str, Any]


class Slices:
    """Keeps the API server's slices of this node as the cards are, from one thread."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        names: Names,
        inventory: Inventory,
        view: AllocationView,
        kube: Kube,
    ) -> None:
        self._settings, self._names, self._inventory, self._view, self._kube = settings, names, inventory, view, kube
        self._lock = threading.Lock()
        self._told: dict[str, Slice] = {}  # by the informer
        self._written: dict[str, tuple[Slice, float]] = {}  # the API server's answers, and when they came (monotonic)
        self._listed = False
        self._generation = 0
        self._accepted: dict[str, tuple[str, str]] = {}  # by name: what we wrote, and the version that it became
        self._node_uid: str | None = None
        self._takes_taints = True
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._conditions = Conditions(log)
        self.writes = 0
        self.worker = Worker("slices", self._turn, longest_wait=10.0, expected=KubeError)
        selector = f"spec.driver={names.driver},spec.nodeName={kube.node}"
        self.informer = Informer(kube.client, Handlers(KIND, self._seen, self._lost, self._all, selector=selector))

    def start(self) -> None:
        self.informer.start()
        self.worker.start()

    def stop(self) -> None:
        """The slices stay: kubelet takes them away if nobody serves them for long."""
        self.informer.stop()
        self._stop.set()
        self.worker.stop()
        self._wake.set()
        self.worker.join(1.0)

    def look(self) -> None:
        """Something may have changed; returns at once."""
        self._wake.set()

    # What is there, by the informer.

    def _seen(self, item: Slice) -> str:
        name = str(item["metadata"]["name"])
        with self._lock:
            self._told[name] = item
        self._wake.set()
        return name

    def _lost(self, item: Slice) -> None:
        name = str(item["metadata"]["name"])
        with self._lock:
            if uid_of(self._told.get(name, {})) == uid_of(item):
                del self._told[name]
            if name in self._written and uid_of(self._written[name][0]) == uid_of(item):
                del self._written[name]
        self._wake.set()

    def _all(self, names: Collection[str], began: float) -> None:
        """What a list says replaces what was known, whatever its versions: after a restore of etcd they are lower."""
        with self._lock:
            self._told = {name: item for name, item in self._told.items() if name in names}
            self._written = {name: one for name, one in self._written.items() if one[1] > began}
            self._listed = True
        self._wake.set()

    def _known(self) -> dict[str, Slice]:
        """By name what is there now: an answer to a write is newer than what the watch still tells after it."""
        with self._lock:
            newer = {
                name: item
                for name, (item, _) in self._written.items()
                if _version(item) > _version(self._told.get(name, {}))
            }
            return {**self._told, **newer}

    # What is to be there.

    def _turn(self) -> None:
        self._wake.wait()
        if self._stop.is_set():
            return
        self._wake.clear()
        if not self._listed:
            return
        try:
            self._publish()
        except ApiError as error:
            self._stop.wait(_PAUSE_S)
            self._wake.set()
            if error.status not in _CONFLICTS:
                raise
            with self._lock:
                self._written.clear()
        except KubeError:
            self._wake.set()
            raise

    def _publish(self) -> None:
        """Write what differs. Raises KubeError."""
        offered = self._devices()
        known = self._known()
        self._generation = max([self._generation, *(_generation(item) for item in known.values())])
        owner = self._owner()
        wanted = devices.slices(self._names, self._kube.node, owner, offered, self._generation)
        by_name = {item["metadata"]["name"]: item for item in wanted}
        same = known.keys() == by_name.keys() and all(self._current(known[name], by_name[name]) for name in by_name)
        if same and len({_generation(item) for item in known.values()}) <= 1:
            return
        self._generation += 1
        for item in devices.slices(self._names, self._kube.node, owner, offered, self._generation):
            self._write(item, known.get(item["metadata"]["name"]))
        for name in known.keys() - by_name.keys():
            self._kube.client.call("DELETE", path(KIND, "", name), timeout=_TIMEOUT_S)
            with self._lock:
                self._told.pop(name, None)
                self._written.pop(name, None)
        log.info("%d devices in %d slices, generation %d", len(offered), len(wanted), self._generation)

    def _devices(self) -> list[dict[str, Any]]:
        """Without the cards that containers still have from the device plugin, where that had them before."""
        settings, snapshot = self._settings(), self._inventory.snapshot
        held = {share.uuid for item in self._view.allocations if item.claim is None for share in item.shares}
        mine = [item for item in snapshot.cards if protocols.of_claims(settings, item) and item.card.memory_blocks]
        still = [item.card.uuid for item in mine if item.card.uuid in held]
        if still:
            self._conditions.set(
                "held", f"{', '.join(still)}: containers have shares of the device plugin there; offered when they end"
            )
        else:
            self._conditions.clear("held", "all cards of --dra-cards are offered")
        islands = devices.islands([item.card for item in mine])
        found = []
        for item in mine:
            taints = _taints(item, snapshot, settings)
            if item.card.uuid not in held and (self._takes_taints or not taints):
                found.append(devices.device(item.card, self._names, _attributes(item, snapshot, islands), taints))
        return found

    def _owner(self) -> str:
        """The node's UID: with the node its slices go, too."""
        if self._node_uid is None:
            try:
                found = self._kube.client.find("nodes", "", self._kube.node, timeout=_TIMEOUT_S)
            except ApiError as error:
                if error.status != 403:
                    raise
                log.warning("we may not read our node (%s): its slices will not go with it", error)
                found = {}
            if found is None:
                return ""  # kubelet has not made it yet
            self._node_uid = uid_of(found)
        return self._node_uid

    def _current(self, known: Slice, wanted: Slice) -> bool:
        """Whether the API server has what we want, or what it made of it: it drops fields whose feature is off."""
        text = _essence(wanted)
        return _essence(known) == text or self._accepted.get(str(known["metadata"]["name"])) == (
            text,
            _version_text(known),
        )

    def _write(self, item: dict[str, Any], known: Slice | None) -> None:
        name = item["metadata"]["name"]
        if known is None:
            answer = self._kube.client.call("POST", path(KIND), item, timeout=_TIMEOUT_S)
        else:
            item["metadata"]["resourceVersion"] = _version_text(known)
            answer = self._kube.client.call("PUT", path(KIND, "", name), item, timeout=_TIMEOUT_S)
        self.writes += 1
        with self._lock:
            self._written[name] = answer, time.monotonic()
        self._accepted[name] = _essence(item), _version_text(answer)
        self._look_for_dropped(item, answer)

    def _look_for_dropped(self, item: Slice, answer: Slice) -> None:
        kept = (answer.get("spec") or {}).get("devices") or ()
        if kept and not all(device.get("allowMultipleAllocations") for device in kept):
            self._conditions.set(
                "shares",
                "the API server knows no shares of a device: claims get whole cards; turn on its feature gate "
                "DRAConsumableCapacity (Kubernetes 1.34), or use Kubernetes 1.36 or newer",
            )
        else:
            self._conditions.clear("shares", "the API server knows shares of a device now")
        tainted = any(device.get("taints") for device in item["spec"]["devices"])
        if tainted and not any(device.get("taints") for device in kept):
            log.warning(
                "the API server takes no taints of devices (feature gate DRADeviceTaints): ill cards are left out"
            )
            self._takes_taints = False
            self._wake.set()


def _essence(item: Slice) -> str:
    """What of a slice is ours to say, whatever its generation, in one order."""
    spec = dict(item.get("spec") or {})
    spec["pool"] = {**(spec.get("pool") or {}), "generation": 0}
    spec["devices"] = [
        {**device, "taints": [_without_time(taint) for taint in device.get("taints") or ()]}
        for device in spec.get("devices") or ()
    ]
    owners = [owner.get("uid") for owner in (item.get("metadata") or {}).get("ownerReferences") or ()]
    return json.dumps([spec, owners], sort_keys=True)


def _without_time(taint: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in taint.items() if name != "timeAdded"}


def _generation(item: Slice) -> int:
    return int(((item.get("spec") or {}).get("pool") or {}).get("generation") or 0)


def _version_text(item: Slice) -> str:
    return str((item.get("metadata") or {}).get("resourceVersion", ""))


def _version(item: Slice) -> int:
    """Versions of one object grow; an answer may be newer than what the watch tells after it."""
    text = _version_text(item)
    return int(text) if text.isdigit() else 0


def _attributes(item: NodeCard, snapshot: Snapshot, islands: Mapping[str, str]) -> dict[str, str | int | Version]:
    return {
        "type": "mig" if item.parent_uuid else "gpu",
        "parentUUID": item.parent_uuid,
        "driverVersion": Version(snapshot.driver_version),
        "cudaVersion": Version(snapshot.cuda_version),
        "computeCapability": Version(item.compute_capability),
        devices.PCIE_ROOT: item.pcie_root,
        "nvlinkIsland": islands.get(item.card.uuid, ""),
    }


def _taints(item: NodeCard, snapshot: Snapshot, settings: Settings) -> Sequence[Taint]:
    """A card that is ill takes no new claims; `--dead-card-policy` says what becomes of the pods that have it."""
    problems = dict(snapshot.problems)
    why = problems.get(item.card.uuid) or problems.get("", "")
    if not why:
        return ()
    effect = Effect.NO_EXECUTE if settings.dead_card_policy == "evict" else Effect.NO_SCHEDULE
    kind, _, value = why.partition(" ")
    return (Taint("xid", value, effect) if kind == "Xid" else Taint("unhealthy", why, effect),)
