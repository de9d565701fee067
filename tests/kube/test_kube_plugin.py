"""`kubectl vcuda` on a real cluster: through kubectl and the API server, as a user who has the chart's Role and no more."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kube_chart import NAMESPACE, Chart
from kube_system import System, share_pod
from kubelab import eventually

_USER = {"kind": "ServiceAccount", "name": "jane", "namespace": "default"}


def _bind(kind: str, name: str, role_kind: str, role: str, namespace: str | None = None) -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": kind,
        "metadata": {"name": name} | ({"namespace": namespace} if namespace else {}),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": role_kind, "name": role},
        "subjects": [_USER],
    }


@pytest.fixture
def jane(system: System, tmp_path: Path) -> Path:
    """A kubeconfig of a user who may edit pods of namespace default and read nodes; nothing of ours yet."""
    nodes = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list"]}
    system.lab.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "jane", "namespace": "default"}},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "node-reader"},
            "rules": [nodes],
        },
        _bind("RoleBinding", "jane", "ClusterRole", "edit", "default"),
        _bind("ClusterRoleBinding", "jane-nodes", "ClusterRole", "node-reader"),
    )
    token = system.lab.token("jane", "default")
    config = json.loads(system.lab.kubectl("config", "view", "--raw", "--flatten", "-o", "json"))
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
    path = tmp_path / "jane"
    path.write_text(json.dumps(config))
    return path


def _vcuda(system: System, kubeconfig: Path, *words: str) -> subprocess.CompletedProcess[str]:
    folder = str(Path(sys.executable).parent)  # where the plugin's console scripts are installed
    env = {**os.environ, "KUBECONFIG": str(kubeconfig), "PATH": f"{folder}:{os.environ['PATH']}"}
    kubectl = shlex.split(system.lab.environment["KUBECTL"])[0]
    return subprocess.run([kubectl, "vcuda", *words], env=env, capture_output=True, text=True, timeout=150, check=False)


def test_a_user_with_the_charts_role_sees_explains_and_resizes_his_shares(
    system: System, chart: Chart, client_image: str, jane: Path, evidence: Any
) -> None:
    chart.install()
    system.create(
        share_pod(
            "hog",
            client_image,
            30,
            4,
            command=["/bin/hog", "again"],
            annotations={"tencent.com/vcuda-core-limit": "80"},
        )
    )
    # More than a card has, less than the node: kube-scheduler's own sums let it pass, and the extender is asked.
    system.create(share_pod("waits", client_image, 30, 400, command=["/bin/hog"]))
    system.wait_phase("hog", "Running")

    refused = _vcuda(system, jane, "top")
    assert refused.returncode == 1 and "answered 403" in refused.stderr and refused.stderr.count("\n") == 1, refused
    system.lab.apply(_bind("RoleBinding", "jane", "Role", "vcuda-user", NAMESPACE))

    def line() -> str | None:
        """Once the daemon may be asked and the client has taken memory."""
        told = _vcuda(system, jane, "top", "--interval=1.5")
        lines = [line for line in told.stdout.splitlines() if line.startswith("hog ")]
        return lines[0] if told.returncode == 0 and lines and " 0 B/" not in lines[0] else None

    shown = eventually("top shows what the share uses", line, 60, every=2)
    assert shown.split()[1] == "main" and " 30-80 " in shown and shown.rstrip().endswith("/1 GiB"), shown
    evidence(f"top: {' '.join(shown.split())}")

    nodes = _vcuda(system, jane, "nodes")
    assert nodes.returncode == 0 and "8/8" in nodes.stdout and nodes.stdout.rstrip().endswith("ok"), nodes
    found = json.loads(_vcuda(system, jane, "nodes", "--json").stdout)
    assert sum(card["booked_cores"] for card in found[0]["cards"]) == 30

    waits = eventually(
        "the extender explains why a pod waits",
        lambda: (told := _vcuda(system, jane, "explain", "waits")).returncode == 0 and told.stdout,
        60,
        every=2,
    )
    assert "asks for 30 cores" in waits and "InsufficientMemory" in waits and "fits on node" in waits
    evidence(f"explain: {waits.splitlines()[-2].strip()}")

    resized = _vcuda(system, jane, "resize", "hog", "core=50,memory=12")
    assert resized.returncode == 0 and resized.stdout.startswith("hog/main: 50 cores, 3 GiB of card GPU-"), resized
    evidence(f"resize: {resized.stdout.split(' of card')[0]}")

    doctor = json.loads(_vcuda(system, jane, "doctor", system.lab.environment["NODE_NAME"], "--json").stdout)
    verdicts = {check["what"]: check["verdict"] for check in doctor}
    assert {verdicts[what] for what in ("kubelet", "inventory", "daemon", "driver", "extender", "API server")} == {
        "ok"
    }, doctor
    assert "FAIL" not in verdicts.values(), doctor
    evidence(f"doctor: {len(doctor)} checks, none failed")
    logs = chart.log("gpu-manager") + chart.log("gpu-scheduler-extender")
    assert json.loads(jane.read_text())["users"][0]["user"]["token"] not in logs
