"""Finding the real driver: in the linker's order, never one of our own shims, never another architecture's library."""

from __future__ import annotations

import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.support.ldcache import I386, X86_64, cache
from vcuda.driver.layout import SHIMS_FOLDER
from vcuda.driver.root import HostRoot
from vcuda.runs import driver, layout
from vcuda.runs.errors import RunError

USUAL = "usr/lib/x86_64-linux-gnu"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("driver") / "real.so"
    source = path.with_suffix(".c")
    source.write_text("int cuInit(unsigned flags) { return (int)flags; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(path), str(source)], check=True, timeout=60)
    return path


def put(folder: Path, library: Path) -> Path:
    folder.mkdir(parents=True)
    for name, version in (("libcuda", "570.1"), ("libnvidia-ml", "570.1")):
        (folder / f"{name}.so.{version}").write_bytes(library.read_bytes())
        (folder / f"{name}.so.1").symlink_to(f"{name}.so.{version}")
    return folder


def test_links_are_resolved_to_the_versioned_files(tmp_path: Path, library: Path) -> None:
    usual = put(tmp_path / USUAL, library)
    found = driver.find([], tmp_path)
    assert found == driver.Driver(usual / "libcuda.so.570.1", usual / "libnvidia-ml.so.570.1")


def test_the_users_library_path_comes_first_then_the_cache_then_usual_folders(tmp_path: Path, library: Path) -> None:
    path, cached, usual = (put(tmp_path / name, library) for name in ("path", "cached", USUAL))
    put(tmp_path / "other", library)
    (tmp_path / "etc").mkdir()
    entries = (
        (I386, "libcuda.so.1", "/other/libcuda.so.1"),
        (X86_64, "libcuda.so.1", "/cached/libcuda.so.1"),
    )
    (tmp_path / "etc/ld.so.cache").write_bytes(cache(*entries))
    assert driver.find([str(path)], tmp_path).cuda.parent == path
    assert driver.find([], tmp_path).cuda.parent == cached
    assert driver.find([], tmp_path).nvml.parent == usual


def test_our_own_shims_are_passed_over(tmp_path: Path, library: Path) -> None:
    mine, usual = tmp_path / "mine", put(tmp_path / USUAL, library)
    mine.mkdir()
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (mine / name).write_bytes((SHIMS_FOLDER / name).read_bytes())
    assert driver.find([str(mine)], tmp_path).cuda.parent == usual


def test_the_daemon_too_passes_over_our_own_shims(tmp_path: Path, library: Path) -> None:
    """It would mirror a shim as the real driver, which then loads itself for ever."""
    real, mine = put(tmp_path / "usr/lib64", library), tmp_path / USUAL
    mine.mkdir(parents=True)
    (mine / "libcuda.so.1").write_bytes((SHIMS_FOLDER / "libcuda.so.1").read_bytes())
    assert HostRoot(tmp_path).find_library("libcuda.so.1") == real / "libcuda.so.570.1"


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF\x01" + bytes(200), b"INPUT(libcuda.so.2)", b"\x7fELF\x02" + bytes(10)]
)
def test_what_is_no_64_bit_library_is_passed_over(tmp_path: Path, library: Path, content: bytes) -> None:
    odd, usual = tmp_path / "odd", put(tmp_path / USUAL, library)
    odd.mkdir()
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (odd / name).write_bytes(content)
    assert driver.find([str(odd)], tmp_path).cuda.parent == usual


def test_a_machine_without_a_driver_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no libcuda.so.1 and libnvidia-ml.so.1.*--sim"):
        driver.find([], tmp_path)


def test_missing_shims_name_the_way_to_build_them(tmp_path: Path, library: Path) -> None:
    with pytest.raises(RunError, match=r"python -m vcuda\._build"):
        layout.lay_out(tmp_path, tmp_path / "vcuda", driver.Driver(library, library), shims=tmp_path / "none")


def test_the_folder_can_be_entered_whatever_made_it(tmp_path: Path, library: Path) -> None:
    """A folder made by mkdtemp is private; a program of the tree may run under another user."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    region = tmp_path / "entry" / "vcuda"
    region.mkdir(parents=True)
    front = layout.lay_out(folder, region, driver.Driver(library, library))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert (front / ".." / "vcuda").resolve() == region
