"""The chart, rendered by Helm's own engine, in the real cluster: daemon and extender run as pods from one image."""

from __future__ import annotations

import urllib.error

import pytest
import yaml
from kube_chart import Chart
from kube_system import System, share_pod
from kubelab import eventually

from deploy import manifests

NAMESPACE = manifests.NAMESPACE
BLOCK = 256 * 1024 * 1024

pytest.importorskip("helm_python", reason="Helm's engine (helm-python-sdk) has no wheel for this machine")


@pytest.fixture(scope="module")
def installed(chart: Chart) -> Chart:
    chart.install()
    return chart


def test_shares_hold_and_outlive_the_daemon_s_pod(system: System, client_image: str, installed: Chart) -> None:
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
    before = installed.usage()["charted"]
    assert before["cards"][0]["memory_limit_bytes"] == 4 * BLOCK
    assert before["processes"] == 1, "the daemon reads the region that the container writes"

    old = installed.pod_of("gpu-manager")["metadata"]["name"]
    system.lab.delete_pod(NAMESPACE, old)
    system.wait_offered()
    after = installed.usage()["charted"]
    assert installed.pod_of("gpu-manager")["metadata"]["name"] != old
    assert after["cards"][0]["memory_limit_bytes"] == 4 * BLOCK
    assert after["cards"][0]["memory_used_bytes"] == before["cards"][0]["memory_used_bytes"]
    assert after["processes"] == 1
    assert system.pod("charted")["status"]["phase"] == "Running"

    system.create(share_pod("next", client_image, 30, 7))
    assert f"total={7 * BLOCK} " in system.wait_log("next", "taken=")


def test_a_standby_takes_over(system: System, client_image: str, installed: Chart) -> None:
    """The leader's pod is deleted: it gives its Lease back, the Service's endpoints follow, and pods are placed again."""
    first = installed.leader()
    name, address = first["metadata"]["name"], first["status"]["podIP"]
    system.lab.delete_pod(NAMESPACE, name)
    second = installed.leader()
    assert second["metadata"]["name"] != name

    def followed() -> bool:
        subsets = system.lab.get("endpoints", "-n", NAMESPACE, "gpu-scheduler-extender").get("subsets") or []
        found = {item["ip"] for subset in subsets for item in subset.get("addresses") or ()}
        return found == {second["status"]["podIP"]} != {address}

    eventually("the Service leads to the new leader alone", followed, 30)
    installed.use_extender(second)
    system.create(share_pod("placed-again", client_image, 30, 5))
    assert f"total={5 * BLOCK} " in system.wait_log("placed-again", "taken=")


def test_roles_hold_nothing_that_was_refused(system: System, installed: Chart) -> None:
    """Neither log tells of a call that the API server or kubelet refused."""
    for program in ("gpu-manager", "gpu-scheduler-extender"):
        log = installed.log(program)
        assert log
        assert "forbidden" not in log.lower(), log
        assert " 403" not in log, log


def test_pages_that_name_tenants_are_for_whom_rbac_allows(system: System, installed: Chart) -> None:
    """The chart's ClusterRole for readers is enough, and needed."""
    kubectl = system.lab.kubectl
    kubectl("create", "serviceaccount", "scraper", "-n", NAMESPACE)
    token = system.lab.token("scraper", NAMESPACE)
    for asked, status in (("", 401), ("forged", 401), (token, 403)):
        with pytest.raises(urllib.error.HTTPError, match=str(status)):
            installed.daemon("/usage", asked)
    kubectl(
        "create",
        "clusterrolebinding",
        "scraper",
        f"--clusterrole={manifests.RELEASE}-gpu-manager-reader",
        f"--serviceaccount={NAMESPACE}:scraper",
    )
    try:
        eventually("the daemon has asked again", lambda: _answers(installed, token), 90)
    finally:
        kubectl("delete", "clusterrolebinding", "scraper")


def _answers(chart: Chart, token: str) -> bool:
    try:
        return "containers" in chart.daemon("/usage", token)
    except urllib.error.HTTPError:
        return False


def test_the_api_server_accepts_the_plain_manifests(system: System, installed: Chart) -> None:
    """deploy/kubernetes, with the policy version that this cluster knows, passes the API server's validation."""
    files = manifests.plain({"extender": {"podDisruptionBudget": {"apiVersion": system.lab.policy_api}}})
    told = system.lab.kubectl("apply", "--dry-run=server", "-f", "-", stdin="\n---\n".join(files.values())).splitlines()
    assert len(told) == sum(len(list(yaml.safe_load_all(text))) for text in files.values())


def test_the_network_policy_is_accepted(system: System, installed: Chart) -> None:
    chosen = {"networkPolicy": {"enabled": True, "schedulerCIDRs": ["10.0.0.0/24"]}}
    text = manifests.render(chosen)["networkpolicy.yaml"]
    assert system.lab.kubectl("apply", "--dry-run=server", "-f", "-", stdin=text).count("networkpolicy") == 2


def test_the_chart_s_own_test_places_a_share_and_sees_its_limit(installed: Chart) -> None:
    assert installed.test() == "a share with 256 MiB\n"
