"""Lives of pods that are not the ordinary one: static, deleted in between, restarted; records in every format."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from manager.allocate import allocator
from manager.allocations.record import Allocation
from tests.manager.manager_kubelet import Rejected
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_support import Node
from vcuda.sim import Machine, SimCard
from vcuda.spec import placement
from vcuda.spec.placement import CardShare, Placement

SOURCE, HASH, MIRROR = (f"kubernetes.io/config.{name}" for name in ("source", "hash", "mirror"))


def static(name: str, uid: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A pod of kubelet's manifest folder as kubelet lists it, and its mirror as the API server does."""
    own = pod(name, container("c", 30, 10), annotations={SOURCE: "file", HASH: uid}, uid=uid)
    mirror = pod(name, container("c", 30, 10), annotations={SOURCE: "file", HASH: uid, MIRROR: uid})
    assert mirror["metadata"]["uid"] != uid
    return own, mirror


def test_a_static_pod_keeps_its_share_under_its_mirrors_name(connected: Node) -> None:
    daemon = connected.start(wait=200)
    assert connected.api is not None
    own, mirror = static("etcd", "4f7e0c6b2f1d4a8c9e5b3a1d7c6f2e80")
    connected.kubelet.admit(own)  # before the API server has heard of it
    assert {item.pod_uid for item in daemon.allocator.allocations} == {own["metadata"]["uid"]}
    connected.api.put("pods", mirror)
    connected.kubelet.pods.remove(own)  # a kubelet that has just started lists it later than the API server its mirror
    assert daemon.allocator.collect() == []
    connected.kubelet.pods.append(own)
    connected.stop()
    connected.start(wait=200)
    assert sum(cores for cores, _ in connected.booked().values()) == 30
    connected.kubelet.start_containers(own)
    connected.kubelet.remove(own)
    connected.api.delete(mirror)
    eventually(lambda: not connected.region(own, "c").exists(), "its end")


def test_a_static_pod_that_was_refused_comes_again_with_its_uid(node: Node) -> None:
    daemon = node.start(wait=200)
    full = [pod(name, container("c", 80, 1)) for name in ("x", "y")]  # kubelet has 30 devices left, no card has
    for item in full:
        node.kubelet.admit(item)
    own, _ = static("late", "00112233445566778899aabbccddeeff")
    node.kubelet.pods.append(own)
    with pytest.raises(Rejected, match="InsufficientCores"):
        node.kubelet.admit(own)
    node.kubelet.remove(full[0])
    full[0]["status"]["phase"] = "Succeeded"
    node.kubelet.pods.append(full[0])
    eventually(lambda: len(daemon.allocator.allocations) == 1, "a free card")
    (node.kubelet.directory / "kubelet_internal_checkpoint").unlink()  # no help from kubelet's records
    node.kubelet.admit(own)
    assert {item.pod_name: item.cores for item in daemon.allocator.allocations} == {"y": 80, "late": 30}


def test_a_pod_deleted_between_bind_and_admission_holds_nothing(connected: Node) -> None:
    """Kubelet still lists it, marked for deletion, and never calls for it; its namesake with equal wishes comes instead."""
    daemon = connected.start(wait=200)
    assert connected.api is not None
    gone, next_one = pod("a", container("c", 60, 20)), pod("a", container("c", 60, 20))
    gone["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    connected.api.put("pods", gone)
    connected.kubelet.pods.append(gone)
    connected.api.delete(gone)
    connected.api.put("pods", next_one)
    connected.api.failing = True  # kubelet's list alone must tell them apart
    connected.kubelet.admit(next_one)
    connected.api.failing = False
    (only,) = daemon.allocator.allocations
    assert only.pod_uid == next_one["metadata"]["uid"]
    assert not connected.region(gone, "c").exists()
    # One that was deleted after its first call leaves nothing either.
    half = pod("half", container("c", 20, 5))
    connected.api.put("pods", half)
    connected.kubelet.pods.append(half)
    connected.kubelet.devices.give(half, *next(connected.kubelet.devices.steps(half)))
    connected.kubelet.remove(half)
    connected.api.delete(half)
    eventually(lambda: not connected.region(half, "c").exists(), "the end of what was half given")
    assert daemon.allocator.allocations == (only,)


@pytest.mark.parametrize("told", [True, False])
def test_a_newcomer_placed_on_its_victims_card_waits_for_the_word_that_the_victim_is_gone(
    connected: Node, machine: Machine, told: bool
) -> None:
    """Preemption: kubelet has let go of the victim already, the API server's watch tells of it a moment later, or not at all."""
    daemon = connected.start(wait=200)
    assert connected.api is not None
    written = placement.encode(Placement({"c": (CardShare(machine.cards[0].uuid, 60, 20),)}))
    victim, newcomer = (
        pod(name, container("c", 60, 20), annotations={NAMES.placement: written}) for name in ("low", "high")
    )
    connected.api.put("pods", victim)
    connected.kubelet.admit(victim)
    connected.kubelet.remove(victim)
    connected.api.put("pods", newcomer)
    if told:
        later = threading.Timer(0.5, connected.api.delete, [victim])
        later.start()
        connected.kubelet.admit(newcomer)
        later.join()
        (only,) = daemon.allocator.allocations
        assert only.pod_uid == newcomer["metadata"]["uid"]
    else:
        with pytest.raises(Rejected, match="InsufficientCores"):
            connected.kubelet.admit(newcomer)
        (only,) = daemon.allocator.allocations
        assert only.pod_uid == victim["metadata"]["uid"]


def test_containers_that_restart_get_what_they_had(node: Node, machine: Machine) -> None:
    daemon = node.start(wait=200)
    item = pod("a", container("c", 30, 10), container("d", 20, 5), init=[container("i", 10, 2)])
    node.kubelet.admit(item)
    before = daemon.allocator.allocations
    inodes = {name: (node.region(item, name) / "usage").stat().st_ino for name in ("c", "d")}
    calls = 'vcuda_manager_allocations_total{node="node-1",reason="",resource="core"} 3.0'
    assert calls in node.get("/metrics")[1]
    for name in ("nvidia0", "nvidia-uvm"):
        machine.remove_node(name)
        node.kubelet.start_containers(item)  # a restart: PreStartContainer alone, with the same devices
        assert (machine.root / "dev" / name).exists()
    assert daemon.allocator.allocations == before
    assert {name: (node.region(item, name) / "usage").stat().st_ino for name in ("c", "d")} == inodes
    assert calls in node.get("/metrics")[1]


def split(ids: list[str]) -> dict[str, list[str]]:
    """As on a machine with two NUMA nodes and devices of none."""
    return {"0": ids[::3], "1": ids[1::3], "-1": ids[2::3]}


FORMS: dict[str, Callable[[list[str]], Any]] = {
    "v1: a list": lambda ids: ids,
    "v2: by NUMA node, one": lambda ids: {"0": ids},
    "v2: by NUMA node, several": split,
}


@pytest.mark.parametrize("form", FORMS)
def test_lost_state_is_rebuilt_from_every_format_of_kubelets_checkpoint(node: Node, form: str) -> None:
    daemon = node.start(wait=200)
    pods = [pod("a", container("c", 30, 10), container("d", 20, 5)), pod("b", container("c", 100))]
    for item in pods:
        node.kubelet.admit(item)
    before = {item.key: (item.shares, item.held, item.cores) for item in daemon.allocator.allocations}
    node.stop()
    for path in (node.directory / "checkpoint").glob("state.*"):
        path.unlink()
    rows = [
        {
            "PodUID": uid,
            "ContainerName": name,
            "ResourceName": resource,
            "DeviceIDs": FORMS[form](held.devices),
            "AllocResp": base64.b64encode(held.response).decode(),
        }
        for (uid, name), resources in node.kubelet.devices.records.items()
        for resource, held in resources.items()
    ]
    registered = {NAMES.core: ["x-1"], NAMES.memory: ["x-1"]}
    document = {"Data": {"PodDeviceEntries": rows, "RegisteredDevices": registered}, "Checksum": 7}
    (node.kubelet.directory / "kubelet_internal_checkpoint").write_text(json.dumps(document))
    daemon = node.start(wait=200)
    assert {item.key: (item.shares, item.held, item.cores) for item in daemon.allocator.allocations} == before and len(
        before
    ) == 3
    node.kubelet.start_containers(pods[0])


def test_instances_are_audited_like_ordinary_cards_and_their_parents_are_not(
    make_machine: Callable[..., Machine], make_node: Callable[..., Node]
) -> None:
    machine = make_machine(SimCard(mig=("3g", "2g")), SimCard())
    node = make_node(machine.root)
    node.kubelet.start()
    daemon = node.start(wait=300)
    on_instance = pod("i", container("c", 30, 4), annotations={NAMES.card_uuid: machine.cards[0].mig[0].uuid})
    on_card = pod("o", container("c", 30, 4), annotations={NAMES.card_uuid: machine.cards[1].uuid})
    for item in (on_instance, on_card):
        node.kubelet.admit(item)

    def figures() -> dict[str, int | None]:
        report = json.loads(node.get("/usage")[1])
        return {item["pod_name"]: item["cards"][0]["unaccounted_bytes"] for item in report["containers"]}

    eventually(lambda: figures() == {"i": 0, "o": 0}, "an audit")
    instances = {instance.uuid for instance in machine.cards[0].mig}
    assert daemon.auditor.finding.others.keys() == {*instances, machine.cards[1].uuid}
    usage = {card["uuid"]: card["booked_cores"] for card in json.loads(node.get("/usage")[1])["cards"]}
    first, second = (instance.uuid for instance in machine.cards[0].mig)
    assert usage == {first: 30, second: 0, machine.cards[1].uuid: 30}


def test_a_pod_is_admitted_between_the_removals_of_many_that_have_gone(
    make_node: Callable[..., Node], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_node(machine.root)
    node.kubelet.start()
    daemon = node.start(wait=200)
    gone = [pod(f"gone-{number}", container("c", 5, 1)) for number in range(16)]  # the newcomer needs six calls
    for item in gone:
        node.kubelet.admit(item)
    monkeypatch.setattr(allocator, "ABSENT_GRACE_S", 0.0)
    regions = daemon.allocator._regions
    remove, removed = regions.remove, threading.Event()

    def slowly(item: Allocation) -> None:
        time.sleep(0.1)
        remove(item)
        removed.set()

    monkeypatch.setattr(regions, "remove", slowly)
    for item in gone:
        node.kubelet.remove(item)
    daemon.hangup()  # look at once
    assert removed.wait(10)
    node.kubelet.admit(pod("newcomer", container("c", 5, 1)))
    assert sum(node.region(item, "c").exists() for item in gone) > 2
    eventually(lambda: not any(node.region(item, "c").exists() for item in gone), "all regions removed")
