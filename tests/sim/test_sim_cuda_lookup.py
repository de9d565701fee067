"""Exports and cuGetProcAddress of the simulated libcuda, compared with NVIDIA's genuine library."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import genuine
from vcuda import sim

# Asks a libcuda for every base name at every version that any name came with, for each kind of default stream.
ASK = """
import ctypes, json, re, sys
library, names = ctypes.CDLL(sys.argv[1]), json.loads(sys.stdin.read())
address = {ctypes.cast(getattr(library, name), ctypes.c_void_p).value: name for name in names}
assert len(address) == len(names), "two exports share an address"
look_up = library.cuGetProcAddress_v2
look_up.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_uint64, ctypes.POINTER(ctypes.c_int)]
answers = []
bases = sorted({re.sub(r"(_v\\d)?(_ptsz|_ptds)?$", "", name) for name in names} | set(names) | {"", "cumemalloc", "cuNoSuchThing"})
for base in bases:
    for flags in (0, 1, 2, 3, 4):
        for version in map(int, sys.argv[2:]):
            pointer, status = ctypes.c_void_p(5), ctypes.c_int(7)
            result = look_up(base.encode(), ctypes.byref(pointer), version, flags, ctypes.byref(status))
            answers.append([base, flags, version, result, address.get(pointer.value, pointer.value), status.value])
print(json.dumps(answers))
"""
VERSIONS = [0, 1000, 2000, 3010, 3020, 4000, 4010, 5000, 5050, 6050, 7000, 8000, 9000, 9020, 10000, 10010, 10020,
            11000, 11010, 11020, 11030, 11040, 11060, 11070, 11080, 12000, 12010, 12020, 12030, 12040, 13000, -1]  # fmt: skip


def exports(library: Path) -> list[str]:
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True)
    names = {line.split()[-1].split("@")[0] for line in listed.stdout.splitlines()}
    return sorted(name for name in names if re.match("cu[A-Z]", name))


def answers(library: Path, names: list[str]) -> Any:
    command = [sys.executable, "-c", ASK, str(library), *map(str, VERSIONS)]
    told = subprocess.run(command, input=json.dumps(names), capture_output=True, text=True, check=True, timeout=60)
    return json.loads(told.stdout)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    machine = sim.Machine.create(tmp_path_factory.mktemp("sim") / "machine")
    return machine.library_folder / f"libcuda.so.{machine.driver_version}"


def test_exports_and_every_answer_are_those_of_the_genuine_550(ours: Path) -> None:
    try:
        theirs = genuine.libcuda("550")
    except genuine.Unavailable as error:
        pytest.skip(str(error))
    names = exports(theirs)
    assert exports(ours) == names
    differing = [
        (mine, real) for mine, real in zip(answers(ours, names), answers(theirs, names), strict=True) if mine != real
    ]
    assert differing == []


def test_suffixed_missing_and_too_new_names(ours: Path) -> None:
    """The facts that clients rely on, for machines that can't fetch the genuine library."""
    library = ctypes.CDLL(str(ours))

    def look_up(name: bytes, version: int, flags: int = 0) -> tuple[int, bool, int]:
        pointer, status = ctypes.c_void_p(5), ctypes.c_int(7)
        result = library.cuGetProcAddress_v2(
            name, ctypes.byref(pointer), version, ctypes.c_uint64(flags), ctypes.byref(status)
        )
        return result, pointer.value is not None, status.value

    assert look_up(b"cuMemAlloc", 12040) == (0, True, 0)
    assert look_up(b"cuMemAlloc_v2", 12040) == look_up(b"", 0) == (0, False, 1)
    assert look_up(b"cuMemPoolCreate", 11000) == (0, False, 2)
    assert look_up(b"cuMemAlloc", 12040, 4) == (1, True, 7)
    pointer = ctypes.c_void_p(5)
    assert library.cuGetProcAddress(b"cuNoSuchThing", ctypes.byref(pointer), 12040, ctypes.c_uint64(0)) == 500
    assert pointer.value == 5


def test_calls_without_a_simulation_behind_them_are_refused_by_name_and_never_missing(ours: Path) -> None:
    library = ctypes.CDLL(str(ours))
    assert library.cuTexObjectCreate(None, None, None, None) == 3, "not initialised comes first"
    table = ctypes.c_void_p(1)
    assert library.cuGetExportTable(ctypes.byref(table), ctypes.create_string_buffer(16)) == 500
