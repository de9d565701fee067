"""Claims on a real Kubernetes with Dynamic Resource Allocation: its scheduler allocates, its kubelet prepares, containers count.

Needs 1.36, or 1.34 with the gate of consumable capacity; on older servers skipped with that reason.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kube_system import CARDS, System
from kubelab import eventually

BLOCK = 256 * 1024 * 1024
DRIVER = "vcuda.tencent.com"
OLDEST = 34


def figures(line: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line)}


@pytest.fixture(scope="module")
def claims(system: System) -> Iterator[System]:
    """The node's cards go to claims for this module's tests."""
    if system.lab.minor < OLDEST:
        pytest.skip(f"Kubernetes 1.{system.lab.minor} has no resource.k8s.io/v1; 1.{OLDEST} or newer is needed")
    root = system.lab.environment["KUBELET_ROOT"]
    system.kill("manager")
    system.start_manager(*_settings(root))
    device_class = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": DRIVER},
        "spec": {"selectors": [{"cel": {"expression": f'device.driver == "{DRIVER}"'}}]},
    }
    system.lab.kubectl("apply", "-f", "-", stdin=json.dumps(device_class))
    eventually("the node's slice", lambda: _devices(system), 60)
    yield system
    system.lab.kubectl("delete", "resourceclaims", "--all", check=False)
    # Only a daemon that serves claims is told by kubelet that one is over.
    eventually("no claim is left on the node", lambda: _nothing_left(system), 240)
    system.lab.kubectl("delete", "deviceclass", DRIVER, check=False)
    system.kill("manager")
    system.start_manager()
    system.wait_offered()


def _nothing_left(system: System) -> bool:
    usage = json.loads(system.get(system.manager_port, "/usage"))
    return not usage["containers"] and not list((system.folder / "vm/regions").iterdir())


def _settings(root: str) -> list[str]:
    return ["--protocols=dra", f"--plugins-path={root}/plugins", f"--plugins-registry-path={root}/plugins_registry"]


def _devices(system: System) -> list[dict[str, Any]]:
    items = system.lab.get("resourceslices")["items"]
    return [device for item in items if item["spec"]["driver"] == DRIVER for device in item["spec"].get("devices", ())]


@pytest.fixture
def made(claims: System) -> Iterator[Any]:
    """Creates objects that go with the test; afterwards nothing of them may be left on the node."""

    def create(*items: dict[str, Any]) -> None:
        claims.create_all(list(items))

    yield create
    claims.delete_all()
    claims.lab.kubectl("delete", "resourceclaims", "--all")
    eventually("no claim is left on the node", lambda: _nothing_left(claims), 240)


def claim(name: str, cores: int, memory: str, *, count: int = 1, apart: bool = False, **config: Any) -> dict[str, Any]:
    exactly = {
        "deviceClassName": DRIVER, "count": count, "capacity": {"requests": {"cores": str(cores), "memory": memory}},
    }  # fmt: skip
    devices: dict[str, Any] = {"requests": [{"name": "gpu", "exactly": exactly}]}
    if apart:
        devices["constraints"] = [{"requests": ["gpu"], "distinctAttribute": f"{DRIVER}/uuid"}]
    if config:
        parameters = {"apiVersion": f"{DRIVER}/v1", "kind": "ShareConfig", **config}
        devices["config"] = [{"requests": ["gpu"], "opaque": {"driver": DRIVER, "parameters": parameters}}]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"devices": devices},
    }


def pod(name: str, image: str, *names: str, containers: int = 1) -> dict[str, Any]:
    """Each container uses all of the claims."""
    users = [{"name": one} for one in names]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "resourceClaims": [{"name": one, "resourceClaimName": one} for one in names],
            "containers": [
                {
                    "name": f"c{number}", "image": image, "imagePullPolicy": "Never",
                    "resources": {"claims": users},
                }
                for number in range(containers)
            ],
        },
    }  # fmt: skip


def _results(system: System, name: str) -> list[dict[str, Any]]:
    return list(system.lab.get("resourceclaim", name)["status"]["allocation"]["devices"]["results"])


def test_two_pods_share_a_card_each_at_its_limit(claims: System, client_image: str, made: Any, evidence: Any) -> None:
    """The client fills its share until it is refused; kube-scheduler's first fit puts both on the first card."""
    made(claim("small", 30, "2560Mi"), claim("large", 50, "5Gi", coreLimit=80))
    made(pod("small", client_image, "small"), pod("large", client_image, "large"))
    for name, blocks in (("small", 10), ("large", 20)):
        claims.wait_phase(name, "Running", seconds=120)
        seen = figures(claims.wait_log(name, "taken="))
        assert seen["result"] == 2 and seen["devices"] == 1, seen
        assert seen["total"] == blocks * BLOCK
        assert (blocks - 2) * BLOCK <= seen["taken"] <= blocks * BLOCK
        (result,) = _results(claims, name)
        evidence(f"{name}: {result['device']} {result['consumedCapacity']} {result['shareID']}, total={seen['total']}")
    assert _results(claims, "small")[0]["device"] == _results(claims, "large")[0]["device"]
    assert _results(claims, "small")[0]["shareID"] != _results(claims, "large")[0]["shareID"]


def test_the_slices_are_the_cards(claims: System, evidence: Any) -> None:
    found = _devices(claims)
    assert len(found) == CARDS
    assert {device["capacity"]["cores"]["value"] for device in found} == {"100"}
    assert all(device["allowMultipleAllocations"] for device in found)
    evidence(json.dumps(found[0]))


def test_a_shared_claim_is_one_limit_for_all_its_containers(claims: System, client_image: str, made: Any) -> None:
    """Two pods, one of them with two containers: whoever comes late finds it full, up to not a context more."""
    made(claim("shared", 30, "2560Mi"))
    made(pod("one", client_image, "shared", containers=2), pod("two", client_image, "shared"))
    taken = 0
    for name, container in (("one", "c0"), ("one", "c1"), ("two", "c0")):
        claims.wait_phase(name, "Running", seconds=120)

        def line(name: str = name, container: str = container) -> str | None:
            text = claims.lab.kubectl("logs", name, "-c", container, check=False)
            return next((one for one in text.splitlines() if "result=" in one), None)

        seen = figures(eventually(f"{name}/{container} says what it got", line, 60))
        assert seen["result"] == 2 and seen.get("total", 10 * BLOCK) == 10 * BLOCK
        taken += seen.get("taken", 0)
    assert 8 * BLOCK <= taken <= 10 * BLOCK


def test_two_cards_that_are_not_the_same(claims: System, client_image: str, made: Any) -> None:
    made(claim("pair", 10, "1Gi", count=2, apart=True), pod("pair", client_image, "pair"))
    claims.wait_phase("pair", "Running", seconds=120)
    assert figures(claims.wait_log("pair", "taken="))["devices"] == 2
    assert len({result["device"] for result in _results(claims, "pair")}) == 2


def test_a_daemon_that_is_killed_knows_its_claims(claims: System, client_image: str, made: Any) -> None:
    made(claim("before", 30, "2560Mi"), pod("before", client_image, "before"))
    claims.wait_phase("before", "Running", seconds=120)
    claims.wait_log("before", "taken=")
    written = [item["metadata"]["resourceVersion"] for item in claims.lab.get("resourceslices")["items"]]
    claims.restart_manager()
    eventually("its slice is as it was", lambda: len(_devices(claims)) == CARDS, 60)
    assert [item["metadata"]["resourceVersion"] for item in claims.lab.get("resourceslices")["items"]] == written
    usage = json.loads(claims.get(claims.manager_port, "/usage"))
    assert [(item["pod_name"], item["container"], item["claimed_by"]) for item in usage["containers"]] == [
        ("before", "gpu", ["before"])
    ]
    made(claim("after", 30, "1Gi"), pod("after", client_image, "after"))
    claims.wait_phase("after", "Running", seconds=150)  # kubelet waits before it tries again what failed
    assert figures(claims.wait_log("after", "taken="))["total"] == 4 * BLOCK


def test_an_update_leaves_no_pod_unprepared(claims: System, client_image: str, made: Any, evidence: Any) -> None:
    """Kubelet calls the daemon that registered last, which passes calls on until it has the node."""
    names = [f"update-{number}" for number in range(9)]

    def begin(part: list[str]) -> None:
        made(*(item for name in part for item in (claim(name, 5, "512Mi"), pod(name, client_image, name))))

    begin(names[:3])
    port = claims.stand_by_manager(*_settings(claims.lab.environment["KUBELET_ROOT"]))
    begin(names[3:6])
    creating = threading.Thread(target=begin, args=(names[6:],))
    creating.start()
    claims.follow_manager(port)
    creating.join()
    for name in names:
        claims.wait_phase(name, "Running", seconds=150)
    text = claims.lab.kubectl("get", "events", "--field-selector=reason=FailedPrepareDynamicResources", "-o", "json")
    failed = [
        one["message"] for one in json.loads(text)["items"] if one["involvedObject"]["name"].startswith("update-")
    ]
    evidence(f"9 claims around an update: {len(failed)} failed to be prepared")
    assert not failed
    eventually(
        "the new daemon's book",
        lambda: {item["pod_name"] for item in json.loads(claims.get(port, "/usage"))["containers"]} >= set(names),
        30,
    )


def test_a_configuration_that_is_wrong_is_told_to_the_pod(claims: System, client_image: str, made: Any) -> None:
    made(claim("typo", 30, "1Gi", corelimit=50), pod("typo", client_image, "typo"))

    def told() -> bool:
        return "InvalidShareConfig" in claims.lab.kubectl("describe", "pod", "typo", check=False)

    eventually("the pod's events say it", told, 60)


@pytest.mark.parametrize("count", [int(os.environ.get("KUBE_CLAIMS", "40"))])
def test_a_burst_of_claims_is_never_mixed_up(
    claims: System, client_image: str, made: Any, evidence: Any, count: int
) -> None:
    """Each container counts the memory of its own claim, whatever comes at the same moment; $KUBE_CLAIMS: how many."""
    blocks = {f"burst-{number}": 1 + number % 10 for number in range(count)}
    pods = [pod(name, client_image, name) for name in blocks]
    for item in pods:
        item["metadata"]["labels"] = {"burst": "claims"}
    made(*(claim(name, 3, f"{size * 256}Mi") for name, size in blocks.items()))
    began = time.monotonic()
    made(*pods)
    seen = claims.totals("burst=claims", count, 60 + 6 * count)
    wrong = {name: seen[name] for name, size in blocks.items() if seen[name] != size * BLOCK}
    evidence(
        f"{count} claims at once: {len(wrong)} mismatches, all containers counted after {time.monotonic() - began:.0f} s"
    )
    assert not wrong
