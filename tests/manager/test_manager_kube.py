"""What the API server is told, and life without it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest

from manager.errors import StartError
from manager.kube import api
from tests.manager.manager_kubelet import Rejected
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_support import Node
from vcuda.kube import events
from vcuda.kube.client import Client
from vcuda.kube.errors import ApiError
from vcuda.sim import CardLost, Machine
from vcuda.spec import bookings, inventory, placement
from vcuda.spec.request import parse_pod


def test_the_node_carries_inventory_and_model(connected: Node, machine: Machine) -> None:
    connected.start("--node-labels=zone=a,rack=7", wait=200)
    api = connected.api
    assert api is not None
    metadata = eventually(api.node, "a patch of the node")
    cards = inventory.decode(metadata["annotations"][NAMES.inventory])
    assert [card.uuid for card in cards] == [card.uuid for card in machine.cards]
    assert all(card.healthy and card.memory_blocks == 32 for card in cards)
    assert metadata["labels"] == {NAMES.model_label: "NVIDIA-A100-SXM4-40GB", "zone": "a", "rack": "7"}
    machine.inject(CardLost(0))
    eventually(
        lambda: not inventory.decode(api.node()["annotations"][NAMES.inventory])[0].healthy,
        "an unhealthy card",
    )


def test_the_node_says_what_each_pod_was_given(connected: Node, machine: Machine) -> None:
    """The extender compares it with its own book, and believes it after a restart: pods' owners can't write there."""
    connected.start(wait=200)
    api = connected.api
    assert api is not None
    item = pod("a", container("c", 30, 10), container("d", 20, 5))
    api.put("pods", item)
    connected.kubelet.admit(item)

    def given() -> dict[str, dict[str, tuple[int, int]]]:
        return bookings.decode(api.node()["annotations"][NAMES.bookings]).pods

    def both_containers() -> bool:  # the first one's share may be written before the second one is allocated
        [use] = given().values()
        assert set(use) <= {card.uuid for card in machine.cards}
        return [sum(amounts) for amounts in zip(*use.values(), strict=True)] == [50, 15]

    eventually(lambda: given() and both_containers(), "both containers' bookings", 30)
    assert set(given()) == {item["metadata"]["uid"]}
    assert inventory.decode(api.node()["annotations"][NAMES.inventory]), "the inventory stays beside it"
    connected.kubelet.remove(item)
    api.remove("pods", "default/a")
    eventually(lambda: given() == {}, "their end", 30)


def test_a_pod_is_marked_assigned_when_all_its_containers_have_devices(connected: Node) -> None:
    connected.start(wait=200)
    api = connected.api
    assert api is not None
    item = pod("a", container("c", 30, 10), container("d", 20, 5))
    connected.kubelet.pods.append(item)
    steps = list(connected.kubelet.devices.steps(item))
    for step in steps[:-1]:
        connected.kubelet.devices.give(item, *step)
    assert not [path for path, _ in api.patches if "/pods/" in path]
    connected.kubelet.devices.give(item, *steps[-1])
    patches = eventually(lambda: [entry for entry in api.patches if "/pods/" in entry[0]], "a patch of the pod")
    [(path, patch)] = patches
    assert path == "/api/v1/namespaces/default/pods/a"
    assert patch["metadata"]["uid"] == item["metadata"]["uid"]
    annotations = patch["metadata"]["annotations"]
    assert annotations[NAMES.gpu_assigned] == "true"
    # The daemon chose the cards; who reads the pod later must find out which.
    chosen = placement.decode(annotations[NAMES.placement])
    placement.check(chosen, parse_pod(item))


def test_a_placement_that_was_there_is_not_written_again(connected: Node, machine: Machine) -> None:
    connected.start(wait=200)
    api = connected.api
    assert api is not None
    card = machine.cards[0].uuid
    chosen = placement.Placement({"c": (placement.CardShare(card, 30, 4),)})
    item = pod("a", container("c", 30, 4), annotations={NAMES.placement: placement.encode(chosen)})
    connected.kubelet.pods.append(item)
    for step in connected.kubelet.devices.steps(item):
        connected.kubelet.devices.give(item, *step)
    patches = eventually(lambda: [patch for path, patch in api.patches if "/pods/" in path], "a patch of the pod")
    assert [patch["metadata"]["annotations"] for patch in patches] == [{NAMES.gpu_assigned: "true"}]


def test_refusals_become_events_with_their_reason(connected: Node) -> None:
    connected.start(wait=200)
    api = connected.api
    assert api is not None
    with pytest.raises(Rejected):
        connected.kubelet.admit(pod("bad", container("c", 150, 10)))
    (event,) = eventually(lambda: api.events, "an event")
    assert (event["type"], event["reason"]) == ("Warning", "InvalidCores")
    assert event["involvedObject"]["name"] == "bad" and "150" in event["message"]


def test_an_api_server_that_fails_holds_nothing_up_and_gets_everything_later(connected: Node) -> None:
    api = connected.api
    assert api is not None
    api.failing = True
    connected.start(wait=200)
    connected.kubelet.admit(pod("a", container("c", 30, 10)))
    assert not api.patches
    api.failing = False
    eventually(lambda: any("/pods/" in path for path, _ in api.patches) and api.node(), "all messages")


def config(tmp_path: Path, **changes: object) -> Path:
    document: dict[str, object] = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": "https://10.0.0.1:6443"}}],
        "users": [{"name": "u", "user": {}}],
    }
    document.update(changes)
    path = tmp_path / "config"
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"current-context": "other"}, "is incomplete: no 'other'"),
        ({"users": [{"name": "u", "user": {"username": "u"}}]}, "uses 'username'; use a certificate"),
        ({"clusters": [{"name": "k", "cluster": {"server": "ftp://x"}}]}, "is no http:// or https:// URL"),
        (
            {"clusters": [{"name": "k", "cluster": {"server": "https://x", "certificate-authority": "none"}}]},
            "cannot use the CA file",
        ),
        (
            {"clusters": [{"name": "k", "cluster": {"server": "https://x", "certificate-authority-data": "%"}}]},
            "certificate-authority-data is not base64",
        ),
    ],
)
def test_an_unusable_kubeconfig_is_one_clear_message(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(StartError, match=message):
        api.login(config(tmp_path, **changes), {})


def test_a_kubeconfig_with_a_token_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc\n")
    users = [{"name": "u", "user": {"tokenFile": "token"}}]
    found = api.login(config(tmp_path, users=users), {})
    assert found is not None
    assert (found.url, found.token()) == ("https://10.0.0.1:6443", "abc")


def test_no_configuration_at_all_is_no_error() -> None:
    assert api.login(None, {}) is None


def test_an_events_name_is_as_long_as_a_name_may_be() -> None:
    long = "a" * 235 + "-" + "b" * 17
    for name in (long, "short"):
        made = events.event_name(name)
        assert len(made) <= 253
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", made)
    assert events.event_name("short").startswith("short.")


def test_a_cluster_without_the_first_version_of_evictions_is_asked_in_the_beta_version() -> None:
    asked: list[str] = []

    class Old:
        def call(self, _method: str, _path: str, body: Any, **_: Any) -> Any:
            asked.append(body["apiVersion"])
            if len(asked) == 1:
                raise ApiError(400, '400 no kind "Eviction" is registered for version "policy/v1"')

    api.Kube(cast(Client, Old()), "node-1").evict("default", "p", "u", 1.0)
    assert asked == ["policy/v1", "policy/v1beta1"]
