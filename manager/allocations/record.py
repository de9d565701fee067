"""An allocation: one container's share as handed to kubelet, and its form on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vcuda.spec.placement import CardShare
from vcuda.spec.request import Kind


@dataclass(frozen=True)
class Held:
    """The devices that kubelet gave a container of one resource: how many, and a digest of their IDs."""

    count: int
    digest: str

    @classmethod
    def of(cls, device_ids: Iterable[str]) -> Held:
        """A digest stands for the IDs: thousands of them would be most of the state file."""
        ids = sorted(device_ids)
        return cls(len(ids), hashlib.blake2s("\n".join(ids).encode(), digest_size=10).hexdigest())


@dataclass(frozen=True)
class ClaimUse:
    """What makes a request of a ResourceClaim's allocation one.

    `pods`: name and UID of those that may use it, which have the claim's namespace. `whole`: it has all of its cards.
    """

    pods: tuple[tuple[str, str], ...] = ()
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One container's share as handed to kubelet, or that of a ResourceClaim's request.

    With `claim` it is the latter's: `pod_uid` and `pod_name` are the claim's own, `container` is the request, `held`
    stays empty.
    `held` maps "core" and "memory" to the devices of each call that came. `minors` are the cards' minors at that time,
    by UUID: kubelet replays old responses, and a card may have another minor after a reboot. `oversell_blocks`: what it
    may hold in all of each card, beyond its share as managed memory; 0: no more than its share. `elastic`: `core_limit`
    was promised and stays, though the share has been resized to it or beyond; without it such a limit is no more than
    the share. `static`: kubelet has said that it has the pod from a file or a URL of its own.
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
    oversell_blocks: int = 0
    elastic: bool = False
    static: bool = False
    claim: ClaimUse | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.pod_uid, self.container

    @property
    def name(self) -> str:
        return f"{self.namespace}/{self.pod_name}/{self.container}"

    @property
    def fields(self) -> Mapping[str, str]:
        """For log lines: `vcuda.logs.fields`."""
        return {
            "pod" if self.claim is None else "claim": f"{self.namespace}/{self.pod_name}",
            "container": self.container,
            "uid": self.pod_uid,
            "uuid": ",".join(share.uuid for share in self.shares),
        }

    @property
    def whole(self) -> bool:
        return self.cores >= 100 if self.claim is None else self.claim.whole

    @property
    def pods(self) -> tuple[tuple[str, str], ...]:
        """Name and UID of the pods whose processes use it; one but for a claim, which may have none or several."""
        return ((self.pod_name, self.pod_uid),) if self.claim is None else self.claim.pods

    @property
    def complete(self) -> bool:
        """Whether both calls came (whole cards may ask no memory: then there is only one)."""
        return "core" in self.held and ("memory" in self.held or self.memory_blocks == 0)

    def with_held(self, resource: str, held: Held) -> Allocation:
        return replace(self, held={**self.held, resource: held})


def encode(allocation: Allocation) -> dict[str, Any]:
    """A row of the state file: JSON values only."""
    return {
        "pod_uid": allocation.pod_uid,
        "namespace": allocation.namespace,
        "pod": allocation.pod_name,
        "container": allocation.container,
        "kind": str(allocation.kind),
        "cores": allocation.cores,
        "memory_blocks": allocation.memory_blocks,
        "core_limit": allocation.core_limit,
        "elastic": allocation.elastic,
        "oversell_blocks": allocation.oversell_blocks,
        "priority": allocation.priority,
        "static": allocation.static,
        "shares": [[share.uuid, share.cores, share.memory_blocks] for share in allocation.shares],
        "minors": dict(allocation.minors),
        "region": allocation.region,
        "mirror": allocation.mirror,
        "held": {name: [held.count, held.digest] for name, held in allocation.held.items()},
        "created_ns": allocation.created_ns,
    } | ({} if allocation.claim is None else {"claim": [list(allocation.claim.pods), allocation.claim.whole]})


def _claim(row: Any) -> ClaimUse | None:
    if row is None:
        return None
    pods, whole = row
    return ClaimUse(tuple((str(name), str(uid)) for name, uid in pods), bool(whole))


def decode(row: Mapping[str, Any]) -> Allocation:
    """The inverse. Raises KeyError, TypeError or ValueError for what `encode` never wrote."""
    return Allocation(
        pod_uid=str(row["pod_uid"]),
        namespace=str(row["namespace"]),
        pod_name=str(row["pod"]),
        container=str(row["container"]),
        kind=Kind(row["kind"]),
        cores=int(row["cores"]),
        memory_blocks=int(row["memory_blocks"]),
        core_limit=int(row["core_limit"]),
        oversell_blocks=int(row.get("oversell_blocks", 0)),  # not in files of version 0.1
        elastic=bool(row.get("elastic", False)),
        static=bool(row.get("static", False)),
        priority=str(row["priority"]),
        shares=tuple(CardShare(str(uuid), int(cores), int(blocks)) for uuid, cores, blocks in row["shares"]),
        minors={str(uuid): int(minor) for uuid, minor in row["minors"].items()},
        region=str(row["region"]),
        mirror=str(row["mirror"]),
        held={str(name): Held(int(count), str(digest)) for name, (count, digest) in row["held"].items()},
        created_ns=int(row["created_ns"]),
        claim=_claim(row.get("claim")),
    )
