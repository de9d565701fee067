"""The simulated machine's host root: nodes, majors, proc and the driver's files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from vcuda import sim
from vcuda.sim import hostroot


@pytest.fixture
def machine(tmp_path: Path) -> sim.Machine:
    return sim.Machine.create(tmp_path / "machine", [sim.SimCard(), sim.SimCard(minor=5, mig=["1g"], numa_node=1)])


def present(machine: sim.Machine) -> set[str]:
    dev = machine.root / "dev"
    return {str(path.relative_to(dev)) for path in dev.rglob("*") if not path.is_dir()}


def test_the_nodes_are_those_of_a_node_with_a_driver(machine: sim.Machine) -> None:
    caps = {f"nvidia-caps/nvidia-cap{minor}" for minor in (1, 2, *machine.cards[1].mig[0].caps)}
    plain = {"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia0", "nvidia5"}
    assert present(machine) == set(machine.nodes()) == plain | caps


def test_nodes_are_character_devices_with_the_numbers_of_proc_devices(machine: sim.Machine) -> None:
    if not machine.character_devices:
        pytest.skip("this process may not make character devices, or a real driver is here")
    rows = [line.split() for line in (machine.root / "proc/devices").read_text().splitlines()]
    majors = {row[1]: int(row[0]) for row in rows if len(row) == 2 and row[0].isdigit()}
    for name, expected in {
        "nvidia5": (195, 5),
        "nvidiactl": (195, 255),
        "nvidia-modeset": (195, 254),
        "nvidia-uvm": (majors["nvidia-uvm"], 0),
        "nvidia-uvm-tools": (majors["nvidia-uvm"], 1),
        f"nvidia-caps/nvidia-cap{machine.cards[1].mig[0].caps[0]}": (
            majors["nvidia-caps"], machine.cards[1].mig[0].caps[0],
        ),
    }.items():  # fmt: skip
        status = (machine.root / "dev" / name).stat()
        assert stat.S_ISCHR(status.st_mode)
        assert (os.major(status.st_rdev), os.minor(status.st_rdev)) == expected, name


def test_dynamic_majors_belong_to_no_driver_of_this_host(machine: sim.Machine) -> None:
    majors = machine.majors()
    here = hostroot.majors_of(hostroot.HOST_DEVICES)
    assert {majors["nvidia-uvm"], majors["nvidia-caps"]}.isdisjoint(here)
    assert majors["nvidia-uvm"] != majors["nvidia-caps"]


def test_without_permission_nodes_are_regular_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "mknod", refuse)
    machine = sim.Machine.create(tmp_path / "machine")
    assert not machine.character_devices
    assert all(path.is_file() for path in (machine.root / "dev").iterdir())
    assert machine.report().cards


def test_beside_a_real_driver_no_node_can_reach_its_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = tmp_path / "devices"
    devices.write_text("Character devices:\n  1 mem\n195 nvidia\n234 nvidia-uvm\n\nBlock devices:\n259 blkext\n")
    monkeypatch.setattr(hostroot, "HOST_DEVICES", devices)
    machine = sim.Machine.create(tmp_path / "machine")
    assert not machine.character_devices
    assert machine.majors()["nvidia-uvm"] != 234


def test_a_node_can_go_and_come_back(machine: sim.Machine) -> None:
    machine.remove_node("nvidia-uvm")
    assert "nvidia-uvm" not in present(machine)
    machine.remove_node("nvidia-uvm")
    machine.restore_node("nvidia-uvm")
    assert present(machine) == set(machine.nodes())
    for change in (machine.remove_node, machine.restore_node):
        with pytest.raises(sim.SimError, match="has no node 'nvidia9'"):
            change("nvidia9")


def test_another_uvm_major_leaves_the_old_node_until_it_is_restored(machine: sim.Machine) -> None:
    old = machine.majors()["nvidia-uvm"]
    machine.set_uvm_major(old + 200)
    assert machine.majors()["nvidia-uvm"] == old + 200
    if machine.character_devices:
        node = machine.root / "dev/nvidia-uvm"
        assert os.major(node.stat().st_rdev) == old
        machine.restore_node("nvidia-uvm")
        assert os.major(node.stat().st_rdev) == old + 200


def test_an_unloaded_driver_leaves_only_its_libraries(machine: sim.Machine) -> None:
    machine.unload_driver()
    assert present(machine) == set() and machine.majors() == {}
    assert not (machine.root / "proc/driver/nvidia").exists()
    assert (machine.library_folder / "libcuda.so.1").exists()
    with pytest.raises(sim.SimError, match="unloaded"):
        machine.set_uvm_major(300)
    machine.load_driver(uvm_major=300)
    assert machine.majors()["nvidia-uvm"] == 300 and present(machine) == set(machine.nodes())
    assert machine.majors()["nvidia-caps"] != 300


def test_proc_names_cards_and_capabilities(machine: sim.Machine) -> None:
    proc = machine.root / "proc/driver/nvidia"
    assert machine.driver_version in (proc / "version").read_text()
    text = (proc / "gpus" / machine.cards[1].bus / "information").read_text()
    assert machine.cards[1].uuid in text and "Device Minor: \t 5" in text
    gpu_instance, compute_instance = machine.cards[1].mig[0].caps
    granted = (proc / "capabilities/gpu5/mig/gi1/access").read_text()
    assert f"DeviceFileMinor: {gpu_instance}\n" in granted
    listed = (machine.root / "proc/driver/nvidia-caps/mig-minors").read_text().splitlines()
    assert f"gpu5/gi1/access {gpu_instance}" in listed and f"gpu5/gi1/ci0/access {compute_instance}" in listed


def test_sysfs_tells_the_numa_node(machine: sim.Machine) -> None:
    for card in machine.cards:
        assert (machine.root / f"sys/bus/pci/devices/{card.bus}/numa_node").read_text() == f"{card.numa_node}\n"


def test_libraries_have_the_usual_links(machine: sim.Machine) -> None:
    for name in ("libcuda", "libnvidia-ml"):
        full = machine.library_folder / f"{name}.so.{machine.driver_version}"
        assert full.is_file() and not full.is_symlink()
        for link in (f"{name}.so.1", f"{name}.so"):
            assert (machine.library_folder / link).resolve() == full


def test_a_given_nvidia_smi_is_installed(tmp_path: Path) -> None:
    genuine = tmp_path / "smi"
    genuine.write_text("#!/bin/sh\n")
    machine = sim.Machine.create(tmp_path / "machine", nvidia_smi=genuine)
    assert os.access(machine.root / "usr/bin/nvidia-smi", os.X_OK)
    assert not (sim.Machine.create(tmp_path / "other").root / "usr/bin").exists()
