"""Whose process it is: its control group names pod and container, its mounts in the kernel's table the region.

A tenant can leave neither its control group nor, without the node's administrator, mount what is not its own. No path
inside a tenant's root is ever resolved: its links could lead to another pod's region, and a file system of its own
(FUSE) need never answer.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from manager.allocations.record import Allocation
from manager.cgroups import pods
from manager.regions.regions import CLAIMS_PATH, CONTAINER_PATH
from vcuda.region import Usage

Key = tuple[str, str]
Program = tuple[int, str]  # PID, and the path of what it executes

# Far above what a process's cgroup, status and mounts take.
_PROC_BYTES = 65536
_MOUNTS_BYTES = 1 << 20
_ANCESTORS = 64
_REMEMBERED = 4096


@dataclass(frozen=True)
class Place:
    """Where a process stands: `pod`, the UID without dashes; `container`, the group below the pod's or ""."""

    pod: str
    container: str


def claimed(cgroup: str, controller: str = "") -> tuple[str, list[str]] | None:
    """The outermost pod's UID in the text of /proc/PID/cgroup (cgroups(7)), and the groups from the pod's own down.

    None where no pod is named. Text alone proves nothing: whoever was given a part of the hierarchy names groups in it
    as he likes. `controller`: whose hierarchy of version 1; "": version 2.
    """
    for line in cgroup.split("\n"):  # any other sign that ends lines may be part of a name
        _, controllers, path = (*line.split(":", 2), "", "", "")[:3]
        if controller not in controllers.split(","):
            continue
        groups = path.split("/")
        for number, group in enumerate(groups):
            if match := pods.POD_GROUP.search(group):
                return match[1], groups[number:]
    return None


class Owners:
    """Finds the container of a host process. Needs the host's PID namespace."""

    def __init__(self, proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> None:
        """`root`: where the host's control groups are mounted."""
        self.proc, self.root = str(proc), root
        self._trees: list[Path] = []
        self._base: tuple[Path, str] | None = None
        self._looked = False
        self._groups: dict[str, list[Path]] = {}  # of the pods that were asked for
        self._by_pod: dict[str, list[Key]] = {}
        self._uids: dict[str, str] = {}  # of these pods, as kubelet writes them
        self._regions: dict[Key, str] = {}
        self._cards: dict[Key, frozenset[str]] = {}
        self._by_slot: dict[tuple[int, int], Key] = {}
        # By container: among whom was looked, and whose regions were found.
        self._containers: dict[Place, tuple[frozenset[Key], tuple[Key, ...]]] = {}

    def among(self, allocations: Sequence[Allocation], usages: Mapping[Key, Usage] | None = None) -> Owners:
        """The owners among these containers; `usages`: ledgers, whose slots tell where nothing better does."""
        found = Owners(Path(self.proc), self.root)
        for item in allocations:
            for _, uid in item.pods:
                found._by_pod.setdefault(pods.plain(uid), []).append(item.key)
                found._uids[pods.plain(uid)] = uid
            found._regions[item.key] = item.region
            found._cards[item.key] = frozenset(share.uuid for share in item.shares)
        for key, usage in (usages or {}).items():
            found._by_slot.update(
                {(process.pid_namespace, process.pid): key for process in usage.processes if process.alive}
            )
        # Whose a control group is never changes: its name has the container's ID.
        if len(self._containers) > _REMEMBERED:
            self._containers.clear()
        found._containers = self._containers
        return found

    def container(self, pid: int, uuid: str = "") -> Key | None:
        """None for a process of no container with a share, or one that has ended.

        A process of no pod, which only the machine's administrator can start, is known by the slot that names it.
        `uuid`: of a container with several regions the one that has this card.
        """
        cgroup = read(f"{self.proc}/{pid}/cgroup")
        if not cgroup:
            return None
        place = self.place(pid, cgroup)
        if place is None:
            return self._slot(pid, self._regions)
        keys = self._by_pod.get(place.pod, [])
        if len(keys) <= 1:
            return keys[0] if keys else None
        mounted = self._mounted(pid, place, keys)
        if not mounted:
            return self._slot(pid, keys)
        # A card of two regions belongs to the first in the shim's order.
        return next((key for key in mounted if uuid in self._cards[key]), mounted[0])

    def given(self, pid: int) -> Key | None:
        """The container by the kernel's words alone: None, too, for a process of its pod's that mounts no region."""
        place = self.place(pid)
        mounted = self._mounted(pid, place, self._by_pod.get(place.pod, [])) if place is not None else ()
        return mounted[0] if mounted else None

    def programs(self, pids: Sequence[int]) -> frozenset[Program] | None:
        """What each executes; None where nobody is there or one does not say."""
        try:
            # The link's text: a look at the file could wait for a file system of the tenant's own.
            return frozenset((pid, os.readlink(f"{self.proc}/{pid}/exe")) for pid in pids) or None  # noqa: PTH115
        except OSError:
            return None

    def has_share(self, pid: int) -> bool:
        """Whether the process belongs to a pod with a share."""
        place = self.place(pid)
        return place is not None and place.pod in self._by_pod

    def place(self, pid: int, cgroup: str | None = None) -> Place | None:
        """The kernel's words: a group that kubelet made for the pod, on disk, lists the process.

        The text of its path, which may be in `cgroup`, tells only where to look: it may be relative to a namespace of
        control groups. Of pods without a share nothing hangs on it, and it is believed.
        """
        if not self._looked:
            self._looked, self._base = True, pods.hierarchy(self.root)
        if self._base is None:
            return None
        base, controller = self._base
        named = claimed(read(f"{self.proc}/{pid}/cgroup") if cgroup is None else cgroup, controller)
        if named is None:
            return None
        uid, groups = named
        place = Place(pods.plain(uid), groups[1] if len(groups) > 1 else "")
        if place.pod not in self._by_pod:
            return place
        if place.pod not in self._groups:
            self._trees = self._trees or pods.trees(base)
            self._groups[place.pod] = pods.of_pod(self._trees, self._uids[place.pod])
        for folder in self._groups[place.pod]:
            # In a group of threads only one above it says; who goes from group to group is in one of the pod's.
            if pid in pods.processes(folder.joinpath(*groups[1:])) or pid in pods.processes(folder):
                return place
        return None

    def _mounted(self, pid: int, place: Place, keys: Collection[Key]) -> tuple[Key, ...]:
        """By the mounts of the process; of one that has changed its root, by its ancestors' in the container.

        In the order in which the shim looks for regions: the device plugin's, then the claims' by name.
        """
        looked_at, known = self._containers.get(place, (frozenset(), ()))
        if known and looked_at.issuperset(keys):
            return tuple(key for key in known if key in keys)
        for _ in range(_ANCESTORS):
            mounts = sorted(_mounts(f"{self.proc}/{pid}"))
            found = tuple(
                dict.fromkeys(
                    key
                    for _, *mount in mounts
                    for key in keys
                    if _is_region((mount[0], mount[1]), Path(self._regions[key]))
                )
            )
            if found:
                if place.container:
                    self._containers[place] = frozenset(keys), found
                return found
            pid = int(_status(f"{self.proc}/{pid}", "PPid") or 0)
            if not pid or self.place(pid) != place:
                return ()
        return ()

    def _slot(self, pid: int, keys: Collection[Key]) -> Key | None:
        """By the ledgers, which tenants write: only where no neighbour can be meant."""
        if not self._by_slot:
            return None
        folder = f"{self.proc}/{pid}"
        try:
            namespace = os.readlink(f"{folder}/ns/pid").removeprefix("pid:[").removesuffix("]")  # noqa: PTH115
            inner = _status(folder, "NSpid").split()[-1]  # in the innermost namespace
            found = self._by_slot.get((int(namespace), int(inner)))
        except (OSError, ValueError, IndexError):
            return None
        return found if found in keys else None


def read(path: str, limit: int = _PROC_BYTES) -> str:
    """A file of /proc; empty if it can't be read.

    A text file's object would take longer than the calls, for hundreds of processes.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    found = bytearray()
    try:
        while len(found) < limit and (piece := os.read(descriptor, _PROC_BYTES)):
            found += piece
    except OSError:  # it has ended meanwhile
        return ""
    finally:
        os.close(descriptor)
    return found.decode(errors="replace")


def _status(folder: str, name: str) -> str:
    for line in read(f"{folder}/status").splitlines():
        if line.startswith(f"{name}:"):
            return line.partition(":")[2].strip()
    return ""


def _mounts(folder: str) -> list[tuple[str, str, str]]:
    """Place, device and root (proc(5), mountinfo) of what is mounted where regions are, hidden mounts too."""
    found = []
    for line in read(f"{folder}/mountinfo", _MOUNTS_BYTES).splitlines():
        fields = line.split(" ", 5)
        if len(fields) == 6 and (
            fields[4] in (CONTAINER_PATH, f"{CONTAINER_PATH}/usage") or fields[4].startswith(f"{CLAIMS_PATH}/")
        ):
            found.append((fields[4], fields[2], fields[3]))
    return found


def _is_region(mount: tuple[str, str], region: Path) -> bool:
    device, root = mount
    try:
        own, around = region.stat().st_dev, region.parent.stat().st_dev
    except OSError:
        return False
    if own != around:  # a file system of its own
        return device == f"{os.major(own)}:{os.minor(own)}"
    folder = "/".join(region.parts[-3:])  # regions, pod, container: nothing else has that name
    return root.removesuffix("/usage").endswith(f"/{folder}")
