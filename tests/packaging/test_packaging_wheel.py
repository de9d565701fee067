"""A wheel holds everything that runs: libraries, the cffi module, the commands; and they work from where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vcuda._build import native

ROOT = Path(__file__).resolve().parents[2]
# Whatever an earlier build left in the checkout must not be what the wheel is made of.
NOT_SOURCES = shutil.ignore_patterns(
    ".git",
    ".venv*",
    "build",
    "dist",
    "*.egg-info",
    "*.so",
    "*.so.*",
    "lib",
    "__pycache__",
    ".*_cache",
    "tests",
    ".hypothesis",
)


def call(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VCUDA", "LD_"))}
    return subprocess.run(
        command,
        cwd=cwd,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.timeout(300)  # on a busy machine the compilers alone take minutes
def test_a_wheel_installs_and_runs_anywhere(tmp_path: Path) -> None:
    tree, wheels, site = tmp_path / "tree", tmp_path / "wheels", tmp_path / "site"
    shutil.copytree(ROOT, tree, ignore=NOT_SOURCES)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    built = call(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), ".", cwd=tree)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = wheels.iterdir()

    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"vcuda/lib/{library.output}" for library in native.LIBRARIES if library.shipped} <= names
    assert {name for name in names if name.startswith("vcuda/_native.") and name.endswith(".so")}
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

    installed = call(*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel), cwd=tmp_path)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    where = call(
        sys.executable,
        "-c",
        "import vcuda.region as r; print(r.__file__)",
        cwd=tmp_path,
        PYTHONPATH=str(site),
    )
    assert where.stdout.startswith(str(site)), where.stderr

    program = str(site / "bin" / "vcuda")
    machine = str(tmp_path / "machine")
    for words in (["--version"], ["sim", "create", machine]):
        result = call(program, *words, cwd=tmp_path, PYTHONPATH=str(site))
        assert result.returncode == 0, result.stderr
    share = ["run", f"--sim={machine}", "--core", "30", "--memory", "1GiB", "--"]
    look = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(0)).total)"
    result = call(program, *share, sys.executable, "-c", look, cwd=tmp_path, PYTHONPATH=str(site))
    assert (result.returncode, result.stdout.strip()) == (0, str(2**30)), result.stderr

    rebuild = call(sys.executable, "-m", "vcuda._build", cwd=tmp_path, PYTHONPATH=str(site))
    assert rebuild.returncode == 1
    assert "installed copy" in rebuild.stderr and "Traceback" not in rebuild.stderr
