"""What kubelet itself says each container holds: PodResources, and its own checkpoint file.

The checkpoint knows pods by UID, lists init containers and is not rate-limited, but its format is kubelet's own affair:
`DeviceIDs` is a list up to 1.19 and a map of lists by NUMA node later. PodResources is the official answer.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import orjson
from google.protobuf.message import DecodeError

from manager.allocations.record import Allocation, Held
from manager.kubelet.incremental_json import Form, Pieces
from manager.proto import deviceplugin_pb2 as api
from manager.proto import podresources_pb2 as resources_api
from manager.proto import podresources_pb2_grpc
from vcuda import plain_file
from vcuda.spec.names import Names

CHECKPOINT_FILE = "kubelet_internal_checkpoint"
_OTHER_PLUGIN = "nvidia.com/"
# github.com/NVIDIA/k8s-dra-driver-gpu: GpuInfo.CanonicalName, MigSpecTuple.ToCanonicalName.
_DRA_DRIVER, _CLAIMED_CARD = "gpu.nvidia.com", re.compile(r"(gpu-\d+)(?:-mig-.+)?$")
_MAX_MESSAGE = 64 * 1024 * 1024


class RecordsError(Exception):
    """Kubelet's records can't be had now; the message says which and why."""


class RecordsDamaged(RecordsError):
    """Kubelet's checkpoint is there and says nothing that can be read; kubelet then begins with an empty one."""


@dataclass(frozen=True)
class Entry:
    """Devices of one resource ("core" or "memory") that a container holds.

    The checkpoint fills `pod_uid` and `answer` (what Allocate answered, as it stands there), PodResources fills `pod`
    (namespace, name).
    """

    container: str
    resource: str
    held: Held
    pod_uid: str = ""
    pod: tuple[str, str] = ("", "")
    answer: str = ""

    @property
    def response(self) -> api.ContainerAllocateResponse | None:
        """What Allocate answered; None if the record does not say."""
        if not self.answer:
            return None
        try:
            return api.ContainerAllocateResponse.FromString(base64.b64decode(self.answer))
        except (binascii.Error, DecodeError, ValueError):
            return None


def _resource(name: str, names: Names) -> str | None:
    return {names.core: "core", names.memory: "memory"}.get(name)


def _row_key(data: bytes, place: int) -> bytes:
    """Pod, container and resource: what stands before the devices."""
    return data[place : data.find(b'"DeviceIDs"', place)]


# Go writes no spaces, and the fields in the order of its structures.
_FORM = Form(
    b'"PodDeviceEntries":[',
    b'],"RegisteredDevices"',
    b'},{"PodUID":"',
    _row_key,
    lambda around: around["Data"]["PodDeviceEntries"] == [],
)


class Checkpoint:
    """Kubelet's device checkpoint; parsed only when it is another file, for every start asks for it."""

    def __init__(self, directory: Path, names: Names) -> None:
        self._path = directory / CHECKPOINT_FILE
        self._names = names
        self._last: tuple[tuple[int, int, int], list[Entry]] | None = None
        self._pieces = Pieces(_FORM, lambda row: _checkpoint_entry(row, names, False))

    def list(self, *, answers: bool = False) -> list[Entry]:
        """Entries of our resources; empty if there is no checkpoint yet.

        `answers`: with what Allocate answered. Raises RecordsError.
        """
        path = self._path
        try:
            status = path.stat()
            mark = (status.st_ino, status.st_mtime_ns, status.st_size)
            last = self._last
            if last is not None and last[0] == mark and not answers:
                return last[1]
            data = plain_file.read(path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RecordsError(f"cannot read kubelet's checkpoint {path}: {error!s:.120}") from error
        try:
            entries = self._entries(data, answers)
        except ValueError as error:
            raise RecordsDamaged(f"cannot read kubelet's checkpoint {path}: {error!s:.120}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise RecordsDamaged(f"kubelet's checkpoint {path} has an unknown format ({error!s:.80})") from error
        found = [entry for entry in entries if entry is not None]
        if not answers:  # they are many bytes, and only a start needs them
            self._last = (mark, found)
        return found

    def _entries(self, data: bytes, answers: bool) -> Sequence[Entry | None]:
        """Of hundreds of rows one or two are new; a text of another form than kubelet's is parsed as a whole."""
        if not answers:
            with contextlib.suppress(ValueError):
                return self._pieces.parse(data)
        rows = orjson.loads(data)["Data"]["PodDeviceEntries"] or []
        return [_checkpoint_entry(row, self._names, answers) for row in rows]


def _checkpoint_entry(row: Mapping[str, Any], names: Names, answers: bool) -> Entry | None:
    resource = _resource(str(row["ResourceName"]), names)
    if resource is None:
        return None
    ids = row["DeviceIDs"]
    if isinstance(ids, Mapping):
        ids = [device_id for part in ids.values() for device_id in part]
    return Entry(
        str(row["ContainerName"]),
        resource,
        Held.of(map(str, ids)),
        pod_uid=str(row["PodUID"]),
        answer=str(row.get("AllocResp") or "") if answers else "",
    )


def _holders(entries: Iterable[Entry], resource: str, held: Held) -> list[Entry]:
    return [entry for entry in entries if entry.resource == resource and entry.held == held]


def vouch(entries: Iterable[Entry], resource: str, held: Held, allocations: Sequence[Allocation]) -> bool:
    """Whether kubelet's records say that one of these allocations holds exactly these devices."""
    ours = {
        (item.container, about) for item in allocations for about in (item.pod_uid, (item.namespace, item.pod_name))
    }
    return any(
        (entry.container, about) in ours
        for entry in _holders(entries, resource, held)
        for about in (entry.pod_uid, entry.pod)
    )


def other_holder(
    entries: Sequence[Entry], resource: str, held: Held, allocations: Sequence[Allocation]
) -> Entry | None:
    """Who holds exactly these devices by kubelet's records, if none of these allocations does.

    None too while no record names them: it has not written them yet, and then nothing contradicts us.
    """
    if vouch(entries, resource, held, allocations):
        return None
    return next(iter(_holders(entries, resource, held)), None)


class PodResources:
    """Kubelet's PodResources API v1 over its socket."""

    def __init__(self, socket: Path, names: Names) -> None:
        self._socket = socket
        self._names = names
        self._channel: grpc.Channel | None = None

    def _ask(self, timeout: float) -> resources_api.ListPodResourcesResponse:
        if not self._socket.exists():
            raise RecordsError(f"PodResources: there is no socket {self._socket}")
        if self._channel is None:
            self._channel = grpc.insecure_channel(
                f"unix:{self._socket}", options=[("grpc.max_receive_message_length", _MAX_MESSAGE)]
            )
        stub = podresources_pb2_grpc.PodResourcesListerStub(self._channel)
        try:
            answer: resources_api.ListPodResourcesResponse = stub.List(
                resources_api.ListPodResourcesRequest(), timeout=timeout
            )
            return answer
        except grpc.RpcError as error:
            self.close()  # after a restart of kubelet the old channel would back off for long
            raise RecordsError(f"PodResources at {self._socket}: {error.details()}") from error

    def held_elsewhere(self, timeout: float) -> dict[str, str]:
        """Devices that others hand out, and who holds each and by what. Raises RecordsError.

        Keys are UUIDs (NVIDIA's plugin; shared ones are named UUID::number there) and what NVIDIA's DRA driver calls a
        card, `gpu-MINOR`; an instance of MIG (`gpu-MINOR-mig-…`) holds its whole card, since its UUID is not told.
        """
        found: dict[str, str] = {}
        for pod in self._ask(timeout).pod_resources:
            who = f"{pod.namespace}/{pod.name}"
            for container in pod.containers:
                for devices in container.devices:
                    name = devices.resource_name
                    if name.startswith(_OTHER_PLUGIN) and _resource(name, self._names) is None:
                        for device_id in devices.device_ids:
                            found[device_id.partition("::")[0]] = f"{name} of {who}, through another device plugin"
                for claim in container.dynamic_resources:
                    for device in claim.claim_resources:
                        card = _CLAIMED_CARD.match(device.device_name)
                        if card and device.driver_name == _DRA_DRIVER:
                            name = f"{claim.claim_namespace}/{claim.claim_name}"
                            found[card[1]] = f"the resource claim {name} of {who}, through NVIDIA's DRA driver"
        return found

    def list(self, timeout: float) -> list[Entry]:
        """Raises RecordsError."""
        answer = self._ask(timeout)
        found = []
        for pod in answer.pod_resources:
            for container in pod.containers:
                ids: dict[str, list[str]] = {}
                for devices in container.devices:  # newer kubelets split a resource by NUMA node
                    resource = _resource(devices.resource_name, self._names)
                    if resource is not None:
                        ids.setdefault(resource, []).extend(devices.device_ids)
                found += [
                    Entry(container.name, resource, Held.of(held), pod=(pod.namespace, pod.name))
                    for resource, held in ids.items()
                    if held
                ]
        return found

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
