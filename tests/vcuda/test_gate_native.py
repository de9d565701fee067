"""Native tests of the GPU-time rules (tests/native): compiled with sanitizers, on a clock of their own, never timed."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "vcuda" / "src"
RULES = (
    "gate/bucket",
    "gate/estimate",
    "gate/gate",
    "gate/busy",
    "gate/lane",
    "gate/ticks",
    "gate/turn",
    "region/share",
    "arbiter/decide",
    "arbiter/observe",
)


def compile_and_run(folder: Path, sources: list[str], *flags: str) -> None:
    program = folder / "test"
    command = [
        *shlex.split(os.environ.get("CC", "gcc")),
        *("-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror"),
        *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DVC_TICKS_OF_TEST=1"),
        *flags,
        *(f"-I{path}" for path in (ROOT / "tests" / "native", SOURCES, ROOT / "vcuda" / "abi")),
        *("-o", str(program)),
        *(str(ROOT / "tests" / "native" / source) for source in sources),
        *(str(SOURCES / f"{name}.c") for name in RULES),
        "-lpthread",
    ]
    built = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("name", ["gate_bucket", "gate_rules", "arbiter_rules"])
def test_rules_hold_exactly(name: str, tmp_path: Path) -> None:
    compile_and_run(tmp_path, [f"{name}.c", "gate_ticks.c"])


def test_shares_come_out_on_the_model_card(tmp_path: Path) -> None:
    compile_and_run(tmp_path, ["gate_shares.c", "gate_model.c", "gate_ticks.c"], "-O2")
