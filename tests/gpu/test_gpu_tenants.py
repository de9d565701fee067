"""Two tenants beside each other, and what the vendor's tool says inside a share."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import _card, _throttle_bench
from tests.gpu.gpu_clients import LIMIT_MIB, ROOT, Share
from tests.gpu.gpu_place import MIB, Place

pytestmark = pytest.mark.gpu
SECONDS = 3.0


@pytest.fixture
def load(home: Path) -> Path:
    """The benchmarks' load program, where any user can run it."""
    source = ROOT / "benchmarks" / "throttle_load.c"
    return _throttle_bench.compile_c(source, home / "throttle_load")


def counted(files: list[Path]) -> list[int]:
    return [struct.unpack("Q", file.read_bytes()[:8])[0] if file.exists() else 0 for file in files]


@pytest.fixture
def progress() -> Iterator[list[Path]]:
    """Where the kernels of two tenants count themselves: in memory, a card must not write to a disk."""
    folder = Path("/dev/shm", f"vcuda-gpu-tests-{os.getpid()}")
    folder.mkdir(mode=0o777)
    yield [folder / "first", folder / "second"]
    shutil.rmtree(folder)


def test_two_greedy_tenants_get_what_they_were_promised(
    any_card: Place, share_of: Callable[..., Share], load: Path, progress: list[Path]
) -> None:
    rounds = 1
    if any_card.real:  # there a kernel takes as long as its loop; on the simulated card its name tells
        own = _card.choose("real", load.parent, load)
        rounds = int(own.watched({"kernel": "spin_1000us"})["rounds"])
    words = [str(load), "kernel=spin_1000us", "sync=20", "seconds=60", f"rounds={rounds}"]
    # Both shares are of one ledger, so that one arbiter sees them.
    # An H100's context takes half a GiB.
    tenants = [share_of(any_card, cores=cores, memory_mib=LIMIT_MIB) for cores in (30, 70)]
    running = [
        subprocess.Popen(tenant.command(*words, f"progress={file}"), cwd=ROOT, stdout=subprocess.DEVNULL)
        for tenant, file in zip(tenants, progress, strict=True)
    ]
    try:
        deadline = time.monotonic() + 60
        while 0 in counted(progress):
            assert time.monotonic() < deadline and all(process.poll() is None for process in running)
            time.sleep(0.05)
        time.sleep(1)
        before = counted(progress)
        time.sleep(SECONDS)
        small, large = (now - then for now, then in zip(counted(progress), before, strict=True))
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(30)
    tolerance = 3 if any_card.real else 12  # the simulated card runs on a processor that others use too
    assert 100 * small / (small + large) == pytest.approx(30, abs=tolerance)


def smi(card: Place, share: Share, *words: str) -> str:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("nvidia-smi is not installed here")
    result = subprocess.run(
        share.command("nvidia-smi", *words), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_nvidia_smi_shows_the_limit_as_the_total_and_one_card(card: Place, share_of: Callable[..., Share]) -> None:
    query = ("--query-gpu=memory.total,memory.used,uuid", "--format=csv,noheader,nounits")
    assert smi(card, share_of(card), *query).split(", ") == [str(LIMIT_MIB), "0", f"{card.uuid}\n"]


def test_nvidia_smi_shows_what_the_share_uses_and_not_the_neighbours(
    card: Place, share_of: Callable[..., Share], python_with: Callable[..., str]
) -> None:
    python = python_with("cuda.bindings.driver")
    script = f"""
import subprocess
from cuda.bindings import driver as d
d.cuInit(0)
d.cuCtxSetCurrent(d.cuDevicePrimaryCtxRetain(0)[1])
assert d.cuMemAlloc({256 * MIB})[0] == 0
query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
print(int(subprocess.run(query, capture_output=True, text=True, check=True).stdout))
"""
    used = share_of(card).run(python, "-c", script)
    assert 256 <= used < 256 + 1024, "what was allocated, and a context"
