"""A card that reports errors: it alone leaves, its pods alone are told, by which reason, and when it is back."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pynvml
import pytest

from manager import doctor
from manager.cards.seen import SeenCards
from manager.kubelet import device_ids
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_support import Node
from vcuda.driver.root import HostRoot
from vcuda.sim import CardLost, CardRecovered, Machine, Xid
from vcuda.spec import inventory

# Uncorrectable memory errors as the driver reports them: double bit, and uncontained.
ECC_XIDS = (48, 95)


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
        if event.get("reason") == "CardUnhealthy" and event["involvedObject"]["kind"] == "Pod"
    ]


def of_node(node: Node) -> list[tuple[str, str, str]]:
    assert node.api is not None
    return [
        (event["type"], event["reason"], event["message"])
        for event in node.api.events
        if event["involvedObject"]["kind"] == "Node"
    ]


def published(node: Node) -> dict[str, tuple[bool, str]]:
    """By UUID what the node's annotation says of a card's health."""
    assert node.api is not None
    text = node.api.find("nodes", "node-1")["metadata"].get("annotations", {}).get(NAMES.inventory)
    return {card.uuid: (card.healthy, card.why) for card in inventory.decode(text)} if text else {}


def test_why_a_card_is_ill_is_at_the_node_and_goes_again(connected: Node, machine: Machine) -> None:
    """`kubectl describe node` said nothing, and the scheduler only that a card is unhealthy."""
    connected.start("--health-check-interval=1", wait=200)
    bad, good = machine.cards
    time.sleep(0.2)  # let the watching thread wait for events
    machine.inject(Xid(bad.minor, 79))
    eventually(lambda: published(connected).get(bad.uuid) == (False, "Xid 79"), "the inventory says why")
    assert published(connected)[good.uuid] == (True, "")
    eventually(lambda: published(connected)[bad.uuid] == (True, ""), "it is well again")
    eventually(lambda: len(of_node(connected)) == 2, "two events")
    assert of_node(connected) == [
        ("Warning", "CardUnhealthy", f"card {bad.uuid}: Xid 79"),
        ("Normal", "CardHealthy", f"card {bad.uuid} can take shares again"),
    ]


def test_what_the_whole_node_lacks_is_said_of_each_card(connected: Node, machine: Machine) -> None:
    daemon = connected.start("--health-check-interval=1", wait=200)
    devices = machine.root / "proc" / "devices"
    kept = devices.read_text()
    devices.write_text("".join(line for line in kept.splitlines(keepends=True) if "nvidia-uvm" not in line))
    connected.kubelet.wait_devices(0)
    eventually(lambda: {why for _, why in published(connected).values()} - {""}, "the inventory says why")
    assert {well for well, _ in published(connected).values()} == {False}
    assert all("nvidia-uvm" in why for _, why in published(connected).values())
    devices.write_text(kept)
    connected.kubelet.wait_devices(200)
    assert daemon.api_writer.wait_empty(10)
    (ill, well) = of_node(connected)
    assert ill[:2] == ("Warning", "CardUnhealthy") and ill[2].startswith("all cards: ") and "nvidia-uvm" in ill[2]
    assert well == ("Normal", "CardHealthy", "all cards can take shares again")


def test_a_pod_is_told_what_it_got(connected: Node, machine: Machine) -> None:
    daemon = connected.start(wait=200)
    assert connected.api is not None
    card = machine.cards[1]
    item = pod("p", container("c", 30, 10), annotations={NAMES.card_uuid: card.uuid, NAMES.core_limit: "50"})
    connected.api.put("pods", item)
    connected.kubelet.admit(item)
    said = eventually(lambda: [one for one in connected.api.events if one["reason"] == "ShareAssigned"], "the event")
    assert daemon.api_writer.wait_empty(10)
    assert [(one["type"], one["involvedObject"]["name"], one["message"]) for one in said] == [
        ("Normal", "p", f"c: 30 cores (up to 50), 2.5 GiB on card 1, {card.model.name}")
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


def test_a_card_that_is_lost_while_no_daemon_runs_is_missed_until_it_is_said_to_be_taken_out(
    connected: Node, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next daemon logged "1 cards, 1 healthy", and nothing told of the other one."""
    assert connected.api is not None
    connected.start("--health-check-interval=0.2", wait=200)
    well, bad = machine.cards
    connected.stop()
    machine.inject(CardLost(bad.minor))
    daemon = connected.start("--health-check-interval=0.2", wait=100)
    why = eventually(lambda: published(connected)[bad.uuid][1], "the inventory says why")
    assert re.fullmatch(r"not seen since \d{4}-\d\d-\d\d \d\d:\d\d UTC: .*GPU is lost", why)
    assert published(connected) == {well.uuid: (True, ""), bad.uuid: (False, why)}
    assert unhealthy(connected) == {device_ids.card_key(bad.uuid)}
    said = eventually(lambda: of_node(connected), "the event")
    assert said == [("Warning", "CardUnhealthy", f"card {bad.uuid}: {why}")]
    [row] = [
        line
        for line in connected.get("/metrics")[1].splitlines()
        if line.startswith("vcuda_card_healthy") and bad.uuid in line
    ]
    assert row.endswith(" 0.0")
    looked = {check.what: check for check in doctor._driver(HostRoot(machine.root), daemon.settings)}
    assert looked[f"card {bad.uuid}"].verdict == "FAIL" and "--removed-cards" in looked[f"card {bad.uuid}"].details
    connected.stop()

    connected.start(f"--removed-cards={bad.uuid}", wait=100)
    eventually(lambda: bad.uuid not in published(connected), "it is forgotten")
    connected.stop()
    daemon = connected.start("--health-check-interval=0.2", wait=100)
    assert [item.card.uuid for item in daemon.inventory.snapshot.cards] == [well.uuid]
    machine.inject(CardRecovered(bad.minor))
    connected.kubelet.wait_devices(200)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 1, "cards": [{}]}',
        '{"version": 1, "cards": [{"card": {}, "seen": 1e99}]}',
        '{"version": 2}',
    ],
)
def test_a_damaged_list_of_cards_counts_as_none(connected: Node, text: str) -> None:
    folder = connected.directory / "checkpoint"
    folder.mkdir(exist_ok=True)
    (folder / "cards.json").write_text(text)
    connected.start(wait=200)
    assert len(SeenCards(folder).cards) == 2
