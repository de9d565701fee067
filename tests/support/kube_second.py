"""A second node of the test cluster on the same machine: its own containerd, kubelet and daemon in a mount namespace of their own.

kubelet 1.20 has /var/lib/kubelet/device-plugins compiled in, so its folder is bound there inside the namespace; cgroups hang below
one of their own, the node's address is another one on `lo`. What the namespace has mounted goes with its last process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import yaml
from kube_system import System, free_port
from kubelab import eventually

from vcuda.sim import Machine, SimCard

NAME = "kubelab-2"
ADDRESS = "10.97.0.2"
BRIDGE = "cni1"
CGROUP = "vcuda-second"
CGROUPS = Path("/sys/fs/cgroup")
GIB = 1024**3


class SecondNode:
    """Start with `up`; `down` takes away all of it, whatever `up` reached."""

    def __init__(self, system: System, folder: Path, cards: int) -> None:
        self.system = system
        self.cards = cards
        self.machine = Machine.create(folder / "machine", [SimCard(memory_bytes=40 * GIB)] * cards)
        self.manager_port = free_port()
        self._folder = folder
        self._lab = Path(system.lab.environment["KUBELAB_DIR"])
        self._bin = Path(system.lab.environment["KUBE_ASSETS"])
        self._socket = folder / "containerd.sock"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._anchor = 0

    def up(self) -> None:
        _run("ip", "address", "add", f"{ADDRESS}/32", "dev", "lo")
        self._namespace()
        self._cgroups()
        self._containerd()
        self._kubelet()
        self._manager()
        words = ("label", "node", NAME, "--overwrite", "nvidia-device-enable=enable")
        eventually(f"{NAME} has registered", self._registered, 60)
        self.system.lab.kubectl(*words)
        eventually(f"{NAME} offers its cards and is ready", self._offers, 60)

    def node(self) -> dict[str, Any]:
        return self.system.lab.get("node", NAME)

    def _registered(self) -> bool:
        self._check()
        return bool(self.system.lab.kubectl("get", "node", NAME, "--ignore-not-found"))

    def _offers(self) -> bool:
        self._check()
        node = self.node()
        ready = any(item["type"] == "Ready" and item["status"] == "True" for item in node["status"]["conditions"])
        tainted = bool(node["spec"].get("taints"))
        cores = node["status"]["allocatable"].get("tencent.com/vcuda-core")
        return ready and not tainted and cores == str(100 * self.cards)

    def _check(self) -> None:
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise AssertionError(f"{NAME}'s {name} ended {process.returncode}:\n{self.log(name)[-3000:]}")

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    # Its parts.

    def _namespace(self) -> None:
        """A process that sleeps in a mount namespace where kubelet's compiled-in paths are ours."""
        script = ["set -e"]
        for name, target in (
            ("kubelet", "/var/lib/kubelet"),
            ("pods", "/var/log/pods"),
            ("logs", "/var/log/containers"),
            ("cdi", "/var/run/cdi"),  # each node's daemon writes a file of the same name
        ):
            (self._folder / name).mkdir()
            script.append(
                f"mkdir -p {target}; mount --bind {self._folder / name} {target}; mount --make-rshared {target}"
            )
        script.append("echo ready; exec sleep 86400")
        process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", "\n".join(script)],
            stdout=subprocess.PIPE,
        )
        self._anchor = process.pid
        self._processes["namespace"] = process
        assert process.stdout is not None
        assert process.stdout.readline().strip() == b"ready"

    def _inside(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                ["nsenter", f"--mount=/proc/{self._anchor}/ns/mnt", "--", *command],
                env={**os.environ, **(environment or {})},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _cgroups(self) -> None:
        for controller in CGROUPS.iterdir():
            if not (controller / "cgroup.procs").exists() or controller.is_symlink():
                continue
            folder = controller / CGROUP
            folder.mkdir(exist_ok=True)
            for file in ("cpuset.cpus", "cpuset.mems"):
                if (folder / file).exists():
                    (folder / file).write_text((controller / file).read_text())

    def _containerd(self) -> None:
        cni = self._folder / "cni.d"
        cni.mkdir()
        first = (self._lab / "etc/cni/10-bridge.conflist").read_text()
        second = first.replace("cni0", BRIDGE).replace("10.244.0.0/16", "10.245.0.0/16")
        (cni / "10-bridge.conflist").write_text(second.replace(str(self._lab / "cni"), str(self._folder / "cni")))
        config = (self._lab / "etc/containerd.toml").read_text()
        for there, here in (
            (f"{self._lab}/run/containerd.sock", self._socket),
            (f"{self._lab}/run/containerd", self._folder / "state"),
            (f"{self._lab}/containerd-opt", self._folder / "opt"),
            (f"{self._lab}/containerd", self._folder / "containerd"),
            (f"{self._lab}/etc/cni", cni),
        ):
            config = config.replace(f'"{there}"', f'"{here}"')
        file = self._folder / "containerd.toml"
        file.write_text(config)
        path = {"PATH": f"{self._bin}:{os.environ['PATH']}"}
        self._inside("containerd", [str(self._bin / "containerd"), "-c", str(file)], path)
        eventually("the second containerd answers", lambda: self._ctr("version").returncode == 0, 30)
        for folder in (self._lab / "cache/images", self._lab / "images"):
            for archive in sorted(folder.glob("*.tar")):
                if "vcuda-gpu-manager" not in archive.name:
                    made = self._ctr("images", "import", str(archive))
                    assert made.returncode == 0, made.stderr

    def _ctr(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(self._bin / "ctr"), "-a", str(self._socket), "-n", "k8s.io", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    def _kubelet(self) -> None:
        config = yaml.safe_load((self._lab / "etc/kubelet.yaml").read_text())
        crt, key = self._certificate()
        config |= {
            "address": ADDRESS,
            "healthzPort": 10258,
            "cgroupRoot": f"/{CGROUP}",
            "cpuManagerPolicy": "none",
            "tlsCertFile": str(crt),
            "tlsPrivateKeyFile": str(key),
        }
        old_flags = []
        if self.system.lab.minor >= 27:
            config["containerRuntimeEndpoint"] = f"unix://{self._socket}"
        else:
            old_flags = [
                "--container-runtime=remote", f"--container-runtime-endpoint=unix://{self._socket}",
                "--pod-infra-container-image=docker.io/library/pause:local",
            ]  # fmt: skip
        file = self._folder / "kubelet.yaml"
        file.write_text(yaml.safe_dump(config))
        self._inside(
            "kubelet",
            [
                str(self._bin / "kubelet"), f"--config={file}", f"--kubeconfig={self._lab}/etc/admin.kubeconfig",
                "--root-dir=/var/lib/kubelet", f"--hostname-override={NAME}", f"--node-ip={ADDRESS}",
                f"--cert-dir={self._folder}/pki", *old_flags,
            ],
        )  # fmt: skip

    def _certificate(self) -> tuple[Path, Path]:
        """kubelet's, signed by the lab's CA, by which the API server checks it."""
        crt, key, request = (self._folder / f"kubelet.{end}" for end in ("crt", "key", "csr"))
        pki = self._lab / "pki"
        _run(
            "openssl",
            "req",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-subj",
            f"/CN={NAME}",
            "-keyout",
            str(key),
            "-out",
            str(request),
        )
        extensions = self._folder / "extensions"
        extensions.write_text(f"subjectAltName=IP:{ADDRESS},DNS:{NAME}\nextendedKeyUsage=serverAuth\n")
        _run(
            "openssl", "x509", "-req", "-in", str(request), "-CA", str(pki / "ca.crt"), "-CAkey", str(pki / "ca.key"),
            "-set_serial", str(time.time_ns()), "-days", "2", "-extfile", str(extensions), "-out", str(crt),
        )  # fmt: skip
        return crt, key

    def _manager(self) -> None:
        arguments = self.system.manager_arguments(
            node=NAME,
            kubelet=f"https://{ADDRESS}:10250",
            machine=self.machine,
            folder=self._folder,
            port=self.manager_port,
        )
        self._inside("manager", arguments, {"VCUDA_SIM_DIR": str(self.machine.directory)})

    # The end.

    def down(self) -> None:
        with contextlib.suppress(AssertionError):
            self.system.lab.kubectl(
                "delete",
                "pods",
                "-A",
                f"--field-selector=spec.nodeName={NAME}",
                "--grace-period=0",
                "--force",
            )
        for name in ("manager", "kubelet"):
            self._end(name)
        if "containerd" in self._processes:
            for task in self._ctr("tasks", "list", "-q").stdout.split():
                self._ctr("tasks", "delete", "--force", task)
            self._end("containerd")
        self._end("namespace")
        with contextlib.suppress(AssertionError):
            self.system.lab.kubectl("delete", "node", NAME, "--ignore-not-found")
        self._sweep()

    def _end(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)

    def _sweep(self) -> None:
        """Shims that outlived containerd, cgroups, the bridge and the address."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str(self._socket).encode() in (folder / "cmdline").read_bytes() and int(folder.name) != os.getpid():
                    os.kill(int(folder.name), signal.SIGKILL)
        for controller in CGROUPS.iterdir():
            for folder, _, _ in os.walk(controller / CGROUP, topdown=False):
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()
        for command in (
            ("ip", "link", "delete", BRIDGE),
            ("ip", "address", "delete", f"{ADDRESS}/32", "dev", "lo"),
        ):
            subprocess.run(command, capture_output=True, check=False, timeout=20)
        shutil.rmtree(self._folder, ignore_errors=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)
