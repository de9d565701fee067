"""The real one-node Kubernetes of the test tier: found, installed, started and stopped through its `kubelab` script."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")

CGROUP_V1_DEVICES = Path("/sys/fs/cgroup/devices")


class Unavailable(Exception):
    """The real Kubernetes can't run here; the message is the reason to show."""


def script() -> Path:
    """The `kubelab` script: $KUBELAB, else beside the checkout. Raises Unavailable."""
    given = os.environ.get("KUBELAB")
    path = Path(given) if given else ROOT.parent / "shared" / "kube" / "kubelab"
    if not path.is_file():
        # Relative to the repository: the report of the benchmarks keeps this sentence.
        shown = os.path.relpath(path, ROOT)
        raise Unavailable(f"no kubelab script at {shown}; set KUBELAB=path to run the real-Kubernetes tests")
    if os.geteuid() != 0:
        raise Unavailable("the real-Kubernetes tests start kubelet and containerd, which need root")
    if not CGROUP_V1_DEVICES.is_dir():
        raise Unavailable(f"the real-Kubernetes tests need cgroup v1: {CGROUP_V1_DEVICES} does not exist")
    return path


@dataclass
class KubeLab:
    """A running cluster. `environment` holds what `kubelab env` exported."""

    path: Path
    environment: dict[str, str]

    @classmethod
    def up(cls, **parameters: str) -> KubeLab:
        """Install where needed, start, return when the node is Ready. Raises Unavailable, CalledProcessError."""
        path = script()
        installed = subprocess.run([str(path), "install"], capture_output=True, text=True, timeout=300, check=False)
        if installed.returncode and "KUBE_PROGRAMS" in installed.stderr:
            raise Unavailable(installed.stderr.strip())
        if installed.returncode:
            raise AssertionError(f"{path} install ended {installed.returncode}:\n{installed.stdout}{installed.stderr}")
        _run([str(path), "down"], timeout=60)
        _run([str(path), "up"], timeout=120, env={**os.environ, **parameters})
        text = _run([str(path), "env"], timeout=20)
        exports = dict(word.split("=", 1) for line in text.splitlines() for word in shlex.split(line) if "=" in word)
        return cls(path, exports)

    @cached_property
    def minor(self) -> int:
        """Of the server's version: 20 for Kubernetes 1.20."""
        return int(json.loads(self.kubectl("version", "-o", "json"))["serverVersion"]["minor"].rstrip("+"))

    @property
    def scheduler_api(self) -> str:
        """The version of kubescheduler.config.k8s.io that this cluster's kube-scheduler reads."""
        return "v1" if self.minor >= 25 else "v1beta2" if self.minor >= 23 else "v1beta1"

    @property
    def policy_api(self) -> str:
        """The version of PodDisruptionBudgets that this cluster has."""
        return "policy/v1" if self.minor >= 21 else "policy/v1beta1"

    @property
    def reads_pods_only(self) -> bool:
        """Whether kubelet knows the right nodes/pods beside nodes/proxy (KubeletFineGrainedAuthz, on from 1.33)."""
        return self.minor >= 33

    def down(self) -> None:
        _run([str(self.path), "down"], timeout=120)

    def call(self, *words: str, **parameters: str) -> str:
        """Run one of the script's verbs, for instance `call("restart-kubelet")`."""
        return _run([str(self.path), *words], timeout=120, env={**os.environ, **parameters})

    def kubectl(self, *words: str, stdin: str | None = None, check: bool = True, wait: float = 60) -> str:
        command = [*shlex.split(self.environment["KUBECTL"]), *words]
        env = {**os.environ, "KUBECONFIG": self.environment["KUBECONFIG"]}
        return _run(command, timeout=wait, env=env, stdin=stdin, check=check)

    def delete_pod(self, namespace: str, name: str) -> None:
        """Until it is gone: kubelet looks at a pod again after a minute or more if it missed that its container ended."""
        self.kubectl("delete", "pod", "-n", namespace, name, "--wait=true", wait=240)

    def get(self, *words: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.kubectl("get", *words, "-o", "json"))
        return answer

    def apply(self, *objects: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin="\n".join("---\n" + json.dumps(item) for item in objects))

    def token(self, account: str, namespace: str) -> str:
        """A new token of a ServiceAccount: since Kubernetes 1.24 none lies in a Secret."""
        where = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        asked = json.dumps({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}})
        made = json.loads(self.kubectl("create", "--raw", where, "-f", "-", stdin=asked))
        return str(made["status"]["token"])

    def image(self, name: str, folder: Path, *command: str) -> None:
        self.call("image", name, str(folder), *command)


def eventually(what: str, probe: Callable[[], T | None], seconds: float = 60.0, every: float = 0.25) -> T:
    """Poll until `probe` gives something true; raise AssertionError that says what did not happen."""
    deadline = time.monotonic() + seconds
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what}")
        time.sleep(every)


def _run(
    command: list[str],
    *,
    timeout: float,
    env: dict[str, str] | None = None,
    stdin: str | None = None,
    check: bool = True,
) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, input=stdin, check=False)
    if check and result.returncode != 0:
        raise AssertionError(f"{shlex.join(command)} ended {result.returncode}:\n{result.stdout}{result.stderr}")
    return result.stdout
