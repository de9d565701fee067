"""The first refusal of a process is explained in one line on stderr; later ones, and processes that do not want it, say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import share as shares
from tests.support.share import MIB, Share
from vcuda import region
from vcuda.sim import Machine, SimCard

LIMIT = 300 * MIB
TWICE = "begin(); answer([alloc(512 * MIB)[0], alloc(600 * MIB)[0], alloc(MIB)[0]])"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine.create(tmp_path / "machine", [SimCard(memory_bytes=4096 * MIB)])


@pytest.fixture
def share(machine: Machine, tmp_path: Path) -> Share:
    return shares.simulated(tmp_path / "share", machine, [shares.limit(machine, memory_bytes=LIMIT)])


def said(share: Share, code: str, **variables: str) -> list[str]:
    process = share.start(code, **variables)
    _, text = process.communicate(timeout=shares.SECONDS)
    assert process.returncode == 0, text
    return text.splitlines()


def test_the_first_refusal_says_what_was_asked_what_is_in_use_and_what_the_card_has(share: Share) -> None:
    region.write_overhead(share.region_directory, [7 * MIB])
    (line,) = said(share, TWICE)
    assert line == (
        "vcuda: refused 512 MiB of GPU memory: limit 300 MiB, 71 MiB in use by this container (7 MiB of it overhead); "
        "the card itself has 3.9375 GiB free; MemoryRefused, said once in a process"
    )


@pytest.mark.parametrize(
    "take",
    [
        'alloc(512 * MIB, "cuMemAllocManaged", 1)',
        'alloc(512 * MIB, "cuMemAllocAsync", None)',
        'call("cuMemCreate", C.byref(u64()), size(512 * MIB), C.byref(Properties(1, 0, Location(1, 0))), u64(0))',
    ],
)
def test_every_way_to_take_memory_explains_its_refusal(share: Share, take: str) -> None:
    (line,) = said(share, f"begin(); {take}")
    assert line.startswith("vcuda: refused 512 MiB of GPU memory: limit 300 MiB, 64 MiB in use")


def test_a_context_that_does_not_fit_says_so_without_a_figure_of_the_card(machine: Machine, tmp_path: Path) -> None:
    small = shares.simulated(
        tmp_path / "small", machine, [shares.limit(machine, memory_bytes=4, context_bytes=64 * MIB)]
    )
    (line,) = said(small, 'cu.cuInit(0); answer(call("cuCtxCreate_v2", C.byref(C.c_void_p()), 0, 0))')
    assert line == (
        "vcuda: refused 64 MiB of GPU memory: limit 4 bytes, 0 bytes in use by this container (0 bytes of it overhead); "
        "MemoryRefused, said once in a process"
    )


def test_an_oversold_share_names_its_part_of_the_card(machine: Machine, tmp_path: Path) -> None:
    oversold = shares.simulated(
        tmp_path / "oversold", machine, [shares.limit(machine, memory_bytes=LIMIT, physical_bytes=100 * MIB)]
    )
    assert "limit 300 MiB (100 MiB on the card), 64 MiB in use" in said(oversold, TWICE)[0]


def test_a_container_that_may_have_no_more_is_told_that_its_limit_is_not_the_reason(share: Share) -> None:
    code = "begin(); answer(0); input(); alloc(MIB)"
    process = share.start(code)
    assert process.stdout is not None
    process.stdout.readline()
    region.refuse(share.region_directory, True)
    _, text = process.communicate("\n", timeout=shares.SECONDS)
    assert text.startswith("vcuda: refused GPU memory: gpu-manager gives this container no more")


def test_the_environment_silences_it(share: Share) -> None:
    assert said(share, TWICE, VCUDA_LOG="0") == []
    assert len(said(share, TWICE, VCUDA_LOG="1")) == 1
