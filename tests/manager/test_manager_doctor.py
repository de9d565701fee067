"""`gpu-manager doctor`: a well node, and each thing that can be missing with its name and the way out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from manager import doctor, main
from manager.doctor import Verdict
from manager.settings import Settings
from manager.settings_reader import parse
from tests.manager.manager_support import Node
from vcuda.sim import Machine


def settings(node: Node, *more: str) -> Settings:
    parsed = parse(node.arguments(*more), {})
    assert parsed is not None
    return parsed.settings


def verdicts(node: Node, *more: str) -> dict[str, tuple[Verdict, str]]:
    return {check.what: (check.verdict, check.details) for check in doctor.examine(settings(node, *more), {})}


def test_nothing_fails_on_a_well_node_and_nothing_is_changed(node: Node) -> None:
    before = sorted(path for path, _, _ in os.walk(node.root))
    found = verdicts(node)
    assert {what for what, (verdict, _) in found.items() if verdict is Verdict.FAIL} == set()
    assert found["driver"][1].endswith("2 cards")
    assert {"card 0", "card 1", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia1", "libcuda.so.1"} <= set(
        found
    )
    assert found["kubelet's pods"] == (Verdict.OK, f"0 at {node.kubelet.url}")
    assert sorted(path for path, _, _ in os.walk(node.root)) == before


def test_what_is_missing_is_named_with_the_way_out(node: Node, machine: Machine) -> None:
    node.kubelet.stop()
    (node.kubelet.directory / "kubelet.sock").unlink(missing_ok=True)
    (machine.root / "dev/nvidia-uvm").unlink()
    found = verdicts(node, "--kubelet-token-file=/does/not/exist", f"--cgroup-root={node.directory}/none")
    assert (
        found["/dev/nvidia-uvm"][0] is Verdict.WARN and "the daemon makes it" in found["/dev/nvidia-uvm"][1]
    )
    assert found["kubelet"][0] is Verdict.FAIL and "is kubelet running" in found["kubelet"][1]
    assert found["kubelet's pods"][0] is Verdict.FAIL and "nodes/pods" in found["kubelet's pods"][1]
    assert found["device cgroups"][0] is Verdict.WARN and "--cgroup-root" in found["device cgroups"][1]
    devices = machine.root / "proc/devices"
    devices.write_text(devices.read_text().replace("nvidia-uvm", "other"))
    verdict, details = verdicts(node)["device nodes"]
    assert verdict is Verdict.FAIL and "/proc/devices lists no nvidia-uvm" in details


def test_a_node_without_a_driver(make_node: Callable[..., Node], short_directory: Path) -> None:
    (short_directory / "root").mkdir()
    found = verdicts(make_node(short_directory / "root"))
    assert found["driver"][0] is Verdict.FAIL and "--driver-root" in found["driver"][1]
    assert found["libcuda.so.1"][0] is Verdict.FAIL


def test_the_command(node: Node, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logging.disable", lambda: None)
    monkeypatch.setattr("sys.argv", ["gpu-manager", "doctor", *node.arguments("--log-format=json")])
    assert main.main() == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"what": "driver", "verdict": "ok"}.items() <= rows[0].items()
    monkeypatch.setattr("sys.argv", ["gpu-manager", "doctor", "--driver-root=/does/not/exist"])
    assert main.main() == 1
    assert "FAIL  driver" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["gpu-manager", "doctor", "--no-such-flag"])
    assert main.main() == 2
