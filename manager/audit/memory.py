"""The bypass audit: what the driver says processes hold on the cards, against the ledgers of the containers they run in.

Bypassing the shim can't be prevented in user space; what a container holds beyond its ledger, and who uses a card past our library
(manager.bypass), is shown, told to its pod and, by `--audit-policy=evict`, ends the pod. Processes of no container with a share are summed per card.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from manager.allocations.record import Allocation
from manager.audit.shim_bypass import BypassWatch
from manager.cards.driver import CardProcess
from manager.regions.regions import CONTAINER_PATH
from vcuda.region import Usage

# A reading of the driver and one of the ledger are not of the same moment: only what stays is told.
LASTING_AUDITS = 2
_POD_UID = re.compile(
    rb"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})"
)

# Far above what a process's cgroup and status take.
_PROC_BYTES = 65536

log = logging.getLogger(__name__)

Key = tuple[str, str]


@dataclass(frozen=True)
class Finding:
    """What an audit found. `beyond`: bytes that containers hold beyond their ledger, by container and card UUID, 0 included.

    `others`: bytes of processes of no container with a share, by card UUID. Cards that do not say are in neither.
    `without_shim`: how many processes use the card past our library, by container and card UUID.
    """

    beyond: Mapping[tuple[Key, str], int] = field(default_factory=dict)
    others: Mapping[str, int] = field(default_factory=dict)
    without_shim: Mapping[tuple[Key, str], int] = field(default_factory=dict)


class Joiner:
    """Finds the container of a host process; trusts what the tenant can't write first.

    The region that the process sees at /etc/vcuda; else the pod of its cgroup, if only one of its containers has a share; else the slot
    that names this process. Needs the host's PID namespace.
    """

    def __init__(self, allocations: Sequence[Allocation], usages: Mapping[Key, Usage], proc: Path) -> None:
        self._proc = str(proc)
        self._by_file: dict[tuple[int, int], Key] = {}
        self._by_pod: dict[str, list[Key]] = {}
        self._by_slot: dict[tuple[int, int], Key] = {}
        for item in allocations:
            file = file_identity(f"{item.region}/limits")
            if file is not None:
                self._by_file[file] = item.key
            self._by_pod.setdefault(item.pod_uid.replace("-", ""), []).append(item.key)
        for key, usage in usages.items():
            for process in usage.processes:
                if process.alive:
                    self._by_slot[process.pid_namespace, process.pid] = key
        self._namespaces = {namespace for namespace, _ in self._by_slot}

    def container(self, pid: int) -> Key | None:
        """None for a process of no container with a share, or one that has ended."""
        folder = f"{self._proc}/{pid}"
        file = file_identity(f"{folder}/root{CONTAINER_PATH}/limits")
        if file in self._by_file:
            return self._by_file[file]
        match = _POD_UID.search(read(f"{folder}/cgroup"))
        keys = self._by_pod.get(match[1].decode().replace("-", "").replace("_", ""), []) if match else []
        if len(keys) == 1:
            return keys[0]
        namespace = _namespace(folder) if self._namespaces else -1
        if namespace not in self._namespaces:
            return None
        return self._by_slot.get((namespace, _inner_pid(folder)))


def file_identity(path: Path | str) -> tuple[int, int] | None:
    """What tells one file from another; None if it can't be reached."""
    try:
        status = os.stat(path)  # noqa: PTH116  (of hundreds of files at every look)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def read(path: str) -> bytes:
    """A file of /proc; empty if it can't be read. A text file's object would take longer than the calls, for hundreds of processes."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, _PROC_BYTES)
    except OSError:  # it has ended meanwhile
        return b""
    finally:
        os.close(descriptor)


def _namespace(folder: str) -> int:
    try:
        return int(os.readlink(f"{folder}/ns/pid").removeprefix("pid:[").removesuffix("]"))  # noqa: PTH115
    except (OSError, ValueError):
        return -1


def _inner_pid(folder: str) -> int:
    """The PID in the innermost namespace (NSpid, proc(5))."""
    for line in read(f"{folder}/status").splitlines():
        if line.startswith(b"NSpid:"):
            return int(line.split()[-1])
    return -1


def compare(
    allocations: Sequence[Allocation],
    usages: Mapping[Key, Usage],
    held: Mapping[str, Iterable[CardProcess]],
    joiner: Joiner,
) -> Finding:
    """One audit. `held`: the processes of each card that says, by UUID; `usages`: the ledgers that could be read."""
    by_driver: dict[tuple[Key, str], int] = {}
    others: dict[str, int] = {}
    for uuid, processes in held.items():
        others[uuid] = 0
        for process in processes:
            key = joiner.container(process.pid)
            if key is not None:
                by_driver[key, uuid] = by_driver.get((key, uuid), 0) + (process.memory_bytes or 0)
            else:
                others[uuid] += process.memory_bytes or 0
    beyond = {}
    anybody = any(held.values())
    elsewhere: dict[Key, list[str]] = {}
    for (key, uuid), much in by_driver.items():
        if much:
            elsewhere.setdefault(key, []).append(uuid)
    for item in allocations:
        usage = usages.get(item.key)
        if usage is None and anybody:
            continue
        ledger = {card.uuid: card.ledger_bytes for card in usage.cards} if usage is not None else {}
        own = (share.uuid for share in item.shares if share.uuid in held)
        for uuid in (*own, *elsewhere.get(item.key, ())):
            beyond[item.key, uuid] = max(0, by_driver.get((item.key, uuid), 0) - ledger.get(uuid, 0))
    return Finding(beyond, others)


class Auditor:
    """Audits when asked, remembers what lasts, and tells it once."""

    def __init__(
        self,
        processes: Callable[[str], Sequence[CardProcess] | None],
        usage: Callable[[Allocation], Usage | None],
        tell: Callable[[Allocation, str], None],
        proc: Path = Path("/proc"),
        bypass: BypassWatch | None = None,
    ) -> None:
        """`processes` of a card by its UUID, None if it does not say; `tell` is called once per container with the finding."""
        self._bypass = bypass
        self._processes = processes
        self._usage = usage
        self._tell = tell
        self._proc = proc
        self._seen: dict[tuple[Key, str], int] = {}
        self.finding = Finding()

    def audit(self, allocations: Sequence[Allocation], cards: Iterable[str], tolerance_bytes: int) -> None:
        """Compare once. What is beyond the tolerance in LASTING_AUDITS audits in a row is told."""
        held = {uuid: found for uuid in cards if (found := self._processes(uuid)) is not None}
        # Nobody holds anything beyond a ledger on cards without a process: the ledgers of an idle node are not read.
        ledgers = {item.key: self._usage(item) for item in allocations} if any(held.values()) else {}
        usages = {key: usage for key, usage in ledgers.items() if usage is not None}
        joiner = Joiner(allocations, usages, self._proc)
        finding = compare(allocations, usages, held, joiner)
        if self._bypass is not None:
            past = self._bypass.look(allocations, joiner, held)
            finding = replace(finding, without_shim=past)
        self.finding = finding
        over = {at: much for at, much in self.finding.beyond.items() if much > tolerance_bytes}
        self._seen = {at: self._seen.get(at, 0) + 1 for at in over}
        for item in allocations:
            for (key, uuid), times in self._seen.items():
                if key == item.key and times == LASTING_AUDITS:
                    message = (
                        f"container {item.container} holds {over[key, uuid] >> 20} MiB of card {uuid} beyond what its shim has "
                        "counted: it bypasses its limit, or its modules need more than --audit-tolerance"
                    )
                    log.warning("%s: %s", item.name, message)
                    self._tell(item, message)
