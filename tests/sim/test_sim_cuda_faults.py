"""Injected faults as a client of the simulated libcuda meets them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import sim_cuda
from vcuda import sim


@pytest.fixture
def machine(tmp_path: Path) -> sim.Machine:
    return sim.Machine.create(tmp_path / "machine", [sim.SimCard()] * 2)


def test_allocations_fail_the_number_of_times_that_was_ordered(machine: sim.Machine) -> None:
    machine.inject(sim.AllocationError(card=0, count=2))
    code = "context(); answer([int(cu.cuMemAlloc(4096)[0]) for _ in range(3)])"
    assert sim_cuda.run(machine, code) == [2, 2, 0]


def test_a_lost_card_fails_running_clients_and_refuses_new_ones_the_other_goes_on(
    machine: sim.Machine,
) -> None:
    client = sim_cuda.start(
        machine,
        """
        context(); launch(kernel("spin_900s")); answer("waiting"); result = int(cu.cuCtxSynchronize()[0])
        answer([result, int(cu.cuMemAlloc(4096)[0]), int(cu.cuMemGetInfo()[0])])
        """,
    )
    assert client.stdout and client.stdout.readline() == '"waiting"\n'
    machine.inject(sim.CardLost(card=0))
    assert client.communicate(timeout=30)[0] == "[999, 999, 999]\n"
    code = "ok(cu.cuInit(0)); answer([int(cu.cuDevicePrimaryCtxRetain(i)[0]) for i in range(2)])"
    assert sim_cuda.run(machine, code) == [46, 0]
    machine.inject(sim.CardRecovered(card=0))
    assert sim_cuda.run(machine, code) == [0, 0]


def test_a_kernel_fault_is_sticky_in_its_process_only(machine: sim.Machine) -> None:
    machine.inject(sim.LaunchFault(card=0))
    code = """
        context(); launch(kernel("broken"))
        answer([int(cu.cuCtxSynchronize()[0]), int(cu.cuMemAlloc(4096)[0])])
        """
    assert sim_cuda.run(machine, code) == [700, 700]
    assert sim_cuda.run(machine, code) == [0, 0]


def test_slow_calls_take_that_much_longer(machine: sim.Machine) -> None:
    code = "context(); begin = time.monotonic(); ok(cu.cuMemAlloc(4096)); answer(time.monotonic() - begin)"
    machine.inject(sim.SlowCall(card=0, microseconds=200_000))
    assert sim_cuda.run(machine, code) >= 0.2
