"""The memory benchmark on a real card, with a simulated machine in its driver's place: all of it runs, and too little memory is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _targets
from vcuda.sim import Machine, SimCard

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30


Measured = tuple[int, str, dict[str, Any]]
# The benchmark with a shorter stress run on the simulated card: 100,000 operations take 8 s of a processor.
SHORTER = """
import sys
from benchmarks import memory
usual = memory.Bench.stress
memory.Bench.stress = lambda bench, operations, seed: usual(bench, min(operations, 12_000), seed)
sys.exit(memory.main())
"""
# The benchmark, with what an earlier run of it measured on the simulated card.
KNOWING = """
import json, sys
from benchmarks import memory
known = json.load(open(sys.argv.pop(1)))
costs = [memory.Cost(**{name: value for name, value in row.items() if name != "added_ns"}) for row in known["costs"]]
figures = memory.Figures(costs, memory.Load(**known["load"]), memory.Stress(**known["stress"]))
memory.on_the_simulated_card = lambda *_: figures
sys.exit(memory.main())
"""


def measured(tmp_path: Path, card: SimCard, driver: str, *program: str) -> Measured:
    machine = Machine.create(tmp_path / "machine", [card])
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-c", *program, "--quick", "--driver", driver, "--json", str(figures)]
    environment = {**os.environ, **machine.environment()}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    said = result.stdout + result.stderr
    assert figures.exists(), said
    return result.returncode, said, json.loads(figures.read_text())


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return measured(tmp_path_factory.mktemp("everything"), SimCard(), "real", SHORTER)


def test_everything_is_measured_on_the_card_too(everything: Measured) -> None:
    status, said, figures = everything
    assert status == 0, said
    real = figures["real"]
    assert real["stress"]["operations"] == 10_000 and real["stress"]["kills"] > 0
    assert real["stress"]["refused"] > 0, "the limit is reached"
    assert not real["stress"]["exact_books"], "NVML's figures"
    assert (real["stress"]["left_bytes"], real["stress"]["left_in_ledger_bytes"]) == (0, 0)
    assert real["load"]["native_ms"] > 0 and len(real["costs"]) == 4
    rows = {row.name: row for row in _targets.judge({"memory": figures})}
    assert rows["T11"].verdict == "met", rows["T11"].measured
    assert " 12,000 operations" in rows["T11"].measured
    assert rows["T11 G"].verdict == "met" and " 10,000 operations" in rows["T11 G"].measured
    assert "ns with 100,000 live" in rows["T3 G"].measured


def test_a_card_too_small_for_the_run_is_skipped_with_the_reason(tmp_path: Path, everything: Measured) -> None:
    (tmp_path / "known.json").write_text(json.dumps(everything[2]))
    small = SimCard(memory_bytes=2 * GIB)
    status, said, figures = measured(tmp_path, small, "auto", KNOWING, str(tmp_path / "known.json"))
    assert status == 0
    assert "real card: skipped: NVIDIA A100-SXM4-40GB: 2048 MiB are free and 16 processes" in said
    assert "need 3078 MiB" in figures["real"]["skipped"]
    rows = {row.name: row for row in _targets.judge({"memory": figures})}
    assert rows["T11"].verdict == "met", rows["T11"].measured
    assert rows["T11 G"].verdict == f"not measured: {figures['real']['skipped']}"
