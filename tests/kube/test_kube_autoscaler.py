"""As an autoscaler asks of a real cluster's objects: a pod that waits, its full node, and a template that is a copy of that node."""

from __future__ import annotations

import copy
import json
import ssl
import urllib.request
from collections import Counter
from typing import Any

from kube_system import CARDS, System, share_pod
from kubelab import eventually


def simulate(system: System, pod: dict[str, Any], *nodes: dict[str, Any]) -> dict[str, Any]:
    """One ExtenderArgs with whole nodes, over the scheduler's TLS."""
    tls = system.extender_tls
    context = ssl.create_default_context(cafile=tls["caFile"])
    context.load_cert_chain(tls["certFile"], tls["keyFile"])
    body = json.dumps({"Pod": pod, "Nodes": {"metadata": {}, "items": list(nodes)}, "NodeNames": None}).encode()
    request = urllib.request.Request(
        f"https://127.0.0.1:{system.extender_port}/scheduler/simulate", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, context=context, timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def books(system: System) -> tuple[set[str], list[str]]:
    """Whom the daemon gives a share, and what the extender says is free."""
    lines = system.get(system.extender_probe_port, "/metrics").splitlines()
    return set(system.bookings()), [line for line in lines if line.startswith("vcuda_extender_free_")]


def test_a_copy_of_a_full_node_would_help_a_pod_that_waits_and_nothing_is_booked(
    system: System, client_image: str, pods: Any, evidence: Any
) -> None:
    """Twice the same answer, the books stay as they were, and the pod starts where room comes in the end: on the real node."""
    pods(*(share_pod(f"full-{number}", client_image, 60, 4, labels={"app": "full"}) for number in range(CARDS)))
    eventually("every card is taken", lambda: Counter(system.phases("app=full").values())["Running"] == CARDS, 120)
    waiting = pods(share_pod("waiting", client_image, 80, 4))
    eventually(
        "it waits for cards, not for sums",
        lambda: "InsufficientCores" in system.lab.kubectl("describe", "pod", waiting),
        60,
    )
    real = system.node()
    template = copy.deepcopy(real)
    template["metadata"] |= {"name": "template-node-for-gpus", "uid": ""}
    template["metadata"]["labels"]["kubernetes.io/hostname"] = "template-node-for-gpus"
    bare = {"metadata": {"name": "template-node-for-cpus"}, "status": {"allocatable": {"cpu": "8", "pods": "110"}}}
    before = books(system)
    for _ in range(2):
        answer = simulate(system, system.pod(waiting), real, template, bare)
        assert [node["metadata"]["name"] for node in answer["Nodes"]["items"]] == ["template-node-for-gpus"]
        assert answer["FailedNodes"][real["metadata"]["name"]].startswith("InsufficientCores")
        assert answer["FailedNodes"]["template-node-for-cpus"].startswith("NoInventory")
    assert books(system) == before
    assert system.pod(waiting)["status"]["phase"] == "Pending"
    evidence(f"simulate: {answer['FailedNodes']}, and fits on a copy of the node with its cards free")
    system.delete("full-0")
    system.wait_phase(waiting, "Running", seconds=90)
