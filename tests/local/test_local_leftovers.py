"""The guard of every test run: what a test leaves is ended and is that test's failure, not the next one's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import subprocess, sys, pathlib, pytest
NOTES = pathlib.Path(__file__).parent / "pids"
NOTES.mkdir(exist_ok=True)
SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]

def start(name, words=SLEEP):
    process = subprocess.Popen(words)
    (NOTES / name).write_text(str(process.pid))
    return process

@pytest.fixture(scope="module")
def server():
    start("server")  # and nothing ends it

def test_fails_and_leaves_one(server):
    start("left", ["sh", "-c", "sleep 300 & wait"])
    assert not "the test's own failure"

def test_ends_its_own():
    process = start("own")
    process.kill()
    process.wait()

def test_is_not_told_of_others(server):
    pass
"""


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_what_a_test_leaves_is_ended_and_said_as_its_failure(tmp_path: Path) -> None:
    (tmp_path / "test_leaving.py").write_text(TESTS)
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    try:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.support.leftovers",
            "-p",
            "no:cacheprovider",
        ]
        done = subprocess.run(
            [*command, "--rootdir", str(tmp_path), str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60,
            check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        text = done.stdout
        pids = {path.name: int(path.read_text()) for path in (tmp_path / "pids").iterdir()}
        assert "1 failed, 2 passed, 2 errors" in text, text
        assert "the test's own failure" in text
        left, server = (f"  {pids[name]} " in text for name in ("left", "server"))
        assert left and server and f"  {pids['own']} " not in text
        assert "sleep 300 (of test_leaving.py::test_fails_and_leaves_one, call)" in text, "its children are named too"
        assert all(gone(pid) for pid in pids.values())
        assert stranger.poll() is None, "what another test run has started is left alone"
    finally:
        stranger.kill()
        stranger.wait()
