"""Kubelet's book of claims: which are prepared for which pods, and what the runtime is told of them.

As kubelet does it (kubernetes pkg/kubelet/cm/dra/manager.go): a claim is prepared for its first pod here and unprepared
after its last; a second pod of a prepared claim finds it so, and the driver hears nothing of it. One difference: there
is no checkpoint, a kubelet that starts anew asks again for the claims of the pods that it finds.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localcluster import api as apis
from localcluster.kubelet.claims import PluginWatcher
from localcluster.kubelet.devices import RunOptions
from localcluster.kubelet.plugins import PluginFailure

JsonObject = dict[str, Any]
_LOOK_SECONDS = 0.2


@dataclass
class _Prepared:
    """A claim that drivers have prepared.

    `devices`: of the runtime, with the request of each; `given`: the request, driver, pool and name of each device.
    """

    claim: JsonObject
    drivers: tuple[str, ...]
    pods: set[str] = field(default_factory=set)
    devices: list[tuple[str, str]] = field(default_factory=list)
    given: list[tuple[str, str, str, str]] = field(default_factory=list)

    def of_request(self, asked: str) -> list[tuple[str, str, str]]:
        """The driver, pool and name of the devices of a request; of all if it is empty."""
        found = [item[1:] for item in self.given if asked in ("", item[0].partition("/")[0])]
        return list(dict.fromkeys(found))


class ClaimManager:
    """Called from the pods' threads, one call at a time."""

    def __init__(self, api: apis.Api, registry: Path, specifications: Path) -> None:
        """`registry`: where drivers register; `specifications`: the runtime's folder of CDI files."""
        self._api, self._specifications = api, specifications
        self._watcher = PluginWatcher(registry)
        self._lock = threading.Lock()
        self._prepared: dict[str, _Prepared] = {}  # by claim UID
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kubelet plugins", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=15)
        self._watcher.forget()

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            self._watcher.look()

    def prepare(self, pod: JsonObject) -> None:
        """Have all claims of a pod prepared. Raises PluginFailure; then it may be tried again."""
        uid = pod["metadata"]["uid"]
        with self._lock:
            for _, name in _claims(pod):
                claim = self._read(pod, name)
                users = {user["uid"] for user in claim.get("status", {}).get("reservedFor") or []}
                if uid not in users:
                    raise PluginFailure(
                        f"pod {pod['metadata']['name']} ({uid}) is not allowed to use ResourceClaim {name}"
                    )
                self._prepare(claim).pods.add(uid)

    def _read(self, pod: JsonObject, name: str) -> JsonObject:
        if not name:
            raise PluginFailure("its ResourceClaim has not been made from the template yet")
        namespace = pod["metadata"].get("namespace", "default")
        try:
            return self._api.call("GET", f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}")
        except apis.ApiFailure as error:
            raise PluginFailure(f"fetch ResourceClaim {name}: {error}") from error

    def _prepare(self, claim: JsonObject) -> _Prepared:
        uid, name = claim["metadata"]["uid"], claim["metadata"]["name"]
        if uid in self._prepared:
            return self._prepared[uid]
        results = claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results") or []
        found = _Prepared(claim, tuple(dict.fromkeys(result["driver"] for result in results)))
        for driver in found.drivers:
            answer = self._driver(driver).prepare(claim)[uid]
            if answer.error:
                raise PluginFailure(f"NodePrepareResources failed for ResourceClaim {name}: {answer.error}")
            for device in answer.devices:
                found.devices += [(request, one) for request in device.request_names for one in device.cdi_device_ids]
                where = driver, device.pool_name, device.device_name
                found.given += [(request, *where) for request in device.request_names]
        self._prepared[uid] = found
        return found

    def _driver(self, name: str) -> Any:
        driver = self._watcher.drivers.get(name)
        if driver is None:
            raise PluginFailure(f"DRA driver {name} is not registered")
        return driver

    def unprepare(self, pod_uid: str) -> None:
        """A pod has ended: its claims go that no other pod here has. Raises PluginFailure; it may be tried again."""
        with self._lock:
            for uid, one in [(uid, one) for uid, one in self._prepared.items() if pod_uid in one.pods]:
                if one.pods == {pod_uid}:
                    for driver in one.drivers:
                        answer = self._driver(driver).unprepare(one.claim)[uid]
                        if answer.error:
                            name = one.claim["metadata"]["name"]
                            raise PluginFailure(
                                f"NodeUnprepareResources failed for ResourceClaim {name}: {answer.error}"
                            )
                    del self._prepared[uid]
                one.pods.discard(pod_uid)

    def run_options(self, pod: JsonObject, container: JsonObject, options: RunOptions) -> None:
        """Add what a container's claims say to its options. Raises PluginFailure."""
        called = dict(_claims(pod))
        named = (container.get("resources") or {}).get("claims") or []
        wanted: dict[str, None] = {}
        with self._lock:
            by_name = {one.claim["metadata"]["name"]: one for one in self._prepared.values()}
        for item in named:
            one = by_name.get(called.get(item["name"], ""))
            if one is None:
                raise PluginFailure(f"unable to get information for ResourceClaim {called.get(item['name'])}")
            asked = item.get("request", "")
            wanted.update({device: None for request, device in one.devices if asked in ("", request.partition("/")[0])})
        for edits in self._edits([*options.cdi, *wanted]):
            pairs = (text.partition("=") for text in edits.get("env") or [])
            options.overriding.update({name: value for name, _, value in pairs})
            for mount in edits.get("mounts") or []:
                options.mounts[mount["containerPath"]] = mount["hostPath"], "ro" in (mount.get("options") or [])
            for node in edits.get("deviceNodes") or []:
                options.devices[node["path"]] = node.get("hostPath") or node["path"]

    def used(self, pod: JsonObject, container: JsonObject) -> Iterator[tuple[JsonObject, list[tuple[str, str, str]]]]:
        """For PodResources: a container's claims, and the driver, pool and name of each device that it has of them.

        Does not wait for a driver that is being asked: it may ask this meanwhile.
        """
        prepared = [one for one in [*self._prepared.values()] if pod["metadata"]["uid"] in one.pods]
        called = {name: own for own, name in _claims(pod)}
        for one in prepared:
            own = called.get(one.claim["metadata"]["name"])
            for item in (container.get("resources") or {}).get("claims") or []:
                if item["name"] == own:
                    yield one.claim, one.of_request(item.get("request", ""))

    def _edits(self, names: list[str]) -> Iterator[JsonObject]:
        """What the runtime finds in its folder: what is common to a file's devices, then the device's own."""
        files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(self._specifications.glob("*.json"))]
        for name in names:
            kind, _, device = name.partition("=")
            for file in files:
                found = next((item for item in file.get("devices") or [] if item["name"] == device), None)
                if file.get("kind") == kind and found is not None:
                    yield file.get("containerEdits") or {}
                    yield found.get("containerEdits") or {}
                    break
            else:
                raise PluginFailure(f"failed to inject CDI devices: unresolvable CDI devices {name}")


def _claims(pod: JsonObject) -> list[tuple[str, str]]:
    """What a pod's containers call each of its claims, and the claim's name; "" while there is none."""
    made = {
        item["name"]: item.get("resourceClaimName", "")
        for item in pod.get("status", {}).get("resourceClaimStatuses") or []
    }
    return [
        (item["name"], item.get("resourceClaimName") or made.get(item["name"], ""))
        for item in pod["spec"].get("resourceClaims") or []
    ]
