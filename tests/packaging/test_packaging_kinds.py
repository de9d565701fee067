"""What the chart renders has only fields that its kinds know: built-in kinds by the official client's models, others by the part
of their public API reference that the chart needs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from kubernetes import client

from deploy import manifests

helm_python = pytest.importorskip("helm_python", reason="Helm's engine (helm-python-sdk) has no wheel for this machine")

EVERYTHING: dict[str, Any] = {
    "extender": {
        "tls": {"mode": "cert-manager"},
        "service": {"clusterIP": "10.96.0.50"},
        "podDisruptionBudget": {"apiVersion": "policy/v1"},
        "quotas": {"entries": [{"namespace": "team-a", "cores": 800}]},
    },
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": {"team": "gpu"}},
        "prometheusRule": {"enabled": True, "labels": {"team": "gpu"}},
        "dashboard": {"enabled": True},
    },
    "networkPolicy": {"enabled": True, "schedulerCIDRs": ["10.0.0.0/24"]},
    "manager": {"audit": {"policy": "evict"}, "failedAdmissionGrace": 60, "extraEnv": [{"name": "A", "value": "b"}]},
    "imagePullSecrets": [{"name": "registry"}],
}  # fmt: skip

API = client.ApiClient()


def documents(values: dict[str, Any]) -> list[dict[str, Any]]:
    rendered = manifests.render(values)
    return [
        document
        for name, text in rendered.items()
        if name.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document
    ]


def model_of(item: dict[str, Any]) -> type | None:
    """The official client's class of a kind, such as V1PodDisruptionBudget; None for kinds that it does not know."""
    version = item["apiVersion"].rpartition("/")[2]
    return getattr(client, version[0].upper() + version[1:] + item["kind"], None)


def strange(value: Any, kind: str, path: str) -> list[str]:
    """Where `value` has a field or a type that the model `kind` has not."""
    listed = re.fullmatch(r"[Ll]ist\[(.+)\]", kind)
    if listed:
        if not isinstance(value, list):
            return [f"{path}: no list"]
        return [found for at, item in enumerate(value) for found in strange(item, listed[1], f"{path}[{at}]")]
    mapped = re.fullmatch(r"[Dd]ict[\[(](\w+), (.+)[\])]", kind)
    if mapped:
        if not isinstance(value, dict):
            return [f"{path}: no mapping"]
        return [found for key, item in value.items() for found in strange(item, mapped[2], f"{path}.{key}")]
    simple = {"str": str, "int": int, "bool": bool, "float": (int, float)}.get(kind)
    if simple is not None:
        right = isinstance(value, simple) and (kind == "bool" or not isinstance(value, bool))  # type: ignore[arg-type]
        return [] if right else [f"{path}: {value!r} is no {kind}"]
    model = getattr(client, kind, None)
    if model is None:  # object, datetime: anything
        return []
    if not isinstance(value, dict):
        return [f"{path}: no {kind}"]
    attribute = {key: name for name, key in model.attribute_map.items()}
    found = [f"{path}.{key}: {kind} has no such field" for key in value if key not in attribute]
    for key, item in value.items():
        if key in attribute:
            found += strange(item, model.openapi_types[attribute[key]], f"{path}.{key}")
    return found


# Fields that the references of cert-manager v1 (CertificateSpec), of the Prometheus operator v1 (ServiceMonitorSpec, Endpoint,
# SafeTLSConfig, PrometheusRuleSpec) and of kubescheduler.config.k8s.io/v1 (KubeSchedulerConfiguration, Extender) list, as far as
# the chart is concerned: a type, a list of one type, or a mapping of fields; None is anything.
LABELS = {"matchLabels": None, "matchExpressions": None}
SECRET_KEY = {"secret": {"name": str, "key": str, "optional": bool}, "configMap": None}
TLS_FILES = {
    "insecure": bool, "serverName": str, "certFile": str, "keyFile": str, "caFile": str, "certData": str, "keyData": str, "caData": str,
}  # fmt: skip
EXTENDER = {
    "urlPrefix": str, "filterVerb": str, "preemptVerb": str, "prioritizeVerb": str, "weight": int, "bindVerb": str, "enableHTTPS": bool,
    "tlsConfig": TLS_FILES, "httpTimeout": str, "nodeCacheCapable": bool, "ignorable": bool,
    "managedResources": [{"name": str, "ignoredByScheduler": bool}],
}  # fmt: skip
KINDS: dict[str, Any] = {
    "Certificate": {
        "secretName": str, "duration": str, "renewBefore": str, "dnsNames": [str], "ipAddresses": [str], "commonName": str,
        "issuerRef": {"name": str, "kind": str, "group": str}, "usages": [str], "isCA": bool, "privateKey": None,
    },
    "ServiceMonitor": {
        "jobLabel": str, "targetLabels": [str], "selector": LABELS, "namespaceSelector": None,
        "endpoints": [{
            "port": str, "path": str, "scheme": str, "interval": str, "scrapeTimeout": str, "honorLabels": bool, "relabelings": None, "bearerTokenFile": str,
            "tlsConfig": {"ca": SECRET_KEY, "cert": SECRET_KEY, "keySecret": None, "serverName": str, "insecureSkipVerify": bool},
        }],
    },
    "PrometheusRule": {
        "groups": [{
            "name": str, "interval": str,
            "rules": [{"alert": str, "record": str, "expr": str, "for": str, "labels": None, "annotations": None}],
        }],
    },
    "KubeSchedulerConfiguration": {
        "parallelism": int, "leaderElection": {"leaderElect": bool}, "clientConnection": {"kubeconfig": str, "qps": int, "burst": int},
        "percentageOfNodesToScore": int, "podInitialBackoffSeconds": int, "podMaxBackoffSeconds": int, "profiles": None,
        "extenders": [EXTENDER],
    },
}  # fmt: skip
REQUIRED = {
    "Certificate": {"secretName", "issuerRef"},
    "ServiceMonitor": {"endpoints", "selector"},
    "PrometheusRule": {"groups"},
}


def unlike(value: Any, wanted: Any, path: str) -> list[str]:
    """Where `value` is not of the form `wanted`."""
    if wanted is None:
        return []
    if isinstance(wanted, list):
        if not isinstance(value, list):
            return [f"{path}: no list"]
        return [found for at, item in enumerate(value) for found in unlike(item, wanted[0], f"{path}[{at}]")]
    if isinstance(wanted, dict):
        if not isinstance(value, dict):
            return [f"{path}: no mapping"]
        unknown = [f"{path}.{key}: no such field" for key in value if key not in wanted]
        return unknown + [
            found
            for key, item in value.items()
            if key in wanted
            for found in unlike(item, wanted[key], f"{path}.{key}")
        ]
    right = isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
    return [] if right else [f"{path}: {value!r} is no {wanted.__name__}"]


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_every_field_is_one_that_the_kind_knows(values: dict[str, Any]) -> None:
    problems = []
    builtin = foreign = 0
    for item in documents(values):
        name = f"{item['kind']}/{item['metadata']['name']}"
        model = model_of(item)
        if model is None:
            foreign += 1
            assert item.keys() == {"apiVersion", "kind", "metadata", "spec"}
            assert item["spec"].keys() >= REQUIRED[item["kind"]]
            problems += unlike(item["spec"], KINDS[item["kind"]], name)
            problems += strange(item["metadata"], "V1ObjectMeta", f"{name}.metadata")
        else:
            builtin += 1
            problems += strange(item, model.__name__, name)
            API.sanitize_for_serialization(item)
    assert not problems
    assert builtin >= 14
    assert foreign == (5 if values else 0)


def test_policy_v1_is_the_kind_of_newer_clusters() -> None:
    (budget,) = [item for item in documents(EVERYTHING) if item["kind"] == "PodDisruptionBudget"]
    assert budget["apiVersion"] == "policy/v1"
    assert model_of(budget) is client.V1PodDisruptionBudget


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
@pytest.mark.parametrize("mode", ["secret", "none"])
def test_kube_scheduler_s_configuration_has_known_fields_only(version: str, mode: str) -> None:
    (config,) = [
        item
        for item in documents({"extender": {"tls": {"mode": mode}}})
        if item["metadata"]["name"] == "gpu-scheduler-configuration"
    ]
    configuration = yaml.safe_load(config["data"][f"{version}.yaml"])
    assert configuration.pop("apiVersion") == f"kubescheduler.config.k8s.io/{version}"
    assert configuration.pop("kind") == "KubeSchedulerConfiguration"
    assert not unlike(configuration, KINDS["KubeSchedulerConfiguration"], version)


def test_a_wrong_field_is_seen() -> None:
    """The check itself: misspelt fields and wrong types of built-in and foreign kinds are told with their path."""
    budget = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "spec": {"maxUnavailble": 1}}
    assert strange(budget, "V1PodDisruptionBudget", "x") == [
        "x.spec.maxUnavailble: V1PodDisruptionBudgetSpec has no such field"
    ]
    daemon = {"spec": {"template": {"spec": {"hostPID": "yes", "containers": [{"name": "a", "args": "b"}]}}}}
    assert strange(daemon, "V1DaemonSet", "x") == [
        "x.spec.template.spec.hostPID: 'yes' is no bool",
        "x.spec.template.spec.containers[0].args: no list",
    ]
    assert unlike({"endpoints": [{"prot": "a"}], "selector": {}}, KINDS["ServiceMonitor"], "x") == [
        "x.endpoints[0].prot: no such field"
    ]
    assert unlike([{"weight": True}], [EXTENDER], "x") == ["x[0].weight: True is no int"]
