"""A wheel holds all that runs, says truly where it runs, and is installed without what only daemons need."""

from __future__ import annotations

import email
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.support import image_files
from vcuda._build import native, tag

ROOT = Path(__file__).resolve().parents[2]
# Whatever an earlier build left in the checkout must not be what the wheel is made of.
NOT_SOURCES = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "*.egg-info", "*.so", "*.so.*", "lib", "__pycache__", ".*_cache", "tests",
    ".hypothesis",
)  # fmt: skip
BUILDING = pytest.mark.timeout(420)  # the first test here waits for the compilers, on a busy machine for minutes
# Where setuptools compiles, and which of the libraries' folders is left to it: compiling all of them takes a minute.
BUILD_TEMP = f"build/temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
COMPILED = "bin"
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
# Of a base installation, everything in site-packages with its bytecode: 21.5 MB on 2026-11-23, of which 9 are pygments, which rich requires.
BUDGET_BYTES = 25_000_000


def call(*command: str, cwd: Path, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VCUDA", "LD_"))}
    return subprocess.run(
        command, cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout's sources, nothing built."""
    copied = tmp_path_factory.mktemp("wheel") / "tree"
    shutil.copytree(ROOT, copied, ignore=NOT_SOURCES)
    return copied


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    """All but `COMPILED` is taken from the checkout's libraries, if the build finds that they are of the tree's very sources."""
    wheels, built_before = tree.parent / "wheels", tree / BUILD_TEMP / "native"
    shutil.copytree(ROOT / "vcuda/lib", built_before, symlinks=True, ignore=shutil.ignore_patterns(f"{COMPILED}*"))
    words = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), ".")
    built = call(*PIP, *words, cwd=tree, timeout=400)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (built_before / COMPILED / "vcuda").exists()
    (made,) = wheels.iterdir()
    return made


@pytest.fixture(scope="module")
def unpacked(wheel: Path) -> Path:
    folder = wheel.parents[1] / "unpacked"
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@BUILDING
def test_a_wheel_holds_all_that_runs_and_nothing_else(tree: Path, wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"vcuda/lib/{library.output}" for library in native.LIBRARIES if library.shipped} <= names
    assert "vcuda/_native.abi3.so" in names
    assert not [name for name in names if name.endswith((".c", ".h", ".o", ".inputs")) or name.startswith("tests")]
    python = {
        path.relative_to(tree).as_posix()
        for top in ("vcuda", "manager", "scheduler_ext")
        for path in (tree / top).rglob("*.py")
    }
    assert python <= names
    # Production gets no stand-ins: they run from a checkout (`make demo`).
    assert {name.partition("/")[0].removesuffix(".so") for name in names if ".dist-info/" not in name} == {
        "vcuda",
        "manager",
        "scheduler_ext",
    }


@BUILDING
def test_a_wheels_name_is_true_of_the_libraries_in_it(wheel: Path, unpacked: Path) -> None:
    """Any Python from 3.11 on, and the glibc whose symbol versions the files ask for; no file is there for debuggers."""
    machine = os.uname().machine
    assert wheel.name.endswith(f"-cp311-abi3-manylinux_2_17_{machine}.whl")
    (told,) = unpacked.glob("*.dist-info/WHEEL")
    assert f"Tag: cp311-abi3-manylinux_2_17_{machine}\n" in told.read_text()
    libraries = [path for path in unpacked.rglob("*.so*") if path.is_file()]
    assert len(libraries) == 1 + sum(library.shipped and not library.program for library in native.LIBRARIES)
    for library in libraries:
        read = subprocess.run(["readelf", "-W", "-S", "-V", library], capture_output=True, text=True, check=True).stdout
        versions = {tuple(map(int, found)) for found in re.findall(r"Name: GLIBC_(\d+)\.(\d+)", read.partition("Version needs")[2])}  # fmt: skip
        assert max(versions, default=(0, 0)) <= (2, 17), (library.name, versions)
        assert ".debug_info" not in read
        assert ".note.gnu.build-id" in read or library.name == "_native.abi3.so"


@pytest.mark.parametrize(
    ("needs", "platform"),
    [("", "linux_x86_64"), ("GLIBC_2.2.5", "manylinux_2_17_x86_64"), ("GLIBC_2.9 GLIBC_2.34", "manylinux_2_34_x86_64")],
)
def test_a_library_that_asks_for_a_newer_glibc_says_so_in_the_wheels_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs: str, platform: str
) -> None:
    """As a symbol does that slipped past vcuda/src/include/vc_glibc.h; what a library itself defines does not count."""
    objdump = tmp_path / "objdump"
    objdump.write_text(f"#!/bin/sh\necho 'Version definitions:\n GLIBC_2.99\nVersion References:\n {needs}'\n")
    objdump.chmod(0o755)
    monkeypatch.setenv("OBJDUMP", str(objdump))
    assert tag.platform("linux_x86_64", [tmp_path / "a.so"]) == platform


def environment(folder: Path, wheel: Path, unpacked: Path, extras: Collection[str] = ()) -> tuple[Path, Path]:
    """A fresh virtual environment that holds what pip would take of the wheel's requirements: its programs and its site-packages."""
    assert call(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=folder.parent).returncode == 0
    (site,) = folder.glob("lib/python*/site-packages")
    (metadata,) = unpacked.glob("*.dist-info/METADATA")
    requirements = email.message_from_string(metadata.read_text()).get_all("Requires-Dist") or []
    for distribution in image_files.needed(requirements, extras):
        image_files.copy(distribution, site)
    words = ("--python", str(folder / "bin/python"), "install", "--no-deps", "--no-index", "--no-compile", str(wheel))
    installed = call(*PIP, *words, cwd=folder, timeout=200)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    return folder / "bin", site


@pytest.fixture(scope="module")
def base(wheel: Path, unpacked: Path) -> tuple[Path, Path]:
    """A base installation."""
    return environment(wheel.parents[1] / "base", wheel, unpacked)


@BUILDING
def test_a_base_installation_is_small_and_has_all_of_vcuda(tmp_path: Path, base: tuple[Path, Path]) -> None:
    programs, site = base
    vcuda = str(programs / "vcuda")
    machine = str(tmp_path / "machine")
    result = call(vcuda, "sim", "create", machine, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    share = ["run", f"--sim={machine}", "--core", "30", "--memory", "1GiB", "--"]
    look = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(0)).total)"
    result = call(vcuda, *share, str(programs / "python"), "-c", look, cwd=tmp_path)
    assert (result.returncode, result.stdout.strip()) == (0, str(2**30)), result.stderr
    inside = call(vcuda, *share, vcuda, "ls", "--interval", "0", cwd=tmp_path)
    assert inside.returncode == 0 and "1 GiB" in inside.stdout, inside.stderr
    simulated = f"--sim={machine}"
    for words in (
        ["--version"],
        ["ls", simulated],
        ["show", simulated],
        ["top", "--once", simulated],
        ["doctor", simulated],
        ["completion", "bash"],
    ):
        result = call(vcuda, *words, cwd=tmp_path)
        assert result.returncode == 0 and result.stdout, result.stderr

    rebuild = call(str(programs / "python"), "-m", "vcuda._build", cwd=tmp_path)
    assert rebuild.returncode == 1
    assert "installed copy" in rebuild.stderr and "Traceback" not in rebuild.stderr

    call(str(programs / "python"), "-m", "compileall", "-q", str(site), cwd=tmp_path, timeout=200)
    sizes = {path: path.stat().st_size for path in site.rglob("*") if path.is_file()}
    largest = sorted(((size, path.relative_to(site)) for path, size in sizes.items()), reverse=True)[:20]
    assert sum(sizes.values()) <= BUDGET_BYTES, largest


@BUILDING
@pytest.mark.parametrize(
    ("program", "name", "extra"),
    [
        ("gpu-manager", "gpu-manager", "node"),
        ("gpu-scheduler-extender", "gpu-scheduler-extender", "extender"),
        ("kubectl-vcuda", "kubectl vcuda", "kubectl"),
    ],
)
def test_a_program_without_its_extra_says_the_command(
    tmp_path: Path, wheel: Path, unpacked: Path, base: tuple[Path, Path], program: str, name: str, extra: str
) -> None:
    """And with it, and nothing else beside it, it begins."""
    lacks = call(str(base[0] / program), "--version", cwd=tmp_path)
    told = rf"{name}: the Python package \w+ is not installed here; pip install 'vcuda-gpu-manager\[{extra}\]'\n"
    assert lacks.returncode == 1 and re.fullmatch(told, lacks.stderr), lacks.stderr
    whole, _ = environment(tmp_path / "whole", wheel, unpacked, (extra,))
    works = call(str(whole / program), "--version", cwd=tmp_path)
    assert works.returncode == 0 and importlib.metadata.version(image_files.DISTRIBUTION) in works.stdout, works.stderr
