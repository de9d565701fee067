"""What the simulated driver only exports: every such function answers "not supported", whatever it is called with, and harms nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import simulated
from vcuda import sim

SOURCES = Path(sim.__file__).parent / "src"
CUDA = re.findall(r"^SIM_(?:REFUSED|UNLISTED)\((\w+)", (SOURCES / "cuda/cu_api.def").read_text(), re.MULTILINE)
NVML = re.findall(r"^NV_UNSUPPORTED\((\w+)\)", (SOURCES / "nvml/nvml_unsupported.def").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> sim.Machine:
    return sim.Machine.create(tmp_path_factory.mktemp("refused") / "machine")


def answers(machine: sim.Machine, library: str, names: list[str], begin: str) -> list[set[int]]:
    """What all functions answer before the library is initialised and after `begin`; then one that works must work."""
    code = f"""
        import ctypes
        library = ctypes.CDLL({library!r})
        said = []
        for words in ("", {begin!r}):
            assert not words or getattr(library, words)(0) == 0
            said.append(sorted({{getattr(library, name)(0, 0, 0, 0, 0, 0) for name in {names!r}}}))
        count = ctypes.c_int()
        count_of = library.cuDeviceGetCount if "cuda" in {library!r} else library.nvmlDeviceGetCount_v2
        assert count_of(ctypes.byref(count)) == 0 and count.value
        answer(said)
    """
    return [set(each) for each in simulated.nvml(machine, code)]


def test_cuda_refuses_what_is_not_simulated(machine: sim.Machine) -> None:
    not_initialised, not_supported = 3, 801
    assert len(CUDA) > 100
    assert answers(machine, "libcuda.so.1", CUDA, "cuInit") == [{not_initialised}, {not_supported}]


def test_nvml_refuses_what_is_not_simulated(machine: sim.Machine) -> None:
    uninitialized, not_supported = 1, 3
    assert len(NVML) > 100
    assert answers(machine, "libnvidia-ml.so.1", NVML, "nvmlInit_v2") == [
        {uninitialized},
        {not_supported},
    ]
