"""Preemption and gangs through the real kube-scheduler: who is evicted for a more important pod, and pods that start together."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kube_system import CARDS, System, share_pod
from kubelab import eventually

from vcuda.spec.names import Names

NAMES = Names()
CLASSES = {"vcuda-test-low": 10, "vcuda-test-high": 1000}


@pytest.fixture(scope="module")
def classes(system: System) -> Iterator[None]:
    system.lab.apply(
        *(
            {
                "apiVersion": "scheduling.k8s.io/v1",
                "kind": "PriorityClass",
                "metadata": {"name": name},
                "value": value,
            }
            for name, value in CLASSES.items()
        )
    )
    yield
    system.lab.kubectl("delete", "priorityclass", *CLASSES)


def whole(name: str, image: str, priority: str, cards: int = 1) -> dict[str, Any]:
    pod = share_pod(name, image, 100 * cards, 1, labels={"app": "groups"})
    pod["spec"]["priorityClassName"] = priority
    return pod


def cards_of(pod: dict[str, Any]) -> set[str]:
    text = pod["metadata"]["annotations"]["tencent.com/vcuda-placement"]
    return {share[0] for shares in json.loads(text)["containers"].values() for share in shares}


def test_a_more_important_pod_gets_the_card_of_exactly_one_other(
    system: System, client_image: str, pods: Any, classes: None, evidence: Any
) -> None:
    """All cards are taken by unimportant pods, one by a pod as important as the newcomer: one unimportant pod goes, not two."""
    pods(whole("equal", client_image, "vcuda-test-high"))
    pods(*(whole(f"low-{number}", client_image, "vcuda-test-low") for number in range(CARDS - 1)))
    eventually("every card is taken", lambda: Counter(system.phases("app=groups").values())["Running"] == CARDS, 90)
    held = {item["metadata"]["name"]: cards_of(item) for item in system.lab.get("pods", "-l", "app=groups")["items"]}
    system.create(whole("newcomer", client_image, "vcuda-test-high"))
    system.wait_phase("newcomer", "Running", seconds=90)
    left = system.phases("app=groups")
    gone = held.keys() - left.keys()
    assert len(gone) == 1, left
    (victim,) = gone
    assert victim.startswith("low-")
    assert cards_of(system.pod("newcomer")) == held[victim]
    evidence(f"preemption: {victim} of {CARDS} pods went for the newcomer, which runs on its card")


def test_a_gang_starts_together_or_not_at_all(system: System, client_image: str, pods: Any, evidence: Any) -> None:
    """Two members of three hold nothing; when the third one comes, all three run."""

    def member(number: int) -> dict[str, Any]:
        return share_pod(
            f"member-{number}", client_image, 100, 1, labels={"app": "gang"}, annotations={"tencent.com/vcuda-gang": "trainer/3"}
        )  # fmt: skip

    pods(member(0), member(1))
    eventually(
        "an event names the gang",
        lambda: "Gang" in system.lab.kubectl("describe", "pods", "-l", "app=gang", "--show-events", check=False),
        60,
    )
    assert set(system.phases("app=gang").values()) == {"Pending"}
    assert not system.bookings()
    pods(member(2))
    eventually("all three run", lambda: Counter(system.phases("app=gang").values())["Running"] == 3, 120, every=1.0)
    evidence("gang of 3: nothing ran before the third pod came, then all three")


@pytest.fixture
def restart(system: System) -> Iterator[Callable[..., None]]:
    """kill -9, and another one with these settings beside the usual ones; afterwards one with the usual ones alone."""

    def again(*more: str) -> None:
        system.kill("extender")
        system.start_extender(*more)

    yield again
    again()


def test_a_gang_whose_last_member_comes_after_its_deadline_starts_within_seconds(
    system: System, client_image: str, pods: Any, restart: Callable[..., None], evidence: Any
) -> None:
    """Created alone it makes kube-scheduler look at nobody; its own Bind did, which had to fail first: 5.7 s."""
    restart("--gang-seconds", "4")
    members = [
        share_pod(f"late-{number}", client_image, 100, 1, labels={"app": "late"}, annotations={NAMES.gang: "late/3"})
        for number in range(3)
    ]
    pods(*members[:2])
    eventually(
        "both are refused before all exist",
        lambda: json.dumps(system.lab.get("pods", "-l", "app=late")).count("nothing is reserved before all exist") == 2,
        90,
    )
    time.sleep(10)  # kube-scheduler has put them aside
    began = time.monotonic()
    pods(members[2])
    eventually("all three run", lambda: Counter(system.phases("app=late").values())["Running"] == 3, 60, every=0.2)
    seconds = time.monotonic() - began
    retried = [NAMES.retry in system.pod(f"late-{number}")["metadata"]["annotations"] for number in range(3)]
    evidence(f"the gang runs {seconds:.1f} s after its last member came")
    assert retried == [True, True, False], "who has just come needs none"


def test_whom_a_killed_extender_had_refused_is_woken_by_the_next_one(
    system: System, client_image: str, pods: Any, restart: Callable[..., None], evidence: Any
) -> None:
    """Its quota was raised while no extender was there: kube-scheduler watches no ConfigMap."""

    def limit(cores: int) -> None:
        system.lab.apply(
            {
                "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": "default", "name": "restart-quotas"},
                "data": {"quotas": f"[{{namespace: default, cores: {cores}}}]"},
            }
        )  # fmt: skip

    limit(10)
    restart("--quotas", "default/restart-quotas")
    pods(share_pod("refused", client_image, 20, 1))
    eventually(
        "it is refused", lambda: "QuotaExceeded" in system.lab.kubectl("describe", "pod", "refused", check=False), 60
    )
    time.sleep(10)  # kube-scheduler has put it aside
    system.kill("extender")
    limit(20)
    system.start_extender("--quotas", "default/restart-quotas")
    began = time.monotonic()
    system.wait_phase("refused", "Running", seconds=90)
    evidence(f"it runs {time.monotonic() - began:.1f} s after the next extender was ready")
    assert NAMES.retry in system.pod("refused")["metadata"]["annotations"]
    system.lab.kubectl("delete", "configmap", "restart-quotas")
