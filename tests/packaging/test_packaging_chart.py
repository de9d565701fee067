"""The chart says what the programs understand: rendered by Helm's own engine, flags parsed by the programs themselves."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import vcuda
from deploy import manifests
from manager import settings_reader
from scheduler_ext import settings as extender_settings

helm_python = pytest.importorskip(
    "helm_python", reason="Helm's engine (helm-python-sdk) has no wheel for this machine"
)

EVERYTHING: dict[str, Any] = {
    "extender": {"tls": {"mode": "cert-manager"}, "service": {"clusterIP": "10.96.0.50"}},
    "metrics": {"serviceMonitor": {"enabled": True, "labels": {"team": "gpu"}}},
    "networkPolicy": {"enabled": True, "schedulerCIDRs": ["10.0.0.0/24"]},
    "manager": {"nodeLabels": {"pool": "gpu", "zone": "a"}, "kubelet": {"access": "pods", "verify": True}},
}


def objects(values: dict[str, Any] | None = None) -> dict[tuple[str, str], dict[str, Any]]:
    """Everything that is rendered, by kind and name."""
    rendered = manifests.render(values)
    documents = [
        document
        for name, text in rendered.items()
        if name.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document
    ]
    found = {(item["kind"], item["metadata"]["name"]): item for item in documents}
    assert len(found) == len(documents)
    return found


def container(item: dict[str, Any]) -> dict[str, Any]:
    (only,) = item["spec"]["template"]["spec"]["containers"]
    return dict(only)


def rules(item: dict[str, Any]) -> set[tuple[str, str]]:
    return {
        (resource, verb) for rule in item["rules"] for resource in rule["resources"] for verb in rule["verbs"]
    }


def test_plain_manifests_are_those_of_the_chart() -> None:
    for name, text in manifests.plain(manifests.VALUES).items():
        assert (manifests.FOLDER / name).read_text() == text, f"out of date; run {manifests.COMMAND}"


def test_the_chart_has_the_product_s_version() -> None:
    chart = yaml.safe_load((manifests.CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == vcuda.__version__


def test_helm_lint_finds_nothing() -> None:
    found = helm_python.lint(manifests.CHART, strict=True)
    assert not found["errors"]
    assert {message["error"] for message in found["messages"]} <= {"icon is recommended"}


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_the_programs_understand_their_flags(values: dict[str, Any]) -> None:
    found = objects(values)
    words = container(found["DaemonSet", "gpu-manager"])["args"]
    parsed = settings_reader.parse([word.replace("$(NODE_IP)", "10.0.0.1") for word in words], {})
    assert parsed is not None
    assert parsed.warnings == ()
    assert dict(parsed.settings.node_labels) == values.get("manager", {}).get("nodeLabels", {})
    assert parsed.settings.virtual_manager_path == Path("/etc/gpu-manager/vm")

    words = container(found["Deployment", "gpu-scheduler-extender"])["args"]
    parser = argparse.ArgumentParser(exit_on_error=False)
    extender_settings.add_options(parser)
    words = [word.replace("$(POD_NAME)", "extender-0") for word in words]
    settings = extender_settings.from_arguments(parser.parse_args(words), parser)
    assert settings.lease == "vcuda-system/gpu-scheduler-extender"
    assert settings.pod == "vcuda-system/extender-0"
    assert settings.port == 3456
    assert settings.tls_cert == "/etc/tls/tls.crt"


def test_state_is_mounted_at_the_path_that_kubelet_is_told() -> None:
    """Allocate answers with host paths: the daemon's own must be the same on the host."""
    pod = objects()["DaemonSet", "gpu-manager"]["spec"]["template"]["spec"]
    paths = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"]}
    mounts = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    assert paths["state"] == mounts["state"]["mountPath"]
    assert mounts["state"]["mountPropagation"] == "Bidirectional"
    assert mounts["driver"]["readOnly"] is mounts["pod-resources"]["readOnly"] is True
    assert pod["nodeSelector"] == {"nvidia-device-enable": "enable"}


def test_roles_are_exactly_what_the_programs_use() -> None:
    found = objects()
    manager = rules(found["ClusterRole", "vcuda-gpu-manager"])
    common = {
        ("pods", "list"),
        ("pods", "watch"),
        ("pods", "patch"),
        ("nodes", "patch"),
        ("events", "create"),
    }
    assert manager == common | {("nodes/proxy", "get")}
    assert rules(found["ClusterRole", "vcuda-gpu-scheduler-extender"]) == {
        ("pods", "get"), ("pods", "list"), ("pods", "watch"), ("nodes", "list"), ("nodes", "watch"), ("pods/binding", "create"),
    }  # fmt: skip
    assert rules(found["Role", "gpu-scheduler-extender"]) == {
        ("leases", "get"), ("leases", "update"), ("leases", "create"), ("pods", "patch"),
    }  # fmt: skip
    for asked, right in (
        ({"audit": {"policy": "evict"}}, ("pods/eviction", "create")),
        ({"deadCardPolicy": "evict"}, ("pods/eviction", "create")),
        ({"failedAdmissionGrace": 60}, ("pods", "delete")),
    ):
        assert rules(objects({"manager": asked})["ClusterRole", "vcuda-gpu-manager"]) == manager | {right}
    for access, more in (("pods", {("nodes/pods", "get")}), ("none", set())):
        other = objects({"manager": {"kubelet": {"access": access}}})
        assert rules(other["ClusterRole", "vcuda-gpu-manager"]) == common | more
        told = [
            word for word in container(other["DaemonSet", "gpu-manager"])["args"] if "kubelet-url" in word
        ]
        assert bool(told) == (access != "none")


@pytest.mark.parametrize("mode", ["secret", "cert-manager", "none"])
def test_tls_is_the_same_for_server_probes_and_scheduler(mode: str) -> None:
    found = objects({"extender": {"tls": {"mode": mode}}})
    scheme = "http" if mode == "none" else "https"
    extender = container(found["Deployment", "gpu-scheduler-extender"])
    assert any("--tls-cert" in word for word in extender["args"]) == (scheme == "https")
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert extender[probe]["httpGet"]["scheme"] == scheme.upper()
    assert (("Certificate", "gpu-scheduler-extender") in found) == (mode == "cert-manager")
    for version in ("v1", "v1beta1"):
        text = found["ConfigMap", "gpu-scheduler-configuration"]["data"][f"{version}.yaml"]
        configuration = yaml.safe_load(text)
        assert configuration["apiVersion"] == f"kubescheduler.config.k8s.io/{version}"
        assert configuration["percentageOfNodesToScore"] == 100
        shares, cpu_only = configuration["extenders"]
        assert shares["urlPrefix"] == f"{scheme}://gpu-scheduler-extender.vcuda-system.svc:3456/scheduler"
        assert [item["name"] for item in shares["managedResources"]] == [
            "tencent.com/vcuda-core",
            "tencent.com/vcuda-memory",
        ]
        assert cpu_only["ignorable"] is True
        assert "managedResources" not in cpu_only
        for entry in (shares, cpu_only):
            assert entry.get("enableHTTPS", False) == (scheme == "https")


def test_optional_kinds_are_there_when_asked_for() -> None:
    kinds = {kind for kind, _ in objects(EVERYTHING)}
    assert {"Certificate", "ServiceMonitor", "NetworkPolicy", "PodDisruptionBudget"} <= kinds
    assert not {"Certificate", "ServiceMonitor", "NetworkPolicy"} & {kind for kind, _ in objects()}
    monitors = [item for (kind, _), item in objects(EVERYTHING).items() if kind == "ServiceMonitor"]
    services = [item for (kind, _), item in objects(EVERYTHING).items() if kind == "Service"]
    for monitor in monitors:  # each selects exactly one Service that has the port
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = [item for item in services if wanted <= item["metadata"]["labels"].items()]
        assert monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}


@pytest.mark.parametrize(
    "values",
    [
        {"extender": {"leaseSeconds": 5}},  # shorter than two API calls may take
        {"manager": {"kubelet": {"access": "admin"}}},
        {"manager": {"prot": 1}},
        {"manager": {"stateDirectory": "relative"}},
        {"extender": {"tls": {"mode": "maybe"}}},
    ],
    ids=json.dumps,
)
def test_the_schema_refuses(values: dict[str, Any]) -> None:
    with pytest.raises(helm_python.HelmError):
        manifests.render(values)


def test_the_schema_knows_every_default() -> None:
    """A value that the schema does not know could never be set."""

    def missing(values: dict[str, Any], schema: dict[str, Any], path: str) -> list[str]:
        known = schema.get("properties")
        if known is None:
            return []
        found = [f"{path}.{name}" for name in values if name not in known]
        for name, value in values.items():
            if isinstance(value, dict) and name in known:
                found += missing(value, known[name], f"{path}.{name}")
        return found

    schema = json.loads((manifests.CHART / "values.schema.json").read_text())
    assert not missing(yaml.safe_load((manifests.CHART / "values.yaml").read_text()), schema, "")
