"""A node's control groups and its driver's limits, without a card: for the tests of what becomes of limits when things go wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from manager.allocations.record import Allocation
from manager.config.settings import Settings
from manager.limits.driver_limits import DriverLimits
from manager.limits.standing import Standing
from tests.manager import manager_pods
from vcuda.driver.memory_limits import CannotLimit, MemoryLimit
from vcuda.spec.placement import CardShare
from vcuda.spec.units import BLOCK_BYTES

ONE, TWO = (f"{number:08x}-1111-2222-3333-444455556666" for number in (1, 2))


class Driver:
    """Limits as NVIDIA describes them: by the kernel's dmem, or counted by the driver itself (`misc`)."""

    def __init__(self, *, misc: bool = False) -> None:
        self.misc = misc
        self.limits: dict[tuple[str, Path], int] = {}
        self.used: dict[tuple[str, Path], int] = {}
        self.lost: set[str] = set()
        self.fixed: set[Path] = set()
        self.refuses = ""

    def limit_memory(self, uuid: str, group: Path, hard_bytes: int | None) -> None:
        self._require(uuid, group)
        if group in self.fixed:
            raise CannotLimit("the driver refuses the limit: Invalid Argument")
        if self.refuses:
            raise CannotLimit(self.refuses)
        if hard_bytes is None:
            self.limits.pop((uuid, group), None)
            return
        if self.misc and self.used.get((uuid, group), 0) > hard_bytes:
            raise CannotLimit("the driver refuses the limit: Invalid Argument")
        self.limits[uuid, group] = hard_bytes

    def memory_limit(self, uuid: str, group: Path) -> MemoryLimit | None:
        self._require(uuid, group)
        for path in (group, *group.parents) if self.misc else (group,):
            if (uuid, path) in self.limits:
                return MemoryLimit(self.limits[uuid, path], self.used.get((uuid, path), 0))
        return None

    def _require(self, uuid: str, group: Path) -> None:
        if uuid in self.lost:
            raise CannotLimit(f"the driver does not show the card {uuid}")
        if not group.is_dir():
            raise CannotLimit("the control group is gone")


class Place:
    """A node's control groups in a folder, its driver, and daemons one after another."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.root, self.state, self.driver = folder / "cgroup", folder / "state", Driver()
        self.tree = self.root / "kubepods"
        self.tree.mkdir(parents=True)
        self.state.mkdir()
        (self.root / "cgroup.controllers").touch()
        self.settings = replace(Settings(), cgroup_root=self.root, checkpoint_path=self.state)
        self.set(**settings)
        self.told: list[tuple[str, str, str]] = []
        self.pods: list[Allocation] = []
        self.leaves: dict[tuple[str, str], list[Path]] = {}
        self.listed: dict[tuple[tuple[str, str], str], int] = {}
        self.begin()

    def set(self, **settings: object) -> None:
        self.settings = replace(self.settings, **settings)  # type: ignore[arg-type]

    def begin(self) -> DriverLimits:
        """A daemon that knows no more than what is on disk."""
        self.daemon = DriverLimits(
            lambda: self.settings,
            self.driver,
            lambda item, reason, message: self.told.append((item.pod_uid, reason, message)),
            Standing(self.state),
        )
        return self.daemon

    def pod(self, uid: str, *containers: tuple[str, dict[str, int]]) -> list[Allocation]:
        """A pod in the state, its group and those of its containers, each with blocks by card."""
        mine = [item(uid, name, blocks) for name, blocks in containers]
        self.pods = [other for other in self.pods if other.pod_uid != uid] + mine
        for one in mine:
            self.leaves[one.key] = [self.group(uid) / one.container]
            self.leaves[one.key][0].mkdir(parents=True, exist_ok=True)
        return mine

    def end(self, *containers: Allocation) -> None:
        """Nobody is in their groups any more, and the state knows them no more."""
        for one in containers:
            self.pods.remove(next(other for other in self.pods if other.key == one.key))
            (self.leaves.pop(one.key)[0] / "cgroup.procs").write_text("")

    def group(self, uid: str) -> Path:
        return self.tree / "burstable" / f"pod{uid}"

    def look(self) -> None:
        self.daemon.look(lambda: tuple(self.pods), self.leaves, self.listed)

    def blocks(self) -> dict[str, int]:
        """What the driver says, by card and group."""
        return {
            f"{uuid} {path.relative_to(self.root)}".replace("kubepods/burstable/pod", ""): hard // BLOCK_BYTES
            for (uuid, path), hard in self.driver.limits.items()
        }

    def held(self, one: Allocation, uuid: str = "G0") -> int | None:
        found = self.daemon.held(one, uuid)
        return None if found is None else found // BLOCK_BYTES


def item(uid: str, name: str, blocks: dict[str, int]) -> Allocation:
    shares = tuple(CardShare(uuid, 10, much) for uuid, much in blocks.items())
    return manager_pods.allocation(*shares, pod_uid=uid, pod_name=f"pod-{uid[:8]}", container=name)


def shared(place: Place) -> list[Allocation]:
    """A pod whose two containers share a card, with limits of its own, and of each of them."""
    mine = place.pod(ONE, ("a", {"G0": 4}), ("b", {"G0": 2}))
    for one in mine:
        (place.leaves[one.key][0] / "cgroup.procs").write_text("1\n")
    place.daemon.prepare(mine)
    place.look()
    assert place.blocks() == {f"G0 {ONE}": 6, f"G0 {ONE}/a": 4, f"G0 {ONE}/b": 2}
    return mine
