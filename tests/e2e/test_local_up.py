"""`python -m localcluster up`: runs until it is told to end or one of its programs dies, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from localcluster.runner.supervisor import descendants

REPOSITORY = Path(__file__).resolve().parents[2]
UP = [sys.executable, "-m", "localcluster", "up", "--cards", "1", "--isolation", "host-paths"]


@pytest.fixture
def up() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """The running deployment and its kubeconfig, which it has printed."""
    process = subprocess.Popen(UP, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert process.stdout is not None
    told = ""
    while "Ctrl-C ends everything" not in told:
        line = process.stdout.readline()
        assert line, told + process.communicate()[1]
        told += line
    kubeconfig = re.search(r"export KUBECONFIG=(\S+)", told)
    assert kubeconfig is not None
    yield process, Path(kubeconfig[1])
    process.kill()
    process.communicate()


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_told_to_end_and_leaves_nothing(
    up: tuple[subprocess.Popen[str], Path], number: signal.Signals
) -> None:
    process, kubeconfig = up
    words = [sys.executable, "-m", "localcluster", "get"]
    found = subprocess.run(
        words, env={**os.environ, "KUBECONFIG": str(kubeconfig)}, cwd=REPOSITORY, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
    below = descendants(process.pid)
    process.send_signal(number)
    assert end(process) == (0, "")
    assert not kubeconfig.parent.exists()
    assert not [pid for pid in below if Path(f"/proc/{pid}/exe").exists()]


def test_a_program_of_it_that_dies_is_begun_again_and_its_last_words_stay(
    up: tuple[subprocess.Popen[str], Path],
) -> None:
    process, kubeconfig = up

    def manager() -> int:
        found = [pid for pid in descendants(process.pid) if b"manager.main" in words(pid)]
        return found[0] if found else 0

    def words(pid: int) -> bytes:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/cmdline").read_bytes()
        return b""

    def local(*arguments: str) -> str:
        command = [sys.executable, "-m", "localcluster", *arguments, "--kubeconfig", str(kubeconfig)]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=60).stdout

    first = manager()
    os.kill(first, signal.SIGKILL)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("gpu-manager ended by signal 9 and starts again in 1 s; what it wrote:")
    deadline = time.monotonic() + 60
    while manager() in (0, first) or "restarts: 1" not in local("get", "-n", "vcuda-system"):
        assert time.monotonic() < deadline, local("get", "-n", "vcuda-system")
        time.sleep(0.2)
    assert "registered with kubelet" in local("logs", "-n", "vcuda-system", "gpu-manager-local", "--previous")
    process.send_signal(signal.SIGTERM)
    assert end(process) == (0, "")
    assert not kubeconfig.parent.exists()
