"""Mirror pods: whoever may create pods may call one the mirror of any other; only kubelet's word makes it one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from manager.allocations.state_file import StateFile
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_support import Node, save_state
from vcuda import region
from vcuda.sim import Machine
from vcuda.spec import bookings, placement, resize
from vcuda.spec.placement import CardShare, Placement
from vcuda.spec.units import BLOCK_BYTES

SOURCE, MIRROR = "kubernetes.io/config.source", "kubernetes.io/config.mirror"
STATIC_UID = "4f7e0c6b2f1d4a8c9e5b3a1d7c6f2e80"


@pytest.fixture
def connected(make_node: Callable[..., Node], machine: Machine) -> Node:
    made = make_node(machine.root, with_api=True)
    made.kubelet.start()
    made.start(wait=200)
    return made


def admitted(node: Node, item: dict[str, Any]) -> dict[str, Any]:
    """An ordinary pod with its containers running."""
    assert node.api is not None
    node.api.put("pods", item)
    node.kubelet.admit(item)
    node.kubelet.start_containers(item)
    return item


def mirror(of: dict[str, Any], name: str, namespace: str, cores: int, blocks: int, card: str) -> dict[str, Any]:
    """An object that calls itself the mirror of a pod, with a placement and what the extender has granted it."""
    written = placement.encode(Placement({"c": (CardShare(card, 1, 1),)}))
    made = pod(name, container("c", 1, 1), annotations={MIRROR: of["metadata"]["uid"], NAMES.placement: written})
    made["metadata"]["namespace"] = namespace
    answer = resize.Answer("…", {"c": resize.Target(CardShare(card, cores, blocks))}, goal={card: (100, 10_000)})
    made["status"]["conditions"] = [resize.condition(answer, NAMES, "2026-01-01T00:00:00Z")]
    return made


def marker(node: Node, name: str = "marker") -> None:
    """Wait until what was put before has been seen: a pod that came later has its annotations."""
    api = node.api
    assert api is not None
    item = admitted(node, pod(name, container("c", 2, 1)))
    api.put("pods", {**item, "metadata": {**item["metadata"], "annotations": {}}})
    eventually(lambda: NAMES.placement in api.find("pods", f"default/{name}")["metadata"]["annotations"], "the watch")


def limits(node: Node, item: dict[str, Any]) -> tuple[int, int]:
    (card,) = region.read_limits(node.region(item, "c"))
    return card.cores, card.memory_bytes // BLOCK_BYTES


@pytest.mark.parametrize("amounts", [(1, 1), (80, 20)])
def test_who_calls_itself_the_mirror_of_a_running_pod_resizes_nobody(connected: Node, amounts: tuple[int, int]) -> None:
    victim = admitted(connected, pod("v", container("c", 50, 10)))
    card = connected.kubelet.cards(victim, "c")[0]
    assert connected.api is not None
    connected.api.put("pods", mirror(victim, "x", "evil", *amounts, card))
    marker(connected)
    assert limits(connected, victim) == (50, 10)
    written = connected.api.find("pods", "evil/x")["metadata"]["annotations"]
    assert placement.decode(written[NAMES.placement]).containers["c"] == (CardShare(card, 1, 1),), "nor is it told"


def test_nor_a_namesake_that_comes_while_the_pods_containers_still_run(connected: Node) -> None:
    """Its owner deletes the object at once, which kubelet learns later, and makes a mirror of the same name."""
    own = admitted(connected, pod("own", container("c", 10, 2)))
    card = connected.kubelet.cards(own, "c")[0]
    assert connected.api is not None
    connected.api.delete(own)
    connected.api.put("pods", mirror(own, "own", "default", 80, 20, card))
    marker(connected)
    assert limits(connected, own) == (10, 2)


@pytest.mark.parametrize("name", ["x", "own"])
def test_a_mirror_of_a_pod_that_is_gone_keeps_no_share(connected: Node, name: str) -> None:
    own = admitted(connected, pod("own", container("c", 60, 10)))
    card = connected.kubelet.cards(own, "c")[0]
    assert connected.api is not None
    connected.api.delete(own)
    connected.api.put("pods", mirror(own, name, "default", 60, 10, card))
    connected.kubelet.remove(own)
    eventually(lambda: not any(cores for cores, _ in connected.booked().values()), "a free card", 5.0)


def test_a_mirror_waits_for_no_admission(make_node: Callable[..., Node], machine: Machine) -> None:
    """Kubelet runs none, so none is the pod that it asks for, nor has a place that must be left free."""
    node = make_node(machine.root, with_api=True, with_kubelet_url=False)
    node.kubelet.start()
    node.start(wait=200)
    assert node.api is not None
    for number, card in enumerate(machine.cards):
        made = mirror(pod("?"), f"x{number}", "evil", 1, 1, card.uuid)
        made["spec"]["containers"] = [container("c", 100, 32)]
        whole = placement.encode(Placement({"c": (CardShare(card.uuid, 100, 32),)}))
        made["metadata"]["annotations"][NAMES.placement] = whole
        node.api.put("pods", made)
    item = admitted(node, pod("whole", container("c", 100, 32)))
    assert limits(node, item) == (100, 32)


def test_a_static_pods_own_mirror_is_believed_and_nobody_else(connected: Node) -> None:
    api = connected.api
    assert api is not None
    own = pod("etcd-node-1", container("c", 30, 10), annotations={SOURCE: "file"}, uid=STATIC_UID)
    connected.kubelet.admit(own)
    card = connected.kubelet.cards(own, "c")[0]
    for name, namespace in (("etcd-node-1", "evil"), ("x", "default")):
        api.put("pods", mirror(own, name, namespace, 1, 1, card))
    marker(connected)
    assert limits(connected, own) == (30, 10)
    connected.kubelet.start_containers(own)
    connected.stop()  # what kubelet said of it once is in the state
    real = mirror(own, "etcd-node-1", "default", 40, 12, card)
    api.put("pods", real)
    connected.kubelet.pods.clear()
    connected.start(wait=200)
    eventually(lambda: limits(connected, own) == (40, 12), "the resize")
    (event,) = eventually(lambda: [one for one in api.events if one.get("reason") == "ResizeCompleted"], "the event")
    assert event["involvedObject"]["uid"] == real["metadata"]["uid"]
    # The extender knows it by its object.
    eventually(
        lambda: (
            bookings.decode(api.node()["annotations"][NAMES.bookings]).pods.get(real["metadata"]["uid"])
            == {card: (40, 12)}
        ),
        "the report",
    )
    assert STATIC_UID not in json.dumps(api.node())


def test_a_state_of_an_older_version_learns_from_kubelet_who_is_static(connected: Node) -> None:
    own = pod("etcd-node-1", container("c", 30, 10), annotations={SOURCE: "file"}, uid=STATIC_UID)
    connected.kubelet.admit(own)
    connected.stop()
    file = StateFile(connected.directory / "checkpoint")
    (saved,) = file.read().values()
    assert saved.static
    save_state(file, [dataclasses.replace(saved, static=False)])
    file.close()
    daemon = connected.start(wait=200)
    assert [item.static for item in daemon.allocator.allocations] == [True]


def test_a_pod_can_not_write_itself_that_it_is_static(make_node: Callable[..., Node], machine: Machine) -> None:
    node = make_node(machine.root, with_api=True, with_kubelet_url=False)
    node.kubelet.start()
    daemon = node.start(wait=200)
    admitted(node, pod("p", container("c", 30, 10), annotations={SOURCE: "file"}))
    assert [item.static for item in daemon.allocator.allocations] == [False]
