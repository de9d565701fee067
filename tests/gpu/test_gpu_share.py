"""A share of a real card through `vcuda run`: the limit is a CUDA out-of-memory error, tools inside see the share."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vcuda.runs import cards, driver
from vcuda.runs.errors import RunError

ROOT = Path(__file__).resolve().parents[2]
LIMIT_MIB = 2048
SHARE = ["--core", "50", "--memory", f"{LIMIT_MIB}MiB"]


def why_no_card() -> str:
    """Empty if this machine has a card that works, else the reason."""
    try:
        found = driver.find(os.environ.get("LD_LIBRARY_PATH", "").split(":"))
        return "" if cards.discover(found.nvml) else "the driver lists no card"
    except RunError as error:
        return str(error)


NO_CARD = why_no_card()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(NO_CARD), reason=NO_CARD or "a card is here")]


def needs(module: str) -> pytest.MarkDecorator:
    try:
        missing = importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        missing = True
    return pytest.mark.skipif(missing, reason=f"{module} is not installed here")


def in_a_share(*command: str, ledger: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "vcuda.cli.main", "run", *SHARE, "--ledger", str(ledger), "--", *command]
    return subprocess.run(
        words, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=110, check=False
    )


def verdict(script: str, tmp_path: Path) -> list[str]:
    result = in_a_share(sys.executable, "-c", script, ledger=tmp_path / "ledger")
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@needs("cuda.bindings")
def test_the_driver_api_is_refused_at_the_limit_and_recovers(tmp_path: Path) -> None:
    script = """
from cuda.bindings import driver as d
def ok(result):
    assert result[0] == 0, result
    return result[1:]
ok(d.cuInit(0))
device, = ok(d.cuDeviceGet(0))
context, = ok(d.cuDevicePrimaryCtxRetain(device))
ok(d.cuCtxSetCurrent(context))
free, total = ok(d.cuMemGetInfo())
held = []
while True:
    status, pointer = d.cuMemAlloc(64 << 20)
    if status != 0:
        break
    held.append(pointer)
error = int(status)
ok(d.cuMemFree(held.pop()))
again, _ = d.cuMemAlloc(32 << 20)
print(ok(d.cuDeviceGetCount())[0], total >> 20, free < total, error, len(held) * 64 + 64, int(again))
"""
    count, total, context_counted, error, reached, again = verdict(script, tmp_path)
    assert (count, total, context_counted) == ("1", str(LIMIT_MIB), "True")
    assert (error, again) == ("2", "0"), (
        "CUDA_ERROR_OUT_OF_MEMORY, and memory that was given back can be had again"
    )
    assert LIMIT_MIB // 2 < int(reached) <= LIMIT_MIB


@needs("torch")
def test_pytorch_sees_an_ordinary_out_of_memory_error(tmp_path: Path) -> None:
    script = """
import torch
held = []
try:
    while True:
        held.append(torch.ones(64 << 20, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError:
    print("refused", len(held) * 64)
held.clear()
torch.cuda.empty_cache()
a = torch.arange(4096, dtype=torch.float64, device="cuda").reshape(64, 64)
print(bool(torch.allclose((a @ a).cpu(), a.cpu() @ a.cpu())))
"""
    refused, reached, right = verdict(script, tmp_path)
    assert (refused, right) == ("refused", "True")
    assert LIMIT_MIB // 4 < int(reached) <= LIMIT_MIB


@needs("cupy")
def test_cupy_sees_an_ordinary_out_of_memory_error(tmp_path: Path) -> None:
    script = """
import cupy
held = []
try:
    while True:
        held.append(cupy.ones(64 << 20, dtype=cupy.uint8))
except cupy.cuda.memory.OutOfMemoryError:
    print("refused", len(held) * 64)
held.clear()
cupy.get_default_memory_pool().free_all_blocks()
print(int(cupy.arange(1000).sum()))
"""
    refused, reached, right = verdict(script, tmp_path)
    assert (refused, right) == ("refused", "499500")
    assert LIMIT_MIB // 4 < int(reached) <= LIMIT_MIB


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="nvidia-smi is not installed here")
def test_nvidia_smi_shows_the_share(tmp_path: Path) -> None:
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    result = in_a_share(*query, ledger=tmp_path / "ledger")
    assert (result.returncode, result.stdout.split()) == (0, [str(LIMIT_MIB)]), result.stderr
