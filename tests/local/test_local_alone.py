"""A test that fails only beside others is named and fails no run; one that fails by itself does (tests/support/alone.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RACE = """
import pathlib
def test_race():
    seen = pathlib.Path("seen")
    before, _ = seen.exists(), seen.touch()
    assert before
"""
WRONG = "\ndef test_wrong_{}():\n    assert False\n"


def make_test(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """What `make test` does, with one file of tests in `folder`."""
    (folder / "test_it.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    python = f"{sys.executable} -m"
    command = f"{python} pytest --cache-clear || {python} tests.support.alone $?"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        ["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def test_one_that_passes_by_itself_is_named_and_fails_no_run(tmp_path: Path) -> None:
    made = make_test(tmp_path, RACE)
    assert made.returncode == 0, made.stdout + made.stderr
    assert "FLAKY: test_it.py::test_race" in made.stdout and "1 failed; each once more" in made.stdout


@pytest.mark.parametrize(
    "text",
    [
        RACE + WRONG.format(1),
        RACE + "".join(WRONG.format(number) for number in range(3)),
        "def test_syntax(:\n",
    ],
    ids=["by-itself-too", "more-than-three", "syntax"],
)
def test_everything_else_fails_the_run(tmp_path: Path, text: str) -> None:
    made = make_test(tmp_path, text)
    assert made.returncode != 0 and "FLAKY" not in made.stdout, made.stdout + made.stderr
