"""Finding the real driver: in the linker's order, never one of our own shims, never another architecture's library."""

from __future__ import annotations

import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from vcuda.runs import driver, layout
from vcuda.runs.errors import RunError


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


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LDCONFIG", ())


def test_links_are_resolved_to_the_versioned_files(tmp_path: Path, library: Path) -> None:
    found = driver.find([], [str(put(tmp_path / "usual", library))])
    assert found == driver.Driver(
        tmp_path / "usual/libcuda.so.570.1", tmp_path / "usual/libnvidia-ml.so.570.1"
    )


def test_the_users_library_path_comes_first_then_the_cache_then_usual_folders(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cached, usual = (put(tmp_path / name, library) for name in ("path", "cached", "usual"))
    other = put(tmp_path / "other", library)
    listing = f"2 libs found in cache\n\tlibcuda.so.1 (libc6) => {other}/libcuda.so.1\n\tlibcuda.so.1 (libc6,x86-64) => {cached}/libcuda.so.1\n"
    program = tmp_path / "ldconfig"
    program.write_text(f"#!/bin/sh\ncat <<'E'\n{listing}E\n")
    program.chmod(0o755)
    monkeypatch.setattr(driver, "LDCONFIG", ("/no/such/program", str(program)))
    assert driver.find([str(path)], [str(usual)]).cuda.parent == path
    assert driver.find([], [str(usual)]).cuda.parent == cached
    assert driver.find([], [str(usual)]).nvml.parent == usual


def test_our_own_shims_are_passed_over(tmp_path: Path, library: Path) -> None:
    mine, usual = tmp_path / "mine", put(tmp_path / "usual", library)
    mine.mkdir()
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (mine / name).write_bytes((layout.SHIMS / name).read_bytes())
    assert driver.find([str(mine)], [str(usual)]).cuda.parent == usual


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF\x01" + bytes(200), b"INPUT(libcuda.so.2)", b"\x7fELF\x02" + bytes(10)]
)
def test_what_is_no_64_bit_library_is_passed_over(tmp_path: Path, library: Path, content: bytes) -> None:
    odd, usual = tmp_path / "odd", put(tmp_path / "usual", library)
    odd.mkdir()
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (odd / name).write_bytes(content)
    assert driver.find([str(odd)], [str(usual)]).cuda.parent == usual


def test_a_machine_without_a_driver_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no libcuda.so.1 and libnvidia-ml.so.1.*--sim"):
        driver.find([], [str(tmp_path)])


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
