"""Incidents I1 and I2: device nodes that come late, vanish, or get another major; never a part of the set."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from manager.cards import device_nodes
from tests.manager.manager_kubelet import Rejected
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_support import Node
from tests.support.ldcache import ELF
from vcuda.driver.root import HostRoot
from vcuda.sim import Machine

needs_nodes = pytest.mark.skipif(os.geteuid() != 0, reason="making device nodes needs root")


def device_paths(node: Node, item: dict[str, object]) -> set[str]:
    return {spec.container_path for spec in node.kubelet.answer(item, "c").devices}


@needs_nodes
@pytest.mark.parametrize("name", ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia0"])
def test_a_missing_node_is_made_at_allocate(node: Node, machine: Machine, name: str) -> None:
    node.start("--health-check-interval=60", wait=200)  # no probe in between: Allocate itself must look
    machine.remove_node(name)
    mine = pod("p", container("c", 200))
    node.kubelet.admit(mine)
    assert f"/dev/{name}" in device_paths(node, mine)
    status = (machine.root / "dev" / name).stat()
    assert (os.major(status.st_rdev), os.minor(status.st_rdev)) == machine.nodes()[name]


@needs_nodes
def test_a_node_with_an_outdated_major_is_made_anew(node: Node, machine: Machine) -> None:
    node.start("--health-check-interval=60", wait=200)
    major = next(number for number in range(500, 384, -1) if number not in machine.majors().values())
    machine.set_uvm_major(major)
    node.kubelet.admit(pod("p", container("c", 10, 1)))
    assert os.major((machine.root / "dev/nvidia-uvm").stat().st_rdev) == major
    assert os.major((machine.root / "dev/nvidia-uvm-tools").stat().st_rdev) == major
    assert (machine.root / f"dev/char/{major}:0").resolve() == (machine.root / "dev/nvidia-uvm").resolve()


def test_without_the_driver_nothing_is_given_and_devices_are_unhealthy_until_it_is_back(
    node: Node, machine: Machine
) -> None:
    daemon = node.start("--health-check-interval=60", wait=200)
    machine.unload_driver()
    mine = pod("p", container("c", 10, 1))
    with pytest.raises(Rejected, match=r"DeviceNodesMissing: .*/dev/nvidiactl can't be given: /proc/devices lists no"):
        node.kubelet.admit(mine)
    assert set(node.booked().values()) == {(0, 0)}
    assert 'vcuda_manager_device_node_problems_total{node="node-1",path="/dev/nvidiactl"}' in node.get("/metrics")[1]
    daemon.inventory.probe()
    node.kubelet.wait_devices(0)
    assert len(node.kubelet.listed(NAMES.core) or ()) == 200  # unhealthy, not gone
    assert node.get("/readyz")[0] == 503
    machine.load_driver()
    daemon.inventory.probe()
    node.kubelet.wait_devices(200)
    node.kubelet.admit(pod("q", container("c", 10, 1)))


def test_started_before_the_driver(make_node: Callable[..., Node], machine: Machine) -> None:
    machine.unload_driver()
    libraries = machine.library_folder
    libraries.rename(libraries.with_name("hidden"))
    node = make_node(machine.root)
    node.kubelet.start()
    node.start()
    eventually(lambda: len(node.kubelet.registered) == 2, "registration without a card")
    eventually(lambda: node.kubelet.listed(NAMES.core) == [], "an empty list")
    assert node.get("/healthz") == (200, "ok\n")
    assert "no cards" in node.get("/graph")[1]
    libraries.with_name("hidden").rename(libraries)
    machine.load_driver()
    node.kubelet.wait_devices(200)
    node.kubelet.admit(pod("p", container("c", 10, 1)))


def test_only_the_card_without_its_node_is_unhealthy(
    node: Node, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    daemon = node.start(wait=200)
    monkeypatch.setattr(os, "mknod", refuse)
    machine.remove_node("nvidia1")
    daemon.inventory.probe()
    node.kubelet.wait_devices(100)
    mine = pod("p", container("c", 10, 1))
    node.kubelet.admit(mine)
    assert "/dev/nvidia0" in device_paths(node, mine)
    monkeypatch.undo()
    os.environ["VCUDA_SIM_DIR"] = machine.environment()["VCUDA_SIM_DIR"]


def test_older_names_in_proc_devices_and_no_modeset(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "dev").mkdir()
    text = "Character devices:\n195 nvidia-frontend\n237 nvidia-uvm\n\nBlock devices:\n  8 sd\n"
    (tmp_path / "proc/devices").write_text(text)
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"):
        (tmp_path / "dev" / name).touch()
    assert [node.container_path for node in device_nodes.common(HostRoot(tmp_path))] == [
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
    ]


def test_plain_files_stand_for_nodes_only_below_a_root_that_is_not_the_hosts(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "dev").mkdir()
    (tmp_path / "proc/devices").write_text("195 nvidia\n237 nvidia-uvm\n")
    (tmp_path / "dev/nvidiactl").touch()
    status = (tmp_path / "dev/nvidiactl").stat()
    assert device_nodes._right(HostRoot(tmp_path), status, 195, 255)
    assert not device_nodes._right(HostRoot(tmp_path, "/"), status, 195, 255)


def test_host_paths_are_what_the_container_runtime_sees(tmp_path: Path) -> None:
    assert HostRoot(Path("/host"), "/").host_path(Path("/host/dev/nvidia0")) == "/dev/nvidia0"
    assert HostRoot(Path("/")).host_path(Path("/dev/nvidia0")) == "/dev/nvidia0"
    assert HostRoot(tmp_path).host_path(tmp_path / "dev/nvidia0") == str(tmp_path / "dev/nvidia0")


def test_links_are_resolved_inside_the_root(tmp_path: Path) -> None:
    (tmp_path / "usr/lib64").mkdir(parents=True)
    (tmp_path / "usr/lib64/the-real-one").write_text(ELF)
    (tmp_path / "usr/lib64/libcuda.so.1").symlink_to("/usr/lib64/the-real-one")
    (tmp_path / "loop").symlink_to("loop")
    root = HostRoot(tmp_path)
    assert root.find_library("libcuda.so.1") == tmp_path / "usr/lib64/the-real-one"
    assert root.resolve("loop") is None
    assert root.resolve("../../usr/lib64") == tmp_path / "usr/lib64"
