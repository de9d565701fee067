"""MIG instances as cards of their own: 100 cores, their own memory, the parent's node plus two capability nodes."""

from __future__ import annotations

import re
from typing import Any

import pynvml

from manager.cards.driver import DriverError, NodeCard
from vcuda.driver import nvml
from vcuda.driver.root import HostRoot
from vcuda.spec.inventory import Card

# Where the driver says which nvidia-cap<N> grants an instance (NVIDIA MIG user guide, "Device nodes and capabilities").
CAPABILITIES = "proc/driver/nvidia/capabilities"
_DEVICE_FILE_MINOR = re.compile(r"^DeviceFileMinor:\s*(\d+)", re.MULTILINE)


def instances(root: HostRoot, handle: Any, parent: Card) -> list[tuple[NodeCard, Any]]:
    """The instances of a card in MIG mode with their handles; without any, the card offers nothing.

    Raises DriverError.
    """
    try:
        present = nvml.mig_instances(handle)
    except pynvml.NVMLError as error:
        raise DriverError(f"nvmlDeviceGetMaxMigDeviceCount: {error}") from error
    found = []
    for index, instance in enumerate(present):
        try:
            uuid = str(pynvml.nvmlDeviceGetUUID(instance))
            memory = nvml.memory_bytes(instance)
            name = str(pynvml.nvmlDeviceGetName(instance))
            gpu_instance = int(pynvml.nvmlDeviceGetGpuInstanceId(instance))
            compute_instance = int(pynvml.nvmlDeviceGetComputeInstanceId(instance))
        except pynvml.NVMLError as error:
            raise DriverError(f"MIG instance {index} of {parent.uuid}: {error}") from error
        base = f"gpu{parent.minor}/mig/gi{gpu_instance}"
        minors = (
            _capability(root, f"{base}/access"),
            _capability(root, f"{base}/ci{compute_instance}/access"),
        )
        card = Card(uuid, parent.minor, name, memory, parent.numa_node)
        found.append((NodeCard(card, parent.minor, parent.uuid, minors), instance))
    return found


def _capability(root: HostRoot, name: str) -> int:
    path = root.path / CAPABILITIES / name
    try:
        match = _DEVICE_FILE_MINOR.search(path.read_text())
    except OSError as error:
        raise DriverError(f"cannot read {path}: {error.strerror}") from error
    if match is None:
        raise DriverError(f"{path} names no DeviceFileMinor")
    return int(match[1])
