"""The container runtime: creates, starts, stops and lists containers.

It outlives kubelet's restarts, as a real one does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from localcluster.runner import config as configs
from localcluster.runner import path_rewrite

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from localcluster.runner.supervisor import main; main()"
_START_SECONDS = 30.0


class RuntimeFailure(Exception):
    """A container can't be created or started; the message says which and why."""


@dataclass
class Container:
    """One container, started or over. `identity` is what kubelet knows it by: pod UID, name, attempt."""

    config: configs.ContainerConfig
    pod_uid: str
    name: str
    attempt: int
    process: subprocess.Popen[bytes]
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def id(self) -> str:
        return f"local://{self.pod_uid}/{self.name}/{self.attempt}"

    def state(self) -> configs.ContainerState:
        """The monitor's last report; a monitor that vanished without one counts as killed."""
        alive = self.process.poll() is None
        try:
            state = configs.ContainerState(**json.loads(self.config.state_path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            state = configs.ContainerState()
        if not alive and not state.over:
            state.phase, state.exit_code, state.signal = "exited", 137, 9
            state.error, state.finished_at = "the container's monitor ended unexpectedly", time.time()
        return state

    def tell(self, command: str) -> None:
        with self.lock:
            if self.process.stdin is None or self.process.poll() is not None:
                return
            try:
                self.process.stdin.write(f"{command}\n".encode())
                self.process.stdin.flush()
            except BrokenPipeError:
                return  # it ended first: that is what was wanted


class Runtime:
    """All containers of this machine below one directory."""

    def __init__(
        self,
        directory: Path,
        isolation: configs.Isolation,
        *,
        pid_namespace: bool = False,
        device_directory: str = "/dev",
    ) -> None:
        self._directory = directory
        self._device_directory = device_directory
        self.isolation = isolation
        self.pid_namespace = pid_namespace
        self._containers: dict[tuple[str, str, int], Container] = {}
        self._lock = threading.Lock()

    def containers(self, pod_uid: str | None = None) -> list[Container]:
        """Those of one pod, or all, oldest attempt first."""
        with self._lock:
            found = [c for c in self._containers.values() if pod_uid in (None, c.pod_uid)]
        return sorted(found, key=lambda container: container.attempt)

    def latest(self, pod_uid: str, name: str) -> Container | None:
        return next((c for c in reversed(self.containers(pod_uid)) if c.name == name), None)

    def directory_of(self, pod_uid: str, name: str, attempt: int) -> Path:
        return self._directory / pod_uid / name / str(attempt)

    def start(self, pod_uid: str, name: str, attempt: int, config: configs.ContainerConfig) -> Container:
        """Start a container and wait until its command runs (or could not). Raises RuntimeFailure."""
        directory = Path(config.directory)
        try:
            directory.mkdir(parents=True)
            effective = replace(config, isolation=self.isolation, pid_namespace=self.pid_namespace)
            if not self.isolation.real_mounts:
                effective = path_rewrite.host_paths(effective, self._device_directory)
            (directory / "config.json").write_text(effective.dump(), encoding="utf-8")
            monitor_log = (directory / "monitor.log").open("wb")
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)  # the same attempt is made again
            raise RuntimeFailure(f"container {name}: its directory can't be prepared: {error}") from error
        with monitor_log:
            process = subprocess.Popen(
                [sys.executable, "-S", "-E", "-c", _BOOT, str(_PACKAGE_ROOT), str(directory / "config.json")],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=monitor_log,
                start_new_session=True,
                env={"PATH": os.environ.get("PATH", os.defpath)},
            )
        container = Container(effective, pod_uid, name, attempt, process)
        with self._lock:
            self._containers[(pod_uid, name, attempt)] = container
        deadline = time.monotonic() + _START_SECONDS
        while (state := container.state()).phase == "created":
            if time.monotonic() > deadline:
                container.tell("KILL")
                raise RuntimeFailure(f"container {name} did not start within {_START_SECONDS:.0f} s")
            time.sleep(0.005)
        if state.phase == "failed" or not (state.pid or state.over):
            raise RuntimeFailure(state.error or f"container {name} could not be started")
        if state.error and state.phase == "exited" and not state.started_at:
            raise RuntimeFailure(f"{state.error}: {(directory / 'monitor.log').read_text(errors='replace')[-300:]}")
        return container

    def execute(
        self, container: Container, command: Sequence[str], streams: Sequence[int], terminal: bool
    ) -> subprocess.Popen[bytes]:
        """One more command in a running container, as `guest` does it. Raises RuntimeFailure if it does not run."""
        state = container.state()
        if state.phase != "running":
            raise RuntimeFailure(f"container {container.name} is not running")
        return start_guest(replace(container.config, command=tuple(command)), state.pid, streams, terminal=terminal)

    def stop(self, container: Container, grace_seconds: float) -> None:
        """SIGTERM, then after the grace period SIGKILL to the whole tree. Returns when nothing of it is left."""
        if grace_seconds > 0:
            container.tell("TERM")
            _wait(container, grace_seconds)
        if not container.state().over:
            container.tell("KILL")
            _wait(container, 10.0)
        if container.process.poll() is None:
            container.process.kill()
            container.process.wait(timeout=10)

    def remove(self, pod_uid: str) -> None:
        """Forget a pod's containers and delete their files. They must be over."""
        with self._lock:
            gone = [key for key in self._containers if key[0] == pod_uid]
            for key in gone:
                container = self._containers.pop(key)
                if container.process.stdin is not None:
                    container.process.stdin.close()
        shutil.rmtree(self._directory / pod_uid, ignore_errors=True)

    def close(self) -> None:
        """End every container at once, without grace."""
        for container in self.containers():
            container.tell("KILL")
        for container in self.containers():
            self.stop(container, 0)


def start_guest(
    config: configs.ContainerConfig, main: int, streams: Sequence[int], *, terminal: bool
) -> subprocess.Popen[bytes]:
    """Start `config.command` beside the process `main`. Its standard output tells how it goes, as lines of JSON."""
    if terminal:
        config = replace(config, environment={"TERM": "xterm", **config.environment})
    order = {"config": config.dump(), "main": main, "streams": list(streams), "terminal": terminal}
    return subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _BOOT.replace("supervisor", "guest"), str(_PACKAGE_ROOT), json.dumps(order)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=tuple(set(streams)),
        env={"PATH": os.environ.get("PATH", os.defpath)},
    )


def _wait(container: Container, seconds: float) -> None:
    try:
        container.process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return  # the caller goes on to SIGKILL
