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


@pytest.mark.parametrize(
    ("name", "sanitizer"),
    [
        ("table", "none"),
        ("quota_threads", "none"),
        ("quota_processes", "none"),
        ("slot", "none"),
        ("slot_exit", "none"),
        ("slot_many", "none"),
        ("shared", "none"),
        ("kill_steps", "none"),
        ("region_damage", "none"),
        # The rules of GPU time, on a clock of their own.
        ("gate_bucket", "address,undefined"),
        ("gate_rules", "address,undefined"),
        ("arbiter_rules", "address,undefined"),
        ("gate_shares", "address,undefined"),
        # What races can be seen only there.
        ("region_threads", "thread"),
        ("gate_threads", "thread"),
    ],
)
def test_claims_of_the_native_program_hold(name: str, sanitizer: str) -> None:
    problem = _runner().run(name, sanitizer)
    assert problem == "", problem
