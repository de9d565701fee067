"""The matrix of clusters in docs/operations.md: a run writes its own row and leaves the others."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.support.kube_matrix import BEGIN, END, Counts, Row, counts, update

OPERATIONS = Path(__file__).resolve().parents[2] / "docs/operations.md"
ROW = Row("v1.36.2", "containerd 1.7", "v1", "DeviceSpecs", {"shares": Counts(9, 0, 1)}, "2026-11-23")


def test_a_run_replaces_what_is_said_of_its_own_files_and_no_other(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n{BEGIN}\n{END}\n\nmore\n")
    update(page, ROW)
    update(page, dataclasses.replace(ROW, injection="CDI", files={"shares": Counts(7, 2)}))
    update(page, dataclasses.replace(ROW, kubernetes="v1.9.0"))
    update(page, dataclasses.replace(ROW, files={"shares": Counts(8, 1, 1), "bursts": Counts(6)}))
    update(page, dataclasses.replace(ROW, files={"modes": Counts(5)}, day="2026-11-24"))
    lines = page.read_text().splitlines()
    assert lines[0] == "# Title" and lines[1] == BEGIN and lines[-3:] == [END, "", "more"]
    assert [line.split(" | ")[0].strip("| ") for line in lines[4:-3]] == ["v1.9.0", "v1.36.2", "v1.36.2"]
    told = "bursts 6, modes 5, shares 8 (1 failed, 1 skipped)"
    assert f"| v1.36.2 | containerd 1.7 | v1 | DeviceSpecs | {told} | 2026-11-24 |" in lines
    assert sum("| CDI | shares 7 (2 failed) |" in line for line in lines) == 1
    update(page, dataclasses.replace(ROW, files={"shares": Counts(10)}))
    assert "bursts 6, modes 5, shares 10 |" in page.read_text()
    page.write_text("no table")
    with pytest.raises(ValueError, match="has no lines"):
        update(page, ROW)


def test_a_test_counts_once_and_a_file_without_a_pass_is_told(tmp_path: Path) -> None:
    shares, modes = "tests/kube/test_kube_shares.py", "tests/kube/test_kube_modes.py"
    found = counts({"passed": [f"{shares}::test_a", f"{shares}::test_b"], "failed": [f"{modes}::test_c"],
                    "error": [f"{shares}::test_b"], "skipped": [f"{modes}::test_d"]})  # fmt: skip
    assert found == {"shares": Counts(1, 1, 0), "modes": Counts(0, 1, 1)}


def test_a_file_that_ran_in_part_is_not_counted() -> None:
    run = {
        "passed": ["a/test_kube_shares.py::test_a", "a/test_kube_bursts.py::test_b"],
        "failed": [],
        "error": [],
        "skipped": [],
    }
    assert counts(run, ["a/test_kube_shares.py::test_c"]) == {"bursts": Counts(1)}
    chosen = [*run["passed"], "a/test_kube_shares.py::test_that_an_interrupted_run_has_not_come_to"]
    assert counts(run, (), chosen) == {"bursts": Counts(1)}


def test_the_page_has_the_table() -> None:
    text = OPERATIONS.read_text()
    assert text.index(BEGIN) < text.index("| v1.") < text.index(END)
