"""Grace nodes: what a tenant loads builds for arm64, loads on old images there, and its rules hold under emulation.

`make arm64` builds all and runs all programs of tests/native that emulation can show.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.run import EMULATED, PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
CROSS = {"CC": COMPILER, "NM": "aarch64-linux-gnu-nm", "EMULATOR": f"{EMULATOR} -L /usr/aarch64-linux-gnu"}
_AARCH64 = b"\xb7\x00"  # e_machine of elf.h

pytestmark = [
    pytest.mark.skipif(not os.environ.get("VCUDA_TEST_ARM64"), reason="takes minutes; `make arm64` runs it"),
    pytest.mark.skipif(
        not shutil.which(COMPILER), reason=f"no {COMPILER}; on Debian: apt-get install gcc-aarch64-linux-gnu"
    ),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shims and the simulated driver, for arm64."""
    folder = tmp_path_factory.mktemp("arm64")
    command = [
        sys.executable,
        "-m",
        "vcuda._build",
        "--into",
        str(folder),
        "cuda-shim",
        "nvml-shim",
        "sim-cuda",
        "preload",
    ]
    made = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **CROSS}, capture_output=True, text=True, check=False, timeout=500
    )
    assert made.returncode == 0, made.stderr
    return folder


def test_shims_and_simulator_are_built_the_preload_library_is_not(built: Path) -> None:
    for name in ("shim/libcuda.so.1", "shim/libnvidia-ml.so.1", "sim/libcuda.so.1"):
        assert (built / name).read_bytes()[18:20] == _AARCH64, name
    assert not (built / "preload").exists(), "its jumps are x86-64's"


def test_shims_ask_for_the_first_glibc_of_that_machine_alone(built: Path) -> None:
    """As on x86-64: a tenant's image may have glibc 2.17, the first one for arm64."""
    for path in (built / "shim").glob("*.so.1"):
        told = subprocess.run(
            ["readelf", "-V", str(path)], capture_output=True, text=True, check=True, timeout=30
        ).stdout
        found = set(re.findall(r"GLIBC_[\d.]+", told))
        assert found == {"GLIBC_2.17"}, (path.name, found)


@pytest.mark.skipif(
    not shutil.which(EMULATOR), reason=f"no {EMULATOR}; on Debian: apt-get install qemu-user libc6-dev-arm64-cross"
)
@pytest.mark.parametrize("program", ["table", "gate_rules", "quota_threads"])
def test_the_core_s_own_tests_pass_under_emulation(program: str) -> None:
    assert program in EMULATED and set(EMULATED) < set(PROGRAMS)
    command = [sys.executable, str(ROOT / "tests/native/run.py"), program]
    ran = subprocess.run(command, env={**os.environ, **CROSS}, capture_output=True, text=True, check=False, timeout=550)
    assert ran.returncode == 0, ran.stdout
