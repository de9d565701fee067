"""Others on our cards: device plugins, MPS daemons; and shares too small to be of use."""

# ruff: noqa: ARG002  (names of parameters are the protocol's)
from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from manager.audit.foreign_use import ForeignUse
from manager.cards.driver import CardProcess, DriverError, NodeCard, Probe, XidEvent
from manager.cards.inventory import Inventory
from manager.cards.seen import SeenCards
from manager.config.settings import Settings
from manager.kubelet.records import PodResources, RecordsError
from manager.proto import podresources_pb2 as resources_api
from manager.proto import podresources_pb2_grpc
from tests.manager.manager_kubelet import Rejected
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_support import Node
from vcuda.driver.root import HostRoot
from vcuda.sim import Machine
from vcuda.spec.inventory import Card

PodRow = tuple[str, str, list[str]]


class Kubelet(podresources_pb2_grpc.PodResourcesListerServicer):
    """PodResources with rows (pod, resource, device IDs)."""

    def __init__(self, socket: Path) -> None:
        self.rows: list[PodRow] = []
        self.claims: list[tuple[str, str, str]] = []  # pod, driver, device
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        podresources_pb2_grpc.add_PodResourcesListerServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{socket}")
        self._server.start()

    def List(self, *_: object) -> resources_api.ListPodResourcesResponse:
        answer = resources_api.ListPodResourcesResponse()
        for name, resource, ids in self.rows:
            devices = resources_api.ContainerDevices(resource_name=resource, device_ids=ids)
            containers = [resources_api.ContainerResources(name="c", devices=[devices])]
            answer.pod_resources.append(
                resources_api.PodResources(name=name, namespace="default", containers=containers)
            )
        for name, driver, device in self.claims:
            made = [resources_api.ClaimResource(driver_name=driver, pool_name="node-1", device_name=device)]
            claim = resources_api.DynamicResource(claim_name="c", claim_namespace="default", claim_resources=made)
            containers = [resources_api.ContainerResources(name="c", dynamic_resources=[claim])]
            answer.pod_resources.append(
                resources_api.PodResources(name=name, namespace="default", containers=containers)
            )
        return answer

    def close(self) -> None:
        self._server.stop(0).wait()


@pytest.fixture
def kubelet(short_directory: Path) -> Iterator[Kubelet]:
    made = Kubelet(short_directory / "resources.sock")
    yield made
    made.close()


def test_only_nvidias_own_plugin_counts_and_shared_devices_are_the_card(
    kubelet: Kubelet, short_directory: Path
) -> None:
    kubelet.rows = [
        ("a", "nvidia.com/gpu", ["GPU-1"]), ("b", "nvidia.com/gpu.shared", ["GPU-2::0", "GPU-2::1"]),
        ("c", NAMES.core, ["0123456789-1"]), ("d", "example.com/fpga", ["GPU-3"]),
    ]  # fmt: skip
    client = PodResources(short_directory / "resources.sock", NAMES)
    assert client.held_elsewhere(5) == {
        "GPU-1": "nvidia.com/gpu of default/a, through another device plugin",
        "GPU-2": "nvidia.com/gpu.shared of default/b, through another device plugin",
    }
    client.close()


def test_only_nvidias_own_driver_counts_among_claims_and_an_instance_is_its_card(
    kubelet: Kubelet, short_directory: Path
) -> None:
    kubelet.claims = [
        ("a", "gpu.nvidia.com", "gpu-1"), ("b", "gpu.nvidia.com", "gpu-12-mig-1g10gb-19-0"),
        ("c", "gpu.nvidia.com", "gpu-vfio-3"), ("d", "gpu.example.com", "gpu-4"), ("e", "gpu.nvidia.com", ""),
    ]  # fmt: skip
    client = PodResources(short_directory / "resources.sock", NAMES)
    assert client.held_elsewhere(5) == {
        "gpu-1": "the resource claim default/c of default/a, through NVIDIA's DRA driver",
        "gpu-12": "the resource claim default/c of default/b, through NVIDIA's DRA driver",
    }
    client.close()


def test_a_card_of_a_resource_claim_is_not_ours_to_give(kubelet: Kubelet, node: Node) -> None:
    daemon = node.start(f"--pod-resources-socket={node.directory}/resources.sock", wait=200)
    claimed, free = daemon.inventory.snapshot.cards
    kubelet.claims = [("other", "gpu.nvidia.com", f"gpu-{claimed.device_minor}")]
    node.kubelet.wait_devices(100)
    problems = {card["uuid"]: card["problem"] for card in json.loads(node.get("/usage")[1])["cards"]}
    assert "held by the resource claim default/c of default/other" in problems[claimed.card.uuid]
    one = pod("a", container("c", 100))
    node.kubelet.admit(one)
    assert node.kubelet.cards(one, "c") == [free.card.uuid]
    kubelet.claims = []
    node.kubelet.wait_devices(200)


def test_a_card_of_another_plugin_is_not_ours_to_give(kubelet: Kubelet, node: Node) -> None:
    daemon = node.start(f"--pod-resources-socket={node.directory}/resources.sock", wait=200)
    first, second = (item.card.uuid for item in daemon.inventory.snapshot.cards)
    kubelet.rows = [("other", "nvidia.com/gpu", [first])]
    node.kubelet.wait_devices(100)
    problems = {card["uuid"]: card["problem"] for card in json.loads(node.get("/usage")[1])["cards"]}
    assert "held by nvidia.com/gpu of default/other, through another device plugin" in problems[first]
    item = pod("a", container("c", 100))
    node.kubelet.admit(item)
    assert node.kubelet.cards(item, "c") == [second]
    kubelet.rows = []
    node.kubelet.wait_devices(200)


def test_whose_pod_holds_a_card_is_told_to_nobody_who_may_not_know(
    kubelet: Kubelet, make_node: Callable[..., Node], machine: Machine
) -> None:
    """The event on a neighbour's pod named the other tenant's pod. Nodes and events are read by many; /usage is guarded."""
    node = make_node(machine.root, with_api=True)
    node.kubelet.start()
    assert node.api is not None
    node.start(f"--pod-resources-socket={node.directory}/resources.sock", wait=200)
    mine = pod("mine", container("c", 30, 4))
    node.api.put("pods", mine)
    node.kubelet.admit(mine)
    (uuid,) = node.kubelet.cards(mine, "c")
    kubelet.rows = [("secret-project", "nvidia.com/gpu", [uuid])]
    node.kubelet.wait_devices(100)
    said = eventually(
        lambda: [one for one in node.api.events if one["reason"] == "CardUnhealthy" and len(node.api.events) > 2],
        "events on node and pod",
    )
    assert {one["involvedObject"]["kind"] for one in said} == {"Node", "Pod"}
    told = eventually(lambda: node.api.find("nodes", "node-1")["metadata"].get("annotations"), "the inventory")
    eventually(
        lambda: "past gpu-manager" in node.api.find("nodes", "node-1")["metadata"]["annotations"][NAMES.inventory],
        "why",
    )
    assert "secret-project" not in json.dumps([node.api.events, node.api.find("nodes", "node-1")]) and told
    assert "secret-project" in node.get("/usage")[1]


def item(uuid: str, parent: str = "") -> NodeCard:
    return NodeCard(Card(uuid, 0, "m", 2**30), 0, parent)


def test_a_card_under_a_foreign_mps_server_is_blocked_with_the_reason(tmp_path: Path) -> None:
    for pid, comm in ((7, "nvidia-cuda-mps"), (8, "python3")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "comm").write_text(f"{comm}\n")
    processes = {
        "GPU-1": (CardProcess(8, 1), CardProcess(7, None)),
        "GPU-2": (CardProcess(8, 1), CardProcess(9, 1)),
    }
    found = ForeignUse(processes.get, dict, lambda _: False, tmp_path).blocked(
        [item("GPU-1"), item("GPU-2"), item("GPU-3")]
    )
    assert list(found) == ["GPU-1"] and "a foreign MPS daemon serves it" in found["GPU-1"]


def test_records_that_cannot_be_had_change_nothing() -> None:
    answers: list[dict[str, str]] = [{"GPU-1": "x"}]

    def held() -> dict[str, str]:
        if not answers:
            raise RecordsError("away")
        return answers.pop()

    foreign_use = ForeignUse(lambda _: None, held, lambda _: False)
    cards = [item("GPU-1"), item("MIG-1", parent="GPU-1"), item("GPU-2")]
    assert [set(foreign_use.blocked(cards)) for _ in range(2)] == [{"GPU-1", "MIG-1"}] * 2


def test_a_share_below_the_smallest_is_refused_with_the_way_out(node: Node) -> None:
    node.start("--smallest-memory=3", wait=200)
    with pytest.raises(Rejected, match=r"ShareTooSmall: .* asks for 2 tencent.com/vcuda-memory, .* no share below 3"):
        node.kubelet.admit(pod("small", container("c", 10, 2)))
    node.kubelet.admit(pod("enough", container("c", 10, 3)))
    node.kubelet.admit(pod("whole", container("c", 100)))


class LostCard:
    """A driver whose wait for events fails at once, as NVML's does while a lost card is in the set."""

    name = "nvml"
    has_events = True

    def __init__(self) -> None:
        self.waits = 0

    def probe(self) -> Probe:
        return Probe("1", ())

    def wait_xid(self, timeout_s: float) -> XidEvent | None:
        self.waits += 1
        raise DriverError("nvmlEventSetWait: GPU is lost")

    def sample(self, uuid: str) -> None:
        return None

    def processes(self, uuid: str) -> None:
        return None

    def close(self) -> None:
        return


def test_a_wait_for_events_that_fails_at_once_does_not_spin(tmp_path: Path) -> None:
    driver = LostCard()
    inventory = Inventory(HostRoot(tmp_path), lambda _: driver, Settings, SeenCards(tmp_path))
    inventory.probe()
    inventory.start()
    eventually(lambda: driver.waits, "a first wait")
    time.sleep(0.5)
    assert driver.waits <= 2
    inventory.stop()
