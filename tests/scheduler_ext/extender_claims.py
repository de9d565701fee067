"""ResourceSlices and ResourceClaims of the extender's tests, and what holds of every book of claims."""

from __future__ import annotations

import uuid
from typing import Any

from tests.scheduler_ext.extender_support import NAMES, cards, plain_pod
from vcuda.spec import devices
from vcuda.spec.inventory import Card

MIB = 2**20


def node_slices(node: str, its_cards: tuple[Card, ...] | None = None, generation: int = 1) -> list[dict[str, Any]]:
    listed = [devices.device(card, NAMES, {}) for card in (cards(node) if its_cards is None else its_cards)]
    return devices.slices(NAMES, node, "", listed, generation)


def ask(
    name: str = "share", cores: int | None = 30, blocks: int | None = 10, count: int | None = None
) -> dict[str, Any]:
    """One request of a claim."""
    amounts = {
        key: value
        for key, value in (("cores", cores and str(cores)), ("memory", blocks and f"{blocks * 256}Mi"))
        if value
    }
    exactly: dict[str, Any] = {"deviceClassName": NAMES.driver}
    if amounts:
        exactly["capacity"] = {"requests": amounts}
    if count is not None:
        exactly["count"] = count
    return {"name": name, "exactly": exactly}


def claim(name: str, *requests: dict[str, Any], uid: str | None = None, **devices_fields: Any) -> dict[str, Any]:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "default", "uid": uid or str(uuid.uuid4())},
        "spec": {"devices": {"requests": list(requests or (ask(),)), **devices_fields}},
        "status": {},
    }


def user(name: str, *claims: str, uid: str | None = None, annotations: dict[str, str] | None = None) -> dict[str, Any]:
    """A pod that uses claims by name."""
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": uid or str(uuid.uuid4()),
            "annotations": annotations or {},
        },
        "spec": {
            "containers": [{"name": "main", "resources": {"claims": [{"name": one} for one in claims]}}],
            "resourceClaims": [{"name": one, "resourceClaimName": one} for one in claims],
        },
        "status": {"phase": "Pending"},
    }


def allocated(thing: dict[str, Any], *results: tuple[str, str, int, int]) -> dict[str, Any]:
    """The claim with `results`: node, card's UUID, cores, blocks."""
    given = [
        {
            "request": thing["spec"]["devices"]["requests"][0]["name"], "driver": NAMES.driver, "pool": node,
            "device": devices.device_name(card), "shareID": str(uuid.uuid4()),
            "consumedCapacity": {"cores": str(cores), "memory": f"{blocks * 256}Mi"},
        }
        for node, card, cores, blocks in results
    ]  # fmt: skip
    return {**thing, "status": {"allocation": {"devices": {"results": given}}}}


def device_class(name: str, *expressions: str, **fields: Any) -> dict[str, Any]:
    """A DeviceClass of an operator; without expressions it is for our driver's devices."""
    listed = expressions or (f"device.driver == '{NAMES.driver}'",)
    spec = {"selectors": [{"cel": {"expression": one}} for one in listed], **fields}
    return {"metadata": {"name": name}, "spec": spec}


def of_class(request: dict[str, Any], name: str, *expressions: str) -> dict[str, Any]:
    """The request, of that DeviceClass and with selectors of its own."""
    exactly = {**request["exactly"], "deviceClassName": name}
    if expressions:
        exactly["selectors"] = [{"cel": {"expression": one}} for one in expressions]
    return {**request, "exactly": exactly}


def configured(**parameters: Any) -> list[dict[str, Any]]:
    """A class's or a claim's configuration for our driver."""
    given = {"apiVersion": NAMES.config_version, "kind": "ShareConfig", **parameters}
    return [{"opaque": {"driver": NAMES.driver, "parameters": given}}]


def extended(resource: str, kind: str = "containers") -> dict[str, Any]:
    one = plain_pod("p")
    one["spec"][kind] = [{"name": "main", "resources": {"limits": {resource: "2"}}}]
    return one
