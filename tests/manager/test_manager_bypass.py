"""Who uses a card past our library: real processes with real mappings, and what is told of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from manager.audit import shim_bypass
from manager.audit.memory import Auditor
from manager.audit.shim_bypass import LASTING_LOOKS, BypassWatch
from manager.cards.driver import CardProcess
from manager.container import driver_dir
from tests.manager.manager_pods import allocation
from tests.manager.manager_proc import Proc, group
from vcuda.spec.placement import CardShare

CARD = "GPU-1"
UID = "a2345678-1234-1234-1234-123456789abc"
LIBC = next(line.split()[5] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so.6" in line)


class Everybody:
    """All processes that were started here are the container's."""

    def __init__(self, key: tuple[str, str]) -> None:
        self.key = key
        self.pids: set[int] = set()

    def container(self, pid: int, _uuid: str = "") -> tuple[str, str] | None:
        return self.key if pid in self.pids else None


class Scene:
    """A container whose driver directory holds three libraries (copies of libc under our names) and its processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        driver = directory / "driver"
        for path in (
            *(driver / "lib64" / name for name in driver_dir.SHIMS),
            driver / "preload" / driver_dir.PRELOAD,
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(LIBC, path)
        self.item = allocation(
            CardShare(CARD, 10, 4),
            pod_uid=UID,
            pod_name="pod",
            minors={CARD: 7},
            region="/none",
            mirror=str(driver),
        )
        self.owner = Everybody(self.item.key)
        self.told: list[tuple[str, str]] = []
        self.watch = BypassWatch(lambda item, _, message: self.told.append((item.pod_name, message)))
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, library: Path | None) -> int:
        """A process that maps the library."""
        code = """
import mmap, sys
kept = []
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        kept.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
print("ready", flush=True)
sys.stdin.read()
"""
        words = [str(library)] if library else []
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        assert process.stdout and process.stdout.readline() == "ready\n"
        self.owner.pids.add(process.pid)
        return process.pid

    def look(self, *on_card: int) -> dict[tuple[tuple[str, str], str], int]:
        held = {CARD: [CardProcess(pid, 1 << 20) for pid in on_card]}
        return self.watch.look([self.item], self.owner, held)

    @property
    def at(self) -> tuple[tuple[str, str], str]:
        return self.item.key, CARD


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    for process in made.processes:
        process.communicate("", timeout=60)


@pytest.mark.parametrize("library", ["lib64/libcuda.so.1", "lib64/libnvidia-ml.so.1", "preload/libvcuda-preload.so"])
def test_a_process_with_one_of_our_libraries_is_in_order(scene: Scene, library: str) -> None:
    pid = scene.start(Path(scene.item.mirror) / library)
    for _ in range(LASTING_LOOKS + 1):
        assert scene.look(pid) == {scene.at: 0}
    assert scene.told == []


def test_a_process_that_the_driver_lists_without_our_library_is_told_once_when_it_lasts(scene: Scene) -> None:
    pid = scene.start(None)
    assert [scene.look(pid)[scene.at] for _ in range(4)] == [0, 1, 1, 1]
    ((pod, message),) = scene.told
    assert (
        pod == "pod"
        and f"process {pid} (" in message
        and CARD in message
        and "nothing but a limit of the driver's own, where there is one, limits it" in message
    )
    assert scene.look()[scene.at] == 0  # gone from the card


def test_a_file_that_only_has_our_name_does_not_count(scene: Scene, tmp_path: Path) -> None:
    own = tmp_path / "own" / "libcuda.so.1"
    own.parent.mkdir()
    shutil.copyfile(LIBC, own)
    pid = scene.start(own)
    assert [scene.look(pid)[scene.at] for _ in range(2)] == [0, 1]


def test_a_file_with_our_inode_number_on_another_file_system_does_not_count(scene: Scene, tmp_path: Path) -> None:
    inode = (Path(scene.item.mirror) / "lib64/libcuda.so.1").stat().st_ino
    folder = tmp_path / "proc/5"
    (folder / "map_files").mkdir(parents=True)
    (folder / "maps").write_text(f"1000-2000 r--p 00000000 00:2a {inode}   /lib/libcuda.so.1\n")
    (folder / "comm").write_text("guest\n")
    (folder / "map_files/1000-2000").symlink_to(LIBC)
    scene.watch = BypassWatch(lambda *_: None, tmp_path / "proc")
    scene.owner.pids.add(5)
    assert [scene.look(5)[scene.at] for _ in range(2)] == [0, 1]


def test_an_open_device_node_is_enough(scene: Scene, tmp_path: Path) -> None:
    # A descriptor that reads /dev/nvidia7 without a card: a folder of links stands for /proc.
    scene.watch = BypassWatch(lambda item, _, message: scene.told.append((item.pod_name, message)), tmp_path / "proc")
    guilty, innocent = scene.start(None), scene.start(Path(scene.item.mirror) / "lib64/libcuda.so.1")
    for pid in (guilty, innocent, os.getpid()):
        folder = tmp_path / "proc" / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "fd/3").symlink_to("/dev/nvidia7")
        (folder / "fd/4").symlink_to("/dev/nvidiactl")
        for name in ("maps", "map_files", "comm"):
            (folder / name).symlink_to(f"/proc/{pid}/{name}")
    assert [scene.look()[scene.at] for _ in range(2)] == [0, 1]
    assert len(scene.told) == 1 and f"process {guilty} (" in scene.told[0][1]


def test_the_audit_shows_it_beside_the_bytes(scene: Scene, tmp_path: Path) -> None:
    pid = scene.start(None)
    proc = Proc(tmp_path)
    folder = proc.add(pid, group(UID))
    for name in ("maps", "map_files"):
        (folder / name).symlink_to(f"/proc/{pid}/{name}")
    item = scene.item
    watch = BypassWatch(lambda item, _, message: scene.told.append((item.pod_name, message)), proc.path)
    auditor = Auditor(
        processes=lambda _: [CardProcess(pid, 1)],
        usage=lambda _: None,
        tell=lambda *_: None,
        owners=proc.owners(),
        bypass=watch,
    )
    for _ in range(2):
        auditor.audit([item], [CARD], 0)
    assert auditor.finding.without_shim == {(item.key, CARD): 1}
    assert len(scene.told) == 1


def test_tenants_with_any_number_of_open_files_are_looked_through_a_part_at_a_time(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading all 60,000 of them at every look took 15 % of a core; who holds the card among them is found all the same."""
    monkeypatch.setattr(shim_bypass, "_FILES_A_LOOK", 20)
    proc = Proc(tmp_path)
    for pid in range(10, 20):
        folder = proc.add(pid, group(UID))
        (folder / "maps").write_text("1000-2000 r--p 00000000 00:2a 7   /lib/libcuda.so.550\n")
        for number in range(30):
            (folder / "fd" / f"{number}").symlink_to("/dev/nvidia7" if (pid, number) == (17, 29) else "/dev/null")
        scene.owner.pids.add(pid)
    read: list[str] = []
    readlink = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: (read.append(path), readlink(path))[1])
    watch = BypassWatch(lambda item, _, message: scene.told.append((item.pod_name, message)), proc.path)
    most = 0
    for _ in range(400):
        read.clear()
        watch.look([scene.item], scene.owner, {})
        most = max(most, len(read))
        if scene.told:
            break
    assert scene.told and "process 17 (" in scene.told[0][1]
    assert most <= 20 + 30  # a part, and all of a suspect
