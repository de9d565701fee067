"""The node's cards as a CDI specification: its rules, what the answers name, when it changes and goes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from manager.config.reader import parse
from manager.container import cdi
from manager.errors import StartError
from tests.manager.manager_kubelet import Rejected
from tests.manager.manager_pods import container, eventually, pod
from tests.manager.manager_support import Node
from vcuda.sim import Machine

# The rules of SPEC.md of the Container Device Interface and of its validator, in our words.
VENDOR = CLASS = r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?"
DEVICE = r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?"
FIELDS = {"cdiVersion", "kind", "devices", "containerEdits"}
EDITS = {"env", "deviceNodes", "mounts", "hooks"}
NODE = {"path", "hostPath", "type", "major", "minor", "fileMode", "permissions", "uid", "gid"}
MOUNT = {"hostPath", "containerPath", "type", "options"}


def breaches(document: dict[str, Any]) -> list[str]:
    """What is against the rules of version 0.5.0."""
    found = [f"unknown {name}" for name in document.keys() - FIELDS]
    if document.get("cdiVersion") != "0.5.0":
        found.append("version")
    vendor, _, kind = str(document.get("kind", "")).partition("/")
    # Dots in the class came with 0.6.0.
    if not (re.fullmatch(VENDOR, vendor) and re.fullmatch(CLASS, kind)) or "." in kind or len(kind) > 63:
        found.append(f"kind {document.get('kind')}")
    names = [device.get("name", "") for device in document.get("devices", [])]
    if not names:
        found.append("no devices")
    if len(set(names)) != len(names):
        found.append("a name twice")
    found += [f"name {name!r}" for name in names if not re.fullmatch(DEVICE, name)]
    for device in document.get("devices", []):
        if not any(device.get("containerEdits", {}).values()):
            found.append("a device without edits")
        found += _edits(device.get("containerEdits", {}))
    return found + _edits(document.get("containerEdits", {}))


def _edits(edits: dict[str, Any]) -> list[str]:
    found = [f"unknown {name}" for name in edits.keys() - EDITS]
    found += [f"variable {item}" for item in edits.get("env", []) if item.find("=") < 1]
    for node in edits.get("deviceNodes", []):
        found += [f"unknown {name}" for name in node.keys() - NODE]
        if not node.get("path", "").startswith("/") or node.get("type", "") not in {"", "b", "c", "u", "p"}:
            found.append(f"node {node}")
        if min(node.get("major", 0), node.get("minor", 0)) < 0 or set(node.get("permissions", "")) - set("rwm"):
            found.append(f"node {node}")
    for mount in edits.get("mounts", []):
        found += [f"unknown {name}" for name in mount.keys() - MOUNT]
        if not mount.get("hostPath") or not mount.get("containerPath"):
            found.append(f"mount {mount}")
        if not all(isinstance(option, str) for option in mount.get("options", [])):
            found.append(f"options {mount}")
    return found


def arguments(node: Node, strategy: str) -> tuple[str, str]:
    return f"--device-list-strategy={strategy}", f"--cdi-root={node.directory}/cdi"


def file_of(node: Node) -> Path:
    return node.directory / "cdi/tencent.com-vcuda.json"


def test_the_rules_find_what_is_wrong() -> None:
    node = {"path": "/dev/x", "type": "c", "major": 1, "minor": 2, "permissions": "rw"}
    good: dict[str, Any] = {
        "cdiVersion": "0.5.0",
        "kind": "a.b/c",
        "devices": [{"name": "d", "containerEdits": {"deviceNodes": [node]}}],
    }
    assert breaches(good) == []
    wrong: tuple[dict[str, Any], ...] = (
        {"kind": "a.b"},
        {"kind": "1.b/c"},
        {"devices": []},
        {"devices": good["devices"] * 2},
        {"devices": [{"name": "a/b", "containerEdits": {"deviceNodes": [node]}}]},
        {"devices": [{"name": "d", "containerEdits": {}}]},
        {"containerEdits": {"deviceNodes": [{**node, "permissions": "rx"}]}},
        {"containerEdits": {"mounts": [{"hostPath": "/x"}]}},
    )
    for change in wrong:
        assert breaches({**good, **change}), change


@pytest.mark.parametrize("strategy", ["cdi-cri", "cdi-annotations", "device-specs,cdi-cri,cdi-annotations"])
def test_cards_are_named_and_described_beside_the_whole_answer(node: Node, machine: Machine, strategy: str) -> None:
    node.start(*arguments(node, strategy), wait=200)
    item = pod("a", container("c", 200))
    node.kubelet.admit(item)
    answer = node.kubelet.answer(item, "c")
    wanted = {f"tencent.com/vcuda={card.uuid}" for card in machine.cards}
    assert {device.name for device in answer.cdi_devices} == (wanted if "cri" in strategy else set())
    listed = answer.annotations.get("cdi.k8s.io/vcuda", "")
    assert set(filter(None, listed.split(","))) == (wanted if "annotations" in strategy else set())
    document = json.loads(file_of(node).read_text())
    assert breaches(document) == []
    assert file_of(node).stat().st_mode & 0o777 == 0o644
    # What a runtime applies for both cards is what the answer says too, no more and no less.
    edits = [document["containerEdits"], *(device["containerEdits"] for device in document["devices"])]
    nodes = {(n["path"], n["hostPath"], n["permissions"]) for e in edits for n in e["deviceNodes"]}
    assert nodes == {(spec.container_path, spec.host_path, spec.permissions) for spec in answer.devices}
    assert {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia1"} <= {path for path, _, _ in nodes}
    numbers = {n["path"].removeprefix("/dev/"): (n["major"], n["minor"]) for e in edits for n in e["deviceNodes"]}
    assert numbers.items() <= machine.nodes().items()
    mounts = {(m["hostPath"], m["containerPath"]) for m in document["containerEdits"]["mounts"]}
    given = {(mount.host_path, mount.container_path) for mount in answer.mounts}
    assert {path for _, path in given - mounts} == {"/etc/vcuda", "/etc/vcuda/usage"} and mounts < given
    assert all("ro" in m["options"] for m in document["containerEdits"]["mounts"])


def test_the_file_follows_the_node(node: Node, machine: Machine) -> None:
    daemon = node.start(*arguments(node, "cdi-cri"), wait=200)
    path = file_of(node)
    eventually(path.exists, "the file")
    status = path.stat()
    for _ in range(3):  # nothing changes, nothing is written
        daemon.cdi.refresh(daemon.inventory.snapshot, daemon.settings)
    assert path.stat().st_ino == status.st_ino

    def major() -> int:
        edits = json.loads(path.read_text())["containerEdits"]
        return next(n["major"] for n in edits["deviceNodes"] if n["path"] == "/dev/nvidia-uvm")

    before = major()
    machine.set_uvm_major(before + 1)
    eventually(lambda: major() == before + 1, "the new major")
    path.unlink()
    eventually(path.exists, "the file again")
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (node.shims / name).write_text("a new build")
    driver = daemon.driver_dir.current().directory
    node.stop()
    assert path.exists()  # containers that run restart without us
    node.start(*arguments(node, "cdi-cri"), wait=200)
    assert node.daemon is not None and node.daemon.driver_dir.current().directory != driver
    assert str(node.daemon.driver_dir.current().directory) in path.read_text()
    node.stop()
    assert list(path.parent.iterdir()) == [path]  # no unfinished ones
    other = path.with_name("other.com-gpu.json")
    other.write_text("{}")
    node.start(*arguments(node, "device-specs"), wait=200)
    eventually(lambda: not path.exists(), "the removal")
    assert other.exists()


def test_nothing_is_named_that_a_runtime_would_not_find(node: Node) -> None:
    (node.directory / "cdi").write_text("a file where the folder should be")
    node.start(*arguments(node, "cdi-cri"), wait=200)
    with pytest.raises(Rejected, match=r"CdiUnavailable: default/a: .*tencent\.com-vcuda\.json does not describe"):
        node.kubelet.admit(pod("a", container("c", 30, 10)))
    assert set(node.booked().values()) == {(0, 0)}
    (node.directory / "cdi").unlink()
    eventually(file_of(node).exists, "the file")
    node.kubelet.pods.clear()
    node.kubelet.admit(pod("b", container("c", 30, 10)))


def test_by_default_there_is_none(node: Node) -> None:
    node.start(arguments(node, "")[1], wait=200)
    item = pod("a", container("c", 30, 10))
    node.kubelet.admit(item)
    answer = node.kubelet.answer(item, "c")
    assert not answer.cdi_devices and "cdi.k8s.io/vcuda" not in answer.annotations
    assert not os.path.lexists(node.directory / "cdi")


@pytest.mark.parametrize("value", ["envvar", "cdi-cri,volume-mounts", "cdi", ""])
def test_other_strategies_are_refused_with_the_choice(value: str) -> None:
    with pytest.raises(StartError, match=r"device-specs, cdi-cri( or|,) cdi-annotations"):
        parse([f"--device-list-strategy={value}"], {})


def test_a_uuid_that_is_no_name_gets_one() -> None:
    assert cdi.device_name("MIG-5c89852c-d268") == "MIG-5c89852c-d268"
    assert re.fullmatch(DEVICE, cdi.device_name("MIG-GPU-1/2/0"))
