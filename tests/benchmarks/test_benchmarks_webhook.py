"""The webhook's benchmark gets right answers of every kind, and its verdict is about the slowest of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks import _readings, webhook

ROOT = Path(__file__).parents[2]


def test_a_small_run_measures_every_kind(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.webhook",
        "--reviews",
        "40",
        "--json",
        str(tmp_path / "figures.json"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=True)
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert {row["kind"] for row in rows} == set(webhook.KINDS) and "refused" in done.stdout
    for row in rows:
        assert row["reviews"] in (40, 4) and 0 < row["p50_ms"] <= row["p99_ms"] <= row["most_ms"]


def test_the_verdict_is_the_slowest_kinds() -> None:
    rows = [
        {"kind": "no share", "p99_ms": 2.0},
        {"kind": "the same, 1 MB", "p99_ms": 10.1},
        {"kind": "refused", "p99_ms": 3.0},
    ]
    ((text, met),) = _readings.reviews({"webhook": {"rows": rows}})
    assert "10.1 ms, the same, 1 MB" in text and not met
    assert _readings.reviews({"webhook": {"rows": rows[:1]}})[0][1]
