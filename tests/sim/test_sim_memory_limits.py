"""Limits of device memory per control group on the simulated driver: what 615 has, for whoever allocates there, by both that can count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import groups, sim_cuda, simulated
from tests.support.groups import Group
from vcuda import sim

MIB = 2**20
LIMIT = 256 * MIB
BOTH = pytest.mark.parametrize("machine", ["dmem", "misc"], indirect=True)
# How many MiB of 16 a client gets before it is out of memory, beside its context of 64.
FILL = """
context()
got, held = 0, []
while got < 1024 and int((last := cu.cuMemAlloc(16 << 20))[0]) == 0:
    got += 16; held.append(last[1])
answer([got, int(last[0])])
"""


@pytest.fixture
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> sim.Machine:
    counts = getattr(request, "param", "dmem")
    return sim.Machine.create(tmp_path / "machine", [sim.SimCard()] * 2, newer=True, memory_limits=counts)


@pytest.fixture
def group() -> Iterator[Group]:
    with groups.made("vcuda-sim") as made:
        yield made


def asked(machine: sim.Machine, code: str, *paths: Path, **more: str) -> Any:
    """`set(path, hard, soft=0, card=0)` and `get(path, card=0)` answer NVML's error code, or 0 and the figures."""
    prelude = f"paths = {[str(path) for path in paths]}\n" + """
nvmlInit()
def call(function, limits, card=0):
    try:
        function(nvmlDeviceGetHandleByIndex(card), limits)
    except NVMLError as error:
        return error.value
    return 0
def set(path, hard, soft=0, card=0):
    return call(nvmlDeviceSetMemoryLimits_v1, c_nvmlSetMemoryLimits_v1_t(path.encode(), soft, hard), card)
def get(path, card=0):
    limits = c_nvmlGetMemoryLimits_v1_t(path.encode())
    # nvidia-ml-py's own getter has no byref of the caller's structure to lose
    code = call(nvmlDeviceGetMemoryLimits_v1, limits, card)
    return [limits.softLimit, limits.hardLimit, limits.currentUsed] if code == 0 else code
MAX = NVML_DEVICE_MEMORY_LIMIT_MAX
"""  # fmt: skip
    return simulated.nvml(machine, prelude + code, **more)


def limit(machine: sim.Machine, group: Group, hard: int = LIMIT) -> None:
    groups.limit(machine, group, hard)


@BOTH
def test_whoever_allocates_in_a_group_is_out_of_memory_at_its_limit_and_nobody_else(
    machine: sim.Machine, group: Group
) -> None:
    one, other = group.child("one"), group.child("other")
    assert sim_cuda.run(machine, FILL, wrapper=one.enter) == [1024, 0]  # nothing limits it yet
    limit(machine, one)
    assert sim_cuda.run(machine, FILL, wrapper=one.enter) == [192, 2]
    assert sim_cuda.run(machine, FILL, wrapper=one.child("its", "own").enter) == [192, 2]
    assert sim_cuda.run(machine, FILL, wrapper=other.enter) == [1024, 0]
    assert sim_cuda.run(machine, FILL.replace("context()", "context(1)"), wrapper=one.enter) == [1024, 0]
    limit(machine, one, 32 * MIB)
    failed = "ok(cu.cuInit(0)); answer(int(cu.cuDevicePrimaryCtxRetain(ok(cu.cuDeviceGet(0)))[0]))"
    assert sim_cuda.run(machine, failed, wrapper=one.enter) == 2


@BOTH
def test_processes_of_a_group_share_its_limit_and_give_back_what_they_held(machine: sim.Machine, group: Group) -> None:
    limit(machine, group)
    with simulated.tenant(machine, memory_bytes=64 * MIB, wrapper=group.enter):
        assert sim_cuda.run(machine, FILL, wrapper=group.enter) == [64, 2]
        assert asked(machine, "answer(get(paths[0]))", group.path) == [0, LIMIT, 128 * MIB]
    assert sim_cuda.run(machine, FILL, wrapper=group.enter) == [192, 2]


@BOTH
def test_a_cleared_limit_is_none_and_so_is_that_of_a_group_that_was_removed(machine: sim.Machine, group: Group) -> None:
    one = group.child("one")
    limit(machine, one)
    assert asked(machine, "answer(set(paths[0], MAX))", one.path) == 0
    assert sim_cuda.run(machine, FILL, wrapper=one.enter) == [1024, 0]
    limit(machine, one)
    one.remove()
    assert asked(machine, "answer([set(paths[0], 1), get(paths[0])])", one.path) == [6, 6]
    again = group.child("one")
    limit(machine, group.child("else"))  # who looks at the hierarchy drops what is gone
    assert sim_cuda.run(machine, FILL, wrapper=again.enter) == [1024, 0]


def test_the_kernel_counts_every_group_above_and_what_was_held_before(machine: sim.Machine, group: Group) -> None:
    child = group.child("child")
    with simulated.tenant(machine, memory_bytes=64 * MIB, wrapper=child.enter):
        limit(machine, group)
        limit(machine, child, 2 * LIMIT)
        assert sim_cuda.run(machine, FILL, wrapper=child.enter) == [64, 2]
        limit(machine, group, 32 * MIB)  # below what is in use: it stands, and nobody gets more
        assert asked(machine, "answer(get(paths[0]))", group.path) == [0, 32 * MIB, 128 * MIB]
        assert asked(machine, "answer(get(paths[0]))", group.child("bare").path)[1] == 2**64 - 1


@pytest.mark.parametrize("machine", ["misc"], indirect=True)
def test_the_driver_s_own_accounting_knows_the_nearest_limit_only_and_nothing_before_it(
    machine: sim.Machine, group: Group
) -> None:
    child = group.child("child")
    with simulated.tenant(machine, memory_bytes=64 * MIB, wrapper=child.enter):
        limit(machine, child)
        assert asked(machine, "answer(get(paths[0]))", child.path) == [0, LIMIT, 0]
        assert sim_cuda.run(machine, FILL, wrapper=child.enter) == [192, 2]
    limit(machine, group, 128 * MIB)
    assert sim_cuda.run(machine, FILL, wrapper=child.enter) == [192, 2]
    with simulated.tenant(machine, memory_bytes=64 * MIB, wrapper=child.enter):
        assert asked(machine, f"answer(set(paths[0], {32 * MIB}))", child.path) == 2
    assert asked(machine, "answer(get(paths[0]))", group.child("bare").path)[1] == 128 * MIB


@BOTH
def test_managed_memory_is_no_group_s(machine: sim.Machine, group: Group) -> None:
    limit(machine, group)
    code = "context(); answer([int(cu.cuMemAllocManaged(512 << 20, 1)[0]), int(cu.cuMemAlloc(128 << 20)[0])])"
    assert sim_cuda.run(machine, code, wrapper=group.enter) == [0, 0]


@BOTH
def test_a_process_of_a_limited_group_sees_the_limit_as_the_card(machine: sim.Machine, group: Group) -> None:
    limit(machine, group)
    code = "context(); answer([int(n) for n in ok(cu.cuMemGetInfo())])"
    assert sim_cuda.run(machine, code, wrapper=group.enter) == [LIMIT - 64 * MIB, LIMIT]
    below = sim_cuda.run(machine, code, wrapper=group.child("below").enter)
    card = machine.cards[0].memory_bytes
    counts = (machine.state / "machine.conf").read_text().partition("memory_limits=")[2].split()[0]
    assert below[1] == (LIMIT if counts == "misc" else card)


def test_errors_are_those_that_are_documented(group: Group, tmp_path: Path) -> None:
    cards = [sim.SimCard(), sim.SimCard(mig=["1g"])]
    machine = sim.Machine.create(tmp_path / "machine", cards, newer=True)
    (tmp_path / "plain").mkdir()
    root = groups.mount()
    assert root is not None
    code = """
    mig = nvmlDeviceGetMigDeviceHandleByIndex(nvmlDeviceGetHandleByIndex(1), 0)
    one = c_nvmlSetMemoryLimits_v1_t(paths[0].encode(), 0, 1 << 30)
    answer([set(paths[0] + "/none", 1), set(paths[1], 1), set(paths[2], 1), get(paths[2]), set(paths[0], 1, card=1),
            set(paths[0], 1, soft=2), call(lambda _, limits: nvmlDeviceSetMemoryLimits_v1(mig, limits), one)])
    """
    assert asked(machine, code.replace("\n    ", "\n"), group.path, tmp_path / "plain", root) == [
        6, 6, 3, 3, 3, 2, 3,
    ]  # fmt: skip
    unprivileged = "import os; os.setresuid(65534, 65534, 65534); answer([set(paths[0], 1 << 30), get(paths[0])])"
    assert asked(machine, unprivileged, group.path) == [4, [0, 2**64 - 1, 0]]


def test_a_driver_without_the_call_and_one_that_counts_nothing(group: Group, tmp_path: Path) -> None:
    older = sim.Machine.create(tmp_path / "older")
    assert asked(older, "answer(set(paths[0], 1 << 30))", group.path) == 13  # NVML_ERROR_FUNCTION_NOT_FOUND
    none = sim.Machine.create(tmp_path / "none", newer=True, memory_limits="none")
    assert asked(none, "answer(set(paths[0], 1 << 30))", group.path) == 3
    assert sim_cuda.run(none, FILL, wrapper=group.enter) == [1024, 0]
    with pytest.raises(sim.SimError, match="memory_limits is 'some'"):
        sim.Machine.create(tmp_path / "some", newer=True, memory_limits="some")
