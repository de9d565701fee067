"""ResourceClaimTemplates for shares that pods ask for as extended resources: one per shape, named by what it holds.

A name says all that its template holds: whoever finds the name can make the template, two that make it make the same,
and equal pods share one: `vcuda-30c-10m` (30 cores, 10 blocks of one card), `vcuda-30c-10m-50l-20o-high` (with an
elastic limit of 50 cores, 20 blocks in all, high priority), `vcuda-2x` (two whole cards).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from vcuda.quoted import quoted
from vcuda.spec.claims import CORES, GROUP_VERSION, MEMORY
from vcuda.spec.devices import quantity
from vcuda.spec.errors import InvalidRequest, Reason
from vcuda.spec.names import Names
from vcuda.spec.request import MAX_CARDS_PER_CONTAINER, ContainerRequest, Priority
from vcuda.spec.share_config import CONFIG_KIND
from vcuda.spec.units import BLOCK_BYTES, CORES_PER_CARD

REQUEST = "share"  # the name of the one request of each claim
MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "gpu-scheduler-extender"
_NUMBER = "[1-9][0-9]{0,8}"
_NAME = re.compile(
    rf"vcuda-(?:(?P<cards>{_NUMBER})x|(?P<cores>{_NUMBER})c-(?P<blocks>{_NUMBER})m(?:-(?P<limit>{_NUMBER})l)?"
    rf"(?:-(?P<oversell>{_NUMBER})o)?)(?:-(?P<priority>{Priority.LOW}|{Priority.HIGH}))?"
)


@dataclass(frozen=True)
class ShareTemplate:
    """`cores` and `blocks` of one card, or `cards` whole ones (then both are 0).

    `core_limit`: the elastic limit in cores, 0 for none; `oversell_blocks`: what the share may hold in all, 0 for no
    more than `blocks`.
    """

    cores: int = 0
    blocks: int = 0
    cards: int = 1
    core_limit: int = 0
    oversell_blocks: int = 0
    priority: Priority = Priority.NORMAL

    @classmethod
    def of(cls, asked: ContainerRequest, priority: Priority) -> ShareTemplate:
        """What a container's request becomes. Raises InvalidRequest for amounts that no name says."""
        if asked.whole:
            found = cls(cards=asked.card_count, priority=priority)
        else:
            limit = asked.core_limit if asked.core_limit > asked.cores else 0
            found = cls(asked.cores, asked.memory_blocks, 1, limit, asked.oversell_blocks, priority)
        if cls.named(found.name) != found:
            raise InvalidRequest(
                Reason.INVALID_CLAIM,
                f"container {quoted(asked.name)}: no claim can say {asked.cores} cores, {asked.memory_blocks} blocks "
                f"of 256 MiB and {asked.oversell_blocks} with oversell; ask for what a card has",
            )
        return found

    @classmethod
    def named(cls, name: str) -> ShareTemplate | None:
        """What a name says; None for a name that is none of ours, or says what no container could ask for."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        priority = Priority(match["priority"] or Priority.NORMAL)
        if match["cards"]:
            cards = int(match["cards"])
            return cls(cards=cards, priority=priority) if cards <= MAX_CARDS_PER_CONTAINER else None
        cores, blocks, limit, oversell = (int(match[key] or 0) for key in ("cores", "blocks", "limit", "oversell"))
        valid = (
            cores < CORES_PER_CARD
            and (not limit or cores < limit <= CORES_PER_CARD)
            and (not oversell or oversell > blocks)
        )
        return cls(cores, blocks, 1, limit, oversell, priority) if valid else None

    @property
    def name(self) -> str:
        parts = [f"{self.cards}x"] if not self.cores else [f"{self.cores}c", f"{self.blocks}m"]
        parts += [f"{self.core_limit}l"] * bool(self.core_limit) + [f"{self.oversell_blocks}o"] * bool(
            self.oversell_blocks
        )
        parts += [str(self.priority)] * (self.priority is not Priority.NORMAL)
        return "-".join(["vcuda", *parts])

    def template(self, namespace: str, names: Names) -> dict[str, Any]:
        """The ResourceClaimTemplate (resource.k8s.io/v1).

        A request without amounts takes a whole card: that is the default of the devices' capacities.
        """
        exactly: dict[str, Any] = {"deviceClassName": names.driver}
        devices: dict[str, Any] = {"requests": [{"name": REQUEST, "exactly": exactly}]}
        if self.cores:
            exactly["capacity"] = {"requests": {CORES: str(self.cores), MEMORY: quantity(self.blocks * BLOCK_BYTES)}}
        if self.cards > 1:
            exactly["count"] = self.cards
            # Else one card could be given twice.
            devices["constraints"] = [{"requests": [REQUEST], "distinctAttribute": f"{names.driver}/uuid"}]
        parameters: dict[str, Any] = {}
        if self.core_limit:
            parameters["coreLimit"] = self.core_limit
        if self.oversell_blocks:
            parameters["oversell"] = quantity(self.oversell_blocks * BLOCK_BYTES)
        if self.priority is not Priority.NORMAL:
            parameters["priority"] = str(self.priority)
        if parameters:
            parameters = {"apiVersion": names.config_version, "kind": CONFIG_KIND, **parameters}
            opaque = {"driver": names.driver, "parameters": parameters}
            devices["config"] = [{"requests": [REQUEST], "opaque": opaque}]
        return {
            "apiVersion": GROUP_VERSION,
            "kind": "ResourceClaimTemplate",
            "metadata": {"namespace": namespace, "name": self.name, "labels": {MANAGED_BY: MANAGER}},
            "spec": {"spec": {"devices": devices}},
        }
