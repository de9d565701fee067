"""The version has one home; the changelog's top entry is about it."""

from __future__ import annotations

import re
from pathlib import Path

import vcuda

ROOT = Path(__file__).resolve().parents[2]


def test_the_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == vcuda.__version__
