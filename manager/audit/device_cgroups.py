"""The device cgroups of running containers: has one lost a card that it was given?

An update of a container rewrites its device cgroup from its configuration; whatever was added behind the runtime's back
is gone then, and `open` of the card fails from that moment. Our containers list their devices, so it must not happen;
where it does, it is told and, by `--device-cgroup-policy=restore`, undone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from manager.allocations.record import Allocation
from manager.audit.consequences import Tell
from manager.audit.owners import Key, Owners, Program
from manager.cgroups import devices, pods
from manager.cgroups.bpf import Number
from manager.cgroups.devices import CannotTell, Devices, Unwatched
from manager.process.logs import Conditions
from vcuda.logs import fields

# A program may have its runtime's path: then a group that was looked at too early is looked at again.
_STRANGE_S = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Watch:
    """What one look found.

    `lost`: paths of the nodes that a running container may no longer open; `looked_at`: how many containers.
    """

    readable: bool = True
    why: str = ""
    looked_at: int = 0
    lost: Mapping[Key, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Stranger:
    """A group in a pod with a share that is no container's of ours, such as its sandbox's.

    `among`: of which containers it is none; `who` was in it at `when`, by the monotonic clock.
    """

    among: tuple[Key, ...]
    who: frozenset[Program] | None
    when: float

    def still(self, among: tuple[Key, ...], who: frozenset[Program] | None) -> bool:
        """Whether its processes' mounts, long texts, need not be read again."""
        return who is not None and (among, who) == (self.among, self.who) and time.monotonic() - self.when < _STRANGE_S


class Watcher:
    """Looks when asked, tells a loss once, and what came back once more."""

    def __init__(
        self,
        root: Path,
        nodes: Path,
        numbers: Callable[[Allocation], Mapping[str, Number]],
        tell: Tell,
        owners: Owners,
    ) -> None:
        """`root`: where control groups are mounted; `nodes`: our folder for device nodes, on a machine with version 2.

        `numbers`: a container's device nodes; `tell(allocation, reason, message)`.
        """
        self._root, self._nodes = root, nodes
        self._numbers = numbers
        self._tell = tell
        self._owners = owners
        self._groups: dict[tuple[int, Path], Key] = {}  # by inode and path
        self._strangers: dict[tuple[int, Path], _Stranger] = {}
        self._folders: dict[Key, tuple[Path, ...]] = {}
        self._of_pods: dict[str, list[Path]] = {}
        self._told: dict[Key, tuple[str, ...]] = {}
        self._conditions = Conditions(log)
        self.restored = 0
        self.watch = Watch()

    def look(self, allocations: Sequence[Allocation], *, restore: bool) -> None:
        """Look at every running container once. Never raises."""
        try:
            machine = devices.of_machine(self._root, self._nodes)
        except Unwatched as error:
            if allocations:
                self._conditions.set(
                    "cgroups", f"device cgroups are not watched, and no audit knows a pod's processes by them: {error}"
                )
            self.watch = Watch(False, str(error))
            return
        self._conditions.clear("cgroups", "device cgroups can be read again")
        self._find(machine.base, allocations)
        lost: dict[Key, tuple[str, ...]] = {}
        looked_at = 0
        for item in allocations:
            *_, folder = self._folders.get(item.key) or (None,)
            if folder is None:
                continue
            try:
                found = machine.lost(folder, self._numbers(item))
            except OSError:  # the container has ended
                continue
            except CannotTell as error:
                self._conditions.set(
                    f"ask {item.key}", f"{item.name}: nobody knows what it may open: {error}", item.fields
                )
                if item.key in self._told:
                    lost[item.key] = self._told[item.key]
                continue
            self._conditions.clear(f"ask {item.key}")
            looked_at += 1
            if found and restore:
                found = self._restore(machine, item, folder, found)
            if found:
                lost[item.key] = found
                if self._told.get(item.key) != found:
                    self._say(item, "DevicesLost", found, "can no longer open")
        self._told = lost
        self.watch = Watch(True, "", looked_at, lost)

    def _say(self, item: Allocation, reason: str, nodes: Sequence[str], what: str) -> None:
        message = f"container {item.container} {what} {', '.join(nodes)}"
        if reason == "DevicesLost":
            message += (
                ": its device cgroup was rewritten without them, by an update of its resources or a reload of systemd; "
                "restart the container, or set --device-cgroup-policy=restore"
            )
        log.warning("%s: %s", item.name, message, extra=fields(item.fields, reason=reason))
        self._tell(item, reason, message)

    def _restore(self, machine: Devices, item: Allocation, folder: Path, nodes: tuple[str, ...]) -> tuple[str, ...]:
        """Allow the nodes again; returns those that could not be."""
        numbers = self._numbers(item)
        try:
            machine.allow(folder, [numbers[path] for path in nodes])
            left = machine.lost(folder, numbers)
        except (OSError, CannotTell) as error:
            self._conditions.set(
                f"restore {item.key}", f"{item.name}: cannot restore its devices: {error}", item.fields
            )
            return nodes
        self._conditions.clear(f"restore {item.key}")
        self.restored += len(nodes) - len(left)
        self._say(item, "DevicesRestored", [path for path in nodes if path not in left], "may again open")
        return left

    @property
    def folders(self) -> Mapping[Key, Sequence[Path]]:
        """The groups of containers with processes, as the last look found them, the newest last.

        The newest is the running container's; in one before it a process of an earlier start does not end.
        """
        return self._folders

    def running(self) -> frozenset[str]:
        """Pods with processes now in containers that were given something, of those that the last look found."""
        return frozenset(uid for uid, paths in self._of_pods.items() if any(map(pods.populated, paths)))

    # Finding.

    def _find(self, base: Path, allocations: Sequence[Allocation]) -> None:
        """Every group in the pods' groups that is some container's: one that restarts has a new group each time, and
        the kernel numbers groups as it makes them.
        """
        owners = self._owners.among(allocations)
        trees = pods.trees(base)
        present = {item.key for item in allocations}
        by_uid: dict[str, list[Key]] = {}
        for item in allocations:
            for _, uid in item.pods:
                by_uid.setdefault(uid, []).append(item.key)
        there = [
            (number, path, uid, tuple(keys))
            for uid, keys in by_uid.items()
            for folder in pods.of_pod(trees, uid)
            for path in pods.folders_in(folder)
            if (number := pods.inode(path)) is not None
        ]
        known, self._groups, alive, of_pods = self._groups, {}, dict[Key, list[Path]](), dict[str, list[Path]]()
        strangers, self._strangers = self._strangers, {}
        for inode, path, uid, among in sorted(there):
            key = known.get((inode, path))
            if key is None:
                pids = list(pods.processes(path))
                # Before the mounts: a runtime's process makes those while it is the runtime.
                who = owners.programs(pids)
                stranger = strangers.get((inode, path))
                if stranger is None or not stranger.still(among, who):
                    stranger = _Stranger(among, who, time.monotonic())
                    key = next((key for key in map(owners.given, pids) if key is not None), None)
                if key is None:
                    self._strangers[inode, path] = stranger
            if key is None or key not in present:
                continue
            self._groups[inode, path] = key
            if pods.populated(path):
                alive.setdefault(key, []).append(path)
                of_pods.setdefault(uid, []).append(path)
        self._folders = {key: tuple(paths) for key, paths in alive.items()}
        self._of_pods = of_pods
