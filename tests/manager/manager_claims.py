"""Claims for the daemon's tests: objects as a scheduler leaves them, a node that serves them, its kubelet's calls."""

from __future__ import annotations

import json
import uuid as uuids
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from localcluster.kubelet.claims import ClaimDriver, PluginWatcher
from manager.allocations import accounting
from tests.manager.manager_pods import NAMES, eventually
from tests.manager.manager_support import Node
from vcuda.spec.devices import device_name


def result(card: str, request: str = "gpu", cores: int | None = 30, memory: str = "2560Mi") -> dict[str, Any]:
    """`card`: its UUID; `cores` None: the device as a whole."""
    found: dict[str, Any] = {
        "request": request, "driver": NAMES.driver, "pool": "node-1", "device": device_name(card),
    }  # fmt: skip
    if cores is not None:
        found |= {"shareID": str(uuids.uuid4()), "consumedCapacity": {"cores": str(cores), "memory": memory}}
    return found


def config(**fields: Any) -> dict[str, Any]:
    parameters = {"apiVersion": NAMES.config_version, "kind": "ShareConfig", **fields}
    return {"source": "FromClaim", "opaque": {"driver": NAMES.driver, "parameters": parameters}}


def claim(name: str, *results: dict[str, Any], configs: Any = (), pods: Any = ("p",)) -> dict[str, Any]:
    users = [item if isinstance(item, dict) else {"name": item, "uid": f"uid-{item}"} for item in pods]
    return {
        "metadata": {"namespace": "default", "name": name, "uid": str(uuids.uuid4())},
        "status": {
            "allocation": {"devices": {"results": list(results), "config": list(configs)}},
            "reservedFor": [{"resource": "pods", **item} for item in users],
        },
    }


class ClaimNode:
    """A node whose cards claims get; its API server has no DRA controller, its kubelet is the watcher."""

    def __init__(self, node: Node, *more: str, services: Any = ()) -> None:
        self.node = node
        self.cdi = node.directory / "cdi"
        self.registry = node.directory / "registry"
        self.more = more
        self.watcher = PluginWatcher(self.registry, *([services] if services else []))

    def arguments(self, *more: str) -> list[str]:
        return [
            "--protocols=dra", f"--plugins-path={self.node.directory}/plugins",
            f"--plugins-registry-path={self.registry}", f"--cdi-root={self.cdi}", *self.more, *more,
        ]  # fmt: skip

    def start(self, *more: str) -> ClaimDriver:
        self.node.start(*self.arguments(*more))
        return self.driver()

    def driver(self) -> ClaimDriver:
        def there() -> ClaimDriver | None:
            self.watcher.look()
            return self.watcher.drivers.get(NAMES.driver)

        found: ClaimDriver = eventually(there, "the driver's registration")
        return found

    @property
    def cards(self) -> list[str]:
        assert self.node.daemon is not None
        return [item.card.uuid for item in self.node.daemon.inventory.snapshot.cards]

    def put(self, *claims: dict[str, Any]) -> None:
        assert self.node.api is not None
        self.node.api.put("resourceclaims", *claims)

    def slices(self) -> list[dict[str, Any]]:
        assert self.node.api is not None
        return list(self.node.api.store("resourceslices").list(None, lambda _: True))

    def region(self, item: dict[str, Any], request: str = "gpu") -> Path:
        return self.node.directory / "vm/regions" / str(item["metadata"]["uid"]) / request

    def spec(self, item: dict[str, Any]) -> dict[str, Any]:
        return dict(json.loads((self.cdi / f"tencent.com-claim-{item['metadata']['uid']}.json").read_text()))

    def left(self) -> list[str]:
        """Whatever of claims is on the disk."""
        regions = self.node.directory / "vm/regions"
        found = [str(path.relative_to(regions)) for path in regions.glob("*/*")] if regions.is_dir() else []
        return found + ([path.name for path in self.cdi.iterdir()] if self.cdi.is_dir() else [])


@contextmanager
def claim_node(node: Node, *more: str, services: Any = ()) -> Iterator[ClaimNode]:
    found = ClaimNode(node, *more, services=services)
    try:
        yield found
    finally:
        found.watcher.forget()


def uid_of(item: dict[str, Any]) -> str:
    return str(item["metadata"]["uid"])


def booked(claims: ClaimNode) -> list[tuple[int, int]]:
    """Cores and blocks by card."""
    assert claims.node.daemon is not None
    use = accounting.booked(claims.node.daemon.allocator.allocations)
    return [use.get(uuid, (0, 0)) for uuid in claims.cards]


def error_of(claims: ClaimNode, item: dict[str, Any]) -> str:
    """Of preparing it; nothing of it may be left."""
    before, left = booked(claims), claims.left()
    answer = claims.driver().prepare(item)[uid_of(item)]
    assert answer.error and not answer.devices
    assert booked(claims) == before and claims.left() == left
    return str(answer.error)
