"""The chart says what the programs understand: rendered by Helm's own engine, flags parsed by the programs themselves."""

from __future__ import annotations

import argparse
import base64
import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import vcuda
from deploy import manifests
from manager.config import reader
from manager.config import settings as manager_settings
from manager.observe.http import GUARDED
from scheduler_ext import settings as extender_settings
from scheduler_ext.admission import app as webhook_app
from scheduler_ext.admission import settings as admission_settings
from scheduler_ext.scoring import quotas
from tests.support.rendered import container, helm_python, objects, rules
from vcuda.settings import add_options, flag_of
from vcuda.spec.device_classes import EXTENDED_PREFIX
from vcuda.spec.names import Names

EVERYTHING: dict[str, Any] = {
    "extender": {
        "tls": {"mode": "cert-manager"},
        "service": {"clusterIP": "10.96.0.50"},
        "quotas": {"entries": [{"namespace": "team-a", "cores": 800, "nodes": {"pool": "training"}}]},
    },
    "metrics": {"serviceMonitor": {"enabled": True, "labels": {"team": "gpu"}}},
    "networkPolicy": {"enabled": True, "schedulerCIDRs": ["10.0.0.0/24"]},
    "manager": {
        "nodeLabels": {"pool": "gpu", "zone": "a"},
        "kubelet": {"access": "pods", "verify": True},
        "audit": {"policy": "evict"},
        "driftTolerance": 35,
        "config": {"smallest-memory": 2},
    },
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
def test_the_programs_understand_their_flags(values: dict[str, Any], tmp_path: Path) -> None:
    found = objects(values)
    words = container(found["DaemonSet", "gpu-manager"])["args"]
    config = tmp_path / "config.yaml"
    config.write_text(found["ConfigMap", "gpu-manager"]["data"]["config.yaml"])
    told = {"$(NODE_IP)": "10.0.0.1", "/etc/gpu-manager.d/config.yaml": str(config)}
    for there, here in told.items():
        assert any(there in word for word in words)
        words = [word.replace(there, here) for word in words]
    parsed = reader.parse(words, {})
    assert parsed is not None
    assert parsed.warnings == ()
    chosen = values.get("manager", {})
    assert dict(parsed.settings.node_labels) == chosen.get("nodeLabels", {})
    assert parsed.settings.audit_policy == chosen.get("audit", {}).get("policy", "report")
    assert parsed.settings.audit_tolerance == 512
    assert parsed.settings.drift_tolerance == chosen.get("driftTolerance", 20)
    assert parsed.settings.smallest_memory == chosen.get("config", {}).get("smallest-memory", 1)
    assert parsed.settings.log_format == "json"
    assert parsed.settings.virtual_manager_path == Path("/etc/gpu-manager/vm")

    words = container(found["Deployment", "gpu-scheduler-extender"])["args"]
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, extender_settings.Settings)
    words = [word.replace("$(POD_NAME)", "extender-0") for word in words]
    settings = extender_settings.read(vars(parser.parse_args(words)), {})
    assert settings.lease == "vcuda-system/gpu-scheduler-extender"
    assert settings.pod == "vcuda-system/extender-0"
    assert settings.port == 3456
    assert settings.tls_cert == "/etc/tls/tls.crt"
    assert settings.client_ca == "/etc/tls/ca.crt" and settings.client_name and settings.probe_port == 3457
    assert settings.quotas == ("vcuda-system/gpu-quotas" if values else None)


def test_what_can_change_live_is_in_the_file_and_nothing_else() -> None:
    """A value in the args would win over the file, and would need a restart to change; one that is not live would wait for it."""
    live = {flag_of(field.name): field.metadata["live"] for field in dataclasses.fields(manager_settings.Settings)}
    found = objects()
    given = {word[2:].partition("=")[0] for word in container(found["DaemonSet", "gpu-manager"])["args"]}
    file = yaml.safe_load(found["ConfigMap", "gpu-manager"]["data"]["config.yaml"])
    assert all(live[name] for name in file)
    assert not any(live[name] for name in given)


def test_a_recording_is_written_to_its_volume() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "records"}}
    found = objects(
        {"extender": {"record": {"enabled": True, "sizeMiB": 64, "volume": claim}, "tls": {"mode": "none"}}}
    )
    deployment = found["Deployment", "gpu-scheduler-extender"]
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, extender_settings.Settings)
    words = [word.replace("$(POD_NAME)", "extender-0") for word in container(deployment)["args"]]
    settings = extender_settings.read(vars(parser.parse_args(words)), {})
    (mount,) = container(deployment)["volumeMounts"]
    assert str(settings.record).startswith(f"{mount['mountPath']}/")
    assert settings.record_mib == 64
    assert deployment["spec"]["template"]["spec"]["volumes"] == [{"name": "record", **claim}]
    assert (
        "volumes"
        not in objects({"extender": {"tls": {"mode": "none"}}})["Deployment", "gpu-scheduler-extender"]["spec"][
            "template"
        ]["spec"]
    )


@pytest.mark.parametrize(
    ("policy", "limits", "read_only"), [("report", "off", True), ("restore", "off", None), ("report", "auto", None)]
)
def test_the_host_s_cgroups_are_writable_only_for_restoring_and_limits(
    policy: str, limits: str, read_only: bool | None
) -> None:
    values = {"manager": {"deviceCgroupPolicy": policy, "driverLimits": limits}}
    daemon = objects(values)["DaemonSet", "gpu-manager"]
    mounts = {mount["name"]: mount for mount in container(daemon)["volumeMounts"]}
    assert mounts["cgroup"].get("readOnly") is read_only
    assert f"--cgroup-root={mounts['cgroup']['mountPath']}" in container(daemon)["args"]


@pytest.mark.parametrize("strategy", ["device-specs", "cdi-cri", "cdi-annotations,cdi-cri"])
def test_the_runtime_s_cdi_folder_is_mounted_when_it_is_written(strategy: str) -> None:
    daemon = objects({"manager": {"deviceListStrategy": strategy}})["DaemonSet", "gpu-manager"]
    words = [word for word in container(daemon)["args"] if not word.startswith("--config=")]
    parsed = reader.parse(words, {})
    assert parsed is not None
    assert parsed.settings.device_list_strategy == frozenset(strategy.split(","))
    mounts = {mount["name"]: mount for mount in container(daemon)["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in daemon["spec"]["template"]["spec"]["volumes"]}
    assert ("cdi" in mounts, "cdi" in volumes) == ("cdi" in strategy, "cdi" in strategy)
    if "cdi" in strategy:
        path = str(parsed.settings.cdi_root)
        assert (mounts["cdi"]["mountPath"], volumes["cdi"]["hostPath"]["path"]) == (path, path)
        assert "readOnly" not in mounts["cdi"]


@pytest.mark.parametrize("name", ["query-port", "audit-policy", "config"])
def test_a_setting_has_one_place(name: str) -> None:
    with pytest.raises(helm_python.HelmError, match=f"manager.config.{name}"):
        manifests.render({"manager": {"config": {name: 1}}})


def test_quotas_come_from_entries_or_from_a_config_map_of_the_user() -> None:
    entries = [
        {"namespace": "team-a", "cores": 800, "models": ["NVIDIA H100 80GB HBM3"]},
        {"namespace": "b", "cards": 1},
    ]
    found = objects({"extender": {"quotas": {"entries": entries}}})
    decoded = quotas.parse(found["ConfigMap", "gpu-quotas"])
    assert {name: len(found) for name, found in decoded.items()} == {"team-a": 1, "b": 1}
    assert decoded["team-a"][0].models
    own = objects({"extender": {"quotas": {"configMap": "ours"}}})
    assert ("ConfigMap", "gpu-quotas") not in own
    assert "--quotas=vcuda-system/ours" in container(own["Deployment", "gpu-scheduler-extender"])["args"]
    for objects_found, name in ((found, "gpu-quotas"), (own, "ours")):
        (rule,) = [
            rule
            for rule in objects_found["Role", "gpu-scheduler-extender"]["rules"]
            if rule["resources"] == ["configmaps"]
        ]
        assert rule["verbs"] == ["list", "watch"]
        assert rule["resourceNames"] == [name]


def test_state_is_mounted_at_the_path_that_kubelet_is_told() -> None:
    """Allocate answers with host paths: the daemon's own must be the same on the host."""
    pod = objects()["DaemonSet", "gpu-manager"]["spec"]["template"]["spec"]
    paths = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
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
        ("events", "patch"),
        ("tokenreviews", "create"),
        ("subjectaccessreviews", "create"),
    }
    (right,) = manager - common
    assert right in {("nodes/proxy", "get"), ("nodes/pods", "get")}  # by the version of the cluster
    assert rules(found["ClusterRole", "vcuda-gpu-scheduler-extender"]) == {
        ("pods", "get"), ("pods", "list"), ("pods", "watch"), ("nodes", "list"), ("nodes", "watch"), ("pods/binding", "create"),
        ("events", "create"), ("events", "patch"), ("pods/status", "patch"), ("tokenreviews", "create"), ("subjectaccessreviews", "create"),
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
    asked = objects({"manager": {"queryAuth": "none"}})
    reviews = {("tokenreviews", "create"), ("subjectaccessreviews", "create")}
    assert rules(asked["ClusterRole", "vcuda-gpu-manager"]) == manager - reviews
    assert not rules(asked["ClusterRole", "vcuda-gpu-scheduler-extender"]) & reviews
    user = {("pods", "list"), ("pods/proxy", "get"), ("serviceaccounts/token", "create")}
    assert rules(found["Role", "vcuda-user"]) == user
    assert rules(asked["Role", "vcuda-user"]) == user - {("serviceaccounts/token", "create")}
    (token,) = [rule for rule in found["Role", "vcuda-user"]["rules"] if rule["resources"] == ["serviceaccounts/token"]]
    assert token["resourceNames"] == ["vcuda-reader"] and ("ServiceAccount", "vcuda-reader") in found
    assert ("ClusterRole", "vcuda-gpu-manager-reader") not in asked
    for values, given in ((asked, False), (found, True)):
        for program in (("DaemonSet", "gpu-manager"), ("Deployment", "gpu-scheduler-extender")):
            assert ("--query-auth=kubernetes" in container(values[program])["args"]) == given
    (readable,) = found["ClusterRole", "vcuda-gpu-manager-reader"]["rules"]
    assert set(readable["nonResourceURLs"]) == GUARDED | {"/explain/*", "/cluster"}
    for access, more in (
        ("proxy", {("nodes/proxy", "get")}),
        ("pods", {("nodes/pods", "get")}),
        ("none", set()),
    ):
        other = objects({"manager": {"kubelet": {"access": access}}})
        assert rules(other["ClusterRole", "vcuda-gpu-manager"]) == common | more
        told = [word for word in container(other["DaemonSet", "gpu-manager"])["args"] if "kubelet-url" in word]
        assert bool(told) == (access != "none")


def test_kubelets_certificate_is_verified_unless_the_operator_says_otherwise() -> None:
    """Else the daemon's token goes to whoever answers at kubelet's port."""
    for verify, more in ((None, []), (True, []), (False, ["--kubelet-verify=false"])):
        asked = {} if verify is None else {"manager": {"kubelet": {"verify": verify}}}
        words = container(objects(asked)["DaemonSet", "gpu-manager"])["args"]
        assert [word for word in words if "verify" in word] == more


def test_every_right_has_its_reason_beside_it() -> None:
    for name in ("manager-rbac.yaml", "extender-rbac.yaml"):
        lines = (manifests.CHART / "templates" / name).read_text().splitlines()
        rights = [number for number, line in enumerate(lines) if line.startswith("  - apiGroups")]
        unexplained = [lines[number + 1].strip() for number in rights if not lines[number - 1].startswith("  # ")]
        # The second rule on leases is explained with the first: create can't be restricted to a name.
        assert unexplained == (["resources: [leases]"] if name.startswith("extender") else [])


OWN: dict[str, Any] = {
    "scheduler": {"mode": "own", "own": {"name": "shares", "image": {"repository": "kube-scheduler"}}},
    "extender": {"tls": {"mode": "generated"}, "service": {"clusterIP": "10.96.0.50"}},
    "webhook": {
        "enabled": True,
        "defaults": {"priority": "low", "coreLimit": 50},
        "exemptNamespaces": ["infra"],
    },
}


def _certificate(secret: dict[str, Any], key: str, folder: Path) -> Path:
    file = folder / f"{secret['metadata']['name']}-{key}"
    file.write_bytes(base64.b64decode(secret["data"][key]))
    return file


def _openssl(*words: str | Path) -> str:
    told = subprocess.run(["openssl", *map(str, words)], capture_output=True, text=True, timeout=30, check=False)
    return told.stdout + told.stderr


def test_a_scheduler_of_our_own_needs_nothing_of_the_cluster_s(tmp_path: Path) -> None:
    found = objects(OWN)
    assert ("ConfigMap", "gpu-scheduler-configuration") not in found
    spec = found["Deployment", "shares"]["spec"]["template"]["spec"]
    configuration = yaml.safe_load(found["ConfigMap", "shares"]["data"]["config.yaml"])
    assert configuration["profiles"] == [{"schedulerName": "shares"}]
    election = configuration["leaderElection"]
    (lease, _) = found["Role", "shares"]["rules"]
    assert (election["resourceNamespace"], election["resourceName"]) == (
        "vcuda-system",
        *lease["resourceNames"],
    )
    assert "clientConnection" not in configuration, "it logs in with its ServiceAccount"
    assert spec["serviceAccountName"] == "shares"
    bound = {
        item["roleRef"]["name"]
        for (kind, _), item in found.items()
        if kind == "ClusterRoleBinding" and item["subjects"][0]["name"] == "shares"
    }
    assert bound == {"system:kube-scheduler", "system:volume-scheduler"}
    # What it shows the extender is what the extender asks for, and the reverse.
    (mount,) = [item for item in container(found["Deployment", "shares"])["volumeMounts"] if item["name"] == "tls"]
    (secret,) = [item["secret"]["secretName"] for item in spec["volumes"] if item["name"] == "tls"]
    for entry in configuration["extenders"]:
        files = [Path(entry["tlsConfig"][name]) for name in ("caFile", "certFile", "keyFile")]
        assert {str(file.parent) for file in files} == {mount["mountPath"]}
        assert {file.name for file in files} <= found["Secret", secret]["data"].keys()
    client, server = found["Secret", secret], found["Secret", "gpu-scheduler-extender-tls"]
    chains = {
        kind: (_certificate(secret, "tls.crt", tmp_path), _certificate(secret, "ca.crt", tmp_path))
        for kind, secret in (("client", client), ("server", server))
    }
    for purpose, shown, trusted, name in (
        ("sslclient", "client", "server", ()),
        ("sslserver", "server", "client", ("-verify_hostname", "gpu-scheduler-extender.vcuda-system.svc")),
        ("sslserver", "server", "client", ("-verify_ip", "10.96.0.50")),
    ):
        told = _openssl("verify", "-purpose", purpose, *name, "-CAfile", chains[trusted][1], chains[shown][0])
        assert told.endswith(": OK\n"), told
    shown_name = _openssl("x509", "-noout", "-subject", "-in", chains["client"][0])
    assert "gpu-scheduler-extender-client" in shown_name
    with pytest.raises(helm_python.HelmError, match=r"scheduler\.own\.image\.repository"):
        manifests.render({"scheduler": {"mode": "own"}})


def test_the_webhook_understands_its_flags_and_the_api_server_finds_it() -> None:
    found = objects(OWN)
    deployment = found["Deployment", "gpu-admission-webhook"]
    assert container(deployment)["command"] == ["gpu-scheduler-extender", "webhook"]
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, admission_settings.Settings)
    settings = admission_settings.read(vars(parser.parse_args(container(deployment)["args"])), {})
    assert settings.scheduler_name == "shares"
    assert settings.exempt_namespaces == {"vcuda-system", "kube-system", "infra"}
    accounts = {
        f"system:serviceaccount:{item['metadata']['namespace']}:{name}"
        for (kind, name), item in found.items()
        if kind == "ServiceAccount"
    }
    assert settings.trusted_users < accounts, "the daemon writes placements, the extender may"
    assert settings.rules().annotations == {
        "tencent.com/vcuda-core-limit": "50",
        "tencent.com/vcuda-priority": "low",
    }
    (hook,) = found["MutatingWebhookConfiguration", "vcuda-gpu-admission-webhook"]["webhooks"]
    assert hook["failurePolicy"] == "Ignore"
    assert {"kube-system", "vcuda-system", "infra"} == set(hook["namespaceSelector"]["matchExpressions"][0]["values"])
    exempt = hook["namespaceSelector"]["matchExpressions"][1]
    assert (exempt["key"], exempt["values"]) == (Names().admission_label, ["ignore"])
    (condition,) = hook["matchConditions"]  # Helm's own idea of a cluster is younger than 1.28
    for name in (Names().core, Names().memory, EXTENDED_PREFIX + Names().driver):
        assert f'"{name}"' in condition["expression"]
    other = objects({**OWN, "resourceDomain": "example.org"})
    (theirs,) = other["MutatingWebhookConfiguration", "vcuda-gpu-admission-webhook"]["webhooks"]
    assert "tencent.com" not in str(theirs) and '"example.org/vcuda-core"' in str(theirs["matchConditions"])
    older = objects({**OWN, "webhook": {**OWN["webhook"], "matchConditions": "never"}})
    (plain,) = older["MutatingWebhookConfiguration", "vcuda-gpu-admission-webhook"]["webhooks"]
    assert "matchConditions" not in plain
    where = hook["clientConfig"]["service"]
    service = found["Service", where["name"]]
    assert where["path"] == webhook_app.PATH
    (port,) = [item for item in service["spec"]["ports"] if item["port"] == where["port"]]
    (named,) = [item for item in container(deployment)["ports"] if item["name"] == port["targetPort"]]
    assert named["containerPort"] == settings.port
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    secret = found["Secret", "gpu-admission-webhook-tls"]
    assert hook["clientConfig"]["caBundle"] == secret["data"]["ca.crt"]
    assert not any(kind == "MutatingWebhookConfiguration" for kind, _ in objects())
    other = objects({"webhook": {"enabled": True, "tls": {"mode": "cert-manager"}}})
    assert ("Certificate", "gpu-admission-webhook") in other
    assert ("Secret", "gpu-admission-webhook-tls") not in other
    assert (
        container(other["Deployment", "gpu-admission-webhook"])["args"].count("--scheduler-name=vcuda-scheduler") == 0
    )


@pytest.mark.parametrize("mode", ["secret", "cert-manager", "generated", "none"])
def test_tls_is_the_same_for_server_probes_and_scheduler(mode: str) -> None:
    found = objects({"extender": {"tls": {"mode": mode}}})
    scheme = "http" if mode == "none" else "https"
    extender = container(found["Deployment", "gpu-scheduler-extender"])
    assert any("--tls-cert" in word for word in extender["args"]) == (scheme == "https")
    assert any("--client-ca" in word for word in extender["args"]) == (scheme == "https")
    assert ("--allow-anyone" in extender["args"]) == (scheme == "http")
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert extender[probe]["httpGet"] == {"path": extender[probe]["httpGet"]["path"], "port": "probes"}
    for name in ("gpu-scheduler-extender", "gpu-scheduler-extender-client"):
        assert (("Certificate", name) in found) == (mode == "cert-manager")
    for version in ("v1", "v1beta2", "v1beta1"):
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
            assert {"caFile", "certFile", "keyFile"} <= set(entry.get("tlsConfig", ())) or scheme == "http"


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
        {"networkPolicy": {"enabled": True}},  # kube-scheduler would be shut out
        {"extender": {"quotas": {"entries": [{"cores": 1}]}}},
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


CLAIMS: dict[str, Any] = {
    **OWN,
    "claims": {"enabled": True, "cards": ["GPU-1", "GPU-2"], "protocols": "device-plugin,dra"},
}


def test_without_claims_the_chart_says_nothing_of_them() -> None:
    text = "\n".join(manifests.render(OWN).values())
    assert "resource.k8s.io" not in text and "claims" not in text.replace("persistentVolumeClaim", "")


def test_claims_have_a_class_rights_and_the_extender_s_ear() -> None:
    found = objects(CLAIMS)
    names = Names()
    (selector,) = found["DeviceClass", names.driver]["spec"]["selectors"]
    assert f"device.driver == '{names.driver}'" in selector["cel"]["expression"]
    for who in ("extender", "manager"):
        name = {"extender": "gpu-scheduler-extender", "manager": "gpu-manager"}[who]
        rules = found["ClusterRole", f"vcuda-{name}"]["rules"]
        asked = {
            resource for rule in rules if rule["apiGroups"] == ["resource.k8s.io"] for resource in rule["resources"]
        }
        assert "resourceclaims" in asked and "resourceslices" in asked, who
        assert ("deviceclasses" in asked) == (who == "extender")
    assert "--claims" in container(found["Deployment", "gpu-scheduler-extender"])["args"]
    parsed = yaml.safe_load(found["ConfigMap", "shares"]["data"]["config.yaml"])
    (entry,) = [one for one in parsed["extenders"] if one["urlPrefix"].endswith("/scheduler/claims")]
    assert entry["ignorable"] and "managedResources" not in entry and "bindVerb" not in entry


@pytest.mark.parametrize(
    ("values", "rolling"),
    [
        ({}, {"maxUnavailable": 1}),
        (CLAIMS, {"maxSurge": 1, "maxUnavailable": 0}),
        ({**CLAIMS, "manager": {"updateStrategy": {"rollingUpdate": {"maxUnavailable": 3}}}}, {"maxUnavailable": 3}),
    ],
)
def test_with_claims_the_new_daemon_stands_by_before_the_old_one_ends(
    values: dict[str, Any], rolling: dict[str, int]
) -> None:
    """Kubernetes before 1.22 knows no maxSurge; those have no claims either."""
    assert objects(values)["DaemonSet", "gpu-manager"]["spec"]["updateStrategy"]["rollingUpdate"] == rolling


def test_a_daemon_that_serves_claims_has_kubelets_folders_and_the_cards_that_are_for_them() -> None:
    pod = container(objects(CLAIMS)["DaemonSet", "gpu-manager"])
    assert {"--protocols=device-plugin,dra", "--dra-cards=GPU-1,GPU-2", "--cdi-root=/var/run/cdi"} <= set(pod["args"])
    mounts = {one["mountPath"] for one in pod["volumeMounts"]}
    assert {"/var/lib/kubelet/plugins", "/var/lib/kubelet/plugins_registry", "/var/run/cdi"} <= mounts


def test_the_drivers_socket_has_the_hosts_path_for_kubelet_dials_what_it_is_told() -> None:
    found = objects({**CLAIMS, "manager": {**CLAIMS.get("manager", {}), "kubelet": {"directory": "/data/kubelet"}}})
    pod = container(found["DaemonSet", "gpu-manager"])
    folders = {"--plugins-path": "/data/kubelet/plugins", "--plugins-registry-path": "/data/kubelet/plugins_registry"}
    assert {f"{flag}={folder}" for flag, folder in folders.items()} <= set(pod["args"])
    assert set(folders.values()) <= {one["mountPath"] for one in pod["volumeMounts"]}


@pytest.mark.parametrize(
    ("setting", "paths"),
    [
        ("never", {"pods": webhook_app.PATH}),
        ("always", {"pods": webhook_app.TO_CLAIMS_PATH}),
        ("labelled", {"pods": webhook_app.PATH, "claims-of-pods": webhook_app.TO_CLAIMS_PATH}),
    ],
)
def test_every_pod_meets_one_entry_of_the_webhook(setting: str, paths: dict[str, str]) -> None:
    found = objects({**CLAIMS, "webhook": {**OWN["webhook"], "claims": setting}})
    hooks = found["MutatingWebhookConfiguration", "vcuda-gpu-admission-webhook"]["webhooks"]
    assert {hook["name"].split(".")[0]: hook["clientConfig"]["service"]["path"] for hook in hooks} == paths
    for label in (None, "ignore", "claims", "other"):
        met = [
            hook for hook in hooks if all(_admits(one, label) for one in hook["namespaceSelector"]["matchExpressions"])
        ]
        assert len(met) == (0 if label == "ignore" else 1), label
    theirs = found["ValidatingWebhookConfiguration", "vcuda-gpu-admission-webhook"]["webhooks"]
    assert {one["clientConfig"]["service"]["path"] for one in theirs} == {webhook_app.CLAIMS_PATH}


def test_classes_of_any_driver_pass_where_no_webhook_answers() -> None:
    found = objects({**CLAIMS, "webhook": {**OWN["webhook"], "failurePolicy": "Fail"}})
    claims, classes = found["ValidatingWebhookConfiguration", "vcuda-gpu-admission-webhook"]["webhooks"]
    assert (claims["failurePolicy"], classes["failurePolicy"]) == ("Fail", "Ignore")
    (rule,) = classes["rules"]
    assert (rule["resources"], rule["operations"], rule["scope"]) == (
        ["deviceclasses"],
        ["CREATE", "UPDATE"],
        "Cluster",
    )
    assert "namespaceSelector" not in classes


def _admits(expression: dict[str, Any], label: str | None) -> bool:
    """A namespace selector's expression on a namespace that has that value of our label, or none."""
    if expression["key"] != Names().admission_label:
        return True
    return (label in expression["values"]) == (expression["operator"] == "In")
