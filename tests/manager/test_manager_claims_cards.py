"""Whose a card is, claims' or the device plugin's: one protocol's, as the settings say, and its old containers'."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from manager.errors import StartError
from tests.manager.manager_claims import ClaimNode, claim, claim_node, error_of, result, uid_of
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_support import Node
from vcuda.sim import Machine
from vcuda.spec import inventory


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["--protocols=device-plugin,dra"], "--dra-cards"),
        (["--protocols=dra", "--dra-cards=GPU-1"], "--protocols=device-plugin,dra"),
        (["--protocols=device-plugin", "--dra-cards=GPU-1"], "--protocols=device-plugin,dra"),
    ],
)
def test_settings_that_leave_open_whose_a_card_is_are_refused(
    claims: ClaimNode, settings: list[str], said: str
) -> None:
    with pytest.raises(StartError, match=said):
        claims.node.start(*claims.arguments(*settings))


def test_without_an_api_server_there_are_no_claims(machine: Machine, make_node: Callable[..., Node]) -> None:
    with claim_node(make_node(machine.root)) as found, pytest.raises(StartError, match="--kubeconfig"):
        found.start()


def test_a_card_belongs_to_one_protocol(claims: ClaimNode, machine: Machine) -> None:
    first, second = (card.uuid for card in machine.cards)
    node = claims.node
    node.kubelet.start()
    claims.more = ("--protocols=device-plugin,dra", f"--dra-cards={second}")
    driver = claims.start()
    node.kubelet.wait_devices(100)
    eventually(claims.slices, "slices")
    (slice_,) = claims.slices()
    assert [device["attributes"]["uuid"]["string"] for device in slice_["spec"]["devices"]] == [second]
    item = claim("train", result(first))
    claims.put(item)
    assert "CardNotAllowed" in error_of(claims, item)
    mine = claim("mine", result(second))
    claims.put(mine)
    assert driver.prepare(mine)[uid_of(mine)].devices
    assert node.api is not None

    described = eventually(
        lambda: node.api and node.api.node().get("annotations", {}).get(NAMES.inventory), "inventory"
    )
    assert [card.uuid for card in inventory.decode(described)] == [first]


def test_a_card_that_containers_still_have_from_the_device_plugin_is_not_offered(
    claims: ClaimNode, machine: Machine
) -> None:
    first, second = (card.uuid for card in machine.cards)
    node = claims.node
    node.kubelet.start()
    node.start(wait=200)
    item = pod("old", container("c", 30, 4))
    assert node.api is not None
    node.api.put("pods", item)
    node.kubelet.admit(item)
    node.stop()
    claims.start()
    eventually(claims.slices, "slices")
    (slice_,) = claims.slices()
    held = json.loads(node.get("/usage")[1])["containers"][0]["cards"][0]["uuid"]
    offered = {device["attributes"]["uuid"]["string"] for device in slice_["spec"]["devices"]}
    assert offered == {first, second} - {held}
    claims.put(late := claim("late", result(held)))
    said = error_of(claims, late)
    assert "CardNotAllowed" in said and "device plugin" in said, "its scheduler knew older slices"
    node.kubelet.remove(item)
    node.api.delete(item)
    eventually(lambda: len(claims.slices()[0]["spec"]["devices"]) == 2, "the card once its container has ended")
