"""What is allocated, on disk: one JSON file, versioned and checksummed, replaced atomically at every change."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vcuda.spec.placement import CardShare
from vcuda.spec.request import Kind

VERSION = 1
FILE_NAME = "state.json"


class StateError(Exception):
    """The state file can't be written or read; the message names the file, the reason and the way out."""


class StateDamaged(StateError):
    """The file was there but unusable; it is kept aside as `kept`."""

    def __init__(self, message: str, kept: Path) -> None:
        super().__init__(message)
        self.kept = kept


@dataclass(frozen=True)
class Held:
    """The devices that kubelet gave a container of one resource: how many, and a digest of their IDs."""

    count: int
    digest: str

    @classmethod
    def of(cls, device_ids: Iterable[str]) -> Held:
        ids = sorted(device_ids)
        return cls(len(ids), hashlib.blake2s("\n".join(ids).encode(), digest_size=10).hexdigest())


@dataclass(frozen=True)
class Allocation:
    """One container's share as handed to kubelet.

    `held` maps "core" and "memory" to the devices of each call that came. `minors` are the cards' minors at that time,
    by UUID: kubelet replays old responses, and a card may have another minor after a reboot.
    """

    pod_uid: str
    namespace: str
    pod_name: str
    container: str
    kind: Kind
    cores: int
    memory_blocks: int
    core_limit: int
    priority: str
    shares: tuple[CardShare, ...]
    minors: Mapping[str, int]
    region: str
    mirror: str
    held: Mapping[str, Held] = field(default_factory=dict)
    created_ns: int = 0

    @property
    def key(self) -> tuple[str, str]:
        return self.pod_uid, self.container

    @property
    def name(self) -> str:
        return f"{self.namespace}/{self.pod_name}/{self.container}"

    @property
    def whole(self) -> bool:
        return self.cores >= 100

    @property
    def complete(self) -> bool:
        """Whether both calls came (whole cards may ask no memory: then there is only one)."""
        return "core" in self.held and ("memory" in self.held or self.memory_blocks == 0)

    def with_held(self, resource: str, held: Held) -> Allocation:
        return replace(self, held={**self.held, resource: held})


def _encode(allocation: Allocation) -> dict[str, Any]:
    return {
        "pod_uid": allocation.pod_uid,
        "namespace": allocation.namespace,
        "pod": allocation.pod_name,
        "container": allocation.container,
        "kind": str(allocation.kind),
        "cores": allocation.cores,
        "memory_blocks": allocation.memory_blocks,
        "core_limit": allocation.core_limit,
        "priority": allocation.priority,
        "shares": [[share.uuid, share.cores, share.memory_blocks] for share in allocation.shares],
        "minors": dict(allocation.minors),
        "region": allocation.region,
        "mirror": allocation.mirror,
        "held": {name: [held.count, held.digest] for name, held in allocation.held.items()},
        "created_ns": allocation.created_ns,
    }


def _decode(row: Mapping[str, Any]) -> Allocation:
    return Allocation(
        pod_uid=str(row["pod_uid"]),
        namespace=str(row["namespace"]),
        pod_name=str(row["pod"]),
        container=str(row["container"]),
        kind=Kind(row["kind"]),
        cores=int(row["cores"]),
        memory_blocks=int(row["memory_blocks"]),
        core_limit=int(row["core_limit"]),
        priority=str(row["priority"]),
        shares=tuple(CardShare(str(uuid), int(cores), int(blocks)) for uuid, cores, blocks in row["shares"]),
        minors={str(uuid): int(minor) for uuid, minor in row["minors"].items()},
        region=str(row["region"]),
        mirror=str(row["mirror"]),
        held={str(name): Held(int(count), str(digest)) for name, (count, digest) in row["held"].items()},
        created_ns=int(row["created_ns"]),
    )


def _canonical(data: Any) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def _checksum(canonical: str) -> str:
    return hashlib.sha256(canonical.encode()).hexdigest()


class StateFile:
    """The file in `directory`. One writer: the daemon, under its allocation lock."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
        self._rows: dict[tuple[str, str], tuple[Allocation, str]] = {}

    def load(self) -> dict[tuple[str, str], Allocation]:
        """Everything that was saved; empty if nothing ever was. Raises StateDamaged, StateError."""
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StateError(
                f"cannot read the state file {self.path}: {error.strerror}; make it readable or point "
                "--checkpoint-path elsewhere"
            ) from error
        try:
            document = json.loads(text)
            if document["version"] != VERSION:
                raise ValueError(f"version {document['version']!r} is not {VERSION}")
            if document["checksum"] != _checksum(_canonical(document["data"])):
                raise ValueError("the checksum does not match")
            allocations = [_decode(row) for row in document["data"]["allocations"]]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            kept = self.path.with_name(f"{FILE_NAME}.damaged-{time.time_ns()}")
            try:
                self.path.rename(kept)
            except OSError as problem:
                raise StateError(
                    f"the state file {self.path} is damaged and can't be moved away: {problem}"
                ) from error
            raise StateDamaged(
                f"the state file {self.path} is damaged ({error!s:.120}); it is kept as {kept} and the state is rebuilt "
                "from kubelet's records",
                kept,
            ) from error
        return {allocation.key: allocation for allocation in allocations}

    def save(self, allocations: Iterable[Allocation]) -> None:
        """Replace the file. Raises StateError.

        After return it survives the death of this process. A power cut may bring back the file before: what that lacks is in
        kubelet's own checkpoint, from which a start completes it.
        """
        rows = {item.key: (item, self._row(item)) for item in allocations}
        self._rows = rows
        data = f'{{"allocations":[{",".join(text for _, text in rows.values())}]}}'  # in its canonical form
        document = f'{{"version":{VERSION},"checksum":"{_checksum(data)}","data":{data}}}\n'
        temporary = self.path.with_name(f".{FILE_NAME}.{os.getpid()}")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(document)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        except OSError as error:
            raise StateError(
                f"cannot write the state file {self.path}: {error.strerror}; make room or make it writable"
            ) from error

    def _row(self, allocation: Allocation) -> str:
        """Only what changed is encoded anew: one of hundreds, usually."""
        before = self._rows.get(allocation.key)
        return (
            before[1] if before is not None and before[0] is allocation else _canonical(_encode(allocation))
        )
