"""The chart in the real cluster: images of one or two builds, install, upgrade, uninstall, and who serves."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from kube_system import STRATEGY, System, mounts_below
from kubelab import eventually

from deploy import manifests
from tests.support import image_files, image_oci

REPOSITORY = "vcuda-gpu-manager"
NAMESPACE = manifests.NAMESPACE
EXTENDER_NAME = f"gpu-scheduler-extender.{NAMESPACE}.svc"
SHIM = "libcuda.so.1"


def certificate(folder: Path, name: str = "tls", subject: str = "extender") -> tuple[Path, Path]:
    """A self-signed certificate for the extender's Service, or for who asks it, and its key."""
    files = folder / f"{name}.crt", folder / f"{name}.key"
    command = [
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={subject}",
        "-addext", f"subjectAltName=DNS:{EXTENDER_NAME}", "-out", str(files[0]), "-keyout", str(files[1]),
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    return files


def build_id(library: Path) -> str:
    """The linker's build id of a shared library, as hexadecimal digits."""
    told = subprocess.run(["readelf", "-n", str(library)], capture_output=True, text=True, check=True, timeout=20)
    found = re.search(r"Build ID: ([0-9a-f]+)", told.stdout)
    assert found, told.stdout
    return found[1]


def next_build(root: Path, version: str) -> None:
    """Make the image's folder another build: the shims get build ids of their own, the packages the version."""
    packages = next(root.rglob("site-packages/vcuda"))
    for shim in (packages / "lib/shim").glob("*.so.1"):
        note = shim.with_name("note")
        section = f".note.gnu.build-id={note}"
        subprocess.run(["objcopy", "--dump-section", section, str(shim)], check=True, timeout=20)
        content = bytearray(note.read_bytes())
        content[-20] ^= 0xFF  # of the 20 bytes of the id, the first one that people compare
        note.write_bytes(content)
        subprocess.run(["objcopy", "--update-section", section, str(shim)], check=True, timeout=20)
        note.unlink()
    source = packages / "__init__.py"
    source.write_text(re.sub(r'__version__ = "[^"]+"', f'__version__ = "{version}"', source.read_text()))


class Chart:
    """One release, applied with kubectl as Helm's engine rendered it, with the least rights that the chart gives."""

    def __init__(self, system: System, folder: Path) -> None:
        """Makes the image `test` and the TLS Secret; nothing is installed yet."""
        self.system = system
        self._folder = folder
        runtime = folder / "runtime"
        runtime.mkdir()
        image_files.runtime(runtime)
        self._runtime = image_oci.Layer.of(runtime, folder / "runtime.tar")
        shutil.rmtree(runtime)
        self._import("test", lambda _: None)
        crt, key = certificate(folder)
        self._client = certificate(folder, "client", "gpu-scheduler-extender-client")
        system.lab.kubectl("create", "namespace", NAMESPACE)
        secret = system.lab.kubectl(
            "create", "secret", "generic", "gpu-scheduler-extender-tls", "--type=kubernetes.io/tls",
            f"--from-file=tls.crt={crt}", f"--from-file=tls.key={key}", f"--from-file=ca.crt={self._client[0]}", "-n", NAMESPACE, "--dry-run=client", "-o", "yaml",
        )  # fmt: skip
        system.lab.kubectl("apply", "-f", "-", stdin=secret)
        self._values = self._needed(crt)
        self._text = self._test = ""

    def add_next_build(self, tag: str, version: str) -> None:
        """The image `tag`: the same programs with shims of another build id."""
        self._import(tag, lambda root: next_build(root, version))

    def _import(self, tag: str, change: Callable[[Path], None]) -> None:
        """Give the cluster the product's image, its files changed by `change`."""
        root, archive = self._folder / tag, self._folder / f"{tag}.tar"
        root.mkdir()
        image_files.product(root)
        change(root)
        layer = image_oci.Layer.of(root, self._folder / f"{tag}-layer.tar")
        image_oci.write(archive, f"docker.io/library/{REPOSITORY}:{tag}", [self._runtime, layer], ["gpu-manager"])
        command = [*shlex.split(self.system.lab.environment["CTR"]), "images", "import", str(archive)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        archive.unlink()

    def _needed(self, certificate_file: Path) -> dict[str, Any]:
        """What this cluster and a simulated machine need beside the defaults."""
        system = self.system
        machine = str(system.machine.directory)
        return {
            "image": {"repository": REPOSITORY, "tag": "test", "pullPolicy": "Never"},
            "manager": {
                "driver": {"hostPath": str(system.machine.root)},
                "stateDirectory": str(system.folder / "pods"),
                "kubelet": {"access": "proxy"},
                **({"deviceListStrategy": STRATEGY} if STRATEGY else {}),
                "extraArgs": ["--allocation-check-period=2", *system.simulation_arguments()],
                "extraEnv": [{"name": "VCUDA_SIM_DIR", "value": machine}],
                "extraVolumes": [{"name": "simulation", "hostPath": {"path": machine}}],
                "extraVolumeMounts": [{"name": "simulation", "mountPath": machine}],
            },
            "extender": {"podDisruptionBudget": {"apiVersion": system.lab.policy_api}},
            "scheduler": {
                "caFile": str(certificate_file),
                "clientCertFile": str(self._client[0]),
                "clientKeyFile": str(self._client[1]),
            },
        }

    def values(self, more: dict[str, Any] | None = None) -> dict[str, Any]:
        return merged(self._values, more or {})

    def install(self, more: dict[str, Any] | None = None) -> None:
        """Install, or upgrade to these values, and wait until the daemon's new pod serves."""
        self.apply(more)
        self.use_extender(self.leader())
        self.system.wait_offered()

    def apply(self, more: dict[str, Any] | None = None) -> None:
        """Give the cluster the chart's objects for these values, and wait for the pods of both programs."""
        chosen = self.values(more)
        rendered = manifests.render(chosen, NAMESPACE)
        self._test = rendered.pop("test-share.yaml")  # Helm applies it when it is asked to test
        self._text = "\n---\n".join(rendered[name] for name in rendered if name.endswith(".yaml"))
        self.system.lab.kubectl("apply", "-f", "-", stdin=self._text)
        rollout = ("rollout", "status", "-n", NAMESPACE, "--timeout=90s")
        self.system.lab.kubectl(*rollout, "daemonset/gpu-manager", wait=100)
        self.system.lab.kubectl(*rollout, "deployment/gpu-scheduler-extender", wait=100)
        self.pod_of("gpu-manager")

    def test(self) -> str:
        """What `helm test` does: the pod of the chart's test runs to its end and is deleted. Returns what it printed."""
        name = yaml.safe_load(self._test)["metadata"]["name"]
        self.system.lab.kubectl("apply", "-f", "-", stdin=self._test)
        try:
            phase = eventually(f"{name} ends", lambda: self._ended(name))
            told = self.system.lab.kubectl("logs", "-n", NAMESPACE, name)
            assert phase == "Succeeded", (phase, told)
            return told
        finally:
            self.system.lab.kubectl("delete", "pod", "-n", NAMESPACE, name, "--wait=false")

    def _ended(self, name: str) -> str:
        phase = self.system.lab.kubectl("get", "pod", "-n", NAMESPACE, name, "-o", "jsonpath={.status.phase}").strip()
        return phase if phase in ("Succeeded", "Failed") else ""

    def wait_free(self) -> None:
        """Until its daemon, if there is one, has let go of all pods that are gone: nobody does once it is gone, too."""
        if self._text:
            folder = self.system.folder / "pods"
            eventually("no region of the chart's daemon is left mounted", lambda: not mounts_below(folder), 60)

    def uninstall(self) -> None:
        """What `helm uninstall` deletes; pods with a share are nobody's business here."""
        if self._text:
            self.system.lab.kubectl(
                "delete", "--ignore-not-found", "--grace-period=0", "--force", "-f", "-", stdin=self._text, check=False
            )  # fmt: skip
        self._text = ""

    def use_extender(self, pod: dict[str, Any]) -> None:
        """Give kube-scheduler the chart's file for this pod: there is no kube-proxy here that would serve the Service."""
        chosen = self.values({"scheduler": {"extenderHost": pod["status"]["podIP"]}})
        configuration = yaml.safe_load(manifests.render(chosen, NAMESPACE)["scheduler-config.yaml"])
        file = self.system.folder / "scheduler.yaml"
        text = configuration["data"][f"{self.system.lab.scheduler_api}.yaml"]
        file.write_text(text.replace("/etc/kubernetes/scheduler.conf", "@KUBECONFIG@"))
        self.system.lab.call("restart-scheduler", SCHED_CONFIG=str(file), EXTENDER_YAML="")

    def leader(self) -> dict[str, Any]:
        return self.pod_of("gpu-scheduler-extender", ",tencent.com/vcuda-extender-role=leader")

    def pod_of(self, program: str, more: str = "") -> dict[str, Any]:
        """The one ready pod of `program`, of those that the selector's other terms leave."""

        def ready() -> dict[str, Any] | None:
            selector = f"app.kubernetes.io/name={program}{more}"
            found = self.system.lab.get("pods", "-n", NAMESPACE, "-l", selector)["items"]
            found = [item for item in found if not item["metadata"].get("deletionTimestamp")]
            if len(found) != 1:
                return None
            conditions = {item["type"]: item["status"] for item in found[0]["status"].get("conditions", ())}
            return found[0] if conditions.get("Ready") == "True" else None

        try:
            return eventually(f"a pod of {program} is ready", ready, 90)
        except AssertionError as error:
            words = ("-n", NAMESPACE, "-l", f"app.kubernetes.io/name={program}")
            described = self.system.lab.kubectl("describe", "pod", *words, check=False)
            logs = self.system.lab.kubectl("logs", *words, check=False)
            raise AssertionError(f"{error}\n{described[-5000:]}\n{logs[-3000:]}") from None

    def daemon(self, path: str, token: str | None = None) -> Any:
        """A JSON page of the daemon's pod, asked with the administrator's token."""
        address = self.pod_of("gpu-manager")["status"]["podIP"]
        if token is None:
            token = Path(self.system.lab.environment["KUBE_TOKEN_FILE"]).read_text().strip()
        request = urllib.request.Request(f"http://{address}:5678{path}", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=5) as answer:
            return json.loads(answer.read())

    def usage(self) -> dict[str, dict[str, Any]]:
        """The daemon's account by pod name."""
        return {entry["pod_name"]: entry for entry in self.daemon("/usage")["containers"]}

    def log(self, program: str) -> str:
        return self.system.lab.kubectl("logs", "-n", NAMESPACE, "-l", f"app.kubernetes.io/name={program}", "--tail=-1")


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """`more` over `base`, mapping by mapping, as Helm merges values."""
    result = dict(base)
    for key, value in more.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result
