"""Which card the benchmarks take for a real one, with simulated machines in the driver's place: what speaks against a card is said, with the way out."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import _usable
from vcuda.sim import CardLost, Machine, SimCard

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
HOLD = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, at = ctypes.c_void_p(), ctypes.c_uint64()
assert not cuda.cuInit(0) and not cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0)
assert not cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(int(sys.argv[1]) << 20))
print("holding", flush=True)
sys.stdin.read()
"""
REFUSES = """
int cuInit(unsigned flags) { return (int)flags; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = 0; return 800 + device; }
int cuGetErrorName(int error, const char **name) { *name = "CUDA_ERROR_NOT_PERMITTED"; return error - 800; }
"""
FIND = """
import sys
import pynvml
from benchmarks import _usable
from vcuda.runs.errors import RunError
{before}
try:
    found = _usable.find({needed}, alone={alone})
    print("taken", found.card.uuid, found.context_bytes >> 20, "; ".join(found.remarks))
except RunError as error:
    print("none", error)
"""


def find(machine: Machine, *, needed: int = GIB, alone: bool = False, before: str = "") -> str:
    """What a program of its own finds on the machine; `before` runs in it first."""
    script = FIND.format(needed=needed, alone=alone, before=textwrap.dedent(before))
    return run(machine, "-c", script).stdout.strip()


def run(machine: Machine, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **machine.environment()}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@contextmanager
def somebody(machine: Machine, mib: int) -> Iterator[int]:
    """Another user's process on the first card, with so much memory; its PID."""
    environment = {**os.environ, **machine.environment()}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(mib)], env=environment, stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert process.stdout and process.stdout.readline() == "holding\n"
        yield process.pid
        process.communicate("")


def test_an_idle_card_is_taken_and_its_contexts_are_measured(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine")
    assert find(machine, alone=True) == f"taken {machine.cards[0].uuid} 64"


def test_too_little_memory_is_said_with_who_holds_it(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine", [SimCard(memory_bytes=2 * GIB)])
    with somebody(machine, 1024) as pid:
        said = find(machine, needed=GIB)
    assert said.endswith(f": 960 MiB are free and 1024 are needed (process {pid} with 1088 MiB)") and said.startswith(
        f"none {machine.cards[0].name} {machine.cards[0].uuid}"
    )
    assert find(machine, needed=3 * GIB).endswith(": 2048 MiB are free and 3072 are needed (no process is shown)")


def test_other_users_are_a_remark_or_where_figures_count_a_reason(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine")
    with somebody(machine, 100) as pid:
        said = find(machine)
        refused = find(machine, alone=True)
    assert said.startswith("taken ") and said.endswith(f"beside us on the card: process {pid} with 164 MiB")
    assert refused.endswith(
        f": other users are on it (process {pid} with 164 MiB); figures beside them would say nothing"
    )


def test_the_first_card_that_can_be_used_is_taken(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine", [SimCard(), SimCard()])
    with somebody(machine, 100):
        assert find(machine, alone=True) == f"taken {machine.cards[1].uuid} 64"


@pytest.mark.parametrize(("mode", "words"), [(2, "prohibited"), (3, "exclusive to one process")])
def test_a_card_that_not_every_program_may_use_is_left_alone(tmp_path: Path, mode: int, words: str) -> None:
    machine = Machine.create(tmp_path / "machine")
    said = find(machine, before=f"pynvml.nvmlDeviceGetComputeMode = lambda handle: {mode}")
    assert f"its compute mode is {words}" in said and said.endswith("(nvidia-smi -c 0, as root)")


def test_a_mig_instance_is_a_card_and_a_card_in_mig_mode_without_one_is_none(tmp_path: Path) -> None:
    divided = Machine.create(tmp_path / "divided", [SimCard(mig=("3g",))])
    said = find(divided)
    assert said.startswith("taken MIG-") and said.endswith("a MIG instance")
    plain = Machine.create(tmp_path / "plain")
    empty = (
        "pynvml.nvmlDeviceGetMigMode = lambda handle: [1, 1]\npynvml.nvmlDeviceGetMaxMigDeviceCount = lambda handle: 0"
    )
    assert "it is in MIG mode without an instance; make one" in find(plain, before=empty)


def test_a_driver_that_refuses_a_context_is_quoted(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine")
    source = tmp_path / "refuses.c"
    source.write_text(REFUSES)
    library = machine.library_folder / "libcuda.so.1"
    library.unlink()
    compiler = os.environ.get("CC", "gcc")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    said = find(machine)
    assert "the driver refuses a context with CUDA_ERROR_NOT_PERMITTED (800)" in said
    assert "MPS server another user's?" in said


def test_a_lost_card_is_none(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine")
    machine.inject(CardLost(0))
    assert find(machine).startswith("none ")


def test_an_mps_server_is_a_remark(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine")
    said = find(machine, before="_usable.mps_is_there = lambda: True")
    assert said.endswith("an MPS server runs on this machine: time slices are not what the shares expect")


def test_memory_that_nobody_is_shown_to_hold_is_a_remark(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine")
    with somebody(machine, 2048):
        said = find(machine, before="pynvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: []")
    assert said.endswith("2112 MiB of the card are used by processes that NVML does not show")


def test_the_probe_is_gone_afterwards(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine")
    find(machine)
    assert machine.report().cards[0].used_bytes == 0
    assert _usable.PROBE_SECONDS < 600


def test_the_model_benchmark_and_the_throttles_card_say_why_there_is_no_real_one(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine", [SimCard(memory_bytes=2 * GIB)])
    torch = tmp_path / "packages"
    torch.mkdir()
    (torch / "torch.py").write_text("")  # only that it can be imported is asked before the card is
    os.environ["PYTHONPATH"] = str(torch)
    try:
        models = run(machine, "-m", "benchmarks.models", "--python", sys.executable)
    finally:
        del os.environ["PYTHONPATH"]
    assert models.returncode == 0, models.stderr
    assert "2048 MiB are free and 17408 are needed (no process is shown)" in models.stdout
    script = (
        "from pathlib import Path; from benchmarks import _card; "
        f"print(_card.choose('auto', Path({str(torch)!r}), Path('none')).name)"
    )
    said = run(machine, "-c", script).stdout.splitlines()
    assert said[0].startswith("No real card: ") and "10240 are needed" in said[0]
    assert said[1] == "simulated"
