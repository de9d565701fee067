"""ResourceSlices: what the cards are, one write per change, none without; and the health that kubelet watches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from localcluster.apiserver.faults import Fault, Request
from localcluster.apiserver.store import copied
from manager.dra.node import NodeClaims
from manager.proto import drahealth_pb2
from tests.manager.manager_claims import ClaimNode, claim_node
from tests.manager.manager_pods import NAMES, eventually
from tests.manager.manager_support import Node
from vcuda.sim import CardLost, Machine, SimCard, Xid

GIB = 2**30


@pytest.fixture
def claims(make_machine: Callable[..., Machine], make_node: Callable[..., Node]) -> Iterator[ClaimNode]:
    machine = make_machine(*(SimCard(memory_bytes=8 * GIB) for _ in range(8)))
    with claim_node(make_node(machine.root, with_api=True)) as found:
        yield found


def writes(claims: ClaimNode) -> int:
    assert claims.node.daemon is not None and isinstance(claims.node.daemon.claims, NodeClaims)
    return claims.node.daemon.claims.slices.writes


def settled(claims: ClaimNode) -> list[dict[str, Any]]:
    """The slices once several looks have found nothing to do."""
    eventually(claims.slices, "slices")
    daemon = claims.node.daemon
    assert daemon is not None and isinstance(daemon.claims, NodeClaims)
    slices, last = daemon.claims.slices, -1
    while last != writes(claims):
        last = writes(claims)
        for _ in range(3):
            slices.look()
            eventually(lambda: not slices._wake.is_set(), "a look")
            time.sleep(0.05)
    return claims.slices()


def taints(claims: ClaimNode) -> list[tuple[str, str, str]]:
    return [
        (device["attributes"]["minor"]["int"], taint["key"].rpartition("/")[2], taint["effect"])
        for item in claims.slices()
        for device in item["spec"]["devices"]
        for taint in device.get("taints", ())
    ]


def test_eight_cards_are_one_write_and_none_after_it(claims: ClaimNode) -> None:
    claims.start()
    (item,) = settled(claims)
    assert writes(claims) == 1
    spec = item["spec"]
    assert (spec["driver"], spec["nodeName"]) == (NAMES.driver, "node-1")
    assert spec["pool"] == {"name": "node-1", "generation": 1, "resourceSliceCount": 1}
    assert item["metadata"]["ownerReferences"][0]["kind"] == "Node"
    assert len(spec["devices"]) == 8
    device = spec["devices"][3]
    assert device["attributes"]["minor"] == {"int": 3} and device["attributes"]["type"] == {"string": "gpu"}
    assert device["capacity"]["memory"]["value"] == "8Gi" and device["allowMultipleAllocations"]
    claims.node.stop()
    claims.start()
    assert settled(claims) == [item] and writes(claims) == 0, "a restart finds them as they are"


def test_each_change_is_one_write(claims: ClaimNode) -> None:
    """An Xid, and a good probe after it."""
    api = claims.node.api
    assert api is not None
    note, written = api.hook, []

    def record(request: Request) -> Fault | None:
        if request.method in ("POST", "PUT") and "/resourceslices" in request.path:
            spec = request.body["spec"]
            ill = [device["attributes"]["minor"]["int"] for device in spec["devices"] if "taints" in device]
            written.append((spec["pool"]["generation"], ill))
        return note(request)

    api.hook = record
    claims.start()
    settled(claims)
    Machine(claims.node.directory / "machine").inject(Xid(2, 79))
    eventually(lambda: len(written) >= 3, "both changes")
    settled(claims)
    assert written == [(1, []), (2, [2]), (3, [])]


def test_a_lost_card_is_told_by_taint_and_by_health(claims: ClaimNode) -> None:
    driver = claims.start("--dead-card-policy=evict")
    settled(claims)
    stream = driver.health()
    first = next(stream)
    assert [device.health for device in first.devices] == [drahealth_pb2.HEALTHY] * 8
    assert {device.device.pool_name for device in first.devices} == {"node-1"}
    Machine(claims.node.directory / "machine").inject(CardLost(5))
    ill = next(item for item in stream if any(device.health != drahealth_pb2.HEALTHY for device in item.devices))
    (bad,) = [device for device in ill.devices if device.health == drahealth_pb2.UNHEALTHY]
    assert bad.message and bad.device.device_name == claims.cards[5].lower()
    eventually(lambda: taints(claims) == [(5, "unhealthy", "NoExecute")], "the taint")


def test_streams_of_health_do_not_keep_the_daemon(claims: ClaimNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubelet holds its stream all the time: a server that waits for it would be away for its whole grace."""
    monkeypatch.setattr("manager.dra.sockets.GRACE_S", 60.0)
    stream = claims.start().health()
    next(stream)
    began = time.monotonic()
    claims.node.stop()
    assert time.monotonic() - began < 40


def test_what_kubelet_takes_away_at_its_start_comes_again(claims: ClaimNode) -> None:
    claims.start()
    (item,) = settled(claims)
    assert claims.node.api is not None
    claims.node.api.remove("resourceslices", item["metadata"]["name"])
    eventually(claims.slices, "the slice")
    assert settled(claims)[0]["spec"]["pool"]["generation"] == 2, (
        "never one that somebody may have seen with other devices"
    )


def test_a_slice_that_somebody_edits_is_put_right(claims: ClaimNode) -> None:
    claims.start()
    (item,) = settled(claims)
    assert claims.node.api is not None
    item["spec"]["devices"] = item["spec"]["devices"][:1]
    claims.node.api.put("resourceslices", item)
    eventually(lambda: len(claims.slices()[0]["spec"]["devices"]) == 8, "the devices")


def test_a_restored_store_is_put_right_though_its_versions_are_lower(claims: ClaimNode) -> None:
    """etcd from a backup: the slice and its version are those of then."""
    claims.start()
    (item,) = settled(claims)
    api = claims.node.api
    assert api is not None
    for number in range(8):
        api.put("resourceslices", {**item, "metadata": {**item["metadata"], "labels": {"n": str(number)}}})
    daemon = claims.node.daemon
    assert daemon is not None and isinstance(daemon.claims, NodeClaims)
    newest = claims.slices()[0]["metadata"]["resourceVersion"]
    slices = daemon.claims.slices
    eventually(lambda: slices.informer._version == newest, "the watch")
    store = api.store("resourceslices")
    with store._clock.changed:
        (key,) = store._objects
        old = copied(store._objects[key])
        old["spec"]["devices"], old["metadata"]["resourceVersion"] = [], "4"
        store._clock.version, store._forgotten = 5, 5
        store._history.clear()
        store._objects[key] = old
    api.break_watches("resourceslices")
    eventually(lambda: len(claims.slices()[0]["spec"]["devices"]) == 8, "the devices")


def test_fields_that_the_api_server_drops_are_not_written_for_ever(
    claims: ClaimNode, caplog: pytest.LogCaptureFixture
) -> None:
    """One whose feature gates are off: shares and taints vanish, what is stored never equals what was sent."""
    api = claims.node.api
    assert api is not None
    note = api.hook

    def drop(request: Request) -> Fault | None:
        if request.path.endswith("resourceslices") or "/resourceslices/" in request.path:
            for device in (request.body or {}).get("spec", {}).get("devices", ()):
                device.pop("allowMultipleAllocations", None)
                device.pop("taints", None)
        return note(request)

    api.hook = drop
    claims.start()
    settled(claims)
    assert writes(claims) == 1
    assert "DRAConsumableCapacity" in caplog.text
    Machine(claims.node.directory / "machine").inject(CardLost(2))
    eventually(lambda: len(claims.slices()[0]["spec"]["devices"]) == 7, "an ill card is left out")
    assert "DRADeviceTaints" in caplog.text


def test_the_api_server_is_away_when_the_cards_change(claims: ClaimNode) -> None:
    claims.start()
    settled(claims)
    api = claims.node.api
    assert api is not None
    api.failing = True
    Machine(claims.node.directory / "machine").inject(CardLost(1))
    daemon = claims.node.daemon
    assert daemon is not None
    eventually(lambda: dict(daemon.inventory.snapshot.problems), "the loss")
    api.failing = False
    eventually(lambda: taints(claims) == [(1, "unhealthy", "NoSchedule")], "the taint, later")
    assert not daemon.probes.unhealthy()


def test_more_cards_than_one_slice_holds(
    make_machine: Callable[..., Machine], make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And instances of MIG are cards of their own."""
    monkeypatch.setattr("vcuda.spec.devices.MOST_DEVICES", 16)
    machine = make_machine(*(SimCard(mig=("1g",) * 7) for _ in range(3)))
    with claim_node(make_node(machine.root, with_api=True)) as claims:
        claims.start()
        found = settled(claims)
        assert [len(item["spec"]["devices"]) for item in found] == [16, 5] and writes(claims) == 2
        assert {item["spec"]["pool"]["resourceSliceCount"] for item in found} == {2}
        assert {item["spec"]["pool"]["generation"] for item in found} == {1}
        attributes = [device["attributes"] for item in found for device in item["spec"]["devices"]]
        assert {one["type"]["string"] for one in attributes} == {"mig"}
        assert {one["parentUUID"]["string"] for one in attributes} == {card.uuid for card in machine.cards}
