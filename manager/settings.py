"""The settings tree: every flag with its default; flag > environment > file > default.

Nothing below `main` reads the environment. A setting `query_port` is the flag `--query-port`, the variable
`GPU_MANAGER_QUERY_PORT` and the key `query-port` of the YAML file that `--config` names.
"""

# ruff: noqa: RUF009  (_option only wraps dataclasses.field)
from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manager.errors import StartError
from vcuda.spec.names import DEFAULT_DOMAIN

ENV_PREFIX = "GPU_MANAGER_"


@dataclass(frozen=True)
class ContainerMount:
    """`--container-mount HOST:CONTAINER[:ro]`."""

    host_path: str
    container_path: str
    read_only: bool


def _text(value: str) -> str:
    return value


def _port(value: str) -> int:
    number = int(value)
    if not 0 <= number <= 65535:
        raise ValueError("a port is 0 to 65535")
    return number


def _seconds(value: str) -> float:
    number = float(value.removesuffix("s"))
    if not 0.05 <= number <= 86400:
        raise ValueError("give seconds between 0.05 and 86400")
    return number


def _mebibytes(value: str) -> int:
    number = int(value)
    if number < 0:
        raise ValueError("give MiB, 0 or more")
    return number


def _blocks(value: str) -> int:
    number = int(value)
    if number < 1:
        raise ValueError("give blocks of 256 MiB, 1 or more")
    return number


def _seconds_or_never(value: str) -> float:
    return 0.0 if value in ("0", "0s") else _seconds(value)


def _level(value: str) -> int:
    return int(value)


def _directory(value: str) -> Path:
    if not value.startswith("/"):
        raise ValueError("give an absolute path")
    return Path(value)


def _optional_path(value: str) -> Path | None:
    return Path(value) if value else None


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in allowed:
            raise ValueError(f"choose one of {', '.join(allowed)}")
        return value

    return parse


def _environment(value: str) -> tuple[str, str]:
    name, separator, content = value.partition("=")
    if not separator or not name:
        raise ValueError("write NAME=VALUE")
    return name, content


def _mount(value: str) -> ContainerMount:
    parts = value.split(":")
    if len(parts) not in (2, 3) or (len(parts) == 3 and parts[2] not in ("ro", "rw")):
        raise ValueError("write HOST:CONTAINER or HOST:CONTAINER:ro")
    if not parts[0].startswith("/") or not parts[1].startswith("/"):
        raise ValueError("both paths must be absolute")
    return ContainerMount(parts[0], parts[1], parts[2:] == ["ro"])


def _xids(value: str) -> frozenset[int]:
    return frozenset(int(item) for item in value.replace(",", " ").split())


def _labels(value: str) -> tuple[tuple[str, str], ...]:
    pairs = tuple(_environment(item.strip()) for item in value.split(",") if item.strip())
    return tuple(sorted(pairs))


def _option(
    default: Any,
    parse: Callable[[str], Any],
    text: str,
    *,
    repeated: bool = False,
    secret: bool = False,
    live: bool = False,
) -> Any:
    metadata = {"parse": parse, "help": text, "repeated": repeated, "secret": secret, "live": live}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """All settings of the daemon; see docs/manager.md, which a test compares with this class."""

    config: Path | None = _option(
        None, _optional_path, "YAML file with any of these settings, flag names as keys"
    )
    # Kubernetes
    resource_domain: str = _option(
        DEFAULT_DOMAIN, _text, "domain of all resource, annotation and label names"
    )
    hostname_override: str = _option(
        "", _text, "this node's name in Kubernetes, if it is not the host's name"
    )
    kubeconfig: Path | None = _option(
        None, _optional_path, "kubeconfig file; in-cluster configuration without it"
    )
    node_labels: tuple[tuple[str, str], ...] = _option(
        (), _labels, "labels to set on the node: a=b,c=d", live=True
    )
    device_plugin_path: Path = _option(
        Path("/var/lib/kubelet/device-plugins"), _directory, "kubelet's device plugin directory"
    )
    pod_resources_socket: Path = _option(
        Path("/var/lib/kubelet/pod-resources/kubelet.sock"), _directory, "kubelet's PodResources socket"
    )
    kubelet_url: str = _option(
        "", _text, "kubelet's own URL, such as https://127.0.0.1:10250, for the exact identity of pods"
    )
    kubelet_token_file: Path | None = _option(
        None, _optional_path, "bearer token for kubelet; the API server's token without it"
    )
    kubelet_ca_file: Path | None = _option(
        None, _optional_path, "CA of kubelet's certificate; it is not verified without one"
    )
    # The driver and what containers get of it
    driver_root: Path = _option(
        Path("/"), _directory, "where the driver's libraries, /dev and /proc/devices are found"
    )
    driver_root_on_host: str = _option(
        "auto",
        _text,
        "the same folder as the container runtime sees it; auto: / if driver-root is a mount point",
    )
    nvidia_visible_devices: str = _option(
        "void", _text, "value of NVIDIA_VISIBLE_DEVICES in containers; empty: leave it out", live=True
    )
    ld_library_path: str = _option(
        "set", _choice("set", "omit"), "whether containers get LD_LIBRARY_PATH", live=True
    )
    container_env: tuple[tuple[str, str], ...] = _option(
        (), _environment, "NAME=VALUE for every container with a share", repeated=True, secret=True, live=True
    )
    container_mount: tuple[ContainerMount, ...] = _option(
        (), _mount, "HOST:CONTAINER[:ro] for every container with a share", repeated=True, live=True
    )
    smallest_memory: int = _option(
        1,
        _blocks,
        "vcuda-memory that a share must ask at least: a CUDA context alone takes one or two",
        live=True,
    )
    # Health
    health_check_interval: float = _option(
        10.0, _seconds, "seconds between two probes of driver, cards and nodes", live=True
    )
    health_ignore_xids: frozenset[int] = _option(
        frozenset({13, 31, 43, 45, 68, 109}),
        _xids,
        "Xid errors that are the application's, not the card's",
        live=True,
    )
    dead_card_policy: str = _option(
        "report",
        _choice("report", "evict"),
        "what becomes of the pods on a card that has become unhealthy",
        live=True,
    )
    # The bypass audit
    audit_policy: str = _option(
        "report",
        _choice("report", "evict"),
        "what becomes of a pod that holds memory beyond its ledger",
        live=True,
    )
    audit_tolerance: int = _option(
        512,
        _mebibytes,
        "MiB that a container may hold beyond its ledger, for modules and the like",
        live=True,
    )
    # Own files
    virtual_manager_path: Path = _option(
        Path("/etc/gpu-manager/vm"), _directory, "driver mirror and regions; containers mount from here"
    )
    checkpoint_path: Path = _option(Path("/etc/gpu-manager"), _directory, "where the state file is kept")
    usage_storage: str = _option(
        "auto", _choice("auto", "tmpfs", "directory"), "one small tmpfs per region, or plain directories"
    )
    allocation_check_period: float = _option(
        30.0, _seconds, "seconds between two searches for pods that are gone", live=True
    )
    failed_admission_grace: float = _option(
        0.0,
        _seconds_or_never,
        "seconds until a pod that failed with UnexpectedAdmissionError is deleted, if a controller owns it; 0: never",
        live=True,
    )
    # Surface
    query_addr: str = _option("localhost", _text, "address of the HTTP server")
    query_port: int = _option(5678, _port, "port of the HTTP server; 0: any free one, see the log")
    sample_period: float = _option(
        1.0, _seconds, "seconds for which a reading of cards and regions is reused", live=True
    )
    v: int = _option(0, _level, "verbosity: 4 and above logs every call", live=True)
    log_format: str = _option(
        "text", _choice("text", "json"), "one line of text or one JSON object per message", live=True
    )

    @property
    def node_name(self) -> str:
        return self.hostname_override or os.uname().nodename.lower()

    def describe(self) -> list[str]:
        """One `name=value` per setting, without the values of secret ones."""
        lines = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.metadata["secret"]:
                value = tuple(f"{name}=…" for name, _ in value)
            if isinstance(value, frozenset):
                value = ",".join(map(str, sorted(value)))
            lines.append(f"{flag_of(field.name)}={value}")
        return lines


# Flags of tkestack gpu-manager that mean nothing here: accepted, with one line that says so.
OLD_FLAGS: Mapping[str, str] = {
    "driver": "there is one driver, NVIDIA's",
    "share-mode": "cards are always shared by request",
    "container-runtime": "the container runtime is not asked",
    "container-runtime-endpoint": "the container runtime is not asked",
    "runtime-request-timeout": "the container runtime is not asked",
    "cgroup-driver": "cgroups are not searched for containers",
    "wait-timeout": "the daemon waits for kubelet as long as it takes",
    "extra-config": "use --container-env and --container-mount",
    "volume-config": "the driver's files are found below --driver-root",
    "log-dir": "logs go to standard error",
    "logtostderr": "logs always go to standard error",
}


@dataclass(frozen=True)
class Parsed:
    """The settings and what the operator should be told about how they came to be."""

    settings: Settings
    warnings: tuple[str, ...]


def flag_of(name: str) -> str:
    return name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise StartError(f"{message}; --help lists all flags")


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="gpu-manager", description="Share this node's NVIDIA GPUs between pods.", allow_abbrev=False
    )
    made.add_argument("--version", action="store_true", help="print the version and exit")
    for field in dataclasses.fields(Settings):
        action = "append" if field.metadata["repeated"] else "store"
        text = f"{field.metadata['help']} (default: {_shown(field.default)})".replace("%", "%%")
        made.add_argument(
            f"--{flag_of(field.name)}", dest=field.name, action=action, help=text, metavar="VALUE"
        )
    old = made.add_argument_group("flags of older releases, accepted without effect")
    for name, why in OLD_FLAGS.items():
        old.add_argument(f"--{name}", dest=f"old_{name}", nargs="?", const="true", help=why, metavar="VALUE")
    return made


def _shown(default: Any) -> str:
    if default is None or default in ("", ()):
        return "none"
    return ",".join(map(str, sorted(default))) if isinstance(default, frozenset) else str(default)


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Parsed | None:
    """Parse the command line, environment and file. None: --version was asked. Raises StartError."""
    given = vars(parser().parse_args(arguments))
    if given["version"]:
        return None
    names = {field.name for field in dataclasses.fields(Settings)}
    layers: list[tuple[str, dict[str, Any]]] = [
        ("--{flag}", {name: given[name] for name in names if given[name] is not None}),
        (ENV_PREFIX + "{variable}", _from_environment(environment, names)),
    ]
    config = next((layer["config"] for _, layer in layers if "config" in layer), None)
    if config:
        layers.append((f"{config}: {{flag}}", _from_file(Path(config), names)))
    values = {}
    for field in dataclasses.fields(Settings):
        for where, layer in layers:
            if field.name in layer:
                origin = where.format(flag=flag_of(field.name), variable=field.name.upper())
                values[field.name] = _value(field, layer[field.name], origin)
                break
    warnings = [
        f"--{name} is accepted but has no effect: {why}"
        for name, why in OLD_FLAGS.items()
        if given[f"old_{name}"] is not None
    ]
    return Parsed(Settings(**values), tuple(warnings))


def _value(field: dataclasses.Field[Any], raw: Any, origin: str) -> Any:
    parse_one = field.metadata["parse"]
    try:
        if field.metadata["repeated"]:
            return tuple(parse_one(str(item)) for item in (raw if isinstance(raw, list) else [raw]))
        if isinstance(raw, list):
            raw = ",".join(map(str, raw))
        return parse_one(str(raw))
    except ValueError as error:
        shown = (
            raw if isinstance(raw, str) else " ".join(map(str, raw)) if isinstance(raw, list) else str(raw)
        )
        raise StartError(f"{origin}: {shown!r:.80} is not valid ({error})") from None


def _from_environment(environment: Mapping[str, str], names: set[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(Settings):
        value = environment.get(ENV_PREFIX + field.name.upper())
        if value is not None and field.name in names:
            found[field.name] = value.splitlines() if field.metadata["repeated"] else value
    if "NODE_NAME" in environment and "hostname_override" not in found:
        found["hostname_override"] = environment["NODE_NAME"]  # the downward API's usual name in manifests
    return found


def _from_file(path: Path, names: set[str]) -> dict[str, Any]:
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"cannot read the settings file {path}: {error}") from None
    except yaml.YAMLError as error:
        raise StartError(f"the settings file {path} is not YAML: {str(error).splitlines()[0]}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise StartError(f"the settings file {path} must hold `name: value` lines, not {type(data).__name__}")
    found = {str(key).replace("-", "_"): value for key, value in data.items()}
    unknown = sorted(set(found) - names)
    if unknown:
        raise StartError(f"the settings file {path} has unknown settings: {', '.join(map(flag_of, unknown))}")
    return {key: value for key, value in found.items() if value is not None}
