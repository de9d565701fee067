"""Registration: kubelet absent at first, restarted, restarted in a loop; the device lists it sees."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import grpc
import pytest

from manager.allocate.find_pod import PodFinder
from manager.errors import StartError
from manager.proto import deviceplugin_pb2 as api
from manager.proto import deviceplugin_pb2_grpc as api_grpc
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_support import Node
from vcuda.sim import CardLost, CardRecovered, Machine, SimCard, Xid


@pytest.mark.parametrize("numa_nodes", [1, 2])
def test_registers_both_resources_with_their_options(
    make_machine: Callable[..., Machine], make_node: Callable[..., Node], numa_nodes: int
) -> None:
    """Kubelet asks which devices we prefer only where it counts them by NUMA node."""
    node = make_node(make_machine(*(SimCard(memory_bytes=8 * 2**30, numa_node=n % numa_nodes) for n in range(2))).root)
    node.kubelet.start()
    node.start(wait=200)
    assert node.kubelet.registered == {NAMES.core: "vcore.sock", NAMES.memory: "vmemory.sock"}
    for resource, socket in node.kubelet.registered.items():
        endpoint = node.kubelet.devices.endpoint(resource)
        assert endpoint.pre_start_required and endpoint.preferred_allocation == (numa_nodes == 2)
        with grpc.insecure_channel(f"unix:{node.kubelet.directory}/{socket}") as channel:
            options = api_grpc.DevicePluginStub(channel).GetDevicePluginOptions(api.Empty(), timeout=5)
        assert options.pre_start_required and options.get_preferred_allocation_available == (numa_nodes == 2)
    assert node.kubelet.healthy(NAMES.memory) == 64


def test_kubelet_is_told_when_cards_of_another_numa_node_come(node: Node) -> None:
    node.start(wait=200)
    snapshot = node.daemon.inventory.snapshot
    first, second = snapshot.cards
    second = dataclasses.replace(second, card=dataclasses.replace(second.card, numa_node=1))
    node.daemon._device_lists.show(dataclasses.replace(snapshot, cards=(first, second)))
    eventually(lambda: node.kubelet.devices.endpoint(NAMES.core).preferred_allocation, "another registration", 5)
    eventually(lambda: node.daemon.registrar.registrations == 2, "its end", 5)


def test_the_largest_node_stays_far_below_the_message_limit() -> None:
    from manager.kubelet import device_ids
    from vcuda.spec.inventory import Card

    cards = [Card(f"GPU-{number}", number, "H", 192 * 2**30, 1) for number in range(8)]
    message = device_ids.device_list(cards, "memory", all_unhealthy=False)
    assert len(message.devices) == 6144 == len({device.ID for device in message.devices})
    assert message.ByteSize() < 256 * 1024
    assert message.devices[0].topology.nodes[0].ID == 1


def test_kubelet_may_come_later(node: Node) -> None:
    node.kubelet.stop()
    for path in node.kubelet.directory.glob("*"):
        path.unlink()
    node.kubelet.directory.rmdir()
    node.start()
    assert node.get("/healthz")[0] == 200
    assert node.get("/readyz") == (503, "not registered with kubelet\n")
    node.kubelet.start()
    node.kubelet.wait_devices(200)
    eventually(lambda: node.get("/readyz")[0] == 200, "ready")


def test_a_restarted_kubelet_is_registered_with_again_quickly(node: Node) -> None:
    node.start(wait=200)
    item = pod("a", container("c", 30, 10))
    node.kubelet.admit(item)
    for _ in range(3):
        node.kubelet.restart()
        started = time.monotonic()
        eventually(lambda: len(node.kubelet.registered) == 2, "registration")
        assert time.monotonic() - started < 10  # within a second on an idle machine
        node.kubelet.wait_devices(200)
    node.kubelet.admit(pod("b", container("c", 30, 10)))


def test_own_sockets_that_vanish_come_back(node: Node) -> None:
    node.start(wait=200)
    before = node.kubelet.registrations
    (node.kubelet.directory / "vcore.sock").unlink()
    eventually(lambda: node.kubelet.registrations >= before + 2, "both registered again")
    eventually((node.kubelet.directory / "vcore.sock").exists, "a new socket")


def test_a_lost_card_alone_is_unhealthy_and_comes_back(node: Node, machine: Machine) -> None:
    node.start(wait=200)
    machine.inject(CardLost(1))
    node.kubelet.wait_devices(100)
    item = pod("a", container("c", 10, 1))
    node.kubelet.admit(item)
    assert node.kubelet.cards(item, "c") == [machine.cards[0].uuid]
    assert "UNHEALTHY" in node.get("/graph")[1]
    machine.inject(CardRecovered(1))
    node.kubelet.wait_devices(200)


def test_xid_errors_of_the_card_count_and_those_of_applications_do_not(node: Node, machine: Machine) -> None:
    node.start("--health-check-interval=1", wait=200)
    time.sleep(0.2)  # let the watching thread wait for events
    machine.inject(Xid(0, 31))
    machine.inject(Xid(1, 79))
    node.kubelet.wait_devices(100)
    unhealthy = {device.id for device in node.kubelet.listed(NAMES.core) or () if not device.healthy}
    assert len({device_id.partition("-")[0] for device_id in unhealthy}) == 1
    node.kubelet.wait_devices(200)


def test_mig_instances_are_cards_of_their_own(
    make_machine: Callable[..., Machine], make_node: Callable[..., Node]
) -> None:
    machine = make_machine(SimCard(mig=("3g", "2g")), SimCard())
    node = make_node(machine.root)
    node.kubelet.start()
    node.start(wait=300)
    instance = next(part for part in machine.cards[0].mig if part.slices == 2)
    item = pod("a", container("c", 100), annotations={NAMES.card_uuid: instance.uuid})
    node.kubelet.admit(item)
    assert node.kubelet.cards(item, "c") == [instance.uuid]
    paths = {spec.container_path for spec in node.kubelet.answer(item, "c").devices}
    assert {f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in instance.caps} <= paths
    assert f"/dev/nvidia{machine.cards[0].minor}" in paths


def test_a_socket_that_could_not_be_made_at_first_is_made_later(node: Node) -> None:
    blocked = node.kubelet.directory / "vmemory.sock"
    (blocked / "in the way").mkdir(parents=True)
    daemon = node.start()
    eventually(lambda: not daemon.registrar.registered and daemon.registrar._servers, "one server of two")
    (blocked / "in the way").rmdir()
    blocked.rmdir()
    node.kubelet.wait_devices(200)
    node.kubelet.admit(pod("a", container("c", 10, 1)))


def test_a_kubelet_that_refuses_us_again_and_again_has_restarted_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time what is known of the pod being admitted is forgotten, and the node described anew."""
    met: list[object] = []
    monkeypatch.setattr(PodFinder, "kubelet_restarted", lambda _: met.append(1))
    register, refused = node.kubelet._register, []

    def refuse(*_: object) -> None:
        refused.append(1)
        raise ValueError("not now")

    node.kubelet._register = refuse  # type: ignore[method-assign]
    node.kubelet.restart()
    node.start()
    eventually(lambda: len(refused) >= 3, "three tries")
    assert len(met) == 1
    node.kubelet._register = register  # type: ignore[method-assign]
    node.kubelet.restart()
    node.kubelet.wait_devices(200)
    assert len(met) == 2


def test_what_query_auth_lacks_is_said_before_anything_is_made(node: Node) -> None:
    with pytest.raises(StartError, match="--query-auth=kubernetes needs an API server to ask"):
        node.start("--query-auth=kubernetes")
    assert not (node.directory / "vm").exists()
