"""The few packages of a card's machine are the project's own, with the same lower bounds."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_what_a_cards_machine_installs_says_the_same_as_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    ours = {*project["dependencies"], *extras["demo"], *extras["dev"]}
    lines = (ROOT / "tests/gpu/requirements.txt").read_text().splitlines()
    theirs = {line for line in lines if line and not line.startswith("#")}
    assert theirs
    assert theirs <= ours
