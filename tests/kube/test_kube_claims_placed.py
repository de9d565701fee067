"""Claims on a real Kubernetes, as the extender and the webhook see them: old pods ask by claims, nodes are named, books agree.

Needs 1.36, or 1.34 with the gate of consumable capacity; on older servers skipped with that reason.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube_system import System, share_pod
from kubelab import eventually

from deploy import manifests
from tests.kube.test_kube_claims import BLOCK, DRIVER, claim, claims, figures, pod  # noqa: F401 - claims: a fixture

LABEL = "tencent.com/vcuda-admission"
RULES = {
    "Mutating": ("/admission/pods/to-claims", "", "v1", ["pods"]),
    "Validating": ("/admission/claims", "resource.k8s.io", "v1", ["resourceclaims", "resourceclaimtemplates"]),
}


@pytest.fixture(scope="module")
def placed(claims: System) -> Iterator[System]:  # noqa: F811
    """The extender with --claims beside kube-scheduler, the webhook beside the API server."""
    file = claims.folder / "extenders.yaml"
    before = yaml.safe_load(file.read_text())
    (entry,) = before["extenders"]
    shared = {key: entry[key] for key in ("enableHTTPS", "tlsConfig", "nodeCacheCapable")}
    ours = {
        **shared,
        "urlPrefix": f"{entry['urlPrefix']}/claims",
        "filterVerb": "filter",
        "ignorable": True,
        "httpTimeout": "5s",
    }
    both = claims.folder / "extenders-claims.yaml"
    both.write_text(yaml.safe_dump({"extenders": [entry, ours]}))
    claims.kill("extender")
    claims.start_extender("--claims")
    claims.lab.call("restart-scheduler", EXTENDER_YAML=str(both))
    address = claims.start_webhook()
    authority = base64.b64encode(Path(claims.extender_tls["caFile"]).read_bytes()).decode()
    for kind, (path, group, version, resources) in RULES.items():
        hook = {
            "name": f"{kind.lower()}.{DRIVER}", "admissionReviewVersions": ["v1"], "sideEffects": "None", "failurePolicy": "Fail",
            "clientConfig": {"url": f"{address}{path}", "caBundle": authority},
            "rules": [{"apiGroups": [group], "apiVersions": [version], "resources": resources, "operations": ["CREATE"]}],
            "namespaceSelector": {"matchLabels": {LABEL: "claims"}},
        }  # fmt: skip
        configuration = {
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": f"{kind}WebhookConfiguration",
            "metadata": {"name": "vcuda-claims"}, "webhooks": [hook],
        }  # fmt: skip
        claims.lab.apply(configuration)
    claims.lab.kubectl("label", "namespace", "default", f"{LABEL}=claims")
    yield claims
    claims.lab.kubectl("label", "namespace", "default", f"{LABEL}-")
    claims.delete_all()
    for kind in RULES:
        claims.lab.kubectl("delete", f"{kind.lower()}webhookconfiguration", "vcuda-claims")
    claims.lab.kubectl("delete", "resourceclaims", "--all")
    claims.kill("webhook")
    claims.kill("extender")
    claims.start_extender()
    claims.lab.call("restart-scheduler", EXTENDER_YAML=str(file))


def counted(system: System) -> dict[str, float]:
    """The extender's figures about claims."""
    text = system.get(system.extender_probe_port, "/metrics")
    found = re.findall(
        r"^vcuda_extender_(claims_\w+|request_seconds_count\{verb=\"claims-filter\"\}) (\S+)$", text, re.M
    )
    return {name: float(value) for name, value in found}


def test_an_old_pod_in_a_labelled_namespace_runs_on_a_claim(placed: System, client_image: str, evidence: Any) -> None:
    old = share_pod("old", client_image, 30, 10, annotations={"tencent.com/vcuda-core-limit": "50"})
    placed.create(old)
    placed.wait_phase("old", "Running", seconds=120)
    seen = figures(placed.wait_log("old", "taken="))
    assert seen["total"] == 10 * BLOCK and seen["result"] == 2
    made = placed.pod("old")
    (container,) = made["spec"]["containers"]
    assert not {name for name in container["resources"].get("limits", {}) if "vcuda" in name}
    (listed,) = made["spec"]["resourceClaims"]
    assert listed["resourceClaimTemplateName"] == "vcuda-30c-10m-50l"
    (status,) = made["status"]["resourceClaimStatuses"]
    held = placed.lab.get("resourceclaim", status["resourceClaimName"])
    (owner,) = held["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("Pod", "old")
    (result,) = held["status"]["allocation"]["devices"]["results"]
    assert result["consumedCapacity"] == {"cores": "30", "memory": "2560Mi"}
    eventually("the extender has booked it", lambda: counted(placed)["claims_allocated"] == 1, 30)
    evidence(
        f"old: {listed['resourceClaimTemplateName']} -> {status['resourceClaimName']} {result['consumedCapacity']}, {seen}"
    )
    evidence(f"extender: {counted(placed)}")
    placed.delete("old")
    eventually("its claim is gone", lambda: not placed.lab.get("resourceclaims")["items"], 90)
    eventually("nothing is booked", lambda: counted(placed)["claims_allocated"] == 0, 30)


def test_a_burst_of_old_pods_is_never_more_than_a_card_has(placed: System, client_image: str, evidence: Any) -> None:
    """24 pods of 30 cores, which is three on each of the eight cards: whoever allocates, no card gives more."""
    pods = {f"b{number}": share_pod(f"b{number}", client_image, 30, 4, labels={"burst": "yes"}) for number in range(24)}
    placed.create_all(list(pods.values()))

    def all_run() -> bool:
        return list(placed.phases("burst=yes").values()).count("Running") == len(pods)

    eventually("all run", all_run, 300)
    held: dict[str, int] = {}
    for item in placed.lab.get("resourceclaims")["items"]:
        (result,) = item["status"]["allocation"]["devices"]["results"]
        held[result["device"]] = held.get(result["device"], 0) + int(result["consumedCapacity"]["cores"])
    assert sorted(held.values()) == [90] * 8
    totals = placed.totals("burst=yes", len(pods), 120)
    assert set(totals.values()) == {4 * BLOCK}
    eventually("the extender has booked them", lambda: counted(placed)["claims_allocated"] == len(pods), 30)
    assert counted(placed)["claims_assumed"] == 0
    evidence(f"burst: {len(pods)} run, cores by card {sorted(held.values())}, extender {counted(placed)}")
    placed.delete_all()
    eventually("nothing is booked", lambda: counted(placed)["claims_allocated"] == 0, 120)


def test_what_no_card_can_give_is_refused_when_it_is_made(placed: System, client_image: str) -> None:
    with pytest.raises(AssertionError, match=r"InvalidShareConfig: .*corelimit"):
        placed.create(claim("typo", 30, "1Gi", corelimit=50))
    with pytest.raises(AssertionError, match=r"InvalidCores: .*150"):
        placed.create(claim("large", 150, "1Gi"))
    with pytest.raises(AssertionError, match=r"InvalidCores: .*150"):
        placed.create(share_pod("never", client_image, 150, 1))


def test_without_the_extender_claims_are_allocated_all_the_same(placed: System, client_image: str) -> None:
    placed.kill("extender")
    try:
        placed.create_all([claim("alone", 30, "1Gi"), pod("alone", client_image, "alone")])
        placed.wait_phase("alone", "Running", seconds=120)
    finally:
        placed.start_extender("--claims")
    eventually("it is booked by who comes back", lambda: counted(placed)["claims_allocated"] == 1, 30)
    placed.delete("alone")
    placed.lab.kubectl("delete", "resourceclaim", "alone")


QUOTAS = "default/claims-quotas"


def device_class(name: str, *expressions: str, **config: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {"selectors": [{"cel": {"expression": one}} for one in expressions]}
    if config:
        parameters = {"apiVersion": f"{DRIVER}/v1", "kind": "ShareConfig", **config}
        spec["config"] = [{"opaque": {"driver": DRIVER, "parameters": parameters}}]
    return {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": name}, "spec": spec}


def of_class(name: str, made: dict[str, Any]) -> dict[str, Any]:
    made["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] = name
    return made


@pytest.fixture
def limited(placed: System) -> Iterator[System]:
    """The namespace may have 80 cores; the webhook is asked about classes, too."""
    placed.lab.apply(
        {
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"namespace": "default", "name": QUOTAS.partition("/")[2]},
            "data": {"quotas": "[{namespace: default, cores: 80}]"},
        }
    )  # fmt: skip
    (hook,) = placed.lab.get("validatingwebhookconfiguration", "vcuda-claims")["webhooks"]
    rules = [{"apiGroups": ["resource.k8s.io"], "apiVersions": ["v1"], "resources": ["deviceclasses"], "operations": ["CREATE", "UPDATE"]}]  # fmt: skip
    ours = {key: hook[key] for key in ("admissionReviewVersions", "sideEffects", "failurePolicy", "clientConfig")}
    placed.lab.apply(
        {
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": "vcuda-classes"}, "webhooks": [{**ours, "name": f"classes.{DRIVER}", "rules": rules}],
        }
    )  # fmt: skip
    placed.kill("extender")
    placed.start_extender("--claims", "--quotas", QUOTAS)
    yield placed
    placed.delete_all()
    placed.lab.kubectl("delete", "resourceclaims", "--all")
    placed.lab.kubectl("delete", "deviceclass", "gold", "open", "typo", "--ignore-not-found")
    placed.lab.kubectl("delete", "validatingwebhookconfiguration", "vcuda-classes")
    placed.lab.kubectl("delete", "configmap", QUOTAS.partition("/")[2])
    placed.kill("extender")
    placed.start_extender("--claims")


def _waits(system: System, name: str, *words: str) -> str:
    """What its event says, once it holds all of the words; it waits meanwhile."""

    def told() -> str | None:
        lines = system.lab.kubectl("describe", "pod", name).splitlines()
        return next((line for line in lines if all(word in line for word in words)), None)

    found = eventually(f"{name}'s event says {words}", told, 60)
    assert system.pod(name)["status"]["phase"] == "Pending"
    return " ".join(found.split())


def test_claims_of_an_operators_class_get_its_cards_and_count(
    limited: System, client_image: str, evidence: Any
) -> None:
    """They passed every quota until they were allocated, and were placed by chance."""
    lab = limited.lab
    items = [one for one in lab.get("resourceslices")["items"] if one["spec"]["driver"] == DRIVER]
    devices = [device for item in items for device in item["spec"]["devices"]]
    one = devices[-2]
    ours = f"device.driver == '{DRIVER}'"
    this = f"device.attributes['{DRIVER}'].uuid == '{one['attributes']['uuid']['string']}'"
    with pytest.raises(AssertionError, match=r"InvalidShareConfig: .*corelimit"):
        lab.apply(device_class("typo", ours, corelimit=50))
    lab.apply(device_class("gold", ours, this, coreLimit=70))
    limited.create_all([of_class("gold", claim("first", 60, "2560Mi")), of_class("gold", claim("second", 30, "1Gi"))])
    limited.create_all([pod("first", client_image, "first")])
    limited.wait_phase("first", "Running", seconds=120)
    (result,) = lab.get("resourceclaim", "first")["status"]["allocation"]["devices"]["results"]
    assert result["device"] == one["name"]
    (card,) = limited.bookings()["first"]["cards"]
    assert (card["cores"], card["core_limit"]) == (60, 70)
    evidence(f"first: {result['device']} {result['consumedCapacity']}, core limit {card['core_limit']} by its class")
    limited.create_all([pod("second", client_image, "second")])
    evidence(f"second: {_waits(limited, 'second', 'QuotaExceeded')}")
    assert "allocation" not in lab.get("resourceclaim", "second").get("status", {})

    lab.apply(device_class("open"))
    limited.create_all([of_class("open", claim("third", 10, "1Gi")), pod("third", client_image, "third")])
    evidence(f"third: {_waits(limited, 'third', 'UndecidedClass', 'open')}")
    lab.apply(device_class("open", ours))  # it says now whose devices it means
    limited.wait_phase("third", "Running", seconds=180)
    limited.delete("first")
    lab.kubectl("delete", "resourceclaim", "first")
    limited.wait_phase("second", "Running", seconds=180)
    (result,) = lab.get("resourceclaim", "second")["status"]["allocation"]["devices"]["results"]
    assert result["device"] == one["name"]


def test_a_quota_that_is_raised_lets_the_waiting_pod_in(limited: System, client_image: str, evidence: Any) -> None:
    """kube-scheduler watches no ConfigMap: the pod waited until something else changed, or five minutes."""
    limited.create_all([claim("wide", 90, "1Gi"), pod("wide", client_image, "wide")])
    evidence(f"wide: {_waits(limited, 'wide', 'QuotaExceeded')}")
    time.sleep(10)  # kube-scheduler has put it aside
    limited.lab.apply(
        {
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"namespace": "default", "name": QUOTAS.partition("/")[2]},
            "data": {"quotas": "[{namespace: default, cores: 90}]"},
        }
    )  # fmt: skip
    raised = time.monotonic()
    limited.wait_phase("wide", "Running", seconds=60)
    evidence(f"it runs {time.monotonic() - raised:.1f} s after the quota was raised")
    assert "tencent.com/vcuda-retry" in limited.pod("wide")["metadata"]["annotations"]


@pytest.fixture
def chart_s(placed: System) -> Iterator[System]:
    """The chart's class, policy and rights for claims, as they are rendered; our slices are written as before."""
    pytest.importorskip("helm_python", reason="Helm's engine (helm-python-sdk) has no wheel for this machine")
    rendered = manifests.render({"claims": {"enabled": True}, "manager": {"kubelet": {"access": "pods"}}})
    text = "\n---\n".join(rendered[name] for name in ("claims.yaml", "manager-rbac.yaml"))
    there = bool(
        placed.lab.kubectl("get", "namespace", manifests.NAMESPACE, "--ignore-not-found")
    )  # the chart's tests'
    if not there:
        placed.lab.kubectl("create", "namespace", manifests.NAMESPACE)
    placed.lab.kubectl("apply", "-f", "-", stdin=text)
    yield placed
    # The class is the other tests', too.
    rest = [one for one in yaml.safe_load_all(text) if one and one["kind"] != "DeviceClass"]
    placed.lab.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=yaml.safe_dump_all(rest))
    if not there:
        placed.lab.kubectl("delete", "namespace", manifests.NAMESPACE, wait=120)


def test_a_daemon_writes_the_slices_of_its_own_node_alone(chart_s: System, evidence: Any) -> None:
    lab, node = chart_s.lab, chart_s.lab.environment["NODE_NAME"]
    account = ("create", "token", "gpu-manager", "-n", manifests.NAMESPACE)
    bound = lab.kubectl(*account, "--bound-object-kind=Node", f"--bound-object-name={node}").strip()
    loose = lab.kubectl(*account).strip()
    server = lab.kubectl("config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}").strip()

    def written(token: str, where: str, driver: str = DRIVER, pool: str = "") -> str:
        """What the API server says to a slice; nothing is kept of it."""
        spec = {
            "driver": driver,
            "nodeName": where,
            "pool": {"name": pool or where, "generation": 1, "resourceSliceCount": 1},
        }
        made = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": "tried"},
            "spec": spec,
        }
        words = ("create", "--dry-run=server", "-f", "-", f"--token={token}", "--kubeconfig=/dev/null")
        try:
            return lab.kubectl(
                *words,
                f"--server={server}",
                f"--certificate-authority={lab.environment['KUBE_CA']}",
                stdin=json.dumps(made),
            )
        except AssertionError as error:
            return str(error)

    eventually("the policy holds", lambda: "names no node" in written(loose, node), 60)
    assert "its own node's pool alone" in written(bound, "elsewhere")
    assert "its own node's pool alone" in written(bound, node, pool="elsewhere")
    assert "its own driver alone" in written(bound, node, driver="gpu.nvidia.com")
    assert "created" in (told := written(bound, node)), told
    evidence(written(bound, "elsewhere").strip().splitlines()[-1])
