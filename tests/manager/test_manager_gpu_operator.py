"""Beside NVIDIA's GPU Operator: a driver that a container brings, late and again, and its toolkit's CDI files in our folder."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from manager.cards.driver import NodeCard, Probe
from manager.cards.inventory import Inventory
from manager.cards.seen import SeenCards
from manager.config.settings import Settings
from tests.manager.conftest import ROOT, SHIMS
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_support import Node
from vcuda.driver.root import HostRoot
from vcuda.sim import Machine
from vcuda.spec.inventory import Card

MS_BIND, MS_SHARED, MNT_DETACH = 4096, 1 << 20, 2
# As kubelet and the runtime mount the chart's volume `driver`: what is mounted on the host later is seen, too.
ENTER = 'mount --rbind "$1" "$2" && shift 2 && exec "$@"'


def mount(source: Path, target: Path, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(os.fsencode(source), os.fsencode(target), None, flags, None) != 0:
        pytest.skip(f"nothing can be mounted here: {os.strerror(ctypes.get_errno())}")


class DriverContainer:
    """What the operator's driver pod does on its host: its root, bound to /run/nvidia/driver as long as it lives."""

    def __init__(self, directory: Path, machine: Machine) -> None:
        self.machine = machine
        self._run = directory / "run"
        self.place = self._run / "nvidia/driver"
        self.place.mkdir(parents=True)
        mount(self._run, self._run, MS_BIND)
        mount(Path("none"), self._run, MS_SHARED)

    def begin(self) -> None:
        mount(self.machine.root, self.place, MS_BIND)

    def end(self, path: Path | None = None) -> None:
        ctypes.CDLL(None).umount2(os.fsencode(path or self.place), MNT_DETACH)

    def close(self) -> None:
        self.end()
        self.end(self._run)


@pytest.fixture
def brought(short_directory: Path, machine: Machine) -> Iterator[DriverContainer]:
    made = DriverContainer(short_directory, machine)
    yield made
    made.close()


@pytest.fixture
def daemon(
    short_directory: Path, brought: DriverContainer, make_node: Callable[..., Node]
) -> Iterator[Callable[[], Node]]:
    """The real command in mounts of its own, as in the chart's pod with `manager.driver.hostPath=/run/nvidia/driver`."""
    if not all((SHIMS / name).exists() for name in ("libcuda.so.1", "libnvidia-ml.so.1")):
        pytest.skip("the shims are not built: python -m vcuda._build")
    started: list[subprocess.Popen[bytes]] = []

    def start() -> Node:
        host = short_directory / "host"
        host.mkdir()
        node = make_node(host)
        node.kubelet.start()
        # Regions as plain folders: mounts of this namespace are not seen outside, as those of the chart's pod are.
        more = ("--driver-root-on-host=/run/nvidia/driver", "--usage-storage=directory")
        command = [sys.executable, "-m", "manager.main", *node.arguments(*more)]
        inside = [
            "unshare",
            "--mount",
            "--propagation",
            "slave",
            "sh",
            "-c",
            ENTER,
            "sh",
            str(brought.place),
            str(host),
        ]
        with (node.directory / "manager.log").open("ab") as log:
            started.append(
                subprocess.Popen(
                    [*inside, *command], cwd=ROOT, env={**os.environ, **brought.machine.environment()}, stderr=log
                )
            )
        eventually(lambda: len(node.kubelet.registered) == 2, "registration")
        return node

    yield start
    for item in started:
        item.terminate()
        item.wait(20)


def test_after_a_reboot_the_driver_container_may_come_last_and_later_again(
    daemon: Callable[[], Node], brought: DriverContainer
) -> None:
    """The daemon starts before there is a driver, finds it when it is mounted, misses it while its pod is replaced, and goes on."""
    node = daemon()
    eventually(lambda: node.kubelet.listed(NAMES.core) == [], "an empty list")
    brought.begin()
    node.kubelet.wait_devices(200)
    first = pod("first", container("c", 30, 4))
    node.kubelet.admit(first)
    nodes = {spec.container_path: spec.host_path for spec in node.kubelet.answer(first, "c").devices}
    assert (
        nodes.items()
        >= {
            "/dev/nvidiactl": "/run/nvidia/driver/dev/nvidiactl",
            "/dev/nvidia-uvm": "/run/nvidia/driver/dev/nvidia-uvm",
        }.items()
    )
    assert all(path == f"/run/nvidia/driver{name}" for name, path in nodes.items())
    library = (node.directory / "vm/driver/current/lib64/drv/libcuda-driver.so.1").resolve()
    assert library.is_file() and node.directory in library.parents  # it outlives the driver's container

    brought.end()
    node.kubelet.wait_devices(0)
    assert len(node.kubelet.listed(NAMES.core) or ()) == 200  # unhealthy, not gone
    assert library.is_file() and (node.region(first, "c") / "limits").is_file()
    brought.begin()
    node.kubelet.wait_devices(200)
    node.kubelet.admit(pod("second", container("c", 30, 4)))


def test_the_toolkits_files_and_ours_leave_each_other_alone(node: Node, machine: Machine) -> None:
    """With CDI as the operator's default both write into one folder; a share names no device of theirs, and asks their hook for none."""
    folder = node.directory / "cdi"
    folder.mkdir()
    theirs = folder / "nvidia.yaml"
    theirs.write_text("cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: []\n")
    before = (theirs.read_bytes(), theirs.stat().st_mtime_ns)
    node.start("--device-list-strategy=cdi-cri", wait=200)
    item = pod("a", container("c", 30, 4))
    item["spec"]["runtimeClassName"] = "nvidia"
    node.kubelet.admit(item)
    answer = node.kubelet.answer(item, "c")
    assert {device.name.partition("=")[0] for device in answer.cdi_devices} == {"tencent.com/vcuda"}
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == "void"
    node.stop()
    assert (theirs.read_bytes(), theirs.stat().st_mtime_ns) == before
    kinds = [json.loads(path.read_text())["kind"] for path in folder.glob("*.json")]
    assert kinds == ["tencent.com/vcuda"]


class Layouts:
    """A driver whose first card the MIG manager lays out anew: `layout` is its instances' UUIDs, none without MIG mode."""

    name = "layouts"
    has_events = False
    layout: tuple[str, ...] = ()

    def probe(self) -> Probe:
        instances = [NodeCard(Card(uuid, 0, "m", 2**30), 0, "GPU-0") for uuid in self.layout]
        first = instances or [NodeCard(Card("GPU-0", 0, "m", 2**33), 0)]
        cards = (*first, NodeCard(Card("GPU-1", 1, "m", 2**33), 1))
        return Probe("1", cards, physical=("GPU-0", "GPU-1"))

    def close(self) -> None:
        return


def test_a_card_that_the_mig_manager_lays_out_anew_is_its_instances_and_nothing_is_missed(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "dev").mkdir()
    (tmp_path / "proc/devices").write_text("195 nvidia\n237 nvidia-uvm\n")
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia0", "nvidia1"):
        (tmp_path / "dev" / name).touch()
    driver = Layouts()
    inventory = Inventory(HostRoot(tmp_path), lambda _: driver, Settings, SeenCards(tmp_path))
    for layout in ((), ("MIG-a", "MIG-b"), ("MIG-c",), ()):
        driver.layout = layout
        cards = inventory.probe().cards
        assert {item.card.uuid: item.card.healthy for item in cards} == dict.fromkeys(
            [*(layout or ("GPU-0",)), "GPU-1"], True
        )
        assert not inventory.snapshot.problems
