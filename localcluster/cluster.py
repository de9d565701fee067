"""All parts on one machine: simulated cards, stand-ins, the real daemon and extender; started, watched, cleaned up."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from localcluster import api as apis
from localcluster import certificates
from localcluster.apiserver.faults import Fault, Hook, Request
from localcluster.apiserver.server import Server
from localcluster.daemon import Daemon
from localcluster.kubelet.kubelet import Kubelet, PodName, Settings
from localcluster.runner import linux, probe
from localcluster.runner.config import Isolation
from localcluster.runner.runtime import Runtime
from localcluster.scheduler import Scheduler
from localcluster.supervision import NAMESPACE, Supervised
from manager.config.settings import ENV_PREFIX
from vcuda import sim
from vcuda.spec import names, units

_READY_SECONDS = 40.0
_PREFIX, _LOCK = "vcuda-local-", "lock"
_REPOSITORY = Path(__file__).resolve().parents[1]


class ClusterFailure(Exception):
    """The deployment can't start; the message says which part and why."""


@dataclass(frozen=True)
class ClusterOptions:
    """What a user may choose. `card_bytes` is the memory of each simulated card.

    `disk_bytes` is the size of a small file system for what the node keeps, where the machine lets us mount one.
    `claims`: they get the cards, not containers that ask for vcuda-core.
    """

    cards: int = 2
    card_bytes: int = 8 * 2**30
    card_model: str = "Tesla T4"
    node_name: str = "local"
    isolation: Isolation | None = None
    pid_namespace: bool = False
    working_directory: Path = _REPOSITORY / "examples"
    port: int = 0
    claims: bool = False
    nvidia_smi: Path | None = None
    disk_bytes: int | None = None


def free_port() -> int:
    """A port that is free now.

    Between this and its use another program may take it: then the start fails and says so.
    """
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        port: int = probe_socket.getsockname()[1]
        return port


def _remove(directory: Path) -> None:
    linux.unmount_below(directory)  # the daemon's small file systems for usage files
    shutil.rmtree(directory, ignore_errors=True)


def remove_leftovers() -> None:
    """Remove the folders of our own deployments that were killed: nobody holds their lock any more."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        lock = directory / _LOCK
        try:
            if directory.is_symlink() or directory.stat().st_uid != os.geteuid():
                continue
            with lock.open("r") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(directory)
        except OSError:
            continue  # in use, just being made, or just being removed by another


class Cluster:
    """Use as a context manager, or call `start` and `stop`. Everything lives below one new temporary directory."""

    def __init__(self, options: ClusterOptions | None = None, report: Callable[[str], None] = lambda _: None) -> None:
        self.options = options or ClusterOptions()
        self._report = report
        remove_leftovers()
        # Short: a socket's path may have 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = (self.directory / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.directory.chmod(0o755)  # what containers mount lies below; secrets have their own modes
        self._token = secrets.token_urlsafe(24)
        self._stops: list[Callable[[], None]] = []
        self.node_directory = self.directory / "node"  # what gpu-manager and pods write
        self.disk_bytes: int | None = None
        self.programs: dict[str, Supervised] = {}
        self._mirrored: dict[PodName, Supervised] = {}
        self.faults: dict[str, Hook] = {}
        self.machine: sim.Machine
        self.server: Server
        self.api: apis.Api
        self.runtime: Runtime
        self.kubelet: Kubelet
        self.manager: Daemon
        self.extender: Daemon
        self._kubelet_settings: Settings

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def kubeconfig(self) -> Path:
        return self.directory / "kubeconfig"

    # --- start and stop ---
    def start(self) -> None:
        """Start everything and wait until the node offers its cards.

        Raises ClusterFailure, DaemonFailure, …; then stopped.
        """
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        options = self.options
        finding = probe.best(options.isolation)
        self._report(finding.describe())
        cards = [sim.SimCard(model=options.card_model, memory_bytes=options.card_bytes) for _ in range(options.cards)]
        self.machine = sim.Machine.create(self.directory / "machine", cards, nvidia_smi=options.nvidia_smi)
        self._make_disk()
        server = self.server = Server(
            self.directory,
            port=options.port,
            certificate=certificates.make(self.directory),
            kubelet_token=self._token,
        )
        server.hook = self._fault
        server.start()
        self._stops.append(server.stop)
        self.api = apis.Api(server.kubeconfig)
        self.runtime = Runtime(
            self.node_directory / "pods", finding.isolation, pid_namespace=options.pid_namespace,
            device_directory=f"{sim.machine.CONTAINER_DIRECTORY}/root/dev",
        )  # fmt: skip
        self._stops.append(self.runtime.close)
        token_file = self.directory / "kubelet-token"
        token_file.touch(0o600)
        token_file.write_text(self._token, encoding="ascii")
        self._kubelet_settings = Settings(
            node_name=options.node_name,
            device_plugins=self.directory / "device-plugins",
            pod_resources_socket=self.directory / "pod-resources" / "kubelet.sock",
            token=self._token,
            working_directory=options.working_directory,
            labels={names.NODE_SELECTOR_LABEL: names.NODE_SELECTOR_VALUE},
            plugins_registry=self.directory / "registry",
            cdi=self.directory / "cdi",
        )
        self.kubelet = Kubelet(self._kubelet_settings, self.api, self.runtime, self._mirrored)
        self.kubelet.start()
        self._stops.append(self._stop_kubelet)
        self._start_daemons(token_file)
        scheduler = Scheduler(self.api, f"{self.extender_url}/scheduler")
        scheduler.start()
        self._stops.append(scheduler.stop)
        self.wait_resources()

    def _start_daemons(self, token_file: Path) -> None:
        environment = {"PYTHONPATH": os.pathsep.join([str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])}
        extender_port, manager_port = free_port(), free_port()
        self.extender_url = f"http://127.0.0.1:{extender_port}"
        self.manager_url = f"http://127.0.0.1:{manager_port}"
        self.extender = Daemon(
            "gpu-scheduler-extender", "scheduler_ext.main",
            ["--kubeconfig", str(self.kubeconfig), "--bind-address", "127.0.0.1", "--port", str(extender_port)],
            self.directory / "extender.log", environment,
        )  # fmt: skip
        self.manager = Daemon(
            "gpu-manager", "manager.main", self._manager_arguments(manager_port, token_file),
            self.directory / "manager.log", {
                **environment, **self.machine.environment(),
                # A variable, so that `gpu-manager doctor` beside it finds the daemon and its flags.
                f"{ENV_PREFIX}CHECKPOINT_PATH": str(self.node_directory / "checkpoint"),
            },
        )  # fmt: skip
        for daemon in (self.extender, self.manager):
            daemon.start()
            self._stops.append(daemon.stop)
        self.manager.wait_ready(f"{self.manager_url}/healthz", _READY_SECONDS)
        self.extender.wait_ready(f"{self.extender_url}/readyz", _READY_SECONDS)

    def _manager_arguments(self, port: int, token_file: Path) -> Sequence[str]:
        arguments = [
            "--kubeconfig", str(self.kubeconfig),
            "--hostname-override", self.options.node_name,
            "--device-plugin-path", str(self._kubelet_settings.device_plugins),
            "--pod-resources-socket", str(self._kubelet_settings.pod_resources_socket),
            "--kubelet-url", self.kubelet.url,
            "--kubelet-token-file", str(token_file),
            "--driver-root", str(self.machine.root),
            "--virtual-manager-path", str(self.node_directory / "vm"),
            "--sample-period", "0.2",  # the demonstration's table is compared with what is true now
            "--query-addr", "127.0.0.1", "--query-port", str(port),
        ]  # fmt: skip
        if self.options.claims:
            arguments += [
                "--protocols", "dra", "--plugins-path", str(self.directory / "drivers"),
                "--plugins-registry-path", str(self._kubelet_settings.plugins_registry),
                "--cdi-root", str(self._kubelet_settings.cdi),
            ]  # fmt: skip
        for name, value in self.machine.container_environment().items():
            arguments += ["--container-env", f"{name}={value}"]
        for mount in self.machine.container_mounts():
            mode = ":ro" if mount.read_only else ""
            arguments += ["--container-mount", f"{mount.host_path}:{mount.container_path}{mode}"]
        return arguments

    def stop(self) -> None:
        """Stop all by PID in the opposite order, and remove the temporary directory. May be called twice."""
        while self._stops:
            self._stops.pop()()
        _remove(self.directory)
        self._lock.close()

    def _stop_kubelet(self) -> None:
        self.kubelet.stop()

    def restart_kubelet(self) -> None:
        """As a real kubelet restart: sockets wiped, plugins have to register again, containers go on."""
        self.kubelet.stop()
        self.start_kubelet()

    def start_kubelet(self) -> None:
        """A new one after `kubelet.stop`, at the same port."""
        port = self.kubelet.port
        settings = Settings(**{**self._kubelet_settings.__dict__, "http_port": port})
        self.kubelet = Kubelet(settings, self.api, self.runtime, self._mirrored)
        self.kubelet.start()

    def _make_disk(self) -> None:
        self.node_directory.mkdir()
        size = self.options.disk_bytes
        if size is not None:
            with contextlib.suppress(PermissionError):
                linux.mount("tmpfs", str(self.node_directory), "tmpfs", 0, f"size={size},mode=755")
                self.disk_bytes = size

    def _fault(self, request: Request) -> Fault | None:
        return next(filter(None, (hook(request) for hook in list(self.faults.values()))), None)

    def supervise(self) -> None:
        """Start daemons again that have ended, as their controllers do. To be called often, by the starting thread."""
        if not self.programs:
            node = self.options.node_name
            for daemon, port in ((self.manager, "metrics"), (self.extender, "http")):
                number = urllib.parse.urlsplit(self.manager_url if daemon is self.manager else self.extender_url).port
                made = Supervised(daemon, self.api, node, (port, number or 0), self._report)
                self.programs[daemon.name] = self._mirrored[(NAMESPACE, made.name)] = made
        for program in self.programs.values():
            program.step()

    def check(self) -> None:
        """Raises DaemonFailure if one of our programs has died."""
        self.manager.check()
        self.extender.check()

    def wait_resources(self, seconds: float = _READY_SECONDS) -> None:
        """Wait until the node offers all cards' cores and memory blocks, or the cards. Raises ClusterFailure."""
        wanted = (
            {}
            if self.options.claims
            else {
                names.Names().core: self.options.cards * units.CORES_PER_CARD,
                names.Names().memory: self.options.cards * units.blocks_on_card(self.options.card_bytes),
            }
        )
        deadline = time.monotonic() + seconds
        offered: dict[str, str] = {}
        while time.monotonic() < deadline:
            self.check()
            node = self.api.call("GET", f"/api/v1/nodes/{self.options.node_name}")
            offered = node["status"].get("allocatable", {})
            annotated = names.Names().inventory in (node["metadata"].get("annotations") or {})
            if annotated and all(offered.get(name) == str(count) for name, count in wanted.items()):
                return
            time.sleep(0.05)
        raise ClusterFailure(
            f"the node offers {offered} after {seconds:.0f} s, expected {wanted} and an inventory annotation; "
            f"the last lines of gpu-manager:\n{self.manager.tail()}"
        )
