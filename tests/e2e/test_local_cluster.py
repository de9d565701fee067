"""The whole product on one machine: real daemon, extender and shims, simulated cards, real CUDA clients, and crashes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from localcluster import api as apis
from localcluster.apiserver.table import pod_state
from localcluster.cluster import Cluster, ClusterOptions
from localcluster.demo import checks
from localcluster.demo.measure import Meter
from tests.support import genuine
from vcuda.spec import units
from vcuda.spec.names import Names

REPOSITORY = Path(__file__).resolve().parents[2]
PODS = "/api/v1/namespaces/default/pods"
SECONDS = 60.0


def wait_for(condition: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"{what} did not happen within {seconds:.0f} s")


class Lab:
    """A running cluster and what the tests do with it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.meter = Meter(cluster)

    def create(
        self,
        name: str,
        core: int | str | None,
        memory: int | str | None,
        command: list[str],
        **annotations: str,
    ) -> None:
        asked = {Names().core: core, Names().memory: memory}
        limits = {resource: str(value) for resource, value in asked.items() if value is not None}
        container = {"name": "main", "image": "x", "command": command, "resources": {"limits": limits}}
        spec = {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 1}
        names = {"vcuda_core_limit": Names().core_limit}
        metadata = {"name": name, "annotations": {names[key]: value for key, value in annotations.items()}}
        self.cluster.api.call("POST", PODS, {"metadata": metadata, "spec": spec})

    def pod(self, name: str) -> dict[str, Any]:
        return self.cluster.api.call("GET", f"{PODS}/{name}")

    def log(self, name: str) -> str:
        return self.cluster.api.text("GET", f"{PODS}/{name}/log")

    def finished_log(self, name: str) -> str:
        wait_for(lambda: self.pod(name)["status"]["phase"] in ("Succeeded", "Failed"), f"the end of {name}")
        return self.log(name)

    def works(self, name: str) -> None:
        """Wait until the pod launches kernels, more than it has already."""
        before = self.meter.sample().truth[name].launches
        try:
            wait_for(lambda: self.meter.sample().truth[name].launches > before + 5, f"work of {name}")
        except AssertionError as error:
            pod = self.pod(name)
            raise AssertionError(f"{error}: {pod_state(pod)} {pod['status']}\n{self.cluster.manager.tail()}") from error

    def resize(self, name: str, text: str) -> None:
        self.cluster.api.patch(f"{PODS}/{name}", {"metadata": {"annotations": {Names().resize: text}}})

    def told(self, name: str, reason: str) -> list[str]:
        """The messages of the events on a pod."""
        items = self.cluster.api.call("GET", "/api/v1/namespaces/default/events")["items"]
        return [one["message"] for one in items if (one["involvedObject"]["name"], one["reason"]) == (name, reason)]

    def delete_all(self) -> None:
        for pod in self.cluster.api.call("GET", PODS)["items"]:
            with contextlib.suppress(apis.ApiFailure):
                self.cluster.api.call("DELETE", f"{PODS}/{pod['metadata']['name']}?gracePeriodSeconds=1")
        wait_for(lambda: not self.cluster.api.call("GET", PODS)["items"], "the end of all pods")


def trainer(memory_mib: int = 128) -> list[str]:
    return ["python", "workloads/trainer.py", "--memory-mib", str(memory_mib)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(ClusterOptions(cards=1)) as running:
        running.machine.set_kernel_time("spin_1000us", 1_000_000)
        yield running


@pytest.fixture
def lab(cluster: Cluster) -> Iterator[Lab]:
    made = Lab(cluster)
    yield made
    made.delete_all()


def test_a_share_is_all_that_its_processes_see_and_get(lab: Lab) -> None:
    lab.create("hog", 20, 4, ["sh", "-c", "timeout 5 python workloads/memory_hog.py; exit 0"])
    text = lab.finished_log("hog")
    assert "1024 MiB in all" in text and "CUDA_ERROR_OUT_OF_MEMORY" in text
    annotations = lab.pod("hog")["metadata"]["annotations"]
    assert annotations[Names().gpu_assigned] == "true" and annotations[Names().predicate_gpu_index(0)] == "0"


def test_neighbours_on_one_card_keep_their_limits(lab: Lab) -> None:
    lab.create("small", 20, 4, trainer(), vcuda_core_limit="30")
    lab.create("hard", 40, 8, trainer())
    lab.create("hog", 10, 4, ["python", "workloads/memory_hog.py"])
    for name in ("small", "hard"):
        lab.works(name)
    wait_for(lambda: checks.OUT_OF_MEMORY in lab.log("hog"), "the refusal")
    first = lab.meter.sample()
    time.sleep(4)
    last = lab.meter.sample()
    period = checks.Period(first, first, last)
    for name, limit in (("small", 30), ("hard", 40)):
        assert 1 < period.share(name) <= limit + 4, f"{name}: {period.share(name):.1f} of {limit}"
    for name, blocks in (("small", 4), ("hard", 8), ("hog", 4)):
        assert 0 < last.truth[name].peak_bytes <= blocks * units.BLOCK_BYTES
    assert all(last.truth[name].cards == {0} for name in ("small", "hard", "hog"))


def test_the_daemon_may_die_and_kubelet_restart_under_running_pods(lab: Lab) -> None:
    cluster = lab.cluster
    lab.create("before", 60, 12, trainer())
    lab.works("before")
    cluster.manager.kill()
    lab.works("before")
    node = f"/api/v1/nodes/{cluster.options.node_name}"
    wait_for(
        lambda: cluster.api.call("GET", node)["status"]["allocatable"][Names().core] == "0",
        "the loss of the devices",
    )
    cluster.manager.start()
    cluster.wait_resources()
    lab.create("after", 40, 8, trainer())
    lab.works("after")
    cluster.restart_kubelet()
    cluster.wait_resources()
    lab.create("too-much", 10, 4, trainer())  # the card is full: 60 + 40
    wait_for(lambda: checks.refusal_of(lab.pod("too-much")), "the refusal")
    cluster.api.call("DELETE", f"{PODS}/after")
    lab.works("too-much")
    lab.works("before")
    status = lab.pod("before")["status"]["containerStatuses"][0]
    assert status["restartCount"] == 0 and status["ready"]


def test_a_running_share_is_resized_under_load(lab: Lab) -> None:
    lab.create("hog", 20, 4, ["python", "workloads/memory_hog.py"])
    lab.create("works", 30, 4, trainer())
    lab.works("works")
    wait_for(lambda: checks.OUT_OF_MEMORY in lab.log("hog"), "the refusal")
    lab.resize("hog", "memory=8")
    lab.resize("works", "core=60")
    half = 4 * units.BLOCK_BYTES
    wait_for(lambda: lab.meter.sample().truth["hog"].peak_bytes > half, "more memory")
    wait_for(lambda: lab.told("works", "ResizeCompleted"), "the event")
    first = lab.meter.sample()
    time.sleep(4)
    period = checks.Period(first, first, lab.meter.sample())
    assert 34 < period.share("works") <= 64, f"{period.share('works'):.1f} of 60"
    lab.resize("works", "core=81")
    (message,) = wait_for(lambda: lab.told("works", "ResizeRefused"), "the refusal")
    assert "InsufficientCores" in message and "has 20 cores left beside the 60 of this pod" in message
    lab.resize("hog", "memory=2,core=10")
    wait_for(lambda: lab.told("hog", "ResizeWaits"), "the word that it waits")
    lab.resize("works", "core=70")
    wait_for(lambda: len(lab.told("works", "ResizeCompleted")) == 2, "the room that was left")
    lab.cluster.manager.kill()
    lab.cluster.manager.start()
    lab.cluster.manager.wait_ready(f"{lab.cluster.manager_url}/healthz", SECONDS)  # kubelet may not have missed it
    lab.cluster.wait_resources()
    lab.create("too-much", 11, 4, trainer())  # 70 + 20: what waits has not been given back
    assert "InsufficientCores" in wait_for(lambda: checks.refusal_of(lab.pod("too-much")), "the refusal")
    assert lab.meter.sample().truth["hog"].peak_bytes <= 2 * half
    status = [lab.pod(name)["status"]["containerStatuses"][0] for name in ("hog", "works")]
    assert all(one["restartCount"] == 0 and one["ready"] for one in status)


@pytest.mark.parametrize(
    ("core", "memory", "core_limit", "reason"),
    [
        (150, 8, None, "InvalidCores"),
        (20, 0, None, "InvalidMemory"),
        (20, None, None, "IncompleteRequest"),
        (None, 8, None, "IncompleteRequest"),
        (20, 1000, None, "InsufficientMemory"),
        (30, 4, "20", "InvalidAnnotation"),
        (30, 4, "fifty", "InvalidAnnotation"),
    ],
)
def test_bad_requests_are_refused_with_a_reason_and_book_nothing(
    lab: Lab, core: int | None, memory: int | None, core_limit: str | None, reason: str
) -> None:
    annotations = {} if core_limit is None else {"vcuda_core_limit": core_limit}
    lab.create("bad", core, memory, trainer(), **annotations)
    message = wait_for(lambda: checks.refusal_of(lab.pod("bad")), "the refusal")
    assert reason in message and "nodeName" not in lab.pod("bad")["spec"]
    with urllib.request.urlopen(f"{lab.cluster.manager_url}/usage", timeout=5) as answer:
        assert json.load(answer)["containers"] == []


def test_a_pod_with_forged_annotations_is_placed_anew(lab: Lab) -> None:
    """A new pod's written-by-us annotations are untrusted: here a placement on a card that does not exist."""
    container = {
        "name": "main", "image": "x", "command": trainer(),
        "resources": {"limits": {Names().core: "10", Names().memory: "4"}},
    }  # fmt: skip
    forged = '{"version":1,"containers":{"main":[["GPU-00000000-0000-0000-0000-000000000000",10,4]]}}'
    metadata = {"name": "forged", "annotations": {Names().placement: forged, Names().gpu_assigned: "true"}}
    lab.cluster.api.call("POST", PODS, {"metadata": metadata, "spec": {"containers": [container]}})
    lab.works("forged")
    assert lab.cluster.machine.cards[0].uuid in lab.pod("forged")["metadata"]["annotations"][Names().placement]


def test_the_demo_passes_as_a_command_without_a_terminal(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "localcluster", "demo", "--seconds", "4", "--json", str(tmp_path / "demo.json")],
        capture_output=True, text=True, cwd=REPOSITORY, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every limit held." in done.stdout and "InvalidCores" in done.stdout
    assert (tmp_path / "demo.json").exists()


def test_the_genuine_nvidia_smi_sees_only_its_share(tmp_path: Path) -> None:
    try:
        program = genuine.nvidia_smi("550")
    except genuine.Unavailable as error:
        pytest.skip(f"no genuine nvidia-smi: {error}")
    with Cluster(ClusterOptions(cards=2, nvidia_smi=program)) as cluster:
        lab = Lab(cluster)
        lab.create("smi", 30, 10, ["sh", "-c", "nvidia-smi -L; nvidia-smi"])
        text = lab.finished_log("smi")
    assert text.count("UUID: GPU-") == 1, text
    assert "2560MiB" in text, text
