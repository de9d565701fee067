"""A card that reports errors: it alone leaves, its pods alone are told, by which reason, and when it is back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from manager.kubelet import device_ids
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_support import Node
from vcuda.sim import Machine, Xid

# Uncorrectable memory errors as the driver reports them: double bit, and uncontained.
ECC_XIDS = (48, 95)


@pytest.fixture
def connected(make_node: Callable[..., Node], machine: Machine) -> Node:
    node = make_node(machine.root, with_api=True)
    node.kubelet.start()
    return node


def unhealthy(node: Node) -> set[str]:
    """Keys of the cards whose devices kubelet was told to be unhealthy, of either resource."""
    return {
        device_ids.card_of(device.id)
        for name in (NAMES.core, NAMES.memory)
        for device in node.kubelet.listed(name) or ()
        if not device.healthy
    }


def one_pod_per_card(node: Node, machine: Machine) -> dict[str, dict[str, Any]]:
    assert node.api is not None
    found = {}
    for card in machine.cards:
        item = pod(f"on-{card.minor}", container("c", 30, 4), annotations={NAMES.card_uuid: card.uuid})
        node.api.put("pods", item)
        node.kubelet.admit(item)
        found[card.uuid] = item
    return found


def told(node: Node) -> list[tuple[str, str]]:
    assert node.api is not None
    return [
        (event["involvedObject"]["name"], event["message"])
        for event in node.api.events
        if event.get("reason") == "CardUnhealthy"
    ]


@pytest.mark.parametrize("xid", ECC_XIDS)
def test_a_memory_error_takes_its_card_alone_and_tells_its_pods_alone(
    connected: Node, machine: Machine, xid: int
) -> None:
    daemon = connected.start("--health-check-interval=1", wait=200)
    one_pod_per_card(connected, machine)
    bad = machine.cards[1]
    time.sleep(0.2)  # let the watching thread wait for events
    machine.inject(Xid(bad.minor, xid))
    connected.kubelet.wait_devices(100)
    assert unhealthy(connected) == {device_ids.card_key(bad.uuid)}
    eventually(lambda: told(connected), "the event")
    assert daemon.api_writer.wait_empty(10)
    assert told(connected) == [(f"on-{bad.minor}", f"card {bad.uuid}: Xid {xid}")]
    # Running pods keep their shares; a new one goes to the other card.
    assert {cores for cores, _ in connected.booked().values()} == {30}
    item = pod("new", container("c", 10, 1))
    connected.kubelet.admit(item)
    assert connected.kubelet.cards(item, "c") == [machine.cards[0].uuid]
    connected.kubelet.wait_devices(200)


def test_the_list_of_ignored_xids_replaces_the_default(node: Node, machine: Machine) -> None:
    """31 is an application's error by default."""
    daemon = node.start("--health-check-interval=1", "--health-ignore-xids=48, 94", wait=200)
    time.sleep(0.2)
    machine.inject(Xid(0, 48))
    machine.inject(Xid(1, 31))
    node.kubelet.wait_devices(100)
    assert dict(daemon.inventory.snapshot.problems) == {machine.cards[1].uuid: "Xid 31"}
    node.kubelet.wait_devices(200)


@pytest.mark.parametrize(
    ("function", "code"),
    [
        ("nvmlDeviceGetMemoryInfo", pynvml.NVML_ERROR_UNKNOWN),
        ("nvmlDeviceGetMinorNumber", pynvml.NVML_ERROR_IRQ_ISSUE),
        ("nvmlDeviceGetName", pynvml.NVML_ERROR_CORRUPTED_INFOROM),
        ("nvmlDeviceGetMemoryInfo", pynvml.NVML_ERROR_GPU_IS_LOST),
    ],
)
def test_a_card_that_answers_with_an_nvml_error(
    connected: Node, machine: Machine, monkeypatch: pytest.MonkeyPatch, function: str, code: int
) -> None:
    daemon = connected.start(wait=200)
    one_pod_per_card(connected, machine)
    bad = machine.cards[0]
    real = getattr(pynvml, function)

    def ask(handle: Any, **version: Any) -> Any:
        if pynvml.nvmlDeviceGetUUID(handle) == bad.uuid:
            raise pynvml.NVMLError(code)
        return real(handle, **version)

    monkeypatch.setattr(pynvml, function, ask)
    connected.kubelet.wait_devices(100)
    assert unhealthy(connected) == {device_ids.card_key(bad.uuid)}
    ((name, message),) = eventually(lambda: told(connected), "the event")
    assert name == f"on-{bad.minor}" and str(pynvml.NVMLError(code)) in message
    (shown,) = [card for card in json.loads(connected.get("/usage")[1])["cards"] if not card["healthy"]]
    assert shown["uuid"] == bad.uuid and shown["booked_cores"] == 30
    assert connected.get("/healthz") == (200, "ok\n")  # a card's error is no reason to restart the daemon
    monkeypatch.setattr(pynvml, function, real)
    connected.kubelet.wait_devices(200)
    assert daemon.api_writer.wait_empty(10) and len(told(connected)) == 1
