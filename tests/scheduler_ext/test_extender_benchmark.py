"""The benchmark program runs, counts one write per bound pod, and draws; its times are nobody's business here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_small_run_binds_with_one_write_each_and_draws(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "benchmarks.extender", "--nodes", "20", "--cards", "8", "--pods", "40", "--requests", "20",
        "--connections", "4", "--trace", str(tmp_path), "--plots", str(tmp_path / "plots"), "--json", str(tmp_path / "figures.json"),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=True)
    data = json.loads((tmp_path / "figures.json").read_text())
    assert [(row["connections"], row["pods"]) for row in data["rows"]] == [(4, 0), (4, 40)]
    for row in data["rows"]:
        assert row["requests"] == 20 and row["refused"] == 0
        assert row["binds"] == row["writes"] == 2
        assert row["lists"] == 2  # a watch that is cut costs more than a pod does
    assert {"filter", "explain", "defrag"} <= data["holds_ms"].keys()
    assert data["packing"] == {} and "skipped" in done.stderr
    assert (tmp_path / "plots" / "extender-latency.png").read_bytes().startswith(b"\x89PNG")
