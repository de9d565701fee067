"""The second timing model of the simulated card: uneven slices, switches, gaps, events and kernels, all from a seed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.support import sim_cuda
from vcuda import sim

MS = 1_000_000


@pytest.fixture
def machine(tmp_path: Path) -> sim.Machine:
    return sim.Machine.create(tmp_path / "machine", [sim.SimCard(knobs=sim.SECOND_TIMING)])


def test_launches_leave_gaps_kernels_vary_and_events_tell_half_microseconds(machine: sim.Machine) -> None:
    times = sim_cuda.run(
        machine,
        """
        context(); stream = ok(cu.cuStreamCreate(1)); function = kernel("spin_100us"); slow = kernel("spin_20ms"); times = []
        launch(slow, stream)
        events = [ok(cu.cuEventCreate(0)) for _ in range(101)]; ok(cu.cuEventRecord(events[0], stream))
        for event in events[1:]: launch(function, stream); ok(cu.cuEventRecord(event, stream))
        ok(cu.cuStreamSynchronize(stream))
        answer([ok(cu.cuEventElapsedTime(*pair)) * 1e6 for pair in zip(events, events[1:])])
        """,
    )
    assert all(abs(spent / 500 - round(spent / 500)) < 0.01 for spent in times), times[:5]
    assert all(101_000 <= spent <= 113_000 for spent in times) and len({*times}) > 10
    busy = machine.report().cards[0].busy_ns - 20 * MS * 1.015
    assert 10 * MS < busy < 11 * MS < sum(times) + 0.5 * MS, "nobody is busy in a gap"


def test_slices_and_switches_are_uneven_and_not_those_of_the_first_model(machine: sim.Machine) -> None:
    code = """
        context(); stream = ok(cu.cuStreamCreate(1)); function = kernel("spin_50us")
        answer(0); sys.stdin.readline(); starts = []
        events = [ok(cu.cuEventCreate(0)) for _ in range(4000)]
        for event in events: launch(function, stream); ok(cu.cuEventRecord(event, stream))
        ok(cu.cuStreamSynchronize(stream))
        answer([ok(cu.cuEventElapsedTime(*pair)) for pair in zip(events, events[1:])])
        """
    clients = [sim_cuda.start(machine, code) for _ in range(2)]
    try:
        for client in clients:
            assert client.stdout and client.stdout.readline() == "0\n"
        for client in clients:
            assert client.stdin
            client.stdin.write("\n")
            client.stdin.flush()
        import json

        away = [
            spent
            for spent in json.loads(clients[0].stdout.readline())
            if 0.5 < spent < 10  # type: ignore[union-attr]
        ]
    finally:
        for client in clients:
            client.kill()
            client.communicate()
    assert len(away) > 20, "the neighbour's slices, with both switches"
    assert max(away) - min(away) > 0.7 and max(away) < 2.7 + 2 * 0.2 + 0.2


def test_work_takes_longer_while_host_copies_run(tmp_path: Path) -> None:
    knobs = {"drag_ppm": 500_000}
    machine = sim.Machine.create(tmp_path / "machine", [sim.SimCard(knobs=knobs)])
    sim_cuda.run(
        machine,
        """
        context(); one, two = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1)); function = kernel("spin_400ms")
        pointer = ok(cu.cuMemAlloc(256 << 20)); host = ok(cu.cuMemHostAlloc(1 << 20, 0)); ok(cu.cuCtxSynchronize())
        launch(function, one)
        for _ in range(500): ok(cu.cuMemcpyHtoDAsync(pointer, host, 1 << 20, two))
        ok(cu.cuCtxSynchronize())
        """,
    )
    busy = machine.report().cards[0].busy_ns
    assert 407 * MS < busy < 411 * MS, "the copies' 27 ms, in which the kernel gets two thirds done"


def test_a_kernel_may_take_turns_between_two_times(tmp_path: Path) -> None:
    machine = sim.Machine.create(tmp_path / "machine")
    machine.set_kernel_time("ragged*", 20_000, other_ns=2 * MS, every_ns=50 * MS)
    spans = sim_cuda.run(
        machine,
        """
        context(); function = kernel("ragged_step"); spans = []
        start, end = (ok(cu.cuEventCreate(0)) for _ in range(2)); until = time.monotonic() + .4
        while time.monotonic() < until:
            ok(cu.cuEventRecord(start, 0)); launch(function); ok(cu.cuEventRecord(end, 0)); ok(cu.cuEventSynchronize(end))
            spans.append(round(ok(cu.cuEventElapsedTime(start, end)), 1))
        answer(spans)
        """,
    )
    assert {0.0, 2.0} <= {*spans} and sum(a != b for a, b in itertools.pairwise(spans)) >= 4


def test_a_copy_from_card_to_card_keeps_no_compute_busy(tmp_path: Path) -> None:
    machine = sim.Machine.create(tmp_path / "machine", [sim.SimCard()] * 2)
    sim_cuda.run(
        machine,
        """
        home = context(); here = ok(cu.cuMemAlloc(64 << 20)); same = ok(cu.cuMemAlloc(64 << 20)); far = created(1)
        there = ok(cu.cuMemAlloc(64 << 20)); ok(cu.cuCtxSetCurrent(home))
        ok(cu.cuMemcpyPeer(there, far, here, home, 64 << 20)); ok(cu.cuCtxSynchronize())
        ok(cu.cuMemcpyPeer(same, home, here, home, 32 << 20)); ok(cu.cuCtxSynchronize())
        """,
    )
    assert machine.report().cards[0].busy_ns == 1500 + 2 * (32 << 20) // 700, "only the copy within the card"
