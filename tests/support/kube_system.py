"""Daemon and extender as processes beside a real cluster, on a simulated machine; pods for its tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from kubelab import KubeLab, eventually

import vcuda
from vcuda.sim import Machine, SimCard

GIB = 1024**3


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class System:
    """What an operator would install, on two simulated cards of 8 GiB."""

    def __init__(self, lab: KubeLab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.native_folder = Path(vcuda.__file__).parent / "lib"
        self.machine = Machine.create(folder / "machine", [SimCard(memory_bytes=8 * GIB)] * 2)
        self.manager_port = free_port()
        self.extender_port = free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        self.start_manager()
        self.start_extender()
        extenders = self.folder / "extenders.yaml"
        extenders.write_text(
            f"""extenders:
- urlPrefix: http://127.0.0.1:{self.extender_port}/scheduler
  filterVerb: filter
  prioritizeVerb: prioritize
  bindVerb: bind
  weight: 1
  nodeCacheCapable: true
  httpTimeout: 10s
  managedResources:
  - {{name: tencent.com/vcuda-core, ignoredByScheduler: false}}
  - {{name: tencent.com/vcuda-memory, ignoredByScheduler: false}}
"""
        )
        self.lab.call("restart-scheduler", EXTENDER_YAML=str(extenders))
        node = self.lab.environment["NODE_NAME"]

        def allocatable() -> bool:
            return self.lab.get("node", node)["status"]["allocatable"].get("tencent.com/vcuda-core") == "200"

        eventually("the node offers 200 cores", allocatable, 60)

    def start_manager(self) -> None:
        env = self.lab.environment
        arguments = [
            "--hostname-override", env["NODE_NAME"],
            "--kubeconfig", env["KUBECONFIG"],
            "--device-plugin-path", f"{env['KUBELET_ROOT']}/device-plugins",
            "--pod-resources-socket", f"{env['KUBELET_ROOT']}/pod-resources/kubelet.sock",
            "--kubelet-url", "https://127.0.0.1:10250",
            "--kubelet-token-file", env["KUBE_TOKEN_FILE"],
            "--kubelet-ca-file", env["KUBE_CA"],
            "--driver-root", str(self.machine.root),
            "--driver-root-on-host", str(self.machine.root),
            "--virtual-manager-path", str(self.folder / "vm"),
            "--checkpoint-path", str(self.folder / "checkpoint"),
            "--allocation-check-period", "2",
            "--query-addr", "127.0.0.1",
            "--query-port", str(self.manager_port),
        ]  # fmt: skip
        for name, value in self.machine.container_environment().items():
            arguments += ["--container-env", f"{name}={value}"]
        for mount in self.machine.container_mounts():
            arguments += ["--container-mount", f"{mount.host_path}:{mount.container_path}"]
        self._spawn("manager", ["-m", "manager.main", *arguments])
        self._ready("manager", self.manager_port)

    def start_extender(self) -> None:
        arguments = ["--kubeconfig", self.lab.environment["KUBECONFIG"], "--bind-address", "127.0.0.1"]
        self._spawn("extender", ["-m", "scheduler_ext.main", *arguments, "--port", str(self.extender_port)])
        self._ready("extender", self.extender_port)

    def kill(self, name: str) -> None:
        """kill -9, as a crash would."""
        self._processes[name].kill()
        self._processes.pop(name).wait(10)

    def stop(self) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for name, process in self._processes.items():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)
                raise AssertionError(f"{name} did not end within 10 s of SIGTERM") from None
        self._processes.clear()
        # Regions outlive the daemon on purpose; the pods of this run are gone, so is the need for their mounts.
        for line in Path("/proc/self/mounts").read_text().splitlines():
            target = line.split()[1]
            if target.startswith(f"{self.folder}/"):
                subprocess.run(["umount", target], check=False, timeout=10)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def get(self, port: int, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            text: bytes = answer.read()
        return text.decode()

    def _spawn(self, name: str, arguments: list[str]) -> None:
        environment = {**os.environ, "VCUDA_SIM_DIR": str(self.machine.directory)}
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, *arguments], env=environment, stderr=log, stdout=log
            )

    def _ready(self, name: str, port: int) -> None:
        def answered() -> bool:
            if self._processes[name].poll() is not None:
                raise AssertionError(
                    f"{name} ended {self._processes[name].returncode}:\n{self.log(name)[-3000:]}"
                )
            try:
                self.get(port, "/readyz")
            except OSError:
                return False
            return True

        try:
            eventually(f"{name} is ready", answered, 30)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log(name)[-3000:]}") from None

    # Pods.

    def create(self, pod: dict[str, Any]) -> str:
        self.lab.apply(pod)
        return str(pod["metadata"]["name"])

    def pod(self, name: str) -> dict[str, Any]:
        return self.lab.get("pod", name)

    def wait_phase(self, name: str, *phases: str, seconds: float = 60) -> dict[str, Any]:
        last: dict[str, Any] = {}

        def reached() -> bool:
            nonlocal last
            last = self.pod(name)
            return last["status"].get("phase") in phases

        try:
            eventually(f"pod {name} is {' or '.join(phases)}", reached, seconds)
        except AssertionError as error:
            events = self.lab.kubectl("describe", "pod", name, check=False)
            raise AssertionError(f"{error}\n{events}\n{self.log('manager')[-3000:]}") from None
        return last

    def wait_log(self, name: str, text: str, seconds: float = 60) -> str:
        return eventually(
            f"pod {name} prints {text!r}",
            lambda: next(
                (line for line in self.lab.kubectl("logs", name, check=False).splitlines() if text in line),
                None,
            ),
            seconds,
        )

    def delete(self, *names: str) -> None:
        self.lab.kubectl(
            "delete", "pod", "--wait=true", "--grace-period=0", "--force", "--ignore-not-found", *names
        )


def share_pod(
    name: str,
    image: str,
    cores: int,
    blocks: int,
    *,
    command: list[str] | None = None,
    env: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    cpu: str | None = None,
) -> dict[str, Any]:
    """A pod with one container that asks for a share; with `cpu` it is Guaranteed (an integer: exclusive CPUs)."""
    limits = {"tencent.com/vcuda-core": str(cores), "tencent.com/vcuda-memory": str(blocks)}
    if cpu is not None:
        limits |= {"cpu": cpu, "memory": "64Mi"}
    container: dict[str, Any] = {
        "name": "main", "image": image, "imagePullPolicy": "Never", "resources": {"limits": limits},
        "env": [{"name": key, "value": value} for key, value in (env or {}).items()],
    }  # fmt: skip
    if command:
        container["command"] = command
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": annotations or {}},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0, "restartPolicy": "Never"},
    }
