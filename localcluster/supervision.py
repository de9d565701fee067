"""Our daemons as their DaemonSet and Deployment run them: begun again when they end, each shown by a pod."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from localcluster import api as apis
from localcluster.daemon import Daemon
from localcluster.kubelet import kubelet, status
from localcluster.runner.config import ContainerConfig, ContainerState, Isolation
from localcluster.runner.runtime import start_guest

JsonObject = dict[str, Any]
NAMESPACE = "vcuda-system"
_LOOK_SECONDS = 1.0
_log = logging.getLogger(__name__)


class _Run:
    """One run of a daemon, as an attempt of its container."""

    def __init__(self, daemon: Daemon, attempt: int) -> None:
        self.attempt = attempt
        self._daemon = daemon
        self._over: ContainerState | None = None

    @property
    def id(self) -> str:
        return f"local://{self._daemon.name}/{self.attempt}"

    def state(self) -> ContainerState:
        if self._over is None:
            code, started = self._daemon.ended, self._daemon.started_at
            if code is None:
                return ContainerState("running", self._daemon.pid, started)
            number = max(0, -code)
            self._over = ContainerState("exited", 0, started, time.time(), 128 + number if number else code, number)
        return self._over


class Supervised:
    """A daemon and the pod NAMESPACE/`name` that shows it. All but `hold` belongs to the thread that starts the daemon.

    `port` is where it serves, for who asks through the API server. What happens is told to `report`.
    """

    def __init__(
        self, daemon: Daemon, api: apis.Api, node: str, port: tuple[str, int], report: Callable[[str], None]
    ) -> None:
        self.daemon = daemon
        self.name = f"{daemon.name}-{node}"
        self.hold = False  # set by anybody: it is ended, with its pod, and stays away until this is False again
        self._api, self._report = api, report
        port_name, number = port
        self._pod: JsonObject = {
            "metadata": {
                "name": self.name, "namespace": NAMESPACE, "annotations": {kubelet.MIRROR: "local"},
                "labels": {"app.kubernetes.io/name": daemon.name},
            },
            "spec": {"nodeName": node, "containers": [{
                "name": daemon.name, "image": daemon.name, "ports": [{"name": port_name, "containerPort": number}],
            }]},
        }  # fmt: skip
        self._present = False
        self._look_at = 0.0
        self._written: JsonObject = {}
        self._begun(0)

    def log(self, previous: bool) -> Path:
        return self.daemon.previous_log if previous else self.daemon.log

    def execute(self, command: Sequence[str], streams: Sequence[int], terminal: bool) -> subprocess.Popen[bytes]:
        """Beside the daemon, in its environment; our programs are found."""
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        config = ContainerConfig(
            tuple(command), {**self.daemon.environment, "PATH": path}, str(Path.cwd()), "/", Isolation.HOST_PATHS
        )
        return start_guest(config, self.daemon.pid, streams, terminal=terminal)

    def step(self) -> None:
        """Do what is due: to be called often."""
        record = self._record
        state = record.state()
        if self.hold:
            if self.daemon.running or self._present:
                self.daemon.stop()
                self._remove()
            return
        if state is None or self._deleted():
            self.daemon.stop()
            self._remove()
            self._begin(0)
        elif state.over and not record.waiting_reason:
            how = f"by signal {state.signal}" if state.signal else f"with status {state.exit_code}"
            delay = record.crashed(state)
            self._report(
                f"{self.daemon.name} ended {how} and starts again in {delay:.0f} s; what it wrote: "
                f"kubectl -n {NAMESPACE} logs {self.name} (then with --previous)"
            )
        elif record.waiting_reason and time.monotonic() >= record.retry_at:
            self._begin(record.attempts)
        self._write()

    def _begin(self, attempt: int) -> None:
        self.daemon.start()
        self._begun(attempt)

    def _begun(self, attempt: int) -> None:
        kept = self._record if attempt else None
        self._record: status.ContainerRecord[_Run] = status.ContainerRecord(
            self._pod["spec"]["containers"][0], _Run(self.daemon, attempt)
        )
        if kept is not None:
            self._record.last, self._record.failures = kept.last, kept.failures

    def _deleted(self) -> bool:
        """Whether somebody has deleted its pod, which is then made anew, with the daemon."""
        if not self._present or time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + _LOOK_SECONDS
        try:
            return "deletionTimestamp" in self._api.call("GET", apis.pod_path(self._pod))["metadata"]
        except apis.ApiFailure as error:
            return error.code == 404

    def _remove(self) -> None:
        try:
            self._api.call("DELETE", apis.pod_path(self._pod), {"gracePeriodSeconds": 0})
        except apis.ApiFailure as error:
            if error.code != 404:
                return
        self._present, self._written = False, {}
        self._record.container = None

    def _write(self) -> None:
        record = self._record
        try:
            if not self._present:
                for path, body in (
                    ("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}}),
                    (f"/api/v1/namespaces/{NAMESPACE}/pods", self._pod),
                ):
                    try:
                        self._api.call("POST", path, body)
                    except apis.ApiFailure as error:
                        if error.code != 409:
                            raise
                self._present = True
            wanted = status.pod_status(
                self._written, [record], [], initialized=True, phase="Running", started_at=self.daemon.started_at,
                now=time.time(),
            )  # fmt: skip
            if wanted != self._written.get("status"):
                self._api.patch(apis.pod_path(self._pod, "status"), {"status": wanted})
                self._written = {"status": wanted}
        except apis.ApiFailure as error:
            _log.info("the pod %s is not shown now: %s", self.name, error)
