"""Which container holds which devices: kubelet's device manager, with its choice, records and checkpoint."""

from __future__ import annotations

import base64
import json
import logging
import random
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localcluster.kubelet.plugins import CHECKPOINT, Endpoint, PluginDevice, PluginFailure
from manager.proto import deviceplugin_pb2 as v1beta1
from vcuda.spec import units

JsonObject = dict[str, Any]
_NO_NUMA = "-1"
_log = logging.getLogger(__name__)


class AdmissionFailure(Exception):
    """A pod can't be admitted: becomes its reason and message."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass
class Held:
    """What one container holds of one resource, and what the plugin answered; replayed at every restart."""

    devices: list[str]
    response: bytes


@dataclass
class RunOptions:
    """The union of the answers for one container: what its runtime must set up."""

    environment: dict[str, str] = field(default_factory=dict)
    mounts: dict[str, tuple[str, bool]] = field(default_factory=dict)  # container path: host path, read-only
    devices: dict[str, str] = field(default_factory=dict)  # container path: host path
    annotations: dict[str, str] = field(default_factory=dict)
    cdi: list[str] = field(default_factory=list)  # names that the runtime has yet to find the devices of
    overriding: dict[str, str] = field(default_factory=dict)  # environment of the runtime's, over the pod's own


def limits_of(container: JsonObject) -> dict[str, int]:
    """The extended resources that a container asks; the API server has checked that they are integers."""
    limits = (container.get("resources") or {}).get("limits") or {}
    return {name: units.parse_count(value, name) for name, value in limits.items() if "/" in name}


def is_sidecar(container: JsonObject) -> bool:
    """Among init containers: one that goes on while the pod's containers run (Kubernetes 1.28)."""
    return container.get("restartPolicy") == "Always"


class DeviceManager:
    """Serial admission happens in the caller; streams and restarts may come at any time, hence the lock."""

    def __init__(
        self, directory: Path, on_change: Callable[[], None] = lambda: None, dice: random.Random | None = None
    ) -> None:
        self._directory = directory
        self._on_change = on_change
        self._lock = threading.RLock()
        self._endpoints: dict[str, Endpoint] = {}
        self._devices: dict[str, dict[str, PluginDevice]] = {}
        self.records: dict[tuple[str, str], dict[str, Held]] = {}  # by UID and container, by resource
        self.asks_preferred = True
        self._dice = dice or random.Random()
        self._closed = False
        self._load()

    # --- plugins ---
    def register(self, resource: str, socket: Path, options: Any) -> None:
        """A plugin (again) registered: its endpoint replaces an older one of the same resource."""
        endpoint = Endpoint(resource, socket, options, self._listed, self._stopped)
        with self._lock:
            old = self._endpoints.get(resource)
            self._endpoints[resource] = endpoint
        if old is not None:
            old.close()
        endpoint.start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            endpoints = list(self._endpoints.values())
        for endpoint in endpoints:
            endpoint.close()

    def _listed(self, endpoint: Endpoint, devices: list[PluginDevice]) -> None:
        with self._lock:
            if self._endpoints.get(endpoint.resource) is not endpoint:
                return
            self._devices[endpoint.resource] = {device.id: device for device in devices}
            self._try_save()
        self._on_change()

    def _stopped(self, endpoint: Endpoint) -> None:
        """The real kubelet keeps the capacity for a while, but nothing of it is allocatable any more."""
        with self._lock:
            if self._closed or self._endpoints.get(endpoint.resource) is not endpoint:
                return
            known = self._devices.get(endpoint.resource, {})
            gone = {i: PluginDevice(i, False, d.numa_nodes) for i, d in known.items()}
            self._devices[endpoint.resource] = gone
        self._on_change()

    def capacity(self) -> dict[str, tuple[int, int]]:
        """(capacity, allocatable) of each resource.

        Names known only from the checkpoint count 0 until their plugin comes.
        """
        with self._lock:
            return {
                resource: (len(devices), sum(device.healthy for device in devices.values()))
                for resource, devices in self._devices.items()
            }

    def listed(self, resource: str) -> list[PluginDevice] | None:
        """The devices as the plugin listed them last, all unhealthy once it has gone; None if it never did."""
        with self._lock:
            found = self._devices.get(resource)
        return None if found is None else list(found.values())

    def allocatable(self) -> dict[str, list[PluginDevice]]:
        with self._lock:
            return {r: [d for d in devices.values() if d.healthy] for r, devices in self._devices.items()}

    # --- admission ---
    def steps(self, pod: JsonObject) -> Iterator[tuple[str, str, int]]:
        """Container, resource and count of every Allocate: init containers first, resources in any order, as in Go."""
        for container in [*(pod["spec"].get("initContainers") or []), *pod["spec"]["containers"]]:
            wanted = list(limits_of(container).items())
            self._dice.shuffle(wanted)
            yield from ((container["name"], resource, count) for resource, count in wanted if count)

    def allocate(self, pod: JsonObject) -> None:
        """Give every container of the pod its devices.

        Raises AdmissionFailure; what was given before it stays until `release`.
        """
        for name, resource, count in self.steps(pod):
            self.give(pod, name, resource, count)

    def give(self, pod: JsonObject, name: str, resource: str, count: int) -> None:
        """One step of `allocate`. Raises AdmissionFailure."""
        uid = pod["metadata"]["uid"]
        with self._lock:
            endpoint = self._endpoints.get(resource)
            known = resource in self._devices
        if not known:
            return  # not a plugin's resource; admission checks it against the node
        held = self.held(uid, name).get(resource)
        if held is not None and len(held.devices) == count:
            return  # kubelet restarted: the container keeps what it has
        try:
            if endpoint is None:
                raise PluginFailure(f"cannot allocate unregistered device {resource}")
            devices = self._choose(endpoint, pod, resource, count)
            response = endpoint.allocate(devices)
        except PluginFailure as error:
            message = f"Allocate failed due to {error}, which is unexpected"
            raise AdmissionFailure("UnexpectedAdmissionError", message) from error
        with self._lock:
            self.records.setdefault((uid, name), {})[resource] = Held(devices, response.SerializeToString())
            try:
                self.save()
            except OSError as error:
                message = f"the allocation can't be written: {error}"
                raise AdmissionFailure("UnexpectedAdmissionError", message) from error

    def _choose(self, endpoint: Endpoint, pod: JsonObject, resource: str, count: int) -> list[str]:
        """What the pod's init containers hold, but not the sidecars, is used again before anything new."""
        uid = pod["metadata"]["uid"]
        inits = {c["name"] for c in pod["spec"].get("initContainers") or [] if not is_sidecar(c)}
        reusable: dict[str, None] = {}
        taken: set[str] = set()
        with self._lock:
            for (owner, container), held in self.records.items():
                if resource in held and owner == uid and container in inits:
                    reusable.update(dict.fromkeys(held[resource].devices))
                elif resource in held:
                    taken.update(held[resource].devices)
            healthy = [device.id for device in self._devices[resource].values() if device.healthy]
        must = [device for device in reusable if device not in taken][:count]
        free = [device for device in healthy if device not in taken and device not in reusable]
        needed = count - len(must)
        if needed > len(free):
            raise PluginFailure(
                f"requested number of devices unavailable for {resource}. Requested: {needed}, Available: {len(free)}"
            )
        chosen: list[str] = []
        if self.asks_preferred and endpoint.preferred_allocation and 0 < needed < len(free):
            preferred = endpoint.preferred(endpoint.preference([*free, *must], must, count))
            chosen = [device for device in preferred if device in set(free)][:needed]
        rest = [device for device in free if device not in set(chosen)]
        return must + chosen + self._dice.sample(rest, needed - len(chosen))

    # --- records ---
    def held(self, uid: str, container: str) -> dict[str, Held]:
        with self._lock:
            return dict(self.records.get((uid, container), {}))

    def numa_nodes(self, resource: str, devices: list[str]) -> list[int]:
        with self._lock:
            known = self._devices.get(resource, {})
        return sorted({node for device in devices if device in known for node in known[device].numa_nodes})

    def release(self, keep: set[str]) -> None:
        """Take the devices of all pods that are not in `keep` (UIDs of active pods)."""
        with self._lock:
            gone = [key for key in self.records if key[0] not in keep]
            for key in gone:
                del self.records[key]
            if gone:
                self._try_save()

    def pre_start(self, uid: str, container: str) -> None:
        """PreStartContainer for each resource that wants it. Raises PluginFailure."""
        for resource, held in self.held(uid, container).items():
            endpoint = self.endpoint(resource)
            if endpoint.pre_start_required:
                endpoint.pre_start(held.devices)

    def endpoint(self, resource: str) -> Endpoint:
        """Raises PluginFailure."""
        with self._lock:
            endpoint = self._endpoints.get(resource)
        if endpoint is None:
            raise PluginFailure(f"endpoint not found in cache for a registered resource: {resource}")
        return endpoint

    def run_options(self, uid: str, container: str) -> RunOptions:
        """Called at every start of a container, PreStartContainer included. Raises PluginFailure."""
        self.pre_start(uid, container)
        options = RunOptions()
        for held in self.held(uid, container).values():
            response = v1beta1.ContainerAllocateResponse.FromString(held.response)
            options.environment.update(response.envs)
            options.mounts.update({m.container_path: (m.host_path, m.read_only) for m in response.mounts})
            options.devices.update({d.container_path: d.host_path for d in response.devices})
            options.annotations.update(response.annotations)
            options.cdi += [device.name for device in response.cdi_devices]
        return options

    # --- checkpoint ---
    def _try_save(self) -> None:
        """What is in memory holds; a full disk costs no more than what a restart would have read."""
        try:
            self.save()
        except OSError as error:
            _log.error("the checkpoint is old until the next change: %s", error)

    def save(self) -> None:
        """Write the checkpoint in kubelet's v2 format, atomically.

        Its checksum is ours: kubelet's hashes Go's memory layout.
        """
        entries = [
            {
                "PodUID": uid, "ContainerName": container, "ResourceName": resource,
                "DeviceIDs": self._by_numa(resource, held.devices),
                "AllocResp": base64.b64encode(held.response).decode(),
            }
            for (uid, container), resources in self.records.items()
            for resource, held in resources.items()
        ]  # fmt: skip
        registered = {
            resource: [d.id for d in known.values() if d.healthy] for resource, known in self._devices.items()
        }
        data = {"PodDeviceEntries": entries or None, "RegisteredDevices": registered}
        checksum = zlib.crc32(json.dumps(data, sort_keys=True).encode())
        partial = self._directory / f".{CHECKPOINT}.partial"
        partial.write_text(json.dumps({"Data": data, "Checksum": checksum}), encoding="utf-8")
        partial.replace(self._directory / CHECKPOINT)

    def _by_numa(self, resource: str, devices: list[str]) -> dict[str, list[str]]:
        known = self._devices.get(resource, {})
        result: dict[str, list[str]] = {}
        for device in devices:
            nodes = known[device].numa_nodes if device in known else ()
            for node in [str(node) for node in nodes] or [_NO_NUMA]:
                result.setdefault(node, []).append(device)
        return result

    def _load(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / CHECKPOINT
        try:
            data = json.loads(path.read_text(encoding="utf-8"))["Data"]
            for entry in data["PodDeviceEntries"] or []:
                devices = list(dict.fromkeys(d for ids in entry["DeviceIDs"].values() for d in ids))
                resources = self.records.setdefault((entry["PodUID"], entry["ContainerName"]), {})
                resources[entry["ResourceName"]] = Held(devices, base64.b64decode(entry["AllocResp"]))
            # As the real kubelet after its restart: known resources have no devices until their plugin registers again.
            self._devices = {resource: {} for resource in data["RegisteredDevices"]}
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError, AttributeError):
            path.unlink()  # a damaged checkpoint starts afresh, as in kubelet
