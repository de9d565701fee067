"""The chart, rendered by Helm's own engine, in the real cluster: daemon and extender run as pods from one image."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kube_image
import pytest
import yaml
from kube_system import System, share_pod
from kubelab import eventually

from deploy import manifests

IMAGE = ("vcuda-gpu-manager", "test")
NAMESPACE = manifests.NAMESPACE
EXTENDER_NAME = f"gpu-scheduler-extender.{NAMESPACE}.svc"
BLOCK = 256 * 1024 * 1024

pytest.importorskip("helm_python", reason="Helm's engine (helm-python-sdk) has no wheel for this machine")


def certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for the extender's Service, and its key."""
    files = folder / "tls.crt", folder / "tls.key"
    command = [
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=extender",
        "-addext", f"subjectAltName=DNS:{EXTENDER_NAME}", "-out", str(files[0]), "-keyout", str(files[1]),
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    return files


def values(system: System, certificate_file: Path) -> dict[str, Any]:
    """What this cluster and a simulated machine need beside the defaults."""
    machine = str(system.machine.directory)
    simulation = {"name": "simulation", "hostPath": {"path": machine}}
    return {
        "image": {"repository": IMAGE[0], "tag": IMAGE[1], "pullPolicy": "Never"},
        "manager": {
            "driver": {"hostPath": str(system.machine.root)},
            "stateDirectory": str(system.folder / "pods"),
            "kubelet": {"verify": True},
            "extraArgs": ["--allocation-check-period=2", *system.simulation_arguments()],
            "extraEnv": [{"name": "VCUDA_SIM_DIR", "value": machine}],
            "extraVolumes": [simulation],
            "extraVolumeMounts": [{"name": "simulation", "mountPath": machine}],
        },
        "extender": {"podDisruptionBudget": {"apiVersion": "policy/v1beta1"}},
        "scheduler": {"caFile": str(certificate_file)},
    }


def leader(system: System) -> dict[str, Any]:
    return pod_of(system, "gpu-scheduler-extender", ",tencent.com/vcuda-extender-role=leader")


def pod_of(system: System, program: str, more: str = "") -> dict[str, Any]:
    """The one ready pod of `program`, of those that the selector's other terms leave."""

    def ready() -> dict[str, Any] | None:
        selector = f"app.kubernetes.io/name={program}{more}"
        found = system.lab.get("pods", "-n", NAMESPACE, "-l", selector)["items"]
        if len(found) != 1 or found[0]["metadata"].get("deletionTimestamp"):
            return None
        conditions = {item["type"]: item["status"] for item in found[0]["status"].get("conditions", ())}
        return found[0] if conditions.get("Ready") == "True" else None

    try:
        return eventually(f"a pod of {program} is ready", ready, 90)
    except AssertionError as error:
        words = ("-n", NAMESPACE, "-l", f"app.kubernetes.io/name={program}")
        described = system.lab.kubectl("describe", "pod", *words, check=False)
        logs = system.lab.kubectl("logs", *words, check=False)
        raise AssertionError(f"{error}\n{described[-5000:]}\n{logs[-3000:]}") from None


def use_extender(system: System, chosen: dict[str, Any], pod: dict[str, Any]) -> None:
    """Give kube-scheduler the chart's file for this pod: there is no kube-proxy here that would serve the Service."""
    host = {**chosen, "scheduler": {**chosen["scheduler"], "extenderHost": pod["status"]["podIP"]}}
    configuration = yaml.safe_load(manifests.render(host, NAMESPACE)["scheduler-config.yaml"])
    file = system.folder / "scheduler.yaml"
    file.write_text(
        configuration["data"]["v1beta1.yaml"].replace("/etc/kubernetes/scheduler.conf", "@KUBECONFIG@")
    )
    system.lab.call("restart-scheduler", SCHED_CONFIG=str(file), EXTENDER_YAML="")


@pytest.fixture(scope="module")
def installed(system: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Stop the processes on the host, install the chart instead, and give kube-scheduler the chart's own file."""
    folder = tmp_path_factory.mktemp("chart")
    image = folder / "image"
    image.mkdir()
    kube_image.build(image)
    system.lab.image(":".join(IMAGE), image, "gpu-manager")
    system.stop()
    crt, key = certificate(folder)
    system.lab.kubectl("create", "namespace", NAMESPACE)
    secret = system.lab.kubectl(
        "create", "secret", "tls", "gpu-scheduler-extender-tls", f"--cert={crt}", f"--key={key}",
        "-n", NAMESPACE, "--dry-run=client", "-o", "yaml",
    )  # fmt: skip
    system.lab.kubectl("apply", "-f", "-", stdin=secret)
    chosen = values(system, crt)
    rendered = manifests.render(chosen, NAMESPACE)
    text = "\n---\n".join(rendered[name] for name in rendered if name.endswith(".yaml"))
    try:
        system.lab.kubectl("apply", "-f", "-", stdin=text)
        pod_of(system, "gpu-manager")
        use_extender(system, chosen, leader(system))
        system.wait_offered()
        yield chosen
    finally:
        system.delete_all()
        system.lab.kubectl(
            "delete", "--ignore-not-found", "--grace-period=0", "--force", "-f", "-", stdin=text, check=False
        )
        system.lab.call("restart-scheduler", SCHED_CONFIG="", EXTENDER_YAML="")
        system.start()


def usage(system: System) -> dict[str, dict[str, Any]]:
    address = pod_of(system, "gpu-manager")["status"]["podIP"]
    with urllib.request.urlopen(f"http://{address}:5678/usage", timeout=5) as answer:
        found = json.loads(answer.read())
    return {entry["pod_name"]: entry for entry in found["containers"]}


def test_shares_hold_and_outlive_the_daemon_s_pod(
    system: System, client_image: str, installed: dict[str, Any]
) -> None:
    """Least-privilege roles, TLS and mounts as shipped: a pod runs into its limit, and keeps it through an upgrade."""
    assert system.node()["metadata"]["annotations"]["tencent.com/vcuda-inventory"]
    system.create(share_pod("charted", client_image, 30, 4))
    system.wait_phase("charted", "Running")
    line = system.wait_log("charted", "taken=")
    assert f"total={4 * BLOCK} " in line
    assert "result=2" in line

    def assigned() -> bool:  # needs the right to patch pods
        return system.pod("charted")["metadata"]["annotations"].get("tencent.com/gpu-assigned") == "true"

    eventually("gpu-assigned is true", assigned, 15)
    before = usage(system)["charted"]
    assert before["cards"][0]["memory_limit_bytes"] == 4 * BLOCK
    assert before["processes"] == 1, "the daemon reads the region that the container writes"

    old = pod_of(system, "gpu-manager")["metadata"]["name"]
    system.lab.kubectl("delete", "pod", "-n", NAMESPACE, old, "--wait=true")
    system.wait_offered()
    after = usage(system)["charted"]
    assert pod_of(system, "gpu-manager")["metadata"]["name"] != old
    assert after["cards"][0]["memory_limit_bytes"] == 4 * BLOCK
    assert after["cards"][0]["memory_used_bytes"] == before["cards"][0]["memory_used_bytes"]
    assert after["processes"] == 1
    assert system.pod("charted")["status"]["phase"] == "Running"

    system.create(share_pod("next", client_image, 30, 7))
    assert f"total={7 * BLOCK} " in system.wait_log("next", "taken=")


def test_a_standby_takes_over(system: System, client_image: str, installed: dict[str, Any]) -> None:
    """The leader's pod is deleted: it gives its Lease back, the Service's endpoints follow, and pods are placed again."""
    first = leader(system)
    name, address = first["metadata"]["name"], first["status"]["podIP"]
    system.lab.kubectl("delete", "pod", "-n", NAMESPACE, name, "--wait=true")
    second = leader(system)
    assert second["metadata"]["name"] != name

    def followed() -> bool:
        subsets = system.lab.get("endpoints", "-n", NAMESPACE, "gpu-scheduler-extender").get("subsets") or []
        found = {item["ip"] for subset in subsets for item in subset.get("addresses") or ()}
        return found == {second["status"]["podIP"]} != {address}

    eventually("the Service leads to the new leader alone", followed, 30)
    use_extender(system, installed, second)
    system.create(share_pod("placed-again", client_image, 30, 5))
    assert f"total={5 * BLOCK} " in system.wait_log("placed-again", "taken=")


def test_roles_hold_nothing_that_was_refused(system: System, installed: dict[str, Any]) -> None:
    """Neither log tells of a call that the API server or kubelet refused."""
    for program in ("gpu-manager", "gpu-scheduler-extender"):
        words = ("-n", NAMESPACE, "-l", f"app.kubernetes.io/name={program}", "--tail=-1")
        log = system.lab.kubectl("logs", *words)
        assert log
        assert "forbidden" not in log.lower(), log
        assert " 403" not in log, log


def test_the_api_server_accepts_the_plain_manifests(system: System, installed: dict[str, Any]) -> None:
    """deploy/kubernetes, with the policy version that this cluster knows, passes the API server's validation."""
    files = manifests.plain({"extender": {"podDisruptionBudget": {"apiVersion": "policy/v1beta1"}}})
    told = system.lab.kubectl(
        "apply", "--dry-run=server", "-f", "-", stdin="\n---\n".join(files.values())
    ).splitlines()
    assert len(told) == sum(len(list(yaml.safe_load_all(text))) for text in files.values())


def test_the_network_policy_is_accepted(system: System, installed: dict[str, Any]) -> None:
    chosen = {"networkPolicy": {"enabled": True, "schedulerCIDRs": ["10.0.0.0/24"]}}
    text = manifests.render(chosen)["networkpolicy.yaml"]
    assert system.lab.kubectl("apply", "--dry-run=server", "-f", "-", stdin=text).count("networkpolicy") == 2
