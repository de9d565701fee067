"""The names that users' manifests, pods, dashboards and scripts rely on, as literals: a renamed one must fail here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from manager.config.reader import parse
from manager.errors import StartError
from tests.manager.manager_pods import container, eventually, pod
from tests.manager.manager_support import Node
from vcuda.sim import Machine
from vcuda.spec.names import Names

MANIFEST = Path(__file__).parents[2] / "deploy/kubernetes/gpu-manager.yaml"

# Flags of tkestack gpu-manager that keep their meaning: flag, value, our setting, what it becomes.
KEPT: tuple[tuple[str, str, str, object], ...] = (
    ("--query-port", "5679", "query_port", 5679),
    ("--query-addr", "0.0.0.0", "query_addr", "0.0.0.0"),
    ("--kubeconfig", "/etc/k", "kubeconfig", Path("/etc/k")),
    ("--sample-period", "2", "sample_period", 2.0),
    ("--node-labels", "b=2,a=1", "node_labels", (("a", "1"), ("b", "2"))),
    ("--hostname-override", "n1", "hostname_override", "n1"),
    ("--virtual-manager-path", "/vm", "virtual_manager_path", Path("/vm")),
    ("--device-plugin-path", "/dp", "device_plugin_path", Path("/dp")),
    ("--checkpoint-path", "/cp", "checkpoint_path", Path("/cp")),
    ("--allocation-check-period", "60", "allocation_check_period", 60.0),
    ("--v", "5", "v", 5),
)
# Those that mean nothing here: accepted, and said so.
DROPPED = (
    "--driver=nvidia", "--share-mode=true", "--container-runtime-endpoint=/run/x.sock", "--cgroup-driver=systemd",
    "--runtime-request-timeout=5s", "--wait-timeout=1m", "--extra-config=/x", "--volume-config=/y", "--log-dir=/z",
    "--logtostderr=false", "--container-runtime=docker",
)  # fmt: skip


@pytest.mark.parametrize("form", ["{}={}", "{} {}"], ids=["with =", "two words"])
@pytest.mark.parametrize(("flag", "value", "setting", "expected"), KEPT, ids=[row[0] for row in KEPT])
def test_old_flags_keep_their_meaning(flag: str, value: str, setting: str, expected: object, form: str) -> None:
    parsed = parse(form.format(flag, value).split(" "), {})
    assert parsed is not None and parsed.warnings == ()
    assert getattr(parsed.settings, setting) == expected
    by_environment = parse([], {"GPU_MANAGER_" + setting.upper(): value})
    assert by_environment is not None and getattr(by_environment.settings, setting) == expected


@pytest.mark.parametrize("word", DROPPED)
def test_flags_without_a_meaning_are_accepted_and_said(word: str) -> None:
    name, _, value = word.partition("=")
    for words in ([word], [name, value]):
        parsed, nothing = parse(words, {}), parse([], {})
        assert parsed is not None and nothing is not None
        assert parsed.settings == nothing.settings
        assert [line.split()[0] for line in parsed.warnings] == [name]
    bare = parse(["--logtostderr", "--query-port=1"], {})  # a switch does not swallow the next flag
    assert bare is not None and bare.settings.query_port == 1


def test_flags_that_never_were_are_errors() -> None:
    with pytest.raises(StartError, match="--no-such-flag"):
        parse(["--no-such-flag=1"], {})
    with pytest.raises(StartError, match="--query-por"):
        parse(["--query-por=1"], {})  # no guessing by prefix


def test_the_defaults_that_manifests_rely_on() -> None:
    parsed = parse([], {"NODE_NAME": "from-the-downward-api"})
    assert parsed is not None
    settings = parsed.settings
    assert (settings.query_port, settings.node_name) == (5678, "from-the-downward-api")
    assert str(settings.device_plugin_path) == "/var/lib/kubelet/device-plugins"
    assert str(settings.pod_resources_socket) == "/var/lib/kubelet/pod-resources/kubelet.sock"
    assert settings.nvidia_visible_devices == "void" and settings.ld_library_path == "set"


def test_names_of_resources_annotations_and_labels() -> None:
    for domain in ("tencent.com", "example.org"):
        names = Names(domain)
        mine = {
            "core": "vcuda-core", "memory": "vcuda-memory", "device": "vcuda-device", "core_limit": "vcuda-core-limit",
            "priority": "vcuda-priority", "policy": "vcuda-policy", "card_model": "vcuda-card-model",
            "card_uuid": "vcuda-card-uuid", "oversell": "vcuda-oversell", "gang": "vcuda-gang",
            "placement": "vcuda-placement", "inventory": "vcuda-inventory", "predicate_time": "predicate-time",
            "predicate_node": "predicate-node", "gpu_assigned": "gpu-assigned",
        }  # fmt: skip
        for attribute, name in mine.items():
            assert getattr(names, attribute) == f"{domain}/{name}"
        assert names.predicate_gpu_index(3) == f"{domain}/predicate-gpu-idx-3"
        assert names.model_label == f"gaia.{domain}/gpu-model"
    daemon = next(item for item in yaml.safe_load_all(MANIFEST.read_text()) if item["kind"] == "DaemonSet")
    assert daemon["spec"]["template"]["spec"]["nodeSelector"] == {"nvidia-device-enable": "enable"}


def served(node: Node, path: str) -> dict[str, set[str]]:
    """Names of samples on a page and their labels."""
    status, text = node.get(path)
    assert status == 200
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_what_a_pod_a_node_and_a_scraper_see(connected: Node, machine: Machine) -> None:
    connected.start(wait=200)
    kubelet, api = connected.kubelet, connected.api
    assert api is not None
    assert kubelet.registered == {
        "tencent.com/vcuda-core": "vcore.sock",
        "tencent.com/vcuda-memory": "vmemory.sock",
    }
    assert {name: total for name, (total, _) in kubelet.devices.capacity().items()} == {
        "tencent.com/vcuda-core": 200,
        "tencent.com/vcuda-memory": 64,
    }
    item = pod(
        "a",
        {"name": "c", "resources": {"limits": {"tencent.com/vcuda-core": "30", "tencent.com/vcuda-memory": "10"}}},
        annotations={"tencent.com/vcuda-core-limit": "50", "tencent.com/vcuda-card-uuid": machine.cards[1].uuid},
    )  # fmt: skip
    api.put("pods", item)
    kubelet.admit(item)
    answer = kubelet.answer(item, "c")
    assert dict(answer.annotations) == {
        "tencent.com/vcuda-core": "30",
        "tencent.com/vcuda-memory": str(10 * 268435456),
        "tencent.com/vcuda-device": machine.cards[1].uuid,
    }
    assert {name: answer.envs[name] for name in ("NVIDIA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")} == {
        "NVIDIA_VISIBLE_DEVICES": "void",
        "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64",
    }
    assert "TRITON_LIBCUDA_PATH" in answer.envs
    inside = {mount.container_path: mount.read_only for mount in answer.mounts}
    assert inside["/usr/local/nvidia"] and inside["/etc/vcuda"]
    assert inside["/usr/lib/x86_64-linux-gnu/libcuda.so.1"] and inside["/usr/lib64/libcuda.so.1"]
    assert all(spec.container_path == f"/dev/{spec.host_path.rpartition('/dev/')[2]}" for spec in answer.devices)
    assert {spec.permissions for spec in answer.devices} == {"rw"}
    (found,) = json.loads(connected.get("/usage")[1])["containers"]
    assert found["cards"][0]["core_limit"] == 50

    def written() -> Any:
        return [body for path, body in api.patches if path.endswith("/pods/a")]

    (patch,) = eventually(written, "the pod's annotation")
    assert patch["metadata"]["annotations"]["tencent.com/gpu-assigned"] == "true"
    assert "tencent.com/vcuda-inventory" in api.node()["annotations"]
    assert "gaia.tencent.com/gpu-model" in api.node()["labels"]

    base = {"pod_name", "namespace", "node", "container_name"}
    old = {
        "container_gpu_utilization": base | {"gpu"},
        "container_gpu_memory_total": base | {"gpu_memory"},
        "container_request_gpu_utilization": base | {"req_of_gpu"},
        "container_request_gpu_memory": base | {"req_of_gpu_memory"},
    }
    ours = {
        "vcuda_card_healthy", "vcuda_card_memory_bytes", "vcuda_card_memory_used_bytes",
        "vcuda_card_utilization_ratio", "vcuda_card_booked_cores", "vcuda_card_booked_memory_bytes",
        "vcuda_container_cores", "vcuda_container_core_limit", "vcuda_container_memory_limit_bytes",
        "vcuda_container_memory_used_bytes", "vcuda_container_memory_peak_bytes", "vcuda_container_waited_seconds_total",
        "vcuda_container_launches_total", "vcuda_container_memory_refusals_total", "vcuda_container_processes",
        "vcuda_manager_allocations_total", "vcuda_manager_registered", "vcuda_manager_registrations_total",
        "vcuda_manager_info",
    }  # fmt: skip
    for path in ("/metrics", "/metric"):
        page = served(connected, path)
        assert {name: page[name] for name in old} == old
        assert ours - page.keys() == set()
    for path in ("/usage", "/graph", "/version", "/healthz"):
        assert connected.get(path)[0] == 200
    eventually(lambda: connected.get("/readyz")[0] == 200, "readiness")


def test_the_old_extender_s_annotations_are_no_obstacle(connected: Node) -> None:
    """Pods bound by an extender that writes minors only, as the old one; UUIDs decide, minors are for compatibility."""
    connected.start(wait=200)
    item = pod(
        "old",
        container("c", 30, 10),
        annotations={
            "tencent.com/predicate-gpu-idx-0": "1",
            "tencent.com/predicate-time": "1700000000000000000",
            "tencent.com/predicate-node": "node-1",
            "tencent.com/gpu-assigned": "false",
        },
    )
    connected.kubelet.admit(item)
    assert sum(cores for cores, _ in connected.booked().values()) == 30
