"""The C core's own tests, as they are built for tenants; `make sanitize` runs all of them under every sanitizer."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _runner() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "native" / "run.py"
    spec = importlib.util.spec_from_file_location("vcuda_native_tests", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(320)  # a little more than the runner gives a program
@pytest.mark.parametrize(
    "name",
    [
        *("table", "quota_threads", "quota_processes", "slot", "slot_exit", "slot_many", "shared", "kill_steps"),
        *("region_damage", "region_threads", "gate_threads"),
        # The rules of GPU time, on a clock of their own.
        *("gate_bucket", "gate_rules", "gate_shares", "arbiter_rules"),
    ],
)
def test_claims_of_the_native_program_hold(name: str) -> None:
    problem = _runner().run(name, "none")
    assert problem == "", problem
