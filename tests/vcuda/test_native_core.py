"""The C core's own tests, under the address and undefined-behaviour sanitizers; `make sanitize` adds the thread sanitizer."""

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


@pytest.mark.parametrize("name", ["ledger", "quota_threads", "quota_processes", "slot", "slot_exit"])
def test_claims_of_the_native_program_hold(name: str) -> None:
    problem = _runner().run(name, "address,undefined")
    assert problem == "", problem
