"""`vcuda run --report` says at the end what the run has used, also when its supervisor was killed and when processes stay behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import share as shares
from tests.support.runs import Runner, wait_for, wait_for_keeper
from vcuda import sim

GIB = 2**30
SHARE = ("--core", "30", "--memory", "1GiB", "--report")
USED = "begin(); held = alloc(100 * MIB); ok('cuMemFree_v2', held[1]); alloc(2048 * MIB); alloc(3072 * MIB)"
LINE = (
    r"vcuda: report: card GPU-\S+: peak memory 164 MiB of 1 GiB; 0\.000 s of GPU time \(0 cores of 30\) in \d+\.\d s; "
    r"launches waited 0\.000 s; 2 allocations refused"
)


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    sim.Machine.create(tmp_path / "machine", [sim.SimCard(memory_bytes=8 * GIB)])
    return Runner(tmp_path / "machine")


def test_the_report_is_the_last_line_and_the_exit_status_stays_the_commands(runner: Runner) -> None:
    code = f"{shares.PRELUDE}\n{USED}\nprint('out'); sys.exit(3)"
    result = runner.call(*runner.run(sys.executable, "-c", code, share=SHARE))
    assert (result.returncode, result.stdout) == (3, "out\n")
    refused, report = result.stderr.splitlines()
    assert refused.startswith("vcuda: refused 2 GiB of GPU memory: limit 1 GiB")
    assert re.fullmatch(LINE, report), report
    silent = runner.call(*runner.run("true"))
    assert (silent.returncode, silent.stderr) == (0, "")


def test_a_whole_card_is_not_metered_and_each_card_has_a_line(tmp_path: Path) -> None:
    sim.Machine.create(tmp_path / "two", [sim.SimCard(), sim.SimCard()])
    two = Runner(tmp_path / "two")
    result = two.call(*two.run("true", share=("--core", "200", "--report")))
    assert result.stderr.count("GPU time not metered, the card was its own") == 2


def test_a_killed_supervisor_and_processes_that_stay_do_not_lose_the_report(runner: Runner) -> None:
    front = runner.start(*runner.run("sh", "-c", "echo $PPID; read end", share=SHARE), stdin=-1)
    assert front.stdout is not None
    # Killed before it has said whom it started, it would leave nobody who knows the command.
    os.kill(wait_for_keeper(int(front.stdout.readline())), signal.SIGKILL)
    _, said = front.communicate("\n", timeout=60)
    assert "report: card GPU-" in said
    staying = runner.call(*runner.run("sh", "-c", "sleep 1 >/dev/null 2>&1 </dev/null &", share=SHARE))
    assert staying.stderr.count("report: card GPU-") == 1
    wait_for("the end of the bookings", lambda: not runner.bookings())


def test_a_command_that_ends_before_its_killed_supervisor_has_is_reported_too() -> None:
    """The kernel gives us the children of who was killed a moment before itself: it was taken for one that the command had left behind."""
    code = """
import os, socket, subprocess, sys, types
from vcuda.runs import launcher
near, far = socket.socketpair()
supervisor, command = subprocess.Popen(["sleep", "0.5"]), subprocess.Popen(["sh", "-c", "exit 3"])
far.send(b"started %d\\n" % command.pid)
os.waitid(os.P_PID, command.pid, os.WEXITED | os.WNOWAIT)
task = types.SimpleNamespace(containers=None, report=lambda: ["report: a card"], finish=lambda: print("finished"))
status = launcher._Launcher(task, near, supervisor.pid, print).wait()
print(status)
os._exit(0)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    killed, *rest = said.stdout.splitlines()
    assert killed.startswith("the supervisor of this run was killed") and rest == ["report: a card", "finished", "3"]
