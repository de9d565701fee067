"""Daemon and extender as processes beside a real cluster, on a simulated machine; pods for its tests."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from kubelab import KubeLab, eventually

import vcuda
from localcluster import certificates
from vcuda.sim import Machine, SimCard

GIB = 1024**3
# How the runtime is told of the cards beside DeviceSpecs, for the whole run: "cdi-cri", "cdi-annotations"; "": not at all.
STRATEGY = os.environ.get("KUBE_DEVICE_LIST_STRATEGY", "")
CARDS = 8
CORES = 100 * CARDS
BLOCKS = 320 * CARDS  # of 256 MiB


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def mounts_below(folder: Path) -> list[str]:
    """What is mounted below `folder`, innermost first."""
    targets = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [target for target in reversed(targets) if target.startswith(f"{folder}/")]


def share_mounts(folder: Path) -> None:
    """Make `folder` a shared mount, as everything is on a systemd host: mounts made in a pod then reach the host."""
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True, timeout=10)
    subprocess.run(["mount", "--make-shared", str(folder)], check=True, timeout=10)


def unmount(folder: Path) -> None:
    """Undo share_mounts. Regions outlive the daemon on purpose; once the pods are gone, their mounts can go, too."""
    for target in (*mounts_below(folder), str(folder)):
        subprocess.run(["umount", "--lazy", target], check=True, timeout=10)


class System:
    """What an operator would install, on eight simulated cards of 80 GiB."""

    def __init__(self, lab: KubeLab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.native_folder = Path(vcuda.__file__).parent / "lib"
        self.machine = Machine.create(folder / "machine", [SimCard(memory_bytes=80 * GIB)] * CARDS)
        self.manager_port = free_port()
        self.extender_port, self.extender_probe_port = free_port(), free_port()
        made = certificates.make(folder)
        assert made is not None, "openssl is needed, for the extender's certificate"
        self.certificate = made
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._manager_settings: tuple[str, ...] = ()

    def start(self, *more: str) -> None:
        """`more`: settings of the daemon beside the usual ones."""
        self.start_manager(*more)
        self.start_extender()
        extenders = self.folder / "extenders.yaml"
        extenders.write_text(
            f"""extenders:
- urlPrefix: https://127.0.0.1:{self.extender_port}/scheduler
  enableHTTPS: true
  tlsConfig: {json.dumps(self.extender_tls)}
  filterVerb: filter
  prioritizeVerb: prioritize
  preemptVerb: preempt
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
        self.wait_offered()

    @property
    def extender_tls(self) -> dict[str, str]:
        """kube-scheduler's tlsConfig: as in the chart both sides show a certificate."""
        certificate, key = str(self.certificate.certificate), str(self.certificate.key)
        return {"caFile": certificate, "certFile": certificate, "keyFile": key}

    def node(self) -> dict[str, Any]:
        return self.lab.get("node", self.lab.environment["NODE_NAME"])

    def wait_offered(self) -> None:
        """Until kubelet offers all of both resources: after each new registration it starts at 0."""

        def offered() -> bool:
            allocatable = self.node()["status"]["allocatable"]
            return (
                allocatable.get("tencent.com/vcuda-core") == str(CORES)
                and allocatable.get("tencent.com/vcuda-memory") == str(BLOCKS)
            )  # fmt: skip

        eventually(f"the node offers {CORES} cores and {BLOCKS} blocks", offered, 60)

    def start_manager(self, *more: str) -> None:
        """`more`: settings beside the usual ones, also of those that `restart_manager` starts."""
        self._spawn_manager("manager", self.manager_port, *more)

    def stand_by_manager(self, *more: str) -> int:
        """Start a second daemon beside the first, which it follows as `follow_manager` says; returns its port."""
        port = free_port()
        self._spawn_manager("next manager", port, *more)
        return port

    def _spawn_manager(self, name: str, port: int, *more: str) -> None:
        self._manager_settings = more
        words = self.manager_arguments(
            node=self.lab.environment["NODE_NAME"],
            kubelet="https://127.0.0.1:10250",
            machine=self.machine,
            folder=self.folder,
            port=port,
        )
        self._spawn(name, [*words[1:], *more])
        self._ready(name, port)

    def follow_manager(self, port: int) -> None:
        """The first daemon is told to end; the second, at `port`, is the manager from here on."""
        first = self._processes.pop("manager")
        first.send_signal(signal.SIGTERM)
        first.wait(20)
        self._processes["manager"] = self._processes.pop("next manager")
        self.manager_port = port

    def restart_manager(self) -> None:
        """After kill -9, with the same settings."""
        self.kill("manager")
        self.start_manager(*self._manager_settings)

    def manager_arguments(self, *, node: str, kubelet: str, machine: Machine, folder: Path, port: int) -> list[str]:
        """The command of a node's daemon that runs on the host."""
        env = self.lab.environment
        return [
            sys.executable, "-m", "manager.main",
            "--hostname-override", node,
            "--kubeconfig", env["KUBECONFIG"],
            "--device-plugin-path", f"{env['KUBELET_ROOT']}/device-plugins",
            "--pod-resources-socket", f"{env['KUBELET_ROOT']}/pod-resources/kubelet.sock",
            "--kubelet-url", kubelet,
            "--kubelet-token-file", env["KUBE_TOKEN_FILE"],
            "--kubelet-ca-file", env["KUBE_CA"],
            "--driver-root", str(machine.root),
            "--driver-root-on-host", str(machine.root),
            "--virtual-manager-path", str(folder / "vm"),
            "--checkpoint-path", str(folder / "checkpoint"),
            "--allocation-check-period", "2",
            "--query-addr", "127.0.0.1",
            "--query-port", str(port),
            *(["--device-list-strategy", STRATEGY] if STRATEGY else []),
            *self.simulation_arguments(machine),
        ]  # fmt: skip

    def simulation_arguments(self, machine: Machine | None = None) -> list[str]:
        """What the daemon is told only because the driver is simulated."""
        machine = machine or self.machine
        environment = machine.container_environment().items()
        return [f"--container-env={name}={value}" for name, value in environment] + [
            f"--container-mount={mount.host_path}:{mount.container_path}" for mount in machine.container_mounts()
        ]

    def start_extender(self, *more: str) -> None:
        """`more`: settings beside the usual ones."""
        arguments = ["--kubeconfig", self.lab.environment["KUBECONFIG"], "--bind-address", "127.0.0.1"]
        arguments += ["--port", str(self.extender_port), "--probe-port", str(self.extender_probe_port)]
        tls = self.extender_tls
        arguments += [
            "--tls-cert",
            tls["certFile"],
            "--tls-key",
            tls["keyFile"],
            "--client-ca",
            tls["caFile"],
        ]
        self._spawn("extender", ["-m", "scheduler_ext.main", *arguments, *more])
        self._ready("extender", self.extender_probe_port)

    def start_webhook(self) -> str:
        """The admission webhook on this host; returns its address without a path."""
        port, probes = free_port(), free_port()
        tls = self.extender_tls
        arguments = ["webhook", "--bind-address", "127.0.0.1", "--port", str(port), "--probe-port", str(probes)]
        arguments += ["--tls-cert", tls["certFile"], "--tls-key", tls["keyFile"]]
        self._spawn("webhook", ["-m", "scheduler_ext.main", *arguments])
        self._ready("webhook", probes)
        return f"https://127.0.0.1:{port}"

    def kill(self, name: str) -> None:
        """kill -9, as a crash would."""
        self._processes[name].kill()
        self._processes.pop(name).wait(10)

    def stop(self) -> None:
        """End both; raises AssertionError, when all have ended, for one that had to be killed."""
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        slow = []
        for name, process in self._processes.items():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)
                slow.append(name)
        self._processes.clear()
        assert not slow, f"{', '.join(slow)} did not end within 10 s of SIGTERM"

    def pid(self, name: str) -> int:
        return self._processes[name].pid

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
                raise AssertionError(f"{name} ended {self._processes[name].returncode}:\n{self.log(name)[-3000:]}")
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
        self.create_all([pod])
        return str(pod["metadata"]["name"])

    def create_all(self, pods: list[dict[str, Any]]) -> None:
        """All by one command, so that they come to the scheduler as a burst."""
        if not pods:
            return
        self.lab.kubectl("create", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": pods}))

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

    def totals(self, selector: str, count: int, seconds: float) -> dict[str, int]:
        """Memory in bytes that the client in each pod of `selector` sees as its card's, once all have said so."""
        lines: dict[str, int] = {}

        def all_said() -> bool:
            text = self.lab.kubectl(
                "logs", "-l", selector, "--prefix", "--tail=-1", "--max-log-requests=250", check=False
            )
            for name, total in re.findall(r"^\[pod/([^/]+)/[^]]*\].* total=(\d+) ", text, re.MULTILINE):
                lines[name] = int(total)
            return len(lines) >= count

        try:
            eventually(f"{count} pods of {selector} say what they see", all_said, seconds, every=max(1.0, count / 40))
        except AssertionError as error:
            pods = self.lab.kubectl("get", "pods", "-l", selector, "-o", "wide", check=False)
            raise AssertionError(f"{error}; {len(lines)} did\n{pods[-4000:]}\n{self.log('manager')[-3000:]}") from None
        return lines

    def phases(self, selector: str) -> dict[str, str]:
        items = self.lab.get("pods", "-l", selector)["items"]
        return {item["metadata"]["name"]: item["status"].get("phase", "") for item in items}

    def settle(self, made: dict[str, dict[str, Any]], selector: str, seconds: float) -> Counter[str]:
        """Until every pod runs; those that were refused at admission are made again, as their controller would.

        Returns how often and why; a refusal that nobody explained fails.
        """
        refused: Counter[str] = Counter()
        deadline = time.monotonic() + seconds
        while True:
            phases = self.phases(selector)
            failed = [name for name, phase in phases.items() if phase == "Failed"]
            if len(phases) == len(made) and set(phases.values()) == {"Running"}:
                return refused
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"not within {seconds:.0f} s: all pods run; {Counter(phases.values())}, refused {refused}\n"
                    f"{self.log('manager')[-3000:]}"
                )
            for name in failed:
                refused[self.refusal(name)] += 1
            ended = [name for name, phase in phases.items() if phase == "Succeeded"]
            # kubelet 1.20 that is killed between a container's creation and its start takes it for one that has ended well.
            lost = [name for name in ended if not self.has_started(name)]
            refused["kubelet: restarted before the start"] += len(lost)
            refused += Counter()  # without the zeros
            self.delete(*failed, *lost)
            self.create_all([made[name] for name in (*failed, *lost)])
            time.sleep(1.0)

    def has_started(self, name: str) -> bool:
        """Whether any container of the pod has run."""
        found = self.lab.get("pod", name)["status"].get("containerStatuses", [])
        states = [state for status in found for state in status["state"].values()]
        return any(state.get("startedAt") for state in states)

    def refusal(self, name: str) -> str:
        """The stable code in what `kubectl describe pod` shows of a refused pod: ours, or kubelet's own words."""
        told = eventually(f"{name}'s refusal is told", lambda: self.explained(name), 30)
        ours = re.search(r"desc = (\w+): |from gpu-manager|Warning +(\w+) +\S+ +gpu-manager", told)
        if ours:
            return next(word for word in (*ours.groups(), "gpu-manager") if word)
        return "kubelet: " + (
            "no device plugin"
            if "unregistered device" in told or "Insufficient" in told or "npredicted" in told
            else "other"
        )

    def explained(self, name: str) -> str:
        """`kubectl describe pod`, once it holds a warning."""
        told = self.lab.kubectl("describe", "pod", name, check=False)
        return told if "Warning" in told or "Message:" in told else ""

    def bookings(self) -> dict[str, dict[str, Any]]:
        """The daemon's account by pod name."""
        usage = json.loads(self.get(self.manager_port, "/usage"))
        return {entry["pod_name"]: entry for entry in usage["containers"]}

    def wait_free(self, seconds: float = 60) -> None:
        """Until daemon and extender have forgotten all pods and no region is left."""
        free = f"vcuda_extender_free_cores {CORES}.0"
        eventually("the daemon has no bookings", lambda: not self.bookings(), seconds)
        eventually("no region is left mounted", lambda: not mounts_below(self.folder), seconds)
        eventually(
            f"the extender says {free}",
            lambda: free in self.get(self.extender_probe_port, "/metrics"),
            seconds,
        )

    def delete(self, *names: str) -> None:
        if names:
            self.lab.kubectl(
                "delete", "pod", "--wait=true", "--grace-period=0", "--force", "--ignore-not-found", *names
            )

    def delete_all(self) -> None:
        """Every pod of the namespace, by one request: kubectl would send 5 a second."""
        self.lab.kubectl("delete", "--raw", "/api/v1/namespaces/default/pods?gracePeriodSeconds=0")


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
    user: int | None = None,
    labels: dict[str, str] | None = None,
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
    if user is not None:
        container["securityContext"] = {"runAsUser": user, "runAsGroup": user}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": annotations or {}, "labels": labels or {}},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0, "restartPolicy": "Never"},
    }
