"""What the node's operator and the pod itself exclude is not given, whoever wrote the placement."""

from __future__ import annotations

from typing import Any

import pytest

from manager.kubelet import device_ids
from tests.manager.manager_kubelet import Rejected
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_support import Node
from vcuda.sim import Machine
from vcuda.spec import placement
from vcuda.spec.inventory import Card
from vcuda.spec.placement import CardShare, Placement


def written_by_its_owner(machine: Machine, card: int, **more: str) -> dict[str, Any]:
    chosen = Placement({"c": (CardShare(machine.cards[card].uuid, 30, 4),)})
    return pod("a", container("c", 30, 4), annotations={NAMES.placement: placement.encode(chosen), **more})


@pytest.mark.parametrize("excluded", ["uuid", "model"])
def test_a_placement_on_a_card_that_the_pod_excludes_is_refused(node: Node, machine: Machine, excluded: str) -> None:
    """Such as one that the owner of a pod with spec.nodeName wrote: no extender ever chooses so."""
    daemon = node.start(wait=200)
    wanted = {
        "uuid": {NAMES.card_uuid: machine.cards[0].uuid},
        "model": {NAMES.card_model: f"!{machine.cards[1].name}"},
    }[excluded]
    with pytest.raises(Rejected, match=r"CardNotAllowed: .*recreate the pod without the annotation"):
        node.kubelet.admit(written_by_its_owner(machine, 1, **wanted))
    assert daemon.allocator.allocations == ()


def test_a_stale_index_beside_a_placement_of_ours_is_put_right(connected: Node, machine: Machine) -> None:
    """Tools that know the old names would show another card than the one that was given."""
    api = connected.api
    assert api is not None
    connected.start(wait=200)
    stale = {NAMES.predicate_gpu_index(0): "7", NAMES.predicate_gpu_index(5): "1"}
    item = pod("a", container("c", 30, 4), annotations=stale)
    api.put("pods", item)
    connected.kubelet.admit(item)

    def said() -> dict[str, str]:
        found = api.find("pods", "default/a")["metadata"]["annotations"]
        return {key: value for key, value in found.items() if "predicate-gpu-idx" in key}

    (share,) = connected.daemon.allocator.allocations[0].shares  # type: ignore[union-attr]
    minor = next(card.minor for card in machine.cards if card.uuid == share.uuid)
    eventually(lambda: said() == {NAMES.predicate_gpu_index(0): str(minor)}, f"the index, not {said()}")


@pytest.mark.parametrize(
    ("limit", "blocks", "given"), [("0", "320", True), ("2", "8", True), ("2", "9", False), ("1", "5", False)]
)
def test_an_operator_bounds_oversell(node: Node, limit: str, blocks: str, given: bool) -> None:
    daemon = node.start(f"--oversell-limit={limit}", wait=200)
    item = pod("a", container("c", 30, 4), annotations={NAMES.oversell: blocks})
    if given:
        node.kubelet.admit(item)
    else:
        with pytest.raises(Rejected, match=f"OversellForbidden: .*{blocks} blocks in all.*--oversell-limit"):
            node.kubelet.admit(item)
    assert len(daemon.allocator.allocations) == int(given)


def sees(value: str | None) -> dict[str, Any]:
    more = (
        {}
        if value is None
        else {"env": [{"name": "A", "value": "x"}, {"name": "NVIDIA_VISIBLE_DEVICES", "value": value}]}
    )
    return pod("a", container("c", 30, 4, **more))


@pytest.mark.parametrize(
    ("value", "told"),
    [("all", True), ("none", True), ("GPU-1", True), ("void", False), ("", False), (None, False)],
)
def test_a_pod_that_asks_nvidias_runtime_for_cards_is_told_of(connected: Node, value: str | None, told: bool) -> None:
    """Its own value wins over ours, and brings the real driver past our library where that runtime is the default."""
    api = connected.api
    assert api is not None
    daemon = connected.start(wait=200)
    item = sees(value)
    api.put("pods", item)
    connected.kubelet.admit(item)
    assert len(daemon.allocator.allocations) == 1
    if told:
        eventually(lambda: any(one.get("reason") == "VisibleDevicesSet" for one in api.events), "the event")
        return
    daemon.api_writer.pod_event("default", "a", item["metadata"]["uid"], "Last", "after all others")
    eventually(lambda: any(one.get("reason") == "Last" for one in api.events), "the last event")
    assert not any(one.get("reason") == "VisibleDevicesSet" for one in api.events)


def test_it_is_refused_where_the_operator_says_so(node: Node) -> None:
    daemon = node.start("--visible-devices-policy=refuse", wait=200)
    with pytest.raises(
        Rejected, match=r"VisibleDevicesSet: .*container 'c' sets NVIDIA_VISIBLE_DEVICES=.*all.*take it out"
    ):
        node.kubelet.admit(sees("all"))
    assert daemon.allocator.allocations == ()


@pytest.mark.parametrize(
    ("path", "given"),
    [("/etc/vcuda", False), ("/etc//vcuda/usage/", False), ("/etc/x/../vcuda", False), ("/usr/local/nvidia/lib64", False),
     ("/usr/lib64/libcuda.so.1", False), ("/etc", True), ("/data", True), ("/etc/vcuda2", True), ("/usr/lib64", True)],
)  # fmt: skip
def test_a_volume_over_what_we_mount_is_refused(node: Node, path: str, given: bool) -> None:
    """Mounted after ours, it would hide the limits, and our library would pass everything on."""
    daemon = node.start(wait=200)
    mounts = [{"name": "v", "mountPath": path}, {"name": "token", "mountPath": "/var/run/secrets/x"}]
    item = pod("a", container("c", 30, 4, volumeMounts=mounts))
    if given:
        node.kubelet.admit(item)
    else:
        with pytest.raises(Rejected, match=r"MountInTheWay: .*container 'c' mounts a volume at"):
            node.kubelet.admit(item)
    assert len(daemon.allocator.allocations) == int(given)


def test_no_device_of_one_resource_has_the_id_of_another() -> None:
    """Newer kubelets look for the pod of a device by its ID alone."""
    cards = [Card(f"GPU-{number}", number, "H", 192 * 2**30) for number in range(8)]
    core, memory = (
        {device.ID for device in device_ids.device_list(cards, resource, all_unhealthy=False).devices}
        for resource in ("core", "memory")
    )
    assert len(core) == 800 and len(memory) == 6144 and not core & memory
