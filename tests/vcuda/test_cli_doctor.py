"""`vcuda doctor`: a healthy machine, and what it says of broken ones."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.runs import Runner
from vcuda import sim
from vcuda._build import native
from vcuda.cli import doctor_command
from vcuda.driver.root import HostRoot
from vcuda.runs.driver import Driver


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    sim.Machine.create(tmp_path / "machine", [sim.SimCard(), sim.SimCard()])
    return Runner(tmp_path / "machine")


def checks(runner: Runner, status: int) -> dict[str, tuple[str, str]]:
    done = runner.call("doctor", "--json")
    assert done.returncode == status, done.stdout + done.stderr
    return {item["what"]: (item["verdict"], item["text"]) for item in json.loads(done.stdout)}


def test_a_healthy_machine_has_nothing_that_fails_and_the_driver_s_own_library_is_named(runner: Runner) -> None:
    found = checks(runner, 0)
    assert {verdict for verdict, _ in found.values()} == {"ok"}
    assert f"libcuda.so.{native.SIM_DRIVER_VERSION}" in found["libcuda"][1]
    assert {"card 0", "card 1", "/dev/nvidia1", "/dev/nvidia-uvm", "kernel module", "ledger"} <= set(found)
    lines = runner.call("doctor")
    assert lines.returncode == 0 and len(lines.stdout.splitlines()) == len(found)


def test_inside_a_run_the_machine_is_the_one_below_it(runner: Runner) -> None:
    words = (sys.executable, "-m", "vcuda.cli.main", "doctor", "--json")
    done = runner.call("run", "--core", "10", "--memory", "1GiB", "--", *words)
    assert done.returncode == 0, done.stderr
    found = {item["what"]: item for item in json.loads(done.stdout)}
    assert {item["verdict"] for item in found.values()} == {"ok"}
    assert "inside the run" in found["run"]["text"] and "1 runs" in found["ledger"]["text"]
    assert str(runner.machine) in found["libcuda"]["text"] and "card 1" in found


def node_gone(root: Path) -> None:
    (root / "dev/nvidia-uvm").unlink()


def driver_updated(root: Path) -> None:
    version = root / "proc/driver/nvidia/version"
    version.write_text(version.read_text().replace(native.SIM_DRIVER_VERSION, "535.1.02"))


def module_gone(root: Path) -> None:
    (root / "proc/driver/nvidia/version").unlink()


@pytest.mark.parametrize(
    ("break_it", "what", "verdict", "told"),
    [
        (node_gone, "/dev/nvidia-uvm", "FAIL", "as root: `nvidia-modprobe -u -c=0`"),
        (driver_updated, "kernel module", "FAIL", f"it is 535.1.02, the libraries are {native.SIM_DRIVER_VERSION}"),
        (module_gone, "kernel module", "warn", "does not say its version; is it loaded?"),
    ],
)
def test_what_is_broken_is_named_with_a_way_out(
    runner: Runner, break_it: Callable[[Path], None], what: str, verdict: str, told: str
) -> None:
    break_it(runner.machine / "root")
    found = checks(runner, int(verdict == "FAIL"))
    assert found[what][0] == verdict and told in found[what][1]
    assert [name for name, (how, _) in found.items() if how != "ok"] == [what]


def test_a_ledger_that_cannot_be_used_fails(runner: Runner) -> None:
    ledger = runner.machine / "ledger"
    ledger.mkdir(exist_ok=True)
    ledger.chmod(0o777)
    verdict, told = checks(runner, 1)["ledger"]
    assert verdict == "FAIL" and "chmod +t" in told


def test_libraries_of_two_versions_fail(tmp_path: Path) -> None:
    """As after an update that ended half way."""
    driver = Driver(tmp_path / "libcuda.so.550.1", tmp_path / "libnvidia-ml.so.535.2")
    found = {check.what: check for check in doctor_command.versions(driver, HostRoot(tmp_path))}
    assert found["driver"].verdict == "FAIL" and "not of one version" in found["driver"].text


def test_a_machine_without_a_driver_and_one_that_is_not_there_fail_without_a_traceback(
    runner: Runner, tmp_path: Path
) -> None:
    missing = Runner(tmp_path / "missing").call("doctor")
    assert missing.returncode == 1 and missing.stdout.startswith("FAIL machine") and not missing.stderr
    root = HostRoot(tmp_path / "empty", str(tmp_path / "empty"))
    failed = {check.what for check in doctor_command.nodes(root, ()) if check.verdict == "FAIL"}
    assert failed == {"/dev/nvidiactl", "/dev/nvidia-uvm"}


def test_a_ledger_whose_lock_is_held_fails_and_names_the_holder(runner: Runner) -> None:
    runner.ledger.mkdir()
    runner.ledger.chmod(0o1777)
    with (runner.ledger / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        verdict, text = checks(runner, 1)["ledger"]
        assert verdict == "FAIL" and f"process {os.getpid()}" in text
