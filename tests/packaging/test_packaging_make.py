"""`make` says what it waits for, what it lacks and the way out; `make clean` removes what it made and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534


def make(folder: Path, *words: str, user: int | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    kept = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    return subprocess.run(
        ["make", "--no-print-directory", f"PYTHON={sys.executable}", *words],
        cwd=folder, env={**kept, **more}, user=user, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, folder)
    return folder


def test_packages_that_cannot_be_fetched_are_announced_and_a_way_out_is_named(tree: Path) -> None:
    result = make(tree, ".venv/.demo", PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_CONFIG_FILE=os.devnull)
    assert result.returncode != 0
    assert result.stdout.startswith("fetching 45 MB of packages") and len(result.stdout.splitlines()) == 1
    assert "pip could not install the packages" in result.stderr and "PIP_FIND_LINKS=folder" in result.stderr
    assert not (tree / ".venv/.demo").exists()


def test_a_checkout_that_cannot_be_written_is_named() -> None:
    """It was said that python3-venv is missing."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        tree = Path(folder)
        shutil.copy(ROOT / "Makefile", tree)
        tree.chmod(0o555)
        result = make(tree, ".venv/.tools", user=NOBODY if os.geteuid() == 0 else None)
    assert result.returncode != 0
    assert f"{tree} can't be written" in result.stderr and "python3-venv" not in result.stderr


def test_clean_removes_what_was_made_and_nothing_else(tree: Path) -> None:
    made = (
        ".venv/.demo",
        "vcuda/lib/shim/libcuda.so.1",
        "vcuda/_native.abi3.so",
        "build/a",
        "a.egg-info/b",
        ".mypy_cache/c",
    )
    kept = ("vcuda/run.py", ".gitignore", ".ci/run", "mine.txt", "vcuda/libs.py")
    for name in (*made, *kept, "vcuda/__pycache__/run.pyc"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).touch()
    result = make(tree, "clean")
    assert result.returncode == 0, result.stderr
    assert [name for name in kept if not (tree / name).exists()] == []
    assert [name for name in (*made, "vcuda/__pycache__") if (tree / name).exists()] == []
