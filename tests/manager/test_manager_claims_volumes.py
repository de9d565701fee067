"""Volumes in the way of a claim's places: refused before the container starts, and looked for in pods that join later."""

from __future__ import annotations

from typing import Any

import pytest

from localcluster.apiserver.faults import Fault
from manager.container.response import in_the_way
from manager.dra.node import NodeClaims
from tests.manager.manager_claims import ClaimNode, claim, error_of, result, uid_of
from tests.manager.manager_pods import container, eventually, pod


def test_a_volume_over_its_limits(claims: ClaimNode) -> None:
    driver = claims.start()
    assert claims.node.api is not None
    user = pod(
        "p", container("c", 0) | {"volumeMounts": [{"name": "v", "mountPath": "/etc/vcuda/claims/x"}]}, uid="uid-p"
    )
    user["spec"]["containers"][0]["resources"] = {}
    claims.node.api.put("pods", user)
    daemon = claims.node.daemon
    assert daemon is not None
    eventually(daemon._known_pods, "the pod by the watch")
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    assert "MountInTheWay" in error_of(claims, item)
    del driver


@pytest.mark.parametrize("path", ["//etc//vcuda", "etc/vcuda", "///etc/./vcuda/", "etc/x/../ld.so.preload"])
def test_a_volume_in_the_way_however_its_path_is_written(path: str) -> None:
    """Runtimes take each from the root; the API server stores what it was given."""
    assert in_the_way(["/data", path]) == path


def test_a_volume_in_the_way_of_a_pod_that_the_watch_does_not_know(
    claims: ClaimNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = claims.start()
    assert claims.node.api is not None and claims.node.daemon is not None
    user = pod("p", container("c", 0) | {"volumeMounts": [{"name": "v", "mountPath": "/etc/vcuda"}]}, uid="uid-p")
    user["spec"]["containers"][0]["resources"] = {}
    claims.node.api.put("pods", user)
    assert isinstance(claims.node.daemon.claims, NodeClaims)
    monkeypatch.setattr(claims.node.daemon.claims.preparer, "_pods", lambda: None)
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    assert "MountInTheWay" in error_of(claims, item)
    note = claims.node.api.hook
    claims.node.api.hook = lambda request: Fault(500) if request.path.endswith("/pods") else note(request)
    assert "ClaimUnreadable" in error_of(claims, item)
    claims.node.api.hook = note
    user["spec"]["containers"][0].pop("volumeMounts")
    claims.node.api.put("pods", user)
    assert driver.prepare(item)[uid_of(item)].devices


def joining(name: str, **extra: Any) -> dict[str, Any]:
    """A pod whose container names the claim `train`."""
    made = pod(name, container("c", 0) | extra, uid=f"uid-{name}")
    made["spec"]["containers"][0]["resources"] = {"claims": [{"name": "it"}], **extra.get("resources", {})}
    made["spec"]["resourceClaims"] = [{"name": "it", "resourceClaimName": "train"}]
    return made


def events_of(claims: ClaimNode, name: str) -> list[tuple[str, str]]:
    assert claims.node.api is not None
    found = claims.node.api.store("events").list(None, lambda _: True)
    return [(one["reason"], one["message"]) for one in found if one["involvedObject"]["name"] == name]


@pytest.mark.parametrize("policy", ["report", "evict"])
def test_a_pod_that_joins_a_prepared_claim_with_a_volume_in_the_way(claims: ClaimNode, policy: str) -> None:
    """Kubelet does not ask for it: the daemon looks by itself, and ends nobody unless it is told to."""
    driver = claims.start(f"--audit-policy={policy}")
    assert claims.node.api is not None
    first = joining("first")
    claims.node.api.put("pods", first)
    claims.node.kubelet.pods.append(first)
    item = claim("train", result(claims.cards[0]), pods=("first", "second", "third"))
    claims.put(item)
    assert not driver.prepare(item)[uid_of(item)].error
    bad = joining("second", volumeMounts=[{"name": "v", "mountPath": "/etc/vcuda/claims"}])
    good = joining("third", volumeMounts=[{"name": "v", "mountPath": "/data"}])
    for other in (bad, good):
        claims.node.api.put("pods", other)
        claims.node.kubelet.pods.append(other)
    eventually(lambda: events_of(claims, "second"), "the event")
    ((reason, message),) = events_of(claims, "second")
    assert reason == "MountInTheWay" and "'/etc/vcuda/claims'" in message
    assert (
        'vcuda_manager_claim_pods_at_fault_total{node="node-1",reason="MountInTheWay"} 1.0'
        in claims.node.get("/metrics")[1]
    )
    api = claims.node.api

    def evicted() -> list[str]:
        return [one["metadata"]["name"] for one in api.events if one.get("kind") == "Eviction"]

    if policy == "evict":
        eventually(evicted, "the eviction")
    assert evicted() == (["second"] if policy == "evict" else [])
    assert events_of(claims, "first") == events_of(claims, "third") == []
