"""The driver directory that containers mount: what lies in it, and what becomes of earlier ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from manager.container import driver_dir
from manager.container.driver_dir import DriverDirError
from tests.manager.manager_support import Node
from tests.support import share as shares
from tests.support.ldcache import ELF
from vcuda.driver import layout
from vcuda.driver.root import HostRoot
from vcuda.sim import Machine, SimCard


def host(tmp_path: Path, version: str) -> HostRoot:
    folder = tmp_path / "root/usr/lib64"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*"):
        old.unlink()
    for name in ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler"):
        (folder / f"{name}.so.{version}").write_text(f"{ELF}{name} {version}")
        (folder / f"{name}.so.1").symlink_to(f"{name}.so.{version}")
    (folder / "libnvidia-nvvm.so.4").symlink_to("libnvidia-nvvm.so.1.0")  # dangling: left over
    return HostRoot(tmp_path / "root")


def our_shims(tmp_path: Path, text: str = "ours") -> Path:
    folder = tmp_path / "shims"
    folder.mkdir(exist_ok=True)
    for name in driver_dir.SHIMS:
        (folder / name).write_text(text)
    for name in (f"preload/{driver_dir.PRELOAD}", "bin/vcuda"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return folder


def test_upgrades_make_new_directories_and_leave_the_old_ones(tmp_path: Path) -> None:
    """I3: running pods map the old files; they are neither overwritten nor removed while a container mounts them."""
    base = tmp_path / "vm"
    first = driver_dir.make(base, host(tmp_path, "535.1.2"), our_shims(tmp_path))
    kept = (first.lib64 / "libcuda.so.1").stat()
    assert driver_dir.make(base, host(tmp_path, "535.1.2"), our_shims(tmp_path)) == first
    assert (first.lib64 / "libcuda.so.1").stat() == kept
    ours = driver_dir.make(base, host(tmp_path, "535.1.2"), our_shims(tmp_path, "newer"))
    driver = driver_dir.make(base, host(tmp_path, "550.1.2"), our_shims(tmp_path, "newer"))
    assert len({first.directory, ours.directory, driver.directory}) == 3
    assert (first.lib64 / "libcuda.so.1").read_text() == "ours"
    assert (base / "driver/current").resolve() == driver.directory
    assert driver_dir.remove_unused(base, [first.directory]) == [ours.directory]
    assert first.directory.exists() and driver.directory.exists()


def test_the_mirrors_layout(tmp_path: Path) -> None:
    made = driver_dir.make(tmp_path / "vm", host(tmp_path, "535.1.2"), our_shims(tmp_path))
    names = {str(path.relative_to(made.directory)) for path in made.directory.rglob("*") if not path.is_dir()}
    assert names == {
        ".complete",
        "bin/vcuda",
        "preload/ld.so.preload",
        "preload/libvcuda-preload.so",
        "lib64/libcuda.so",
        "lib64/libcuda.so.1",
        "lib64/libnvidia-ml.so",
        "lib64/libnvidia-ml.so.1",
        "lib64/libnvidia-ptxjitcompiler.so.1",
        "lib64/libnvidia-ptxjitcompiler.so.535.1.2",
        "lib64/drv/libcuda.so.535.1.2",
        "lib64/drv/libcuda-driver.so.1",
        "lib64/drv/libnvidia-ml.so.535.1.2",
        "lib64/drv/libnvidia-ml-driver.so.1",
        "vcuda/limits",
    }
    assert (made.lib64 / "drv/libcuda-driver.so.1").read_text() == ELF + "libcuda 535.1.2"
    assert "libnvidia-ptxjitcompiler.so.1" in made.loader_files


def test_an_interrupted_build_of_the_mirror_is_made_anew(tmp_path: Path) -> None:
    base = tmp_path / "vm"
    made = driver_dir.make(base, host(tmp_path, "535.1.2"), our_shims(tmp_path))
    (made.directory / driver_dir.MANIFEST).unlink()
    (made.lib64 / "libcuda.so.1").unlink()
    again = driver_dir.make(base, host(tmp_path, "535.1.2"), our_shims(tmp_path))
    assert again == made and (made.lib64 / "libcuda.so.1").exists()


def test_a_missing_driver_or_shim_is_named(tmp_path: Path) -> None:
    root = host(tmp_path, "535.1.2")
    with pytest.raises(driver_dir.DriverDirError, match=r"our own libcuda.so.1 is missing .* python -m vcuda._build"):
        driver_dir.make(tmp_path / "vm", root, tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(driver_dir.DriverDirError, match=r"no libcuda.so.1 below .* --driver-root right"):
        driver_dir.make(tmp_path / "vm", HostRoot(tmp_path / "empty"), our_shims(tmp_path))


def test_a_library_that_an_upgrade_takes_away_meanwhile_is_an_ordinary_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made again at the next look; the thread that looks must not end by it."""
    root = host(tmp_path, "535.1.2")
    monkeypatch.setattr(HostRoot, "find_program", lambda *_: tmp_path / "root/usr/bin/nvidia-smi")
    with pytest.raises(driver_dir.DriverDirError, match=r"cannot make the driver directory .*nvidia-smi"):
        driver_dir.make(tmp_path / "vm", root, our_shims(tmp_path))


def test_where_a_containers_region_is_hidden_its_shims_refuse_memory(tmp_path: Path) -> None:
    """A volume over /etc/vcuda, through a link of the image: these shims never are without a share."""
    machine = Machine.create(tmp_path / "machine", [SimCard()])
    libraries = tmp_path / "root/usr/lib64"
    libraries.mkdir(parents=True)
    for name in ("libcuda", "libnvidia-ml"):
        library = f"{name}.so.{machine.driver_version}"
        shutil.copy(machine.library_folder / library, libraries)
        (libraries / f"{name}.so.1").symlink_to(library)
    made = driver_dir.make(tmp_path / "vm", HostRoot(tmp_path / "root"), layout.SHIMS_FOLDER)
    share = shares.Share(made.directory, machine)
    said = (
        f"vcuda: cannot open {share.lib64}/../vcuda/limits: No such file or directory; "
        "GPU memory is refused until the container is started with readable limits\n"
    )
    assert share.run('begin(); answer([alloc(MIB)[0], alloc(MIB, "cuMemAllocAsync", None)[0]])', errors=said) == [2, 2]


def test_on_a_machine_without_a_preload_library_the_shims_are_all(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """arm64: its absence kept the daemon from making any driver directory."""
    layout.preload_of(node.shims).unlink()
    root = HostRoot(node.root)
    with pytest.raises(DriverDirError, match=r"libvcuda-preload\.so is missing"):
        driver_dir.make(tmp_path, root, node.shims)
    monkeypatch.setattr(layout, "HAS_PRELOAD", False)
    made = driver_dir.make(tmp_path, root, node.shims)
    assert (made.lib64 / "libcuda.so.1").exists() and not made.preload_list.exists()
