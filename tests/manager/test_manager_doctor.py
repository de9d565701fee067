"""`gpu-manager doctor`: a well node, and each thing that can be missing with its name and the way out."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localcluster.cluster import free_port
from manager import doctor, main
from manager.cards.driver import DriverError, NodeCard, NullDriver, Probe
from manager.config.reader import parse
from manager.config.settings import Settings
from manager.doctor import Verdict
from manager.observe import http
from tests.manager.manager_support import Node, node_report
from vcuda.sim import Machine
from vcuda.spec.inventory import Card


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
    assert {"card 0", "card 1", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia1", "libcuda.so.1"} <= set(found)
    assert found["kubelet's pods"] == (Verdict.OK, f"0 at {node.kubelet.url}")
    assert sorted(path for path, _, _ in os.walk(node.root)) == before


def test_what_is_missing_is_named_with_the_way_out(node: Node, machine: Machine) -> None:
    node.kubelet.stop()
    (node.kubelet.directory / "kubelet.sock").unlink(missing_ok=True)
    (machine.root / "dev/nvidia-uvm").unlink()
    found = verdicts(node, "--kubelet-token-file=/does/not/exist", f"--cgroup-root={node.directory}/none")
    assert found["/dev/nvidia-uvm"][0] is Verdict.WARN and "the daemon makes it" in found["/dev/nvidia-uvm"][1]
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


def test_without_flags_it_has_the_settings_of_the_daemon_that_runs(
    node: Node,
    process: Callable[..., subprocess.Popen[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a pod `kubectl exec … gpu-manager doctor` knew nothing of the flags that the chart gives the daemon."""
    monkeypatch.setattr("logging.disable", lambda: None)
    monkeypatch.setenv("GPU_MANAGER_CHECKPOINT_PATH", str(node.directory / "checkpoint"))
    monkeypatch.setattr("sys.argv", ["gpu-manager", "doctor", "--log-format=json"])
    assert main.main() == 1
    assert "no running daemon" in capsys.readouterr().err
    daemon = process()
    assert main.main() == 0
    told = capsys.readouterr()
    assert f"process {daemon.pid}" in told.err and json.loads(told.out)[0]["what"] == "driver"
    daemon.kill()
    daemon.wait()
    assert main.main() == 1
    assert "no running daemon" in capsys.readouterr().err


class Probed(NullDriver):
    """A driver that found a card and lost another one, or that does not answer."""

    def __init__(self, probe: Probe | DriverError) -> None:
        super().__init__("played")
        self._probe = probe

    def probe(self) -> Probe:
        if isinstance(self._probe, DriverError):
            raise self._probe
        return self._probe


def test_a_driver_that_does_not_answer_and_a_card_that_is_lost_are_named(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Probe | DriverError] = [DriverError("nvmlInit: Driver Not Loaded")]
    monkeypatch.setattr("manager.cards.nvml.open_driver", lambda _: Probed(answers[0]))
    assert verdicts(node)["driver"] == (Verdict.FAIL, "it does not answer: nvmlInit: Driver Not Loaded")
    monkeypatch.setattr(doctor, "NullDriver", type("Other", (), {}))
    card = NodeCard(Card("GPU-1", 1, "A", 2**30), 1)
    answers[0] = Probe("550.1", (card,), (("GPU-0", "GPU is lost"),))
    found = verdicts(node)
    assert found["card GPU-0"] == (Verdict.FAIL, "GPU is lost")
    assert found["card 1"] == (Verdict.OK, "GPU-1  A")
    assert "/dev/nvidia1" in found and "/dev/nvidia0" not in found


Spoil = Callable[[Path, int, int], None]


def wrong_number(path: Path, major: int, minor: int) -> None:
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor + 100))


def right_without_link(path: Path, major: int, minor: int) -> None:
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))


def right_with_link(path: Path, major: int, minor: int) -> None:
    right_without_link(path, major, minor)
    link = path.parent / f"char/{major}:{minor}"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(f"../{path.name}")


@pytest.mark.parametrize(
    ("spoil", "verdict", "message"),
    [
        (lambda path, *_: path.mkdir(), Verdict.FAIL, "is no character device; remove it"),
        (
            wrong_number,
            Verdict.WARN,
            "it is .*:10., /proc/devices says .*; the daemon makes it anew if it may",
        ),
        (
            right_without_link,
            Verdict.WARN,
            "without .*/dev/char/.*: some versions of runc drop it at daemon-reload",
        ),
        (right_with_link, Verdict.OK, "^[0-9]+:1$"),
    ],
)
def test_a_device_node_that_is_not_as_it_should_be_is_named_with_what_becomes_of_it(
    node: Node, machine: Machine, spoil: Spoil, verdict: Verdict, message: str
) -> None:
    path = machine.root / "dev/nvidia-uvm-tools"
    devices = (machine.root / "proc/devices").read_text().splitlines()
    major = next(int(line.split()[0]) for line in devices if line.split()[1:] == ["nvidia-uvm"])
    path.unlink()
    try:
        spoil(path, major, 1)
    except PermissionError:
        pytest.skip("making device nodes is not permitted here")
    found = verdicts(node)["/dev/nvidia-uvm-tools"]
    assert found[0] is verdict and re.search(message, found[1]), found


def test_what_our_own_part_lacks_is_named_with_how_to_make_it(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("vcuda.driver.layout.SHIMS_FOLDER", tmp_path / "lib/shim")
    verdict, details = verdicts(node)["shims"]
    assert verdict is Verdict.FAIL and "no libcuda.so.1, libnvidia-ml.so.1 in" in details
    assert details.endswith("python -m vcuda._build makes them")


def test_an_api_server_that_refuses_and_settings_that_can_not_work_are_named(
    make_node: Callable[..., Node], machine: Machine
) -> None:
    node = make_node(machine.root, with_api=True)
    assert node.api is not None
    assert verdicts(node)["API server"] == (Verdict.OK, f"0 pods on node node-1 at {node.api.url}")
    node.api.failing = True
    verdict, details = verdicts(node)["API server"]
    assert verdict is Verdict.FAIL and "answered 500: the store is away" in details
    verdict, details = verdicts(node, "--kubelet-url=nowhere")["API server"]
    assert verdict is Verdict.FAIL and "--kubelet-url: 'nowhere' is of no use" in details
    node.with_kubelet_url = False
    verdict, details = verdicts(node)["kubelet's pods"]
    assert verdict is Verdict.WARN and "--kubelet-url is not set" in details


def test_sockets_control_groups_and_folders_of_a_host(node: Node, short_directory: Path, tmp_path: Path) -> None:
    resources = short_directory / "r.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(resources))
        found = verdicts(node, f"--pod-resources-socket={resources}", f"--cgroup-root={tmp_path}")
    assert found["PodResources"] == (Verdict.OK, str(resources))
    assert found["device cgroups"] == (
        Verdict.WARN,
        f"not watched: there is no {tmp_path}/devices; mount the host's control groups there, or set --cgroup-root",
    )
    (tmp_path / "cgroup.controllers").touch()
    found = verdicts(node, f"--cgroup-root={tmp_path}")
    assert found["device cgroups"] == (Verdict.OK, f"{tmp_path}, control groups v2")
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices/cgroup.procs").touch()
    found = verdicts(node, f"--cgroup-root={tmp_path}", "--virtual-manager-path=/proc/none")
    assert found["device cgroups"] == (Verdict.OK, f"{tmp_path}/devices, control groups v1")
    verdict, details = found["regions"]
    assert verdict is Verdict.FAIL and "cannot write to /proc/none" in details and "--virtual-manager-path" in details


def test_the_running_daemon_shows_what_the_doctor_finds(process: Callable[..., Any], node: Node) -> None:
    """Its own command line counts; the look is a process of its own, one at a time."""
    port = free_port()
    process(f"--query-port={port}")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/doctor", timeout=60) as answer:
        found = {check["what"]: check["verdict"] for check in json.loads(answer.read())}
    assert found["driver"] == "ok" and found["kubelet"] == "ok"


def test_a_doctor_that_fails_or_is_at_work_says_so() -> None:
    with pytest.raises(http.DoctorFailed, match=r"gpu-manager doctor failed: .*--nonsense"):
        doctor.look(["--nonsense"])
    pages = http.Pages(lambda: b"", node_report, list, list, "1")
    assert pages.page("/doctor")[0] == 500
    with pages._looking:
        assert pages.page("/doctor")[0] == 503
    assert pages.page("/doctor")[0] == 500
