"""Each entry of the break list in a running playground: what it promises is seen by the command that it names."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from localcluster import breaks, cli
from localcluster.cluster import Cluster, ClusterOptions
from manager.config.settings import ENV_PREFIX

REPOSITORY = Path(__file__).resolve().parents[2]
SECONDS = 90.0


class Playground:
    """A cluster whose daemons are supervised by the thread that starts it, as `up` does it."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self._ready, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="playground")
        self._thread.start()
        assert self._ready.wait(SECONDS), self.told

    def _run(self) -> None:
        with Cluster(ClusterOptions(cards=2, disk_bytes=32 * 2**20), self.told.append) as self.cluster:
            self.cluster.supervise()
            self.cluster.server.control = breaks.Desk(self.cluster).answer
            self._ready.set()
            while not self._end.wait(0.1):
                self.cluster.supervise()

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def run(self, words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig)}
        return subprocess.run(
            [sys.executable, "-m", "localcluster", *words.split()], cwd=REPOSITORY, env=environment,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def says(self, words: str) -> str:
        """What the command prints. In this process: to look often must not start a Python each time."""
        handler, printed = signal.getsignal(signal.SIGTERM), io.StringIO()
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                cli.main([*words.split(), "--kubeconfig", str(self.cluster.kubeconfig)])
        finally:
            signal.signal(signal.SIGTERM, handler)
        return printed.getvalue()

    def sees(self, sign: breaks.Sign) -> bool:
        return re.search(sign.shows, self.says(sign.command)) is not None

    def wait_for(self, sign: breaks.Sign, *, seen: bool = True) -> None:
        deadline = time.monotonic() + SECONDS
        while self.sees(sign) is not seen:
            if time.monotonic() > deadline:
                logs = f"{self.cluster.manager.tail()}\n{self.cluster.extender.tail()}\n{self.told}"
                raise AssertionError(f"{sign} is not {seen}: {self.says(sign.command)}\n{logs}")
            time.sleep(0.1)


@pytest.fixture(scope="module")
def playground() -> Iterator[Playground]:
    with pytest.MonkeyPatch.context() as patch:
        # Two breaks, their mending and a full disk are seen by that look alone.
        patch.setenv(f"{ENV_PREFIX}HEALTH_CHECK_INTERVAL", "1")
        made = Playground()
        yield made
        made.close()


@pytest.mark.parametrize("name", breaks.BREAKS)
def test_what_a_break_promises_is_seen_and_was_not_seen_before(playground: Playground, name: str) -> None:
    found = breaks.BREAKS[name]
    if name == "disk" and playground.cluster.disk_bytes is None:
        pytest.skip("mounting a small disk for the node needs root")
    # A count of restarts may be left of an earlier break; what others show first is not there before.
    if not name.startswith("kill-"):
        playground.wait_for(found.signs[0], seen=False)
    done = playground.run(f"break {name}")
    try:
        assert done.returncode == 0, done
        assert all(sign.command in done.stdout for sign in found.signs)
        for sign in found.signs:
            playground.wait_for(sign)
    finally:  # or the breaks after it would not be seen either
        mended = playground.says("mend " + name) if found.mend is not None else ""
    if found.mend is not None:
        assert "is mended" in mended
        # It works again: a pod gets a share, and a gauge goes back.
        for sign in found.signs:
            if re.fullmatch("nodes|metrics .*(?<!_total)", sign.command):
                playground.wait_for(sign, seen=False)


def test_a_break_is_told_by_name_and_twice_is_refused(playground: Playground) -> None:
    assert "card-lost" in playground.says("break")
    unknown = playground.run("break no-such")
    assert unknown.returncode == 1
    assert "nothing is called no-such" in unknown.stderr
    assert playground.run("break forged").returncode == 0
    again = playground.run("break forged")
    assert again.returncode == 1
    assert "forged is broken already; `mend forged` takes it back" in again.stderr
    assert playground.run("mend forged").returncode == 0


def test_a_deleted_pod_of_a_daemon_is_made_anew_with_the_daemon(playground: Playground) -> None:
    before = playground.cluster.manager.pid
    name = "gpu-manager-local"
    assert playground.run(f"delete -n vcuda-system {name}").returncode == 0
    deadline = time.monotonic() + SECONDS
    while playground.cluster.manager.pid == before or "Running" not in playground.says("get -n vcuda-system"):
        assert time.monotonic() < deadline, playground.says("get -n vcuda-system")
        time.sleep(0.1)
    assert "restarts" not in next(line for line in playground.says("get -n vcuda-system").splitlines() if name in line)
