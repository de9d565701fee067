"""Cards as devices of ResourceSlices: their names, capacities, attributes and taints, and slices of a node's pool.

Source of fields and limits: Kubernetes' api/resource/v1 and its validation (pkg/apis/resource/validation).
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vcuda.spec.claims import CORES, GROUP_VERSION, MEMORY
from vcuda.spec.inventory import NVLINK_RANK, Card
from vcuda.spec.names import Names
from vcuda.spec.units import BLOCK_BYTES, CORES_PER_CARD

MOST_DEVICES = 64  # of a slice in which a device may have taints
_LONGEST_TEXT = 64  # of an attribute
_LONGEST_NAME = 253
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_NO_LABEL_VALUE = re.compile(r"[^A-Za-z0-9_.-]+")
_SUFFIXES = (("Ti", 2**40), ("Gi", 2**30), ("Mi", 2**20))
PCIE_ROOT = "resource.kubernetes.io/pcieRoot"


class Effect(enum.StrEnum):
    """What a taint does to claims that don't tolerate it."""

    NO_SCHEDULE = "NoSchedule"
    NO_EXECUTE = "NoExecute"


@dataclass(frozen=True)
class Taint:
    """Why a card is not for everybody. `key` without the driver's name in front, such as "xid"."""

    key: str
    value: str
    effect: Effect


@dataclass(frozen=True)
class Version:
    """An attribute that CEL compares as a version; NVIDIA's numbers have leading zeros, which semver forbids."""

    text: str

    @property
    def semver(self) -> str:
        """Three numbers; parts that are missing are 0."""
        parts = [int(part) for part in re.findall(r"[0-9]+", self.text)[:3]]
        return ".".join(str(part) for part in (*parts, 0, 0, 0)[:3])


def device_name(uuid: str) -> str:
    """A card's name in its node's pool: its UUID in lower case, so that no other card is ever meant by it."""
    name = uuid.lower()
    if _LABEL.fullmatch(name):
        return name
    return "gpu-" + hashlib.blake2s(uuid.encode(), digest_size=10).hexdigest()  # older drivers' names of MIG instances


def quantity(amount_bytes: int) -> str:
    """Bytes as the API server writes them: the largest binary suffix without a fraction."""
    for suffix, unit in _SUFFIXES:
        if amount_bytes and amount_bytes % unit == 0:
            return f"{amount_bytes // unit}{suffix}"
    return str(amount_bytes)


def islands(cards: Iterable[Card]) -> dict[str, str]:
    """For cards that NVLink joins, directly or by others: the first UUID of their island, by UUID."""
    known = {card.uuid: card for card in cards}
    found: dict[str, str] = {}
    for first in sorted(known):
        waiting = [] if first in found else [first]
        while waiting:
            uuid = waiting.pop()
            if uuid in found:
                continue
            found[uuid] = first
            waiting += [peer for peer, rank in known[uuid].links if rank >= NVLINK_RANK and peer in known]
    sizes = [*found.values()]
    return {uuid: island for uuid, island in found.items() if sizes.count(island) > 1}


def device(
    card: Card, names: Names, attributes: Mapping[str, str | int | Version], taints: Sequence[Taint] = ()
) -> dict[str, Any]:
    """A card as any number of claims share it. `attributes`: beside those that every card has; empty ones are left out.

    Without amounts a claim gets the whole card.
    """
    everything: dict[str, str | int | Version | None] = {
        "uuid": card.uuid, "productName": card.model, "minor": card.minor, "numaNode": card.numa_node, **attributes,
    }  # fmt: skip
    found: dict[str, Any] = {
        "name": device_name(card.uuid),
        "allowMultipleAllocations": True,
        "attributes": {
            name: _attribute(value) for name, value in everything.items() if value not in (None, "", Version(""))
        },
        "capacity": {
            CORES: _capacity(str(CORES_PER_CARD), "1", steps=True),
            MEMORY: _capacity(
                quantity(card.memory_blocks * BLOCK_BYTES), quantity(BLOCK_BYTES), steps=card.memory_blocks > 1
            ),
        },
    }
    if taints:
        found["taints"] = [
            {"key": f"{names.driver}/{taint.key}", "effect": str(taint.effect)}
            | ({"value": value} if (value := _label_value(taint.value)) else {})
            for taint in taints
        ]
    return found


def _attribute(value: str | int | Version | None) -> dict[str, Any]:
    if isinstance(value, Version):
        return {"version": value.semver}
    return {"int": value} if isinstance(value, int) else {"string": str(value)[:_LONGEST_TEXT]}


def _capacity(whole: str, least: str, *, steps: bool) -> dict[str, Any]:
    between = {"min": least, "max": whole} | ({"step": least} if steps else {})  # min + step must not exceed the value
    return {"value": whole, "requestPolicy": {"default": whole, "validRange": between}}


def _label_value(text: str) -> str:
    return _NO_LABEL_VALUE.sub("-", text)[:63].strip("-_.")


def slice_name(names: Names, node: str, number: int) -> str:
    """Always the same for a node's n-th slice: whoever writes it again after a kill writes no second one."""
    name = f"00-{names.driver}-{node}-{number}"
    if len(name) <= _LONGEST_NAME:
        return name
    return f"00-{names.driver}-{hashlib.blake2s(node.encode(), digest_size=10).hexdigest()}-{number}"


def slices(
    names: Names, node: str, node_uid: str, devices: Sequence[Mapping[str, Any]], generation: int
) -> list[dict[str, Any]]:
    """A node's pool as ResourceSlices, which the node owns (`node_uid`; "": nobody); the devices in the order given."""
    groups = [devices[first : first + MOST_DEVICES] for first in range(0, len(devices), MOST_DEVICES)]
    owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid, "controller": True}
    return [
        {
            "apiVersion": GROUP_VERSION,
            "kind": "ResourceSlice",
            "metadata": {"name": slice_name(names, node, number)} | ({"ownerReferences": [owner]} if node_uid else {}),
            "spec": {
                "driver": names.driver,
                "nodeName": node,
                "pool": {"name": node, "generation": generation, "resourceSliceCount": len(groups)},
                "devices": list(group),
            },
        }
        for number, group in enumerate(groups)
    ]
