"""From a pod's container to what the runner needs: command, environment, volumes, devices."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localcluster.kubelet.devices import RunOptions
from localcluster.runner.config import ContainerConfig, Device, Isolation, Mount

JsonObject = dict[str, Any]
_REFERENCE = re.compile(r"\$(\$|\((?P<name>[A-Za-z_][\w.-]*)\))")
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
# What real clusters do with these and a process on this machine can't: they are named in an event, not dropped
# silently.
_WITHOUT_EFFECT = (
    "livenessProbe",
    "readinessProbe",
    "startupProbe",
    "lifecycle",
    "securityContext",
    "envFrom",
)


class ConfigFailure(Exception):
    """A container can't be configured: becomes CreateContainerConfigError."""


@dataclass(frozen=True)
class Defaults:
    """What an image would bring: where commands start and which environment they have."""

    working_directory: str
    environment: dict[str, str]
    visible: tuple[str, ...]


def image_defaults(working_directory: Path) -> Defaults:
    """The host's root file system serves as the image; `python` is the interpreter that runs the deployment."""
    path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    environment = {
        "PATH": path,
        "HOME": "/tmp",
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        "PYTHONUNBUFFERED": "1",
    }
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    visible = {sys.prefix, sys.base_prefix, str(_PACKAGE_ROOT), str(working_directory)}
    return Defaults(str(working_directory), environment, tuple(sorted(visible)))


def fields_without_effect(pod: JsonObject) -> list[str]:
    """The fields of a pod that this deployment does not honour, for an event."""
    containers = [*(pod["spec"].get("initContainers") or []), *pod["spec"]["containers"]]
    return [field for field in _WITHOUT_EFFECT if any(container.get(field) for container in containers)]


def expand(text: str, environment: dict[str, str]) -> str:
    """Kubernetes' $(NAME) expansion: unknown names stay as they are, $$ is a dollar."""

    def replace(match: re.Match[str]) -> str:
        return "$" if match[1] == "$" else environment.get(match["name"], match[0])

    return _REFERENCE.sub(replace, text)


def _field(pod: JsonObject, path: str) -> str:
    keyed = re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path)
    if keyed:
        return str((pod["metadata"].get(keyed[1]) or {}).get(keyed[2], ""))
    known = {
        "metadata.name": pod["metadata"]["name"], "metadata.namespace": pod["metadata"]["namespace"],
        "metadata.uid": pod["metadata"]["uid"], "spec.nodeName": pod["spec"].get("nodeName", ""),
        "spec.serviceAccountName": pod["spec"].get("serviceAccountName", ""),
        "status.podIP": "127.0.0.1", "status.hostIP": "127.0.0.1",
    }  # fmt: skip
    if path not in known:
        raise ConfigFailure(f"fieldRef {path!r} is not supported here")
    return str(known[path])


def _environment(pod: JsonObject, container: JsonObject, base: dict[str, str]) -> dict[str, str]:
    """The pod's own values win over the plugin's, and those over the image's; as kubelet and the runtimes do it."""
    environment = dict(base)
    for variable in container.get("env") or []:
        source = variable.get("valueFrom")
        if source is None:
            environment[variable["name"]] = expand(variable.get("value", ""), environment)
        elif "fieldRef" in source:
            environment[variable["name"]] = _field(pod, source["fieldRef"].get("fieldPath", ""))
        else:
            raise ConfigFailure(f"variable {variable['name']}: only value and fieldRef are supported here")
    return environment


def _volumes(pod: JsonObject, container: JsonObject, pod_directory: Path) -> list[Mount]:
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes") or []}
    mounts = []
    for mount in container.get("volumeMounts") or []:
        volume = volumes[mount["name"]]
        if "hostPath" in volume:
            source = Path(volume["hostPath"]["path"])
            if not source.exists():
                raise ConfigFailure(f"volume {mount['name']}: host path {source} does not exist")
        elif "emptyDir" in volume:
            source = pod_directory / "volumes" / mount["name"]
            source.mkdir(parents=True, exist_ok=True)
        else:
            raise ConfigFailure(f"volume {mount['name']}: only hostPath and emptyDir are supported here")
        mounts.append(Mount(str(source), mount["mountPath"], bool(mount.get("readOnly"))))
    return mounts


def configure(
    pod: JsonObject, container: JsonObject, options: RunOptions, defaults: Defaults, directory: Path
) -> ContainerConfig:
    """What to run. Raises ConfigFailure that names what this deployment can't do."""
    environment = _environment(
        pod, container, {**defaults.environment, **options.environment, "HOSTNAME": pod["metadata"]["name"]}
    )
    environment.update(options.overriding)
    words = [*(container.get("command") or []), *(container.get("args") or [])]
    if words[:1] in (
        ["python"],
        ["python3"],
    ):  # its folder, first in PATH, may hold it under another name only
        words[0] = sys.executable
    if not container.get("command"):
        raise ConfigFailure(f"image {container.get('image')!r} is only a label here: give the container a command")
    mounts = [Mount(host, path, read_only) for path, (host, read_only) in options.mounts.items()]
    mounts += _volumes(pod, container, directory.parent.parent)
    missing = [mount.host_path for mount in mounts if not Path(mount.host_path).exists()]
    missing += [host for host in options.devices.values() if not Path(host).exists()]
    if missing:
        raise ConfigFailure(f"these host paths do not exist: {', '.join(sorted(missing))}")
    return ContainerConfig(
        command=tuple(expand(word, environment) for word in words),
        environment=environment,
        working_directory=container.get("workingDir") or defaults.working_directory,
        directory=str(directory),
        isolation=Isolation.HOST_PATHS,  # the runtime puts in what it has found to work
        mounts=tuple(mounts),
        devices=tuple(Device(host, path) for path, host in options.devices.items()),
        visible=defaults.visible,
        hostname=pod["metadata"]["name"][:63],
    )
