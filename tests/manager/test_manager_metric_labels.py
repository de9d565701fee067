"""Labels by which our series join those of kube-state-metrics and DCGM: namespace, pod, container, node, uuid."""

from __future__ import annotations

import re

from manager.observe.metrics import Counts, Metrics
from manager.observe.report import CardReport, ContainerReport, NodeReport, ShareReport
from tests.manager.manager_support import node_report

SHARE = {"namespace", "pod", "container", "node", "uuid"}
INHERITED = {"namespace", "pod_name", "container_name", "node"}


def report() -> NodeReport:
    share = ShareReport(
        uuid="GPU-0", minor=0, cores=50, core_limit=50, memory_limit_bytes=1, memory_used_bytes=0, memory_peak_bytes=0,
        gpu_time_ns=1, waited_ns=0, launches=0, refusals=0, unaccounted_bytes=0,
    )  # fmt: skip
    card = CardReport(
        uuid="GPU-0", minor=0, model="T4", numa_node=None, memory_bytes=1, memory_used_bytes=1, gpu_percent=1,
        booked_cores=1, booked_memory_bytes=1, healthy=True, problem="", other_memory_bytes=0,
    )  # fmt: skip
    container = ContainerReport(
        namespace="default", pod_name="p", pod_uid="u", container="c", cores=50, priority="normal", processes=1,
        cards=(share,),
    )  # fmt: skip
    found = node_report(container)
    return NodeReport(**{**{name: getattr(found, name) for name in found.__dataclass_fields__}, "cards": (card,)})


def example() -> Metrics:
    """A daemon's metrics with at least one series of each, of a pod in `default`."""
    shown = Metrics()
    shown.describe("1", "550", "node-1")
    shown.watch(report)
    shown.count(
        lambda: Counts(
            registered=True, registrations=1, restored_devices=0, failures={"x": 0}, api_failing=False, folders_without_room=0,
            xids={("GPU-0", 79, False): 1},
        )
    )  # fmt: skip
    shown.allocated("core", "PodUnknown", 0.1)
    shown.refused_start("Busy")
    shown.node_problem("/dev/nvidia0")
    return shown


def series() -> dict[str, dict[str, str]]:
    found = {}
    for line in example().exposition().decode().splitlines():
        if not line.startswith("#"):
            name, labels = re.fullmatch(r"(\w+)(?:{(.*)})? \S+", line).groups()  # type: ignore[union-attr]
            found[name] = dict(re.findall(r'(\w+)="([^"]*)"', labels or ""))
    return found


def test_our_series_of_containers_have_the_labels_that_others_use_and_the_inherited_ones_keep_theirs() -> None:
    found = series()
    ours = {name: set(labels) for name, labels in found.items() if name.startswith("vcuda_container_")}
    assert ours["vcuda_container_gpu_seconds_total"] == ours["vcuda_container_memory_used_bytes"] == SHARE
    assert all(SHARE - {"uuid"} <= labels <= SHARE | {"mechanism"} for labels in ours.values())
    assert found["vcuda_container_cores"] == {
        "namespace": "default", "pod": "p", "container": "c", "node": "node-1", "uuid": "GPU-0"
    }  # fmt: skip
    inherited = [set(labels) for name, labels in found.items() if name.startswith("container_")]
    assert inherited and all(labels > INHERITED for labels in inherited)


def test_every_series_of_the_daemon_names_its_node_and_no_counter_has_a_second_one_of_its_birth() -> None:
    found = series()
    assert {labels.get("node") for labels in found.values()} == {"node-1"}
    assert found["vcuda_manager_device_node_problems_total"]["path"] == "/dev/nvidia0"
    assert not [name for name in found if name.endswith("_created")]


def test_xids_are_counted_by_card_and_number_also_those_that_heal() -> None:
    assert series()["vcuda_card_xid_errors_total"] == {
        "uuid": "GPU-0", "xid": "79", "ignored": "false", "node": "node-1"
    }  # fmt: skip
