"""Upgrade, downgrade, removal and a new driver while pods run: shares hold throughout, and no mapped library is touched."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kube_chart import SHIM, Chart, build_id
from kube_system import System, share_pod
from kubelab import eventually

import vcuda

BLOCK = 256 * 1024 * 1024
NEXT = f"{vcuda.__version__}+next"

pytest.importorskip("helm_python", reason="Helm's engine (helm-python-sdk) has no wheel for this machine")


@dataclass(frozen=True)
class Mapped:
    """The shim that a container's process has mapped: its inode says that nobody replaced it, its build id whose it is."""

    inode: int
    build_id: str


@dataclass(frozen=True)
class Client:
    """A pod whose client fills its share, frees it and fills it again."""

    system: System
    name: str
    blocks: int

    def rounds(self) -> list[dict[str, int]]:
        text = self.system.lab.kubectl("logs", self.name, "--tail=-1")
        lines = [line for line in text.splitlines() if line.startswith("round=")]
        return [{key: int(value) for key, value in re.findall(r"(\w+)=(-?\d+)", line)} for line in lines]

    def goes_on(self) -> None:
        """Three more rounds are filled, and each so far ended at the same limit."""
        before = len(self.rounds())
        eventually(f"{self.name} allocates on", lambda: len(self.rounds()) >= before + 3, 60, every=1.0)
        found = self.rounds()
        assert {item["total"] for item in found} == {self.blocks * BLOCK}
        assert {item["result"] for item in found} == {2}, "CUDA_ERROR_OUT_OF_MEMORY ends every round"
        taken = {item["taken"] for item in found}
        assert max(taken) <= self.blocks * BLOCK
        assert len(taken) == 1, f"{self.name} got {sorted(taken)} bytes"
        assert self.system.pod(self.name)["status"]["containerStatuses"][0]["restartCount"] == 0

    def process(self) -> Path:
        """The client's folder below /proc."""
        uid = self.system.pod(self.name)["metadata"]["uid"]
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if uid in (folder / "cgroup").read_text() and (folder / "exe").readlink().name == "hog":
                    return folder
            except OSError:
                continue
        raise AssertionError(f"no process of {self.name} is left")

    def mapped(self) -> Mapped:
        for line in (self.process() / "maps").read_text().splitlines():
            words = line.split()
            if words[-1].endswith(SHIM) or (words[-1] == "(deleted)" and words[-2].endswith(SHIM)):
                assert "(deleted)" not in line, line
                return Mapped(int(words[4]), build_id(self.process() / "map_files" / words[0]))
        raise AssertionError(f"{self.name} has no {SHIM} mapped")


@pytest.fixture
def client(system: System, client_image: str, chart: Chart) -> Iterator[Callable[[str, int], Client]]:
    def start(name: str, blocks: int) -> Client:
        system.create(share_pod(name, client_image, 20, blocks, command=["/bin/hog", "again"]))
        system.wait_phase(name, "Running")
        system.wait_log(name, "round=")
        return Client(system, name, blocks)

    yield start
    system.delete_all()


@pytest.fixture(scope="module")
def two_builds(chart: Chart) -> Chart:
    chart.add_next_build("next", NEXT)
    return chart


def driver_folders(system: System) -> set[str]:
    return {path.name for path in (system.folder / "pods/vm/driver").glob("[0-9]*-*")}


def test_upgrade_and_downgrade_with_running_pods(system: System, two_builds: Chart, client: Any, evidence: Any) -> None:
    """Old pods keep the shim that they have mapped, new ones get the new build's; both are limited all the time."""
    chart = two_builds
    chart.install()
    assert chart.daemon("/version")["version"] == vcuda.__version__
    first = client("first", 4)
    at_start = first.mapped()
    (old_folder,) = driver_folders(system)

    chart.install({"image": {"tag": "next"}})
    assert chart.daemon("/version")["version"] == NEXT
    first.goes_on()
    assert first.mapped() == at_start
    second = client("second", 6)
    newer = second.mapped()
    assert newer.build_id != at_start.build_id
    assert len(driver_folders(system)) == 2
    assert {name: entry["processes"] for name, entry in chart.usage().items()} == {"first": 1, "second": 1}

    chart.install({"image": {"tag": "test"}})
    assert chart.daemon("/version")["version"] == vcuda.__version__
    for pod, was in ((first, at_start), (second, newer)):
        pod.goes_on()
        assert pod.mapped() == was
    third = client("third", 5)
    assert third.mapped().build_id == at_start.build_id
    assert {name: entry["cards"][0]["memory_limit_bytes"] // BLOCK for name, entry in chart.usage().items()} == {
        "first": 4,
        "second": 6,
        "third": 5,
    }
    evidence(
        f"upgrade {at_start.build_id[:12]} -> {newer.build_id[:12]} and back: {len(first.rounds())} rounds of the first pod, "
        f"{len(second.rounds())} of the second, all at their limit, mapped inodes {at_start.inode} and {newer.inode} untouched"
    )

    system.delete("second")
    eventually("the build that nobody uses any more is gone", lambda: driver_folders(system) == {old_folder}, 30)
    first.goes_on()


def test_removal_and_reinstallation_with_running_pods(system: System, chart: Chart, client: Any, evidence: Any) -> None:
    """Without the product a pod's limit holds on; the one that is installed again takes the pod over and books nothing twice."""
    chart.install()
    kept = client("kept", 4)
    at_start = kept.mapped()
    before = chart.usage()["kept"]
    chart.uninstall()
    eventually(
        "the node offers no cores",
        lambda: system.node()["status"]["allocatable"]["tencent.com/vcuda-core"] == "0",
        60,
    )
    kept.goes_on()
    assert kept.mapped() == at_start

    chart.install()
    after = chart.usage()["kept"]
    assert after["cards"][0]["uuid"] == before["cards"][0]["uuid"]
    assert after["cards"][0]["memory_limit_bytes"] == 4 * BLOCK
    assert after["processes"] == 1
    kept.goes_on()
    assert kept.mapped() == at_start
    beside = client("beside", 7)
    beside.goes_on()
    evidence(f"removed and installed again: {len(kept.rounds())} rounds at the limit, same card, same mapped shim")


def test_a_new_driver_beside_running_pods(system: System, chart: Chart, client: Any, evidence: Any) -> None:
    """Pods of the old driver keep its folder (a real one could not be unloaded under them), new ones get the new driver's."""
    chart.install()
    old = client("of-the-old-driver", 4)
    at_start = old.mapped()
    was = system.machine.driver_version
    system.machine.report()  # loads the control library while it has the old name
    try:
        change_driver(system, was, "551.7.1")
        system.lab.delete_pod("vcuda-system", chart.pod_of("gpu-manager")["metadata"]["name"])
        eventually(
            "there is a folder for the new driver",
            lambda: any(name.startswith("551.7.1-") for name in driver_folders(system)),
            60,
        )
        chart.pod_of("gpu-manager")
        system.wait_offered()
        new = client("of-the-new-driver", 5)
        assert "libcuda.so.551.7.1" in (new.process() / "maps").read_text()
        assert f"libcuda.so.{was}" in (old.process() / "maps").read_text()
        for pod in (old, new):
            pod.goes_on()
        assert old.mapped() == at_start
        evidence(f"driver {was} -> 551.7.1 beside a running pod: {len(old.rounds())} rounds at the limit")
    finally:
        change_driver(system, "551.7.1", was)


def change_driver(system: System, old: str, new: str) -> None:
    """What a driver's package does to the libraries of a host; processes that run keep what they have mapped.

    The simulated kernel driver keeps its version: a machine's configuration can't change under its clients.
    """
    folder = system.machine.library_folder
    for library in ("libcuda", "libnvidia-ml"):
        (folder / f"{library}.so.{old}").rename(folder / f"{library}.so.{new}")
        link = folder / f"{library}.so.1"
        link.unlink()
        link.symlink_to(f"{library}.so.{new}")
