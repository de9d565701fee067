"""Two nodes, each with a kubelet, a containerd and a daemon: the extender chooses, placements are right, a drain moves pods."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_second import NAME, SecondNode
from kube_system import CARDS, System, share_mounts, share_pod, unmount
from kubelab import eventually

BLOCK = 256 * 1024 * 1024
CARDS_THERE = 2


@pytest.fixture(scope="module")
def second(system: System, client_image: str) -> Iterator[SecondNode]:
    folder = Path(tempfile.mkdtemp(prefix="vcuda-kube-2-"))
    share_mounts(folder)
    node = SecondNode(system, folder / "node", CARDS_THERE)
    try:
        node.up()
        yield node
    finally:
        node.down()
        unmount(folder)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def clean(system: System, second: SecondNode) -> Iterator[None]:
    yield
    system.delete_all()
    total = f"vcuda_extender_free_cores {100 * (CARDS + CARDS_THERE)}.0"
    eventually(
        "the extender has all cores back",
        lambda: total in system.get(system.extender_probe_port, "/metrics"),
        90,
    )


def cards_of(node: dict[str, Any]) -> set[str]:
    text = node["metadata"]["annotations"]["tencent.com/vcuda-inventory"]
    return {card["uuid"] for card in json.loads(text)["cards"]}


def placed(pod: dict[str, Any]) -> tuple[str, str]:
    """(node, UUID of the only card) of a pod."""
    text = pod["metadata"]["annotations"]["tencent.com/vcuda-placement"]
    ((share,),) = json.loads(text)["containers"].values()
    return pod["spec"]["nodeName"], share[0]


def test_each_card_of_both_nodes_is_given_once(
    system: System, second: SecondNode, client_image: str, clean: None, evidence: Any
) -> None:
    """As many whole-card pods as the cluster has cards run, each on a card of its own node; one more waits, with the reason."""
    count = CARDS + CARDS_THERE
    names = [f"whole-{number}" for number in range(count)]
    system.create_all([share_pod(name, client_image, 100, 1, labels={"app": "whole"}) for name in names])
    eventually(
        "all pods run",
        lambda: Counter(system.phases("app=whole").values())["Running"] == count,
        120,
        every=1.0,
    )
    where = [placed(system.pod(name)) for name in names]
    assert len(set(where)) == count, "no card twice"
    for node, cards in ((system.node(), cards_of(system.node())), (second.node(), cards_of(second.node()))):
        given = {uuid for name, uuid in where if name == node["metadata"]["name"]}
        assert given == cards
    for name in names:
        assert "devices=1 " in system.wait_log(name, "taken=")
    system.create(share_pod("too-many", client_image, 100, 1))
    told = eventually(
        "an event tells why",
        lambda: next(
            (line for line in system.lab.kubectl("describe", "pod", "too-many").splitlines() if "0/2 nodes" in line), None
        ),
        30,
    )  # fmt: skip
    evidence(
        f"two nodes: {dict(Counter(node for node, _ in where))} whole cards given once each; then: {' '.join(told.split())}"
    )


def test_a_drain_moves_pods_to_the_other_node(
    system: System, second: SecondNode, client_image: str, clean: None, evidence: Any
) -> None:
    here = system.lab.environment["NODE_NAME"]
    template = share_pod("any", client_image, 30, 5)["spec"] | {"restartPolicy": "Always"}
    replicas = {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {"name": "moved", "namespace": "default"},
        "spec": {
            "replicas": 4,
            "selector": {"matchLabels": {"app": "moved"}},
            "template": {"metadata": {"labels": {"app": "moved"}}, "spec": template},
        },
    }

    def on(node: str) -> int:
        """Running pods there that are not on their way out."""
        items = system.lab.get("pods", "-l", "app=moved")["items"]
        return sum(
            item["spec"].get("nodeName") == node
            and item["status"].get("phase") == "Running"
            and "deletionTimestamp" not in item["metadata"]
            for item in items
        )

    system.lab.kubectl("cordon", here)
    try:
        system.lab.apply(replicas)
        eventually(f"four pods run on {NAME}", lambda: on(NAME) == 4, 90)
        system.lab.kubectl("uncordon", here)
        system.lab.kubectl("drain", NAME, "--ignore-daemonsets", "--force", "--timeout=60s", wait=90)
        eventually(f"four pods run on {here}", lambda: on(here) == 4, 90)
        assert on(NAME) == 0
        totals = system.totals("app=moved", 4, 30)
        assert set(totals.values()) == {5 * BLOCK}
        for item in system.lab.get("pods", "-l", "app=moved")["items"]:
            node, uuid = placed(item)
            assert node == here
            assert uuid in cards_of(system.node())
        evidence(f"drain of {NAME}: 4 pods of 4 run on {here}, at their limits")
    finally:
        system.lab.kubectl("uncordon", here)
        system.lab.kubectl("uncordon", NAME)
        system.lab.kubectl("delete", "replicaset", "moved", "--ignore-not-found")
