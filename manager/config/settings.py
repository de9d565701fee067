"""The settings tree: every flag with its default; flag > environment > file > default.

Nothing below `main` reads the environment. A setting `query_port` is the flag `--query-port`, the variable
`GPU_MANAGER_QUERY_PORT` and the key `query-port` of the YAML file that `--config` names.
"""

# ruff: noqa: RUF009  (_option only wraps dataclasses.field)
from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from manager.config import values
from vcuda import logs
from vcuda.driver import layout
from vcuda.settings import (
    choice,
    domain,
    host,
    number,
    option,
    optional_name,
    optional_path,
    port,
    switch,
    text,
)
from vcuda.spec.names import DEFAULT_DOMAIN

ENV_PREFIX = "GPU_MANAGER_"


@dataclass(frozen=True)
class Settings:
    """All settings of the daemon; see docs/manager.md, which a test compares with this class."""

    config: Path | None = option(None, optional_path, "YAML file with any of these settings, flag names as keys")
    # Kubernetes
    resource_domain: str = option(DEFAULT_DOMAIN, domain, "domain of all resource, annotation and label names")
    hostname_override: str = option("", optional_name, "this node's name in Kubernetes, if it is not the host's name")
    kubeconfig: Path | None = option(None, optional_path, "kubeconfig file; in-cluster configuration without it")
    node_labels: tuple[tuple[str, str], ...] = option(
        (), values.labels, "labels to set on the node: a=b,c=d", separated=True, live=True
    )
    device_plugin_path: Path = option(
        Path("/var/lib/kubelet/device-plugins"), values.directory, "kubelet's device plugin directory"
    )
    protocols: frozenset[str] = option(
        frozenset({"device-plugin"}),
        values.protocols,
        "how this node's cards are offered: device-plugin, dra (claims), or both, each its own cards",
        separated=True,
    )
    dra_cards: frozenset[str] = option(
        frozenset(),
        values.words,
        "with both protocols: UUIDs of the cards that claims get, of MIG instances also their card's",
        separated=True,
    )
    plugins_path: Path = option(
        Path("/var/lib/kubelet/plugins"), values.directory, "kubelet's folder for drivers' own sockets (dra)"
    )
    plugins_registry_path: Path = option(
        Path("/var/lib/kubelet/plugins_registry"), values.directory, "where kubelet looks for drivers (dra)"
    )
    pod_resources_socket: Path = option(
        Path("/var/lib/kubelet/pod-resources/kubelet.sock"),
        values.directory,
        "kubelet's PodResources socket",
    )
    kubelet_url: str = option(
        "",
        text,
        "kubelet's own URL, such as https://127.0.0.1:10250, for the exact identity of pods",
    )
    kubelet_token_file: Path | None = option(
        None, optional_path, "bearer token for kubelet; the API server's token without it"
    )
    kubelet_ca_file: Path | None = option(
        None, optional_path, "authority of kubelet's certificate; the API server's without one"
    )
    kubelet_verify: bool = option(
        True,
        switch,
        "false: send our token to whoever answers at --kubelet-url, whatever certificate it shows",
    )
    # The driver and what containers get of it
    driver_root: Path = option(
        Path("/"), values.directory, "where the driver's libraries, /dev and /proc/devices are found"
    )
    driver_root_on_host: str = option(
        "auto",
        text,
        "the same folder as the container runtime sees it; auto: / if driver-root is a mount point",
    )
    nvidia_visible_devices: str = option(
        "void",
        text,
        "value of NVIDIA_VISIBLE_DEVICES in containers; empty: leave it out",
        live=True,
    )
    ld_library_path: str = option("set", choice("set", "omit"), "whether containers get LD_LIBRARY_PATH", live=True)
    injection: str = option(
        "shim",
        choice("shim", *(("preload",) if layout.HAS_PRELOAD else ())),
        "how our library comes before the driver's: in place of libcuda.so.1, or by /etc/ld.so.preload",
        live=True,
    )
    device_list_strategy: frozenset[str] = option(
        frozenset({"device-specs"}),
        values.strategies,
        "how the runtime is told of the cards, beside device-specs, which is always done: cdi-cri, cdi-annotations",
        separated=True,
    )
    cdi_root: Path = option(
        Path("/var/run/cdi"), values.directory, "where the CDI specification of this node is written"
    )
    container_env: tuple[tuple[str, str], ...] = option(
        (),
        values.environment_pair,
        "NAME=VALUE for every container with a share",
        repeated=True,
        secret=True,
        live=True,
    )
    container_mount: tuple[values.ContainerMount, ...] = option(
        (),
        values.mount,
        "HOST:CONTAINER[:ro] for every container with a share",
        repeated=True,
        live=True,
    )
    smallest_memory: int = option(
        1,
        number(1, 2**31),
        "vcuda-memory that a share must ask at least: a CUDA context alone takes one or two",
        live=True,
    )
    oversell_limit: int = option(
        0,
        number(0, 2**31),
        "blocks that a share may hold in all by vcuda-oversell, per block of its own; 1: none beyond its own, 0: as "
        "many as it asks",
        live=True,
    )
    visible_devices_policy: str = option(
        "report",
        choice("report", "refuse"),
        "what becomes of a pod that sets NVIDIA_VISIBLE_DEVICES itself: its value wins over ours, under NVIDIA's "
        "runtime past our library",
        live=True,
    )
    # Health
    health_check_interval: float = option(
        10.0, values.seconds, "seconds between two probes of driver, cards and nodes", live=True
    )
    health_ignore_xids: frozenset[int] = option(
        frozenset({13, 31, 43, 45, 68, 109}),
        values.xids,
        "Xid errors that are the application's, not the card's",
        separated=True,
        live=True,
    )
    removed_cards: frozenset[str] = option(
        frozenset(),
        values.words,
        "UUIDs of cards that were taken out: those that the driver doesn't show are no longer missed",
        separated=True,
        live=True,
    )
    dead_card_policy: str = option(
        "report",
        choice("report", "evict"),
        "what becomes of the pods on a card that has become unhealthy",
        live=True,
    )
    # The bypass audit
    audit_policy: str = option(
        "report",
        choice("report", "refuse", "evict"),
        "what becomes of a pod that holds memory beyond its ledger, or uses GPU time beyond its limit: its containers "
        "get no more memory, or it ends",
        live=True,
    )
    audit_tolerance: int = option(
        512,
        number(0, 2**31),
        "MiB that a container may hold beyond its ledger, for modules and the like",
        live=True,
    )
    # Limits that the driver itself holds
    driver_limits: str = option(
        "auto",
        choice("auto", "off"),
        "whether the driver is told each pod's memory, too, where it can hold it (NVIDIA 615, control groups v2)",
        live=True,
    )
    require_driver_limits: bool = option(
        False, switch, "true: no container starts whose pod's memory the driver does not hold", live=True
    )
    # The drift alarm
    drift_tolerance: int = option(
        20,
        number(1, 100),
        "hundredths of a card by which a container's charged GPU time may differ from what NVML saw; 100: never told",
        live=True,
    )
    # Device cgroups of running containers
    cgroup_root: Path = option(Path("/sys/fs/cgroup"), values.directory, "where the host's control groups are mounted")
    device_cgroup_policy: str = option(
        "report",
        choice("report", "restore"),
        "what becomes of a running container whose device cgroup has lost a device that it was given",
        live=True,
    )
    # Own files
    virtual_manager_path: Path = option(
        Path("/etc/gpu-manager/vm"),
        values.directory,
        "driver mirror and regions; containers mount from here",
    )
    checkpoint_path: Path = option(Path("/etc/gpu-manager"), values.directory, "where the state file is kept")
    usage_storage: str = option(
        "auto",
        choice("auto", "tmpfs", "directory"),
        "one small tmpfs per region, or plain directories",
    )
    allocation_check_period: float = option(
        30.0, values.seconds, "seconds between two searches for pods that are gone", live=True
    )
    failed_admission_grace: float = option(
        0.0,
        values.seconds_or_never,
        "seconds until a pod that failed with UnexpectedAdmissionError is deleted, if a controller owns it; 0: never",
        live=True,
    )
    # Surface
    query_addr: str = option("localhost", host, "address of the HTTP server")
    query_port: int = option(5678, port, "port of the HTTP server; 0: any free one, see the log")
    query_auth: str = option(
        "none",
        choice("none", "kubernetes"),
        "who may see /metrics, /usage, /graph and /doctor, which name tenants: anybody, or whom Kubernetes allows "
        "(TokenReview, nonResourceURLs)",
    )
    sample_period: float = option(
        1.0, values.seconds, "seconds for which a reading of cards and regions is reused", live=True
    )
    v: int = option(0, number(0, 99), "verbosity: 4 and above logs every call", live=True)
    log_format: str = option("text", choice(*logs.FORMATS), logs.FORMAT_HELP, live=True)

    @property
    def log_level(self) -> int:
        """As of `logging`."""
        return logging.DEBUG if self.v >= 4 else logging.INFO

    @property
    def node_name(self) -> str:
        return self.hostname_override or os.uname().nodename.lower()
