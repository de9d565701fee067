"""Unmodified monitoring programs on the simulated libnvidia-ml, and its likeness to the genuine library."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import genuine, simulated
from vcuda import sim

GIB, MIB = 2**30, 2**20
SERIES = ("535", "550")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> sim.Machine:
    cards = [sim.SimCard(memory_bytes=8 * GIB), sim.SimCard(model="Tesla T4"), sim.SimCard(mig=["3g"])]
    return sim.Machine.create(tmp_path_factory.mktemp("clients") / "machine", cards)


@pytest.fixture(params=SERIES)
def smi(request: pytest.FixtureRequest) -> str:
    try:
        return str(genuine.nvidia_smi(request.param))
    except genuine.Unavailable as error:
        pytest.skip(f"no genuine nvidia-smi: {error}")


def test_nvidia_smi_lists_cards_and_instances(machine: sim.Machine, smi: str) -> None:
    result = simulated.program(machine, smi, "-L")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    for card in machine.cards:
        assert f"GPU {card.index}: {card.name} (UUID: {card.uuid})" in lines
    part = machine.cards[2].mig[0]
    assert re.fullmatch(rf"  MIG {part.profile} +Device +0: \(UUID: {part.uuid}\)", lines[-1])


def test_nvidia_smi_shows_memory_in_its_default_view(machine: sim.Machine, smi: str) -> None:
    with simulated.tenant(machine, memory_bytes=1000 * MIB):
        used = machine.report().cards[0].used_bytes // MIB
        result = simulated.program(machine, smi)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(rf"\b{used}MiB / +8192MiB", result.stdout), result.stdout
    assert re.search(r"\b0MiB / +16384MiB", result.stdout)
    assert f"Driver Version: {machine.driver_version}" in result.stdout and "CUDA Version: 12.4" in result.stdout


def test_nvidia_smi_answers_queries(machine: sim.Machine, smi: str) -> None:
    fields = "index,uuid,name,memory.total,utilization.gpu,temperature.gpu,power.limit,pci.bus_id,mig.mode.current"
    result = simulated.program(machine, smi, f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line.split(", ") for line in result.stdout.splitlines()]
    assert [row[:4] for row in rows] == [
        [str(card.index), card.uuid, card.name, str(card.memory_bytes // MIB)] for card in machine.cards
    ]
    assert [row[8] for row in rows] == ["Disabled", "[N/A]", "Enabled"]


def test_nvidia_smi_tells_everything(machine: sim.Machine, smi: str) -> None:
    result = simulated.program(machine, smi, "-q")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"Attached GPUs +: 3\n", result.stdout)
    for card in machine.cards:
        assert f": {card.uuid}\n" in result.stdout
    assert not re.search(r"Unknown Error|GPU is lost", result.stdout)


def test_nvidia_smi_reports_a_missing_driver(tmp_path: Path, smi: str) -> None:
    machine = sim.Machine.create(tmp_path / "machine")
    machine.unload_driver()
    result = simulated.program(machine, smi)
    assert result.returncode == 9 and "couldn't communicate with the NVIDIA driver" in result.stdout


def test_gpustat_shows_cards_and_processes(machine: sim.Machine) -> None:
    with simulated.tenant(machine, memory_bytes=1000 * MIB) as pid:
        used = machine.report().cards[0].used_bytes // MIB
        result = simulated.program(machine, sys.executable, "-m", "gpustat", "--no-color", "--show-pid")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(rf"\[0\] NVIDIA A100.*\b{used} / +8192 MB.*/{pid}\({used}M\)", result.stdout), result.stdout


def test_nvitop_shows_cards_processes_and_instances(machine: sim.Machine) -> None:
    with simulated.tenant(machine, memory_bytes=1000 * MIB) as pid:
        used = machine.report().cards[0].used_bytes // MIB
        result = simulated.program(machine, sys.executable, "-m", "nvitop", "--once", "--no-unicode")
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{used}MiB / 8192MiB" in result.stdout and re.search(rf"\b{pid} C ", result.stdout), result.stdout
    assert machine.cards[2].mig[0].profile in result.stdout


# ---- likeness to the genuine library ----


def exported(library: Path) -> set[str]:
    if shutil.which("nm") is None:
        pytest.skip("there is no nm here")
    result = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True, timeout=60
    )
    return {line.split()[2].split("@")[0] for line in result.stdout.splitlines() if len(line.split()) == 3}


def test_it_exports_what_the_genuine_550_library_exports(machine: sim.Machine) -> None:
    try:
        real = exported(genuine.libnvidia_ml("550"))
    except genuine.Unavailable as error:
        pytest.skip(f"no genuine libnvidia-ml: {error}")
    ours = exported(machine.library_folder / "libnvidia-ml.so.1")
    wanted = {name for name in real if name.startswith("nvml")}
    assert ours - {"simReport", "simInject", "simWatch"} == wanted


def test_inner_calls_can_be_interposed_as_in_the_genuine_library(machine: sim.Machine) -> None:
    """nvmlInit_v2 reaches nvmlInitWithFlags through its linkage table, so a shim in front sees the inner call."""
    if shutil.which("readelf") is None:
        pytest.skip("there is no readelf here")
    library = machine.library_folder / "libnvidia-ml.so.1"
    result = subprocess.run(
        ["readelf", "--relocs", "--wide", str(library)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    through_table = set(re.findall(r"JUMP_SLOT\s+\S+\s+(nvml\w+)", result.stdout))
    assert through_table >= {
        "nvmlInitWithFlags",
        "nvmlDeviceGetCount_v2",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetHandleByPciBusId_v2",
    }


_ERROR_STRINGS = """
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1])
library.nvmlErrorString.restype = ctypes.c_char_p
print(json.dumps([library.nvmlErrorString(number).decode() for number in (*range(29), 999, 12345)]))
"""


def test_error_strings_are_the_genuine_ones(machine: sim.Machine) -> None:
    try:
        real = genuine.libnvidia_ml("550")
    except genuine.Unavailable as error:
        pytest.skip(f"no genuine libnvidia-ml: {error}")
    ours = machine.library_folder / "libnvidia-ml.so.1"
    said = [
        subprocess.run(
            [sys.executable, "-c", _ERROR_STRINGS, str(library)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for library in (ours, real)
    ]
    assert said[0] == said[1]
