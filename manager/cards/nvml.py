"""The NVIDIA driver through NVML (nvidia-ml-py), loaded from the driver root.

NVML answers from one process-wide library; a lock keeps a sample from running into a shutdown.
"""

from __future__ import annotations

import ctypes
import logging
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml

from manager.cards import mig
from manager.cards.driver import (
    CardProcess,
    CardSample,
    Driver,
    DriverError,
    NodeCard,
    NullDriver,
    Probe,
    ProcessUtilization,
    XidEvent,
)
from vcuda.driver import layout, memory_limits
from vcuda.driver import nvml as driver_nvml
from vcuda.driver.memory_limits import CannotLimit, MemoryLimit
from vcuda.driver.root import HostRoot
from vcuda.logs import fields
from vcuda.spec.inventory import NVLINK_RANK, Card

LIBRARY = layout.NVML

# Ranks of closeness: NVLink beats every PCIe path; 0 is the bus between sockets (NVML_TOPOLOGY_SYSTEM).
_TOPOLOGY_RANKS = {0: 60, 10: 50, 20: 40, 30: 30, 40: 20, 50: 0}
_MAX_NVLINKS = 18
_PCIE_ROOT = re.compile(r"pci[0-9a-f]{4}:[0-9a-f]{2}")

log = logging.getLogger(__name__)


def open_driver(root: HostRoot) -> Driver:
    """The driver below `root`, or a null driver that says why there is none. Never raises."""
    path = root.find_library(LIBRARY)
    if path is None and not root.is_host:
        return NullDriver(f"no {LIBRARY} below {root.path}")
    try:
        return NvmlDriver(root, path)
    except DriverError as error:
        return NullDriver(str(error))


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        raise DriverError(f"{function.__name__}: {error}") from error


def _optional(function: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, or None where this driver or card does not know the question."""
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


def _address(handle: Any) -> int | None:
    """What two handles of one card have in common."""
    return ctypes.cast(handle, ctypes.c_void_p).value


class NvmlDriver:
    """An initialised NVML. `path` None: wherever the dynamic linker finds the library."""

    name = "nvml"

    def __init__(self, root: HostRoot, path: Path | None) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._events: Any = None
        self._shown: tuple[str, ...] = ()  # the cards of the last probe
        self._watched: tuple[str, ...] = ()
        self._watched_uuids: dict[int | None, str] = {}  # by the handle that an event names
        self._links: dict[tuple[str, ...], dict[str, tuple[tuple[str, int], ...]]] = {}
        self._handles: dict[str, Any] = {}  # of the physical cards
        self._instances: dict[str, Any] = {}  # of MIG instances
        self._numa_nodes: dict[str, int] = {}  # by PCI address; they don't change
        self._open = False
        try:
            driver_nvml.load(path or LIBRARY)
        except OSError as error:
            raise DriverError(f"cannot load {path or LIBRARY}: {error}") from error
        _call(pynvml.nvmlInit)
        self._open = True

    def close(self) -> None:
        with self._lock:
            if not self._open:
                return
            self._open = False
            if self._events is not None:
                _optional(pynvml.nvmlEventSetFree, self._events)
                self._events = None
            _optional(pynvml.nvmlShutdown)

    # Probing.

    def probe(self) -> Probe:
        with self._lock:
            if not self._open:
                raise DriverError("the driver was closed")
            version = str(_call(pynvml.nvmlSystemGetDriverVersion))
            cards: list[NodeCard] = []
            failed: list[tuple[str, str]] = []
            handles: dict[str, Any] = {}
            instances: dict[str, Any] = {}
            for index in range(_call(pynvml.nvmlDeviceGetCount)):
                name = f"index {index}"
                try:
                    handle = _call(pynvml.nvmlDeviceGetHandleByIndex, index)
                    name = str(_call(pynvml.nvmlDeviceGetUUID, handle))
                    found = self._cards_of(handle, name)
                except DriverError as error:
                    failed.append((name, str(error)))
                    continue
                handles[name] = handle
                instances.update({item.card.uuid: own for item, own in found if item.parent_uuid})
                cards += [item for item, _ in found]
            self._handles, self._instances = handles, instances
            self._register_events(handles)
            cuda = _optional(pynvml.nvmlSystemGetCudaDriverVersion) or 0  # 13020 is 13.2 (nvml.h)
            newest = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""
            return Probe(version, self._with_links(cards, handles), tuple(failed), newest, tuple(handles))

    def _cards_of(self, handle: Any, uuid: str) -> list[tuple[NodeCard, Any]]:
        """What the physical card offers, itself or its instances, with their handles."""
        minor = int(_call(pynvml.nvmlDeviceGetMinorNumber, handle))
        model = str(_call(pynvml.nvmlDeviceGetName, handle))
        numa = self._numa_node(handle)
        capability = ".".join(map(str, _optional(pynvml.nvmlDeviceGetCudaComputeCapability, handle) or ()))
        pcie_root = self._pcie_root(handle)
        try:
            memory = driver_nvml.memory_bytes(handle)
        except pynvml.NVMLError as error:
            raise DriverError(f"nvmlDeviceGetMemoryInfo: {error}") from error
        if driver_nvml.mig_enabled(handle):
            found = mig.instances(self._root, handle, Card(uuid, minor, model, memory, numa))
        else:
            found = [(NodeCard(Card(uuid, minor, model, memory, numa), minor), handle)]
        return [(replace(item, compute_capability=capability, pcie_root=pcie_root), own) for item, own in found]

    def _device_folder(self, handle: Any) -> Path | None:
        """Where sysfs has the card."""
        info = _optional(pynvml.nvmlDeviceGetPciInfo, handle)
        if info is None:
            return None
        domain, _, rest = str(info.busId).lower().partition(":")
        return self._root.path / "sys/bus/pci/devices" / f"{domain[-4:]}:{rest}"

    def _pcie_root(self, handle: Any) -> str:
        """Where sysfs' link leads is …/devices/<root complex>/<bridge>/…/<card>."""
        folder = self._device_folder(handle)
        parts = folder.resolve().parts if folder is not None else ()
        return next((part for part in parts if _PCIE_ROOT.fullmatch(part)), "")

    def _numa_node(self, handle: Any) -> int | None:
        folder = self._device_folder(handle)
        if folder is None:
            return None
        bus = folder.name
        if bus not in self._numa_nodes:
            try:
                self._numa_nodes[bus] = int((folder / "numa_node").read_text())
            except (OSError, ValueError):
                return None
        node = self._numa_nodes[bus]
        return node if node >= 0 else None  # -1: the machine has no NUMA

    def _with_links(self, cards: list[NodeCard], handles: dict[str, Any]) -> tuple[NodeCard, ...]:
        """Links are fixed while the same cards are there, and asking for all pairs is slow: remembered."""
        key = tuple(sorted(handles))
        if key not in self._links:
            self._links = {key: {uuid: self._links_of(uuid, handles) for uuid in handles}}
        links = self._links[key]
        return tuple(
            item if item.parent_uuid else replace(item, card=replace(item.card, links=links[item.card.uuid]))
            for item in cards
        )

    @staticmethod
    def _links_of(uuid: str, handles: dict[str, Any]) -> tuple[tuple[str, int], ...]:
        handle = handles[uuid]
        active = sum(_optional(pynvml.nvmlDeviceGetNvLinkState, handle, link) == 1 for link in range(_MAX_NVLINKS))
        found = []
        for peer, other in handles.items():
            if peer == uuid:
                continue
            # No common ancestor is an ordinary machine, not an error.
            ancestor = _optional(pynvml.nvmlDeviceGetTopologyCommonAncestor, handle, other)
            rank = _TOPOLOGY_RANKS.get(ancestor, 0)
            nvlink = pynvml.NVML_P2P_CAPS_INDEX_NVLINK
            if active and _optional(pynvml.nvmlDeviceGetP2PStatus, handle, other, nvlink) == 0:
                rank = NVLINK_RANK + active
            if rank:
                found.append((peer, rank))
        return tuple(found)

    # Health.

    @property
    def has_events(self) -> bool:
        return self._events is not None

    def _register_events(self, handles: dict[str, Any]) -> None:
        watched = tuple(sorted(handles))
        before, self._shown = self._shown, watched
        # Why a card is lost may be told after the probe that misses it: its events are taken until the next one.
        if watched == self._watched or (watched != before and set(watched) < set(self._watched)):
            return
        self._watched = watched
        self._watched_uuids = {_address(handle): uuid for uuid, handle in handles.items()}
        if self._events is not None:
            _optional(pynvml.nvmlEventSetFree, self._events)
            self._events = None
        events = _optional(pynvml.nvmlEventSetCreate)
        if events is None:
            log.info("this driver reports no Xid events; cards are only probed")
            return
        kind = pynvml.nvmlEventTypeXidCriticalError
        registered = 0
        for uuid, handle in handles.items():
            try:
                pynvml.nvmlDeviceRegisterEvents(handle, kind, events)
                registered += 1
            except pynvml.NVMLError as error:
                log.info("card %s reports no Xid events: %s", uuid, error, extra=fields(uuid=uuid))
        if registered:
            self._events = events
        else:
            _optional(pynvml.nvmlEventSetFree, events)

    def wait_xid(self, timeout_s: float) -> XidEvent | None:
        """Called by the thread that also probes and closes, so the event set can't vanish meanwhile."""
        events = self._events
        if events is None:
            return None
        try:
            data = pynvml.nvmlEventSetWait_v2(events, max(1, int(timeout_s * 1000)))
            # Not asked: a card that is off the bus (Xid 79) no longer tells its UUID.
            uuid = self._watched_uuids.get(_address(data.device)) or str(pynvml.nvmlDeviceGetUUID(data.device))
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_TIMEOUT:
                return None
            raise DriverError(f"nvmlEventSetWait: {error}") from error
        return XidEvent(uuid, int(data.eventData))

    # Use.

    def sample(self, uuid: str) -> CardSample | None:
        with self._lock:
            handle = self._handles.get(uuid) or self._instances.get(uuid)
            if handle is None or not self._open:
                return None
            memory = _optional(pynvml.nvmlDeviceGetMemoryInfo, handle)
            rates = _optional(pynvml.nvmlDeviceGetUtilizationRates, handle)
        if memory is None:
            return None
        return CardSample(int(rates.gpu) if rates is not None else None, int(memory.used))

    def processes(self, uuid: str) -> tuple[CardProcess, ...] | None:
        """By an instance's handle NVML lists that instance, by its card's all of them (nvml.h)."""
        with self._lock:
            handle = self._handles.get(uuid) or self._instances.get(uuid)
            if handle is None or not self._open:
                return None
            found = _optional(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
        if found is None:
            return None
        return tuple(CardProcess(int(item.pid), item.usedGpuMemory) for item in found)

    def utilization(self, uuid: str, since_us: int) -> tuple[ProcessUtilization, ...] | None:
        with self._lock:
            handle = self._handles.get(uuid)
            if handle is None or not self._open:
                return None
            try:
                found = pynvml.nvmlDeviceGetProcessUtilization(handle, since_us)
            except pynvml.NVMLError as error:
                # Nothing newer; nvidia-ml-py raises success, too, where there is nobody.
                idle = error.value in (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_SUCCESS)
                return () if idle else None
        # Users of nvtop and nvitop saw drivers answer with a whole buffer of PIDs that are none, and with figures above
        # 100.
        return tuple(
            ProcessUtilization(int(item.pid), int(item.smUtil)) for item in found if item.pid and item.smUtil <= 100
        )

    # Limits of its own.

    def limit_memory(self, uuid: str, group: Path, hard_bytes: int | None) -> None:
        with self._lock:
            memory_limits.put(self._limited(uuid), group, hard_bytes)

    def memory_limit(self, uuid: str, group: Path) -> MemoryLimit | None:
        with self._lock:
            return memory_limits.get(self._limited(uuid), group)

    def _limited(self, uuid: str) -> Any:
        handle = self._handles.get(uuid)
        if uuid in self._instances:
            raise CannotLimit("the driver limits no MIG instances, which have their own memory")
        if handle is None or not self._open:
            raise CannotLimit(f"the driver does not show the card {uuid}")
        return handle
