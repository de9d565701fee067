"""The matrix of clusters in docs/operations.md: a run writes its own row and leaves the others."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.support.kube_matrix import BEGIN, END, Row, update

OPERATIONS = Path(__file__).resolve().parents[2] / "docs/operations.md"
ROW = Row("v1.36.2", "containerd 1.7", "v1", "DeviceSpecs", ["test_kube_shares.py"], 9, 0, 1, "2026-11-23")


def test_a_run_replaces_its_own_row_and_no_other(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n{BEGIN}\n{END}\n\nmore\n")
    update(page, ROW)
    update(page, dataclasses.replace(ROW, injection="CDI", failed=2))
    update(page, dataclasses.replace(ROW, kubernetes="v1.9.0"))
    update(page, dataclasses.replace(ROW, passed=10))
    lines = page.read_text().splitlines()
    assert lines[0] == "# Title" and lines[1] == BEGIN and lines[-3:] == [END, "", "more"]
    assert [line.split(" | ")[0].strip("| ") for line in lines[4:-3]] == ["v1.9.0", "v1.36.2", "v1.36.2"]
    assert "| v1.36.2 | containerd 1.7 | v1 | DeviceSpecs | shares | 10 | 0 | 1 | 2026-11-23 |" in lines
    assert sum("| CDI | shares | 9 | 2 |" in line for line in lines) == 1
    page.write_text("no table")
    with pytest.raises(ValueError, match="has no lines"):
        update(page, ROW)


def test_the_page_has_the_table() -> None:
    text = OPERATIONS.read_text()
    assert text.index(BEGIN) < text.index("| v1.") < text.index(END)
