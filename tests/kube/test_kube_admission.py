"""A cluster whose kube-scheduler knows nothing of us: the chart's own scheduler, and the webhook that sends pods to it."""

from __future__ import annotations

import contextlib
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_chart import NAMESPACE, Chart
from kube_service import service
from kube_system import System, share_pod
from kubelab import eventually

pytest.importorskip("helm_python", reason="Helm's engine (helm-python-sdk) has no wheel for this machine")

BLOCK = 256 * 1024 * 1024
SCHEDULER = "vcuda-scheduler"
EXTENDER_ADDRESS, WEBHOOK_ADDRESS = "10.96.0.50", "10.96.0.60"


def _values(system: System) -> dict[str, Any]:
    """Versions of this cluster: Helm's engine takes the newest Kubernetes for it where it can't ask."""
    conditions = "always" if system.lab.minor >= 28 else "never"
    return {**VALUES, "scheduler": {**VALUES["scheduler"], "own": {**VALUES["scheduler"]["own"], "configVersion": system.lab.scheduler_api}},
            "webhook": {**VALUES["webhook"], "matchConditions": conditions}}  # fmt: skip


VALUES: dict[str, Any] = {
    "scheduler": {
        "mode": "own",
        "own": {"name": SCHEDULER, "image": {"repository": "kube-scheduler", "tag": "test"},
                "command": "/kube-scheduler", "replicas": 1},
        "clientSecretName": "made-by-the-chart",
    },
    "extender": {"tls": {"mode": "generated", "secretName": "made-by-the-chart-too"}, "service": {"clusterIP": EXTENDER_ADDRESS}},
    "webhook": {"enabled": True, "replicas": 1,
                 "service": {"clusterIP": WEBHOOK_ADDRESS}, "defaults": {"memoryBlocks": 3}},
}  # fmt: skip
FORGED = {
    "tencent.com/vcuda-placement": "forged",
    "tencent.com/gpu-assigned": "true",
    "tencent.com/predicate-gpu-idx-0": "7",
}


@pytest.fixture(scope="module")
def own(system: System, chart: Chart, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """The chart with a scheduler of its own. kubectl in a namespace whose pods the webhook sees."""
    folder = tmp_path_factory.mktemp("kube-scheduler")
    assets = Path(system.lab.environment["KUBE_ASSETS"])
    program = assets / "hyperkube"  # all programs in one, by the name that it is called with
    shutil.copy(program if program.exists() else assets / "kube-scheduler", folder / "kube-scheduler")
    system.lab.image("kube-scheduler:test", folder, "/kube-scheduler")
    system.lab.call("restart-scheduler", SCHED_CONFIG="", EXTENDER_YAML="")
    with contextlib.ExitStack() as services:
        # Before the chart comes: the API server calls the webhook from the first moment on.
        extender = services.enter_context(service(EXTENDER_ADDRESS, 3456))
        webhook = services.enter_context(service(WEBHOOK_ADDRESS, 443))
        chart.apply(_values(system))
        extender.lead_to(chart.leader()["status"]["podIP"], 3456)
        webhook.lead_to(chart.pod_of("gpu-admission-webhook")["status"]["podIP"], 8443)
        chart.pod_of(SCHEDULER)
        system.wait_offered()
        yield system.lab.kubectl
        system.delete_all()


def annotations(system: System, name: str) -> dict[str, str]:
    return dict(system.pod(name)["metadata"]["annotations"])


def test_a_pod_that_names_no_scheduler_is_placed_by_ours(
    system: System, client_image: str, own: Callable[..., str], evidence: Callable[[str], None]
) -> None:
    """kube-scheduler of the cluster has no extender: only the chart's own can have placed it."""
    system.create(share_pod("first", client_image, 30, 4, annotations=FORGED))
    made = system.pod("first")
    assert made["spec"]["schedulerName"] == SCHEDULER
    assert not any(annotations(system, "first").get(name) == value for name, value in FORGED.items() if value != "true")
    assert f"total={4 * BLOCK} " in system.wait_log("first", "taken=")
    placement = annotations(system, "first")["tencent.com/vcuda-placement"]

    def sources() -> set[str]:  # written by whoever placed it, some time after
        return {
            event["source"].get("component") or event.get("reportingComponent")
            for event in system.lab.get("events", "--field-selector=reason=Scheduled")["items"]
            if event["involvedObject"]["name"] == "first"
        }

    eventually("an event says who placed it", sources, 30)
    assert sources() == {SCHEDULER}
    evidence(f"schedulerName {made['spec']['schedulerName']}, placement {placement} instead of {FORGED}")


def test_the_owner_of_a_running_pod_can_t_change_where_it_is(
    system: System, client_image: str, own: Callable[..., str]
) -> None:
    system.create(share_pod("held", client_image, 30, 4))
    system.wait_phase("held", "Running")

    def assigned() -> bool:  # which the daemon writes: its word counts
        return annotations(system, "held").get("tencent.com/gpu-assigned") == "true"

    eventually("the daemon's annotation is there", assigned, 30)
    before = annotations(system, "held")
    for name, value in FORGED.items():
        own("annotate", "pod", "held", "--overwrite", f"{name}={value}")
    own("annotate", "pod", "held", "tencent.com/vcuda-placement-", "team/owner=me")
    assert annotations(system, "held") == {**before, "team/owner": "me"}


def test_what_cannot_run_is_refused_when_it_is_created(
    system: System, client_image: str, own: Callable[..., str]
) -> None:
    with pytest.raises(AssertionError, match=r"InvalidCores: container 'main' asks for 150 tencent.com/vcuda-core"):
        system.create(share_pod("never", client_image, 150, 1))
    assert "never" not in own("get", "pods", "-o", "name")
    half = share_pod("half", client_image, 30, 1)
    del half["spec"]["containers"][0]["resources"]["limits"]["tencent.com/vcuda-memory"]
    system.create(half)
    assert f"total={3 * BLOCK} " in system.wait_log("half", "taken=")


def test_without_a_webhook_no_pod_is_held_up(system: System, client_image: str, own: Callable[..., str]) -> None:
    own("scale", "-n", NAMESPACE, "deployment/gpu-admission-webhook", "--replicas=0")

    def gone() -> bool:
        words = ("pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/name=gpu-admission-webhook")
        return not system.lab.get(*words)["items"]

    eventually("the webhook's pod is gone", gone, 60)
    plain = share_pod("plain", client_image, 1, 1)
    del plain["spec"]["containers"][0]["resources"]
    system.create(plain)
    named = share_pod("named", client_image, 30, 5)
    named["spec"]["schedulerName"] = SCHEDULER
    system.create(named)
    assert f"total={5 * BLOCK} " in system.wait_log("named", "taken=")
    system.wait_phase("plain", "Running", "Succeeded", "Failed")


def test_the_scheduler_s_rights_are_enough(system: System, own: Callable[..., str], chart: Chart) -> None:
    log = chart.log(SCHEDULER)
    assert log
    assert "forbidden" not in log.lower(), log
    assert shlex.quote(SCHEDULER) in own("get", "lease", "-n", NAMESPACE)
