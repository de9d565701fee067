"""What an operator sets in the chart: settings, names, labels, accounts; what is made of the values; and the chart's own test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import chart as chart_files
from deploy import manifests
from manager.config import reader
from tests.support.rendered import container, helm_python, objects


def test_what_is_made_of_the_values_and_the_settings_is_up_to_date() -> None:
    for name, text in (("settings.json", chart_files.settings()), ("README.md", chart_files.readme())):
        assert (manifests.CHART / name).read_text() == text, f"out of date; run {chart_files.COMMAND}"


def test_the_chart_s_page_says_each_value_with_its_default() -> None:
    rows = [line.split(" | ") for line in chart_files.readme().splitlines() if line.startswith("| `")]
    told = {row[0].strip("| `"): row[1].strip("`") for row in rows}
    values = yaml.safe_load((manifests.CHART / "values.yaml").read_text())
    for path, given in told.items():
        found = values
        for part in path.split("."):
            found = found[part]
        assert json.loads(given) == found
    assert {path.partition(".")[0] for path in told} == set(values)
    assert "policy/v1beta1" in next(row[2] for row in rows if "podDisruptionBudget.apiVersion" in row[0])


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"manager": {"config": {"no-such": 1}}}, "manager.config.no-such: gpu-manager has no such setting"),
        ({"manager": {"extraArgs": ["--no-such=1"]}}, 'manager.extraArgs: "--no-such=1" is no flag'),
        ({"manager": {"extraArgs": ["v=2"]}}, 'manager.extraArgs: "v=2" is no flag'),
        ({"extender": {"extraArgs": ["--driver-root=/"]}}, 'extender.extraArgs: "--driver-root=/" is no flag'),
        ({"webhook": {"enabled": True, "extraArgs": ["--gang-seconds=9"]}}, "webhook.extraArgs"),
    ],
)
def test_a_setting_that_the_program_does_not_know_is_refused_when_it_is_rendered(
    values: dict[str, Any], told: str
) -> None:
    """Not by a daemon that ends at its start on every node."""
    with pytest.raises(helm_python.HelmError) as error:
        manifests.render(values)
    assert told in str(error.value)


def test_settings_that_the_programs_know_are_rendered() -> None:
    found = objects(
        {
            "manager": {"config": {"smallest-memory": 2}, "extraArgs": ["--share-mode=true", "--allocation-check-period=2"]},
            "extender": {"extraArgs": ["--assume-seconds=60"], "extraEnv": [{"name": "A", "value": "b"}]},
        }
    )  # fmt: skip
    assert reader.parse(container(found["DaemonSet", "gpu-manager"])["args"][-2:], {}) is not None
    assert "--assume-seconds=60" in container(found["Deployment", "gpu-scheduler-extender"])["args"]
    assert {"name": "A", "value": "b"} in container(found["Deployment", "gpu-scheduler-extender"])["env"]


ALL_PARTS: dict[str, Any] = {
    "webhook": {"enabled": True},
    "claims": {"enabled": True, "protocols": "device-plugin,dra"},
    "networkPolicy": {"enabled": True, "schedulerCIDRs": ["10.0.0.0/24"]},
    "metrics": {name: {"enabled": True} for name in ("serviceMonitor", "prometheusRule", "dashboard")},
    "extender": {"tls": {"mode": "cert-manager"}, "quotas": {"entries": [{"namespace": "a", "cores": 100}]}},
}
# What `kubectl vcuda` and users' roles name; what values of their own name; the DeviceClass.
FIXED = {"vcuda-reader", "vcuda-user", "gpu-admission-webhook-tls", "vcuda.tencent.com"}


def test_names_are_overridden_everywhere_and_labels_by_which_programs_are_found_are_not() -> None:
    usual, other = (
        objects({**ALL_PARTS, **more}) for more in ({}, {"fullnameOverride": "gpus", "nameOverride": "shares"})
    )
    stripped = sorted(
        (kind, name.removeprefix("gpus-").removeprefix("vcuda-")) for kind, name in other if name not in FIXED
    )
    assert stripped == sorted(
        (
            kind,
            name.removeprefix("vcuda-").replace("gpu-manager", "shares")
            if kind == "PrometheusRule"
            else name.removeprefix("vcuda-"),
        )
        for kind, name in usual
        if name not in FIXED
    )
    assert not [name for _, name in other if not name.startswith("gpus-") and name not in FIXED]
    for item in other.values():
        assert item["metadata"]["labels"]["app.kubernetes.io/part-of"] == "shares"
    # Whatever one object names of another is there.
    accounts = {name for kind, name in other if kind == "ServiceAccount"}
    roles = {(kind, name) for kind, name in other if kind in ("Role", "ClusterRole")}
    services = {name for kind, name in other if kind == "Service"}
    for (kind, _), item in other.items():
        if kind in ("RoleBinding", "ClusterRoleBinding"):
            assert {subject["name"] for subject in item["subjects"]} <= accounts
            assert (item["roleRef"]["kind"], item["roleRef"]["name"]) in roles
        if kind in ("Deployment", "DaemonSet"):
            pod = item["spec"]["template"]
            assert pod["spec"].get("serviceAccountName", next(iter(accounts))) in accounts
            assert item["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        if kind == "MutatingWebhookConfiguration":
            assert {hook["clientConfig"]["service"]["name"] for hook in item["webhooks"]} <= services
    assert other["Service", "gpus-gpu-manager-metrics"]["spec"]["selector"]["app.kubernetes.io/name"] == "gpu-manager"
    args = container(other["Deployment", "gpus-gpu-scheduler-extender"])["args"]
    assert "--lease=vcuda-system/gpus-gpu-scheduler-extender" in args
    assert "--quotas=vcuda-system/gpus-gpu-quotas" in args
    assert ("ConfigMap", "gpus-gpu-quotas") in other
    trusted = next(
        word for word in container(other["Deployment", "gpus-gpu-admission-webhook"])["args"] if "trusted" in word
    )
    assert trusted.endswith(":gpus-gpu-manager,system:serviceaccount:vcuda-system:gpus-gpu-scheduler-extender")
    names = other["Certificate", "gpus-gpu-scheduler-extender"]["spec"]["dnsNames"]
    assert "gpus-gpu-scheduler-extender.vcuda-system.svc" in names
    configured = yaml.safe_load(other["ConfigMap", "gpus-gpu-scheduler-configuration"]["data"]["v1.yaml"])["extenders"][
        0
    ]
    assert configured["tlsConfig"]["serverName"] in names and configured["urlPrefix"].partition("//")[2].startswith(
        "gpus-"
    )


PODS = {
    "manager": ("DaemonSet", "gpu-manager"),
    "extender": ("Deployment", "gpu-scheduler-extender"),
    "webhook": ("Deployment", "gpu-admission-webhook"),
    "own": ("Deployment", "vcuda-scheduler"),
}


@pytest.mark.parametrize("part", PODS)
def test_pods_get_annotations_and_labels(part: str) -> None:
    more = {"podAnnotations": {"example.com/a": "1"}, "podLabels": {"team": "gpu"}}
    own = {"image": {"repository": "kube-scheduler"}, **(more if part == "own" else {})}
    values = {
        "manager": {}, "extender": {}, "webhook": {"enabled": True}, "scheduler": {"mode": "own", "own": own},
    }  # fmt: skip
    if part != "own":
        values[part] = {**values[part], **more}
    plain = {
        "webhook": {"enabled": True},
        "scheduler": {"mode": "own", "own": {"image": {"repository": "kube-scheduler"}}},
    }
    before, after = (found[PODS[part]]["spec"] for found in (objects(plain), objects(values)))
    labels, annotations = (after["template"]["metadata"][name] for name in ("labels", "annotations"))
    assert annotations == {**before["template"]["metadata"].get("annotations", {}), "example.com/a": "1"}
    assert labels == {**before["template"]["metadata"]["labels"], "team": "gpu"}
    assert after["selector"] == before["selector"]


@pytest.mark.parametrize(("part", "name"), [("manager", "gpu-manager"), ("extender", "gpu-scheduler-extender")])
def test_an_account_of_ones_own_is_used_and_one_that_is_made_is_annotated(part: str, name: str) -> None:
    made = objects({part: {"serviceAccount": {"annotations": {"example.com/role": "r"}}}})["ServiceAccount", name]
    assert made["metadata"]["annotations"] == {"example.com/role": "r"}
    found = objects({part: {"serviceAccount": {"create": False, "name": "ours"}}})
    assert ("ServiceAccount", name) not in found and ("ServiceAccount", "ours") not in found
    assert found[PODS[part]]["spec"]["template"]["spec"]["serviceAccountName"] == "ours"
    bound = [item["subjects"][0]["name"] for (kind, _), item in found.items() if kind.endswith("RoleBinding")]
    assert "ours" in bound and name not in bound


@pytest.mark.parametrize(
    ("values", "blocks"),
    [({}, 1), ({"manager": {"config": {"smallest-memory": 2}}}, 2), ({"resourceDomain": "example.com"}, 1)],
)
def test_the_chart_s_test_asks_for_the_smallest_share(values: dict[str, Any], blocks: int) -> None:
    pod = objects(values)["Pod", "gpu-share-test"]
    domain = values.get("resourceDomain", "tencent.com")
    (only,) = pod["spec"]["containers"]
    assert only["resources"]["limits"] == {f"{domain}/vcuda-core": "1", f"{domain}/vcuda-memory": str(blocks)}
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert "hook-succeeded" in pod["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
    assert "schedulerName" not in pod["spec"]


@pytest.mark.parametrize(("memory", "status"), [("256MiB", 0), ("512MiB", 1)])
def test_what_the_chart_s_test_runs_sees_the_limit_of_its_share(tmp_path: Path, memory: str, status: int) -> None:
    """In a run's share on a simulated card; tests/kube runs the pod itself."""
    (only,) = objects()["Pod", "gpu-share-test"]["spec"]["containers"]
    command = [
        sys.executable,
        "-m",
        "vcuda.cli.main",
        "run",
        f"--sim={tmp_path / 'machine'}",
        "--core",
        "1",
        "--memory",
        memory,
    ]
    created = [sys.executable, "-m", "vcuda.cli.main", "sim", "create", str(tmp_path / "machine")]
    subprocess.run(created, check=True, timeout=30, capture_output=True)
    done = subprocess.run([*command, "--", *only["command"]], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (status, f"a share with {memory.removesuffix('MiB')} MiB\n"), done.stderr


def test_where_cards_are_for_claims_alone_the_chart_has_no_test_and_promises_none() -> None:
    rendered = manifests.render({"claims": {"enabled": True}})
    assert "test-share.yaml" not in rendered and "helm test" not in rendered["NOTES.txt"]
    assert "helm test vcuda -n vcuda-system" in manifests.render()["NOTES.txt"]
