"""benchmarks/throttle.py measures the rows that were asked for, and loses none of them when it is stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_stopped_run_has_written_its_rows_and_ends_its_loads(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    wanted = ["--rows", "30/70 greedy, kernels of 1 ms", "--rows", "inference"]
    command = [sys.executable, "-m", "benchmarks.throttle", "--driver", "simulated", "--quick", *wanted]
    with subprocess.Popen(
        [*command, "--json", str(figures)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stderr
        assert "30/70 greedy, kernels of 1 ms" in run.stderr.readline()
        run.terminate()
        said, _ = run.communicate(timeout=60)
    assert run.returncode == 0
    found = json.loads(figures.read_text())
    assert found["stopped"] is True
    assert {row["what"].removesuffix(": sum") for row in found["shares"]} == {"30/70 greedy, kernels of 1 ms"}
    assert found["shares"][0]["charged"] > 0
    assert "stopped before the end" in said
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False)
    assert left.stdout == ""
