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


def phases(system: System) -> dict[str, str]:
    items = system.lab.get("pods", "-l", SELECTOR)["items"]
    return {item["metadata"]["name"]: item["status"].get("phase", "") for item in items}


def running(system: System) -> int:
    return Counter(phases(system).values())["Running"]


@pytest.mark.parametrize("count", [200])
def test_a_burst_has_no_mismatch(system: System, client_image: str, pods: Any, count: int) -> None:
    """Equal cores, different memory, all at once: the client in each pod sees its own size, and the daemon books it."""
    made = burst("many", client_image, count)
    pods(*made.values())
    assert system.totals(SELECTOR, count, 240) == wanted(made)
    booked = {name: entry["cards"][0]["memory_limit_bytes"] for name, entry in system.bookings().items()}
    assert booked == wanted(made)


def test_the_daemon_is_killed_during_a_burst(system: System, client_image: str, pods: Any) -> None:
    """kill -9: pods that run keep their limits, those refused meanwhile hold nothing, and all others get their own."""
    made = burst("killed", client_image, 40)
    pods(*made.values())
    eventually("some pods run", lambda: running(system) >= 8, 60, every=0.1)
    system.kill("manager")
    time.sleep(1.0)
    system.start_manager()
    system.wait_offered()

    def settled() -> bool:
        return set(phases(system).values()) <= {"Running", "Failed"}

    eventually("every pod runs or was refused", settled, 90, every=1.0)
    refused = {name: made[name] for name, phase in phases(system).items() if phase == "Failed"}
    system.delete(*refused)
    system.create_all(list(refused.values()))  # what a Deployment would do
    assert system.totals(SELECTOR, len(made), 90) == wanted(made)
    assert len(system.bookings()) == len(made)


def test_scheduler_and_api_server_restart_under_load(system: System, client_image: str, pods: Any) -> None:
    made = burst("restarted", client_image, 40)
    pods(*made.values())
    eventually("some pods run", lambda: running(system) >= 3, 60, every=0.1)
    system.lab.call("restart-scheduler")
    system.lab.call("restart-apiserver")
    system.kill("extender")
    system.start_extender()
    assert system.totals(SELECTOR, len(made), 120) == wanted(made)
    booked = {name: entry["cards"][0]["memory_limit_bytes"] for name, entry in system.bookings().items()}
    assert booked == wanted(made)


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
