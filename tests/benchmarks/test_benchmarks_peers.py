"""Peers beside ours, with small libraries in their place: their variables reach them, and one that crashes, hangs or limits nothing is reported."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks import _throttle_bench, peers
from benchmarks._throttle_bench import Bench

NOTES_VARIABLES = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void begin(void)
{
    FILE *file = fopen(getenv("CUDA_DEVICE_MEMORY_SHARED_CACHE"), "ax");
    if (!file) /* another program's limits are there */
        abort();
    fprintf(file, "%s %s\\n", getenv("CUDA_DEVICE_MEMORY_LIMIT"), getenv("CUDA_DEVICE_SM_LIMIT"));
    fclose(file);
}
"""
CRASHES = "__attribute__((constructor)) static void begin(void) { *(volatile int *)8 = 1; }"
HANGS = "#include <unistd.h>\n__attribute__((constructor)) static void begin(void) { pause(); }"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench for one kernel and cap, short."""
    monkeypatch.setattr(peers, "KERNELS", {"1 ms": {"kernel": "spin_1000us"}})
    for module in (peers, _throttle_bench):
        monkeypatch.setattr(module, "WARM_SECONDS", 0.5)
    return Bench(tmp_path)


def library(folder: Path, code: str) -> Path:
    source, built = folder / "peer.c", folder / "libvgpu.so"
    source.write_text(code)
    subprocess.run([os.environ.get("CC", "gcc"), "-shared", "-fPIC", "-o", built, source], check=True)
    return built


def test_a_peer_that_limits_nothing_is_measured_and_told_of(bench: Bench, tmp_path: Path) -> None:
    made = peers.peer(["hami", str(library(tmp_path, NOTES_VARIABLES))])
    result = peers.measure(bench, made, quick=True)
    assert result.failed == [], "each program found a folder of its own"
    assert result.launch_p50_ns and result.reached_mib and result.reached_mib > peers.MEMORY_MIB
    memory, time = result.unlimited
    assert memory == f"memory: {result.reached_mib} MiB of {peers.MEMORY_MIB}"
    assert time.startswith("time: 1 ms at 50, ")
    noted = {file.read_text() for file in tmp_path.glob("hami-*/cudevshr.cache")}
    assert noted == {"1024m 50\n", "1024m 90\n"}


def test_a_peer_that_crashes_its_program_is_reported(bench: Bench, tmp_path: Path) -> None:
    made = peers.peer(["broken", str(library(tmp_path, CRASHES)), "LIMIT={cores}"])
    result = peers.measure(bench, made, quick=True)
    nothing = {"1 ms at 50": None}
    assert (result.reached_mib, result.launch_p50_ns) == (None, None)
    assert result.achieved == result.shares == nothing
    assert [failure.partition(":")[0] for failure in result.failed] == ["memory", "launches", "1 ms at 50"]
    assert all("it ended with SIGSEGV" in failure for failure in result.failed), result.failed


def test_a_peer_that_hangs_is_ended_and_reported(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "CLIENT_SECONDS", 1.0)
    monkeypatch.setattr(peers, "LOAD_SECONDS", 1.0)
    made = peers.peer(["stuck", str(library(tmp_path, HANGS)), "LIMIT={cores}"])
    result = peers.measure(bench, made, quick=True)
    assert [failure.rpartition(": ")[2] for failure in result.failed] == ["it was not done after 1 s"] * 3


def test_ours_limits_both(bench: Bench) -> None:
    assert peers.measure(bench, peers.Ours(), quick=True).unlimited == []


def test_what_is_no_limit_is_told() -> None:
    ours = peers.Ours()
    assert peers.not_limited(ours, peers.MEMORY_MIB, {"a at 50": 70.0, "b at 80": None, "c at 50": 2.0}) == []
    assert peers.not_limited(ours, peers.MEMORY_MIB + 1, {"a at 80": 91.0}) == [
        f"memory: {peers.MEMORY_MIB + 1} MiB of {peers.MEMORY_MIB}",
        "time: a at 80, it got 91",
    ]
    assert peers.not_limited(peers.Nothing(), 10 * peers.MEMORY_MIB, {}) == []
