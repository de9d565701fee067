"""The settings tree: every flag with its default; flag > environment > file > default.

Nothing below `main` reads the environment. A setting `query_port` is the flag `--query-port`, the variable
`GPU_MANAGER_QUERY_PORT` and the key `query-port` of the YAML file that `--config` names.
"""

# ruff: noqa: RUF009  (_option only wraps dataclasses.field)
from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manager.config import values
from vcuda.spec.names import DEFAULT_DOMAIN

ENV_PREFIX = "GPU_MANAGER_"


def flag_of(name: str) -> str:
    return name.replace("_", "-")


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
        None, values.optional_path, "YAML file with any of these settings, flag names as keys"
    )
    # Kubernetes
    resource_domain: str = _option(
        DEFAULT_DOMAIN, values.text, "domain of all resource, annotation and label names"
    )
    hostname_override: str = _option(
        "", values.text, "this node's name in Kubernetes, if it is not the host's name"
    )
    kubeconfig: Path | None = _option(
        None, values.optional_path, "kubeconfig file; in-cluster configuration without it"
    )
    node_labels: tuple[tuple[str, str], ...] = _option(
        (), values.labels, "labels to set on the node: a=b,c=d", live=True
    )
    device_plugin_path: Path = _option(
        Path("/var/lib/kubelet/device-plugins"), values.directory, "kubelet's device plugin directory"
    )
    pod_resources_socket: Path = _option(
        Path("/var/lib/kubelet/pod-resources/kubelet.sock"),
        values.directory,
        "kubelet's PodResources socket",
    )
    kubelet_url: str = _option(
        "",
        values.text,
        "kubelet's own URL, such as https://127.0.0.1:10250, for the exact identity of pods",
    )
    kubelet_token_file: Path | None = _option(
        None, values.optional_path, "bearer token for kubelet; the API server's token without it"
    )
    kubelet_ca_file: Path | None = _option(
        None, values.optional_path, "CA of kubelet's certificate; it is not verified without one"
    )
    # The driver and what containers get of it
    driver_root: Path = _option(
        Path("/"), values.directory, "where the driver's libraries, /dev and /proc/devices are found"
    )
    driver_root_on_host: str = _option(
        "auto",
        values.text,
        "the same folder as the container runtime sees it; auto: / if driver-root is a mount point",
    )
    nvidia_visible_devices: str = _option(
        "void",
        values.text,
        "value of NVIDIA_VISIBLE_DEVICES in containers; empty: leave it out",
        live=True,
    )
    ld_library_path: str = _option(
        "set", values.choice("set", "omit"), "whether containers get LD_LIBRARY_PATH", live=True
    )
    injection: str = _option(
        "shim",
        values.choice("shim", "preload"),
        "how our library comes before the driver's: in place of libcuda.so.1, or by /etc/ld.so.preload",
        live=True,
    )
    device_list_strategy: frozenset[str] = _option(
        frozenset({"device-specs"}),
        values.strategies,
        "how the runtime is told of the cards, beside device-specs, which is always done: cdi-cri, cdi-annotations",
    )
    cdi_root: Path = _option(
        Path("/var/run/cdi"), values.directory, "where the CDI specification of this node is written"
    )
    container_env: tuple[tuple[str, str], ...] = _option(
        (),
        values.environment_pair,
        "NAME=VALUE for every container with a share",
        repeated=True,
        secret=True,
        live=True,
    )
    container_mount: tuple[values.ContainerMount, ...] = _option(
        (),
        values.mount,
        "HOST:CONTAINER[:ro] for every container with a share",
        repeated=True,
        live=True,
    )
    smallest_memory: int = _option(
        1,
        values.blocks,
        "vcuda-memory that a share must ask at least: a CUDA context alone takes one or two",
        live=True,
    )
    # Health
    health_check_interval: float = _option(
        10.0, values.seconds, "seconds between two probes of driver, cards and nodes", live=True
    )
    health_ignore_xids: frozenset[int] = _option(
        frozenset({13, 31, 43, 45, 68, 109}),
        values.xids,
        "Xid errors that are the application's, not the card's",
        live=True,
    )
    dead_card_policy: str = _option(
        "report",
        values.choice("report", "evict"),
        "what becomes of the pods on a card that has become unhealthy",
        live=True,
    )
    # The bypass audit
    audit_policy: str = _option(
        "report",
        values.choice("report", "refuse", "evict"),
        "what becomes of a pod that holds memory beyond its ledger: its containers get no more, or it ends",
        live=True,
    )
    audit_tolerance: int = _option(
        512,
        values.mebibytes,
        "MiB that a container may hold beyond its ledger, for modules and the like",
        live=True,
    )
    # The drift alarm
    drift_tolerance: int = _option(
        20,
        values.points,
        "hundredths of a card by which a container's charged GPU time may differ from what NVML saw; 100: never told",
        live=True,
    )
    # Device cgroups of running containers
    cgroup_root: Path = _option(
        Path("/sys/fs/cgroup"), values.directory, "where the host's control groups are mounted"
    )
    device_cgroup_policy: str = _option(
        "report",
        values.choice("report", "restore"),
        "what becomes of a running container whose device cgroup has lost a device that it was given",
        live=True,
    )
    # Own files
    virtual_manager_path: Path = _option(
        Path("/etc/gpu-manager/vm"),
        values.directory,
        "driver mirror and regions; containers mount from here",
    )
    checkpoint_path: Path = _option(
        Path("/etc/gpu-manager"), values.directory, "where the state file is kept"
    )
    usage_storage: str = _option(
        "auto",
        values.choice("auto", "tmpfs", "directory"),
        "one small tmpfs per region, or plain directories",
    )
    allocation_check_period: float = _option(
        30.0, values.seconds, "seconds between two searches for pods that are gone", live=True
    )
    failed_admission_grace: float = _option(
        0.0,
        values.seconds_or_never,
        "seconds until a pod that failed with UnexpectedAdmissionError is deleted, if a controller owns it; 0: never",
        live=True,
    )
    # Surface
    query_addr: str = _option("localhost", values.text, "address of the HTTP server")
    query_port: int = _option(5678, values.port, "port of the HTTP server; 0: any free one, see the log")
    query_auth: str = _option(
        "none",
        values.choice("none", "kubernetes"),
        "who may see /metrics, /usage and /graph, which name tenants: anybody, or whom Kubernetes allows (TokenReview, nonResourceURLs)",
    )
    sample_period: float = _option(
        1.0, values.seconds, "seconds for which a reading of cards and regions is reused", live=True
    )
    v: int = _option(0, values.level, "verbosity: 4 and above logs every call", live=True)
    log_format: str = _option(
        "text",
        values.choice("text", "json"),
        "one line of text or one JSON object per message",
        live=True,
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
