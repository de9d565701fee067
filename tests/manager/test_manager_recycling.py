"""Pods that can't go on here: failed admissions, and pods on a card that has died."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from manager.audit.failed_pods import failed_admissions
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_support import Node
from vcuda.sim import CardLost, Machine

NOW = 1_800_000_000


def stamp(age_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(NOW - age_s))


def failed(name: str, *, now: float = NOW, **metadata: Any) -> dict[str, Any]:
    made = pod(name, container("c", 10, 1))
    made["metadata"] |= {"ownerReferences": [{"kind": "ReplicaSet", "controller": True}], **metadata}
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now - 100))
    made["status"] = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "startTime": started}
    return made


def test_only_failed_admissions_of_ours_that_a_controller_owns_and_that_are_old_enough() -> None:
    others = failed("others-resources")
    others["spec"]["containers"][0]["resources"]["limits"] = {"cpu": "1"}
    evicted, running, young, undated = (failed(name) for name in ("evicted", "running", "young", "undated"))
    evicted["status"]["reason"] = "Evicted"
    running["status"]["phase"] = "Running"
    young["status"]["startTime"] = stamp(99)
    undated["status"]["startTime"] = "yesterday"
    pods = [
        failed("gone"), failed("bare", ownerReferences=[]), failed("owned", ownerReferences=[{"kind": "ConfigMap"}]),
        failed("going", deletionTimestamp=stamp(1)), others, evicted, running, young, undated,
    ]  # fmt: skip
    assert [item["metadata"]["name"] for item in failed_admissions(pods, NAMES, 100, NOW)] == ["gone"]


@pytest.mark.parametrize("grace", ["50", "0"])
def test_the_daemon_deletes_them_when_told_to(make_node: Callable[..., Node], machine: Machine, grace: str) -> None:
    node = make_node(machine.root, with_api=True)
    node.kubelet.start()
    daemon = node.start(f"--failed-admission-grace={grace}", wait=200)
    assert node.api is not None
    item = failed("a", now=time.time())
    node.api.put("pods", item)
    if grace == "0":
        time.sleep(0.6)  # three looks for pods that are gone
        assert daemon.api_writer.wait_empty(10) and node.api.deletions == []
        return
    path, body = eventually(lambda: node.api.deletions, "the deletion")[0]
    assert path == "/api/v1/namespaces/default/pods/a"
    assert body["preconditions"] == {"uid": item["metadata"]["uid"]}


@pytest.mark.parametrize("policy", ["report", "evict"])
def test_pods_of_a_dead_card_are_evicted_by_policy(
    make_node: Callable[..., Node], machine: Machine, policy: str
) -> None:
    node = make_node(machine.root, with_api=True)
    node.kubelet.start()
    daemon = node.start(f"--dead-card-policy={policy}", wait=200)
    assert node.api is not None
    events = node.api.events
    dead, well = pod("dead", container("c", 100)), pod("well", container("c", 100))
    for item in (dead, well):
        node.api.put("pods", item)
        node.kubelet.admit(item)
    card = next(c for c in machine.cards if c.uuid == node.kubelet.cards(dead, "c")[0])
    machine.inject(CardLost(card.minor))
    eventually(lambda: [e for e in events if e.get("reason") == "CardUnhealthy"], "the event")
    evicted = lambda: [e["metadata"]["name"] for e in events if e.get("kind") == "Eviction"]  # noqa: E731
    if policy == "evict":
        eventually(evicted, "the eviction")
    assert daemon.api_writer.wait_empty(10)
    assert evicted() == (["dead"] if policy == "evict" else [])
