"""A cluster for the plugin: the stand-in API server, a real daemon with a share on its node, a real extender, a user's rights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from localcluster.apiserver.faults import Fault, Request
from tests.manager.conftest import (  # noqa: F401 - fixtures
    contexts_known,
    machine,
    make_machine,
    make_node,
    short_directory,
    soon_stopped,
)
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_support import Node
from tests.scheduler_ext.extender_support import Served
from vcuda.kubectl import main as plugin
from vcuda.sim import Machine

SYSTEM = "vcuda-system"
TOKEN = "of-the-reader"


def program_pod(
    name: str, program: str, port_name: str, port: int, node: str = "node-1", **labels: str
) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": SYSTEM, "labels": {"app.kubernetes.io/name": program, **labels}},
        "spec": {
            "nodeName": node,
            "containers": [{"name": "c", "ports": [{"name": port_name, "containerPort": port}]}],
        },
        "status": {"podIP": "127.0.0.1", "phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }


class Cluster:
    """`refused`: paths (regular expressions) that the API server answers with 403, as it does without a right."""

    def __init__(self, node: Node, kubeconfig: Path) -> None:
        self.node, self.kubeconfig = node, kubeconfig
        self.refused: list[str] = []
        self.tokens_made = 0
        assert node.api is not None
        self.api = node.api
        self._before = node.api.hook
        node.api.hook = self._answer

    def _answer(self, request: Request) -> Fault | None:
        if any(re.search(pattern, f"{request.method} {request.path}") for pattern in self.refused):
            return Fault(403, message=f'User "jane" cannot {request.method.lower()} {request.path}')
        if request.path.endswith("/serviceaccounts/vcuda-reader/token"):
            self.tokens_made += 1
            return Fault(201, body=b'{"status": {"token": "%s"}}' % TOKEN.encode())
        if request.path.endswith("/tokenreviews"):
            known = b"true" if request.body["spec"]["token"] == TOKEN else b"false"
            return Fault(201, body=b'{"status": {"authenticated": %s, "user": {"username": "reader"}}}' % known)
        if request.path.endswith("/subjectaccessreviews"):
            return Fault(201, body=b'{"status": {"allowed": true}}')
        return self._before(request)

    def vcuda(self, *words: str) -> int:
        """The exit status of `kubectl vcuda WORDS`."""
        return plugin.main([words[0], f"--kubeconfig={self.kubeconfig}", *words[1:]])


@pytest.fixture
def cluster(make_node: Callable[..., Node], machine: Machine) -> Cluster:  # noqa: F811
    """One node with two cards of 8 GiB, its daemon (which asks who reads its pages), and pod default/p with 30 cores and 4 blocks."""
    node = make_node(machine.root, with_api=True)
    api = node.api
    assert api is not None
    made = Cluster(node, api.kubeconfig(node.directory))
    node.kubelet.start()
    daemon = node.start("--query-auth=kubernetes", wait=200)
    api.put("namespaces", {"metadata": {"name": SYSTEM}})
    labels = {"nvidia-device-enable": "enable"}
    # As the API server has it once the daemon has written its inventory.
    eventually(
        lambda: NAMES.inventory in (api.find("nodes", "node-1")["metadata"].get("annotations") or {}), "the inventory"
    )
    thing = api.find("nodes", "node-1")
    thing["metadata"]["labels"] = labels
    thing["status"] = {
        "conditions": [{"type": "Ready", "status": "True"}], "nodeInfo": {"kubeletVersion": "v1.30.0"},
        "allocatable": {NAMES.core: "200", NAMES.memory: "64"},
    }  # fmt: skip
    api.put("nodes", thing)
    api.put("pods", program_pod("gpu-manager-x", "gpu-manager", "metrics", daemon.port))
    item = pod("p", container("c", 30, 4))
    item["metadata"]["namespace"] = "default"
    api.put("pods", item)
    node.kubelet.admit(item)
    node.kubelet.start_containers(item)
    return made


@pytest.fixture
def extender(cluster: Cluster) -> Iterator[Served]:
    """A serving extender, whose pod is the leader's."""
    served = Served("--kubeconfig", str(cluster.kubeconfig), "--probe-port", "0", "--query-auth", "kubernetes")
    assert served.process.stderr is not None
    while not (found := re.search(r"probes on http://[^:]+:(\d+)", "".join(served.log[-1:]))):
        served.log.append(served.process.stderr.readline())
    role = {NAMES.role_label: "leader"}
    cluster.api.put("pods", program_pod("extender-y", "gpu-scheduler-extender", "probes", int(found[1]), **role))
    yield served
    served.stop()
