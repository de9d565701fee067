"""Many pods at once on the real kubelet, with and without failures in between: every one has exactly its own limits."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from kube_system import System, share_pod
from kubelab import eventually

BLOCK = 256 * 1024 * 1024
APP = {"app": "burst"}
SELECTOR = "app=burst"


def burst(prefix: str, image: str, count: int) -> dict[str, dict[str, Any]]:
    """Pods with equal cores and different memory: what can be told apart only by knowing whose call Allocate is."""
    names = [f"{prefix}-{index}" for index in range(count)]
    return {name: share_pod(name, image, 3, 1 + index % 20, labels=APP) for index, name in enumerate(names)}


def wanted(pods: dict[str, dict[str, Any]]) -> dict[str, int]:
    return {
        name: int(pod["spec"]["containers"][0]["resources"]["limits"]["tencent.com/vcuda-memory"]) * BLOCK
        for name, pod in pods.items()
    }


def running(system: System) -> int:
    return Counter(system.phases(SELECTOR).values())["Running"]


def booked(system: System) -> dict[str, int]:
    return {name: entry["cards"][0]["memory_limit_bytes"] for name, entry in system.bookings().items()}


def check(system: System, made: dict[str, dict[str, Any]], seconds: float) -> Counter[str]:
    """Every pod comes to run, and client and daemon agree about its own limit. Returns the refusals on the way."""
    refused = system.settle(made, SELECTOR, seconds)
    assert system.totals(SELECTOR, len(made), 120) == wanted(made)
    assert booked(system) == wanted(made)
    return refused


@pytest.mark.parametrize("count", [200])
def test_a_burst_has_no_mismatch(system: System, client_image: str, pods: Any, count: int, evidence: Any) -> None:
    """Equal cores, different memory, all at once: the client in each pod sees its own size, and the daemon books it.

    On a machine that is too slow for kubelet's deadlines a pod may be refused, never given another one's share.
    """
    made = burst("many", client_image, count)
    pods(*made.values())
    refused = check(system, made, 420)
    assert sum(refused.values()) <= count, refused
    evidence(
        f"{count} pods with equal cores and different memory at once: 0 mismatches, refused and made again: {dict(refused)}"
    )


def test_the_daemon_is_killed_during_a_burst(system: System, client_image: str, pods: Any, evidence: Any) -> None:
    """kill -9: pods that run keep their limits, those refused meanwhile hold nothing, and all others get their own."""
    made = burst("killed", client_image, 40)
    pods(*made.values())
    eventually("some pods run", lambda: running(system) >= 8, 240, every=0.1)
    system.kill("manager")
    time.sleep(1.0)
    system.start_manager()
    refused = check(system, made, 180)
    evidence(f"daemon killed during a burst of 40: 0 mismatches, refused and made again: {dict(refused)}")


def test_scheduler_and_api_server_restart_under_load(
    system: System, client_image: str, pods: Any, evidence: Any
) -> None:
    """Everything that decides goes away at once and comes back: nothing is booked twice and nothing is lost."""
    made = burst("restarted", client_image, 40)
    pods(*made.values())
    eventually("some pods run", lambda: running(system) >= 3, 240, every=0.1)
    system.lab.call("restart-scheduler")
    system.lab.call("restart-apiserver")
    system.kill("extender")
    system.start_extender()
    refused = check(system, made, 180)
    evidence(
        f"scheduler, API server and extender restarted during a burst of 40: 0 mismatches, refused {dict(refused)}"
    )


def test_kubelet_restarts_and_the_daemon_is_killed_at_once(
    system: System, client_image: str, pods: Any, evidence: Any
) -> None:
    """A new kubelet empties the socket folder while the daemon's next life starts, under load."""
    made = burst("both", client_image, 40)
    pods(*made.values())
    eventually("some pods run", lambda: running(system) >= 8, 240, every=0.1)
    before = {name for name, phase in system.phases(SELECTOR).items() if phase == "Running"}
    system.kill("manager")
    system.lab.call("restart-kubelet")
    system.start_manager()
    system.wait_offered()
    refused = check(system, made, 180)
    restarts = {
        item["metadata"]["name"]: sum(status["restartCount"] for status in item["status"]["containerStatuses"])
        for item in system.lab.get("pods", "-l", SELECTOR)["items"]
    }
    assert not any(restarts[name] for name in before), "pods that ran were left alone"
    evidence(f"kubelet restarted and daemon killed during a burst of 40: 0 mismatches, refused {dict(refused)}")


def test_the_api_server_is_away_while_the_daemon_restarts(
    system: System, client_image: str, pods: Any, evidence: Any
) -> None:
    """An outage of the API server: the daemon's next life starts all the same, knows its bookings, and goes on afterwards."""
    made = burst("outage", client_image, 20)
    first = dict(list(made.items())[:10])
    pods(*first.values())
    check(system, first, 90)
    system.lab.call("stop", "kube-apiserver")
    try:
        system.kill("manager")
        system.start_manager()
        assert booked(system) == wanted(first)
    finally:
        system.lab.call("restart-apiserver")
    system.wait_offered()
    system.create_all([made[name] for name in made if name not in first])
    refused = check(system, made, 120)
    evidence(f"API server away while the daemon restarts: 10 bookings kept, 10 more pods, refused {dict(refused)}")


STAGES = ("created", "bound", "booked", "running")


def test_pods_are_deleted_at_every_stage(system: System, client_image: str, pods: Any) -> None:
    """Nothing of a deleted pod stays booked at daemon or extender, and no region stays mounted (the fixture looks)."""

    def reached(name: str, stage: str) -> bool:
        if stage == "booked":
            return name in system.bookings()
        pod = system.pod(name)
        if stage == "bound":
            return bool(pod["spec"].get("nodeName"))
        return stage == "created" or pod["status"].get("phase") == "Running"

    made = list(burst("deleted", client_image, 5 * len(STAGES)).values())
    for index, pod in enumerate(made):
        name, stage = pods(pod), STAGES[index % len(STAGES)]
        eventually(f"{name} is {stage}", lambda name=name, stage=stage: reached(name, stage), 30, every=0.02)
        system.delete(name)
    system.wait_free()
