"""Daemons as subprocesses: readiness, last words, and that nothing outlives a deployment that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localcluster import cluster
from localcluster.daemon import Daemon, DaemonFailure

REPOSITORY = Path(__file__).resolve().parents[2]
PATHS = {"PYTHONPATH": str(REPOSITORY)}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    made: list[Daemon] = []

    def daemon(*arguments: str) -> Daemon:
        made.append(Daemon("httpd", "http.server", arguments, tmp_path / "log", {**PATHS, "PYTHONUNBUFFERED": "1"}))
        made[-1].start()
        return made[-1]

    yield daemon
    for one in made:
        one.stop()


def test_a_ready_daemon_is_waited_for_and_can_be_started_again_after_a_kill(make: Any) -> None:
    port = cluster.free_port()
    daemon = make("--bind", "127.0.0.1", str(port))
    daemon.wait_ready(f"http://127.0.0.1:{port}/", 30)
    daemon.kill()
    with pytest.raises(DaemonFailure, match="ended with status -9"):
        daemon.check()
    daemon.start()
    daemon.wait_ready(f"http://127.0.0.1:{port}/", 30)
    daemon.stop()
    assert not daemon.running


def test_a_daemon_that_dies_shows_its_last_words(make: Any) -> None:
    daemon = make("--no-such-flag")
    with pytest.raises(DaemonFailure, match="status 2") as error:
        daemon.wait_ready("http://127.0.0.1:9/", 30)
    assert "unrecognized arguments: --no-such-flag" in str(error.value)


def test_a_daemon_that_is_never_ready_says_what_it_answered(make: Any) -> None:
    port = cluster.free_port()
    daemon = make("--bind", "127.0.0.1", str(port))
    daemon.wait_ready(f"http://127.0.0.1:{port}/", 30)
    with pytest.raises(DaemonFailure, match=r"not ready after 0 s.*404"):
        daemon.wait_ready(f"http://127.0.0.1:{port}/no-such-file", 0.3)


def test_what_a_daemon_did_not_say_is_asked_for_in_vain(make: Any, tmp_path: Path) -> None:
    silent = Daemon("silent", "http.server", [], tmp_path / "no-log", PATHS)
    assert (silent.output(), silent.tail(), silent.pid) == ("", "    (it wrote nothing)", 0)
    silent.check()  # not started is not ended
    silent.kill()
    daemon = make("--bind", "127.0.0.1", "0")
    assert daemon.wait_output(r"port (\d+)", 30)[1] != "0"
    with pytest.raises(DaemonFailure, match="httpd did not say 'Bye' within 0 s; its last lines:\n    Serving"):
        daemon.wait_output("Bye", 0.2)
    daemon.kill()
    with pytest.raises(DaemonFailure, match="httpd ended with status -9"):
        daemon.wait_output("Bye", 30)


def test_daemons_end_with_a_deployment_that_is_killed(tmp_path: Path, wait_for: Any) -> None:
    code = (
        "import sys, time; from pathlib import Path; from localcluster.daemon import Daemon; "
        "d = Daemon('httpd', 'http.server', ['--bind', '127.0.0.1', '0'], Path(sys.argv[1]) / 'log', {'PYTHONUNBUFFERED': '1'}); "
        "d.start(); d.wait_output('Serving', 30); print(d.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY,
        env={**os.environ, **PATHS},
    )  # fmt: skip
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait(timeout=10)

    def gone() -> bool:
        try:
            return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
        except FileNotFoundError:
            return True

    wait_for(gone, "the daemon's end")


def test_what_a_killed_deployment_left_is_removed_and_what_is_in_use_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "vcuda-local-left"
    left.mkdir()
    (left / "lock").touch()
    foreign = tmp_path / "vcuda-local-without-lock"
    foreign.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "lock").touch()
    link = tmp_path / "vcuda-local-link"
    link.symlink_to(tmp_path / "elsewhere")
    used = cluster.Cluster()
    assert not left.exists() and foreign.exists()
    assert link.is_symlink() and (tmp_path / "elsewhere" / "lock").exists()
    cluster.remove_leftovers()
    assert used.directory.exists()
    used.stop()
    assert not used.directory.exists()
