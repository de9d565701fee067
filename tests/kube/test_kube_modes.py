"""The chart's modes in the real cluster: kubelet's list by each right or none, settings that change live, quotas, clean-up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from kube_chart import NAMESPACE, Chart
from kube_system import System, share_pod
from kubelab import eventually

BLOCK = 256 * 1024 * 1024
MANAGER = f"system:serviceaccount:{NAMESPACE}:gpu-manager"

pytest.importorskip("helm_python", reason="Helm's engine (helm-python-sdk) has no wheel for this machine")


@pytest.fixture
def installed(system: System, chart: Chart) -> Iterator[Chart]:
    yield chart
    system.delete_all()


def allowed(system: System, verb: str, resource: str, user: str = MANAGER) -> bool:
    """What the API server's authorizer says, by which a kubelet goes, too."""
    kind, _, part = resource.partition("/")
    words = ["auth", "can-i", verb, kind, f"--as={user}", *([f"--subresource={part}"] if part else [])]
    return system.lab.kubectl(*words, check=False).strip() == "yes"


def touch(system: System, chart: Chart) -> None:
    """Have kubelet look at the daemon's pod now: it renews mounted ConfigMaps only every minute or so."""
    name = chart.pod_of("gpu-manager")["metadata"]["name"]
    stamp = f"looked-at={system.node()['metadata']['resourceVersion']}"
    system.lab.kubectl("annotate", "pod", "-n", NAMESPACE, name, "--overwrite", stamp)


@pytest.mark.parametrize("access", ["none", "pods"])
def test_without_kubelet_s_list_a_share_is_never_guessed(
    system: System, client_image: str, installed: Chart, access: str, evidence: Any
) -> None:
    """Each pod gets its own share or is refused with an event. A kubelet before 1.33 answers 403 to the right nodes/pods."""
    installed.install({"manager": {"kubelet": {"access": access}}})
    assert not allowed(system, "get", "nodes/proxy")
    assert allowed(system, "get", "nodes/pods") == (access == "pods")
    system.create(share_pod("alone", client_image, 20, 4))
    assert f"total={4 * BLOCK} " in system.wait_log("alone", "taken=")
    system.delete("alone")

    made = {
        f"similar-{blocks}": share_pod(f"similar-{blocks}", client_image, 5, blocks, labels={"app": "similar"})
        for blocks in range(1, 17)
    }
    system.create_all(list(made.values()))

    def settled() -> bool:
        return set(system.phases("app=similar").values()) <= {"Running", "Failed"}

    eventually("every pod runs or was refused", settled, 120, every=1.0)
    phases = system.phases("app=similar")
    for name, phase in phases.items():
        if phase == "Running":
            blocks = name.removeprefix("similar-")
            assert f"total={int(blocks) * BLOCK} " in system.wait_log(name, "taken=")
        else:
            told = system.lab.kubectl("describe", "pod", name)
            assert "PodAmbiguous" in told or "PodUnknown" in told or "Busy" in told, told
    refused = [name for name, phase in phases.items() if phase == "Failed"]
    evidence(f"kubelet.access={access}: of 16 similar pods {16 - len(refused)} right, {len(refused)} refused, 0 wrong")
    if access == "pods":
        lines = installed.log("gpu-manager").splitlines()
        away = [line for line in lines if "kubelet's pods can't be had" in line]  # UIDs have a 403 in them, too
        assert any("403" in line for line in away) != system.lab.reads_pods_only, away
        assert not refused or not system.lab.reads_pods_only, "kubelet's own list tells similar pods apart"


def test_settings_of_the_file_change_without_a_restart(system: System, installed: Chart, evidence: Any) -> None:
    """An upgrade that only changes live settings leaves the daemon's pod alone; the ConfigMap's next version reaches it."""
    installed.install()
    name = installed.pod_of("gpu-manager")["metadata"]["name"]
    for labels, there in (({"vcuda-test-pool": "a"}, True), ({}, False)):
        installed.install({"manager": {"nodeLabels": labels}})
        touch(system, installed)
        eventually(
            f"the node has the label: {there}",
            lambda there=there: (system.node()["metadata"]["labels"].get("vcuda-test-pool") == "a") == there,
            150,
            every=1.0,
        )
    assert installed.pod_of("gpu-manager")["metadata"]["name"] == name
    evidence("node labels set and taken away by the ConfigMap, the daemon's pod the same")


def test_refused_pods_are_explained_and_cleaned_up(
    system: System, client_image: str, installed: Chart, evidence: Any
) -> None:
    """A share below the smallest is refused at Allocate: the event says why, and with a grace the failed pods go."""
    assert not allowed(system, "delete", "pods")
    installed.install({"manager": {"failedAdmissionGrace": 3, "config": {"smallest-memory": 3}}})
    assert allowed(system, "delete", "pods")
    touch(system, installed)
    eventually(
        "the daemon has taken the file over",
        lambda: "smallest-memory: 3" in installed.log("gpu-manager"),
        150,
        every=1.0,
    )
    pod = share_pod("small", client_image, 5, 1, labels={"app": "small"})
    replicas = {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {"name": "small", "namespace": "default"},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {"app": "small"}},
            "template": {
                "metadata": {"labels": {"app": "small"}},
                "spec": pod["spec"] | {"restartPolicy": "Always"},
            },
        },
    }
    system.lab.apply(replicas)
    try:
        first = eventually(
            "a pod was refused",
            lambda: next((name for name, phase in system.phases("app=small").items() if phase == "Failed"), None),
            60,
        )
        told = eventually(
            "an event says why",
            lambda: next(
                (line for line in system.lab.kubectl("describe", "pod", first, check=False).splitlines() if "ShareTooSmall" in line),
                None,
            ),
            30,
        )  # fmt: skip
        evidence(f"kubectl describe pod: {' '.join(told.split())}")
        system.lab.kubectl("scale", "replicaset", "small", "--replicas=0")
        eventually("the failed pods are deleted", lambda: not system.phases("app=small"), 60)
    finally:
        system.lab.kubectl("delete", "replicaset", "small", "--ignore-not-found")


def test_quotas_hold_and_change_live(system: System, client_image: str, installed: Chart, evidence: Any) -> None:
    """The chart's ConfigMap limits a namespace; a larger quota lets the waiting pod in without a restart of the extender."""

    def install(cores: int) -> None:
        installed.install({"extender": {"quotas": {"entries": [{"namespace": "default", "cores": cores}]}}})

    install(30)
    extender = installed.leader()["metadata"]["name"]
    system.create(share_pod("within", client_image, 30, 4))
    system.wait_phase("within", "Running")
    system.create(share_pod("beyond", client_image, 20, 4))
    told = eventually(
        "an event names the quota",
        lambda: next(
            (line for line in system.lab.kubectl("describe", "pod", "beyond").splitlines() if "QuotaExceeded" in line), None
        ),
        60,
    )  # fmt: skip
    evidence(f"kubectl describe pod: {' '.join(told.split())}")
    install(60)
    system.wait_phase("beyond", "Running", seconds=120)
    assert installed.leader()["metadata"]["name"] == extender
    placed = json.loads(system.pod("beyond")["metadata"]["annotations"]["tencent.com/vcuda-placement"])
    assert placed["containers"]["main"][0][1:] == [20, 4]


def test_rights_are_no_more_than_asked_for(system: System, installed: Chart) -> None:
    """By the API server's own authorizer: what neither program needs is refused to it."""
    installed.install()
    extender = f"system:serviceaccount:{NAMESPACE}:gpu-scheduler-extender"
    for user in (MANAGER, extender):
        for verb, resource in (
            ("create", "pods"), ("delete", "pods"), ("get", "secrets"), ("list", "secrets"), ("create", "pods/exec"),
            ("create", "pods/eviction"), ("update", "nodes"), ("delete", "nodes"), ("create", "clusterrolebindings"), ("*", "*"),
        ):  # fmt: skip
            assert not allowed(system, verb, resource, user), f"{user} may {verb} {resource}"
    assert allowed(system, "get", "nodes/proxy")
    assert not allowed(system, "patch", "nodes", extender)
    assert not allowed(system, "patch", "pods", extender), "only in its own namespace"
    assert not allowed(system, "create", "pods/binding", MANAGER)
