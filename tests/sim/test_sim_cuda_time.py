"""GPU time on the simulated card: kernels, events, streams, order, callbacks, slices between processes.

Times are the card's own (events and the ground truth in the report), so that a slow machine changes nothing; where host time
matters, only lower bounds are asserted.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support import sim_cuda
from vcuda import sim

MS = 1_000_000


@pytest.fixture
def machine(tmp_path: Path) -> sim.Machine:
    return sim.Machine.create(tmp_path / "machine", [sim.SimCard(slice_ns=2 * MS, switch_ns=50_000)] * 2)


def busy_ns(machine: sim.Machine, card: int = 0) -> int:
    return machine.report().cards[card].busy_ns


def test_a_kernel_takes_what_its_name_says_or_the_base_cost(machine: sim.Machine) -> None:
    code = """
        context(); named, plain = kernel("spin_3ms", "plain"); launch(named); launch(named); launch(plain)
        ok(cu.cuCtxSynchronize())
        """
    sim_cuda.run(machine, code)
    assert busy_ns(machine) == 6 * MS + 5_000


def test_rules_change_running_clients_first_match_wins_blocks_count(machine: sim.Machine) -> None:
    client = sim_cuda.start(
        machine,
        """
        context(); function = kernel("train_step")
        for line in sys.stdin:
            launch(function, blocks=int(line)); ok(cu.cuCtxSynchronize()); answer(0); time.sleep(.03)
        """,
    )
    assert client.stdin and client.stdout

    def one(blocks: int) -> int:
        before = busy_ns(machine)
        client.stdin.write(f"{blocks}\n")  # type: ignore[union-attr]
        client.stdin.flush()  # type: ignore[union-attr]
        assert client.stdout.readline() == "0\n"  # type: ignore[union-attr]
        return busy_ns(machine) - before

    with client:
        assert one(1) == 5_000
        machine.set_kernel_time("train*", 2 * MS, 1000)
        client_seen = [one(10) for _ in range(2)][-1]  # rules are looked at again within 10 ms
        assert client_seen == 2 * MS + 10_000
        machine.set_kernel_time("train_s*", 3 * MS)
        assert [one(10) for _ in range(2)][-1] == 3 * MS
        client.stdin.close()


def test_events_measure_what_lies_between_them(machine: sim.Machine) -> None:
    first, both, early = sim_cuda.run(
        machine,
        """
        context(); stream = ok(cu.cuStreamCreate(1)); function = kernel("spin_300ms")
        events = [ok(cu.cuEventCreate(0)) for _ in range(3)]
        launch(function, stream); ok(cu.cuEventRecord(events[0], stream))
        launch(function, stream); ok(cu.cuEventRecord(events[1], stream))
        launch(function, stream); ok(cu.cuEventRecord(events[2], stream))
        early = [int(cu.cuEventQuery(events[2])[0]), int(cu.cuStreamQuery(stream)[0]),
                 int(cu.cuEventElapsedTime(events[0], events[2])[0])]
        ok(cu.cuEventSynchronize(events[2]))
        answer([ok(cu.cuEventElapsedTime(*events[:2])), ok(cu.cuEventElapsedTime(events[0], events[2])), early])
        """,
    )
    assert first == pytest.approx(300, abs=1e-2) and both == pytest.approx(600, abs=1e-2)
    assert early == [600, 600, 600]


def test_streams_of_one_process_share_the_card(machine: sim.Machine) -> None:
    times = sim_cuda.run(
        machine,
        """
        context(); function = kernel("spin_30ms"); long = kernel("spin_60ms"); plain = kernel("gate_400ms")
        gate = ok(cu.cuStreamCreate(1)); opened = ok(cu.cuEventCreate(0))
        launch(plain, gate); ok(cu.cuEventRecord(opened, gate))
        streams = [ok(cu.cuStreamCreate(1)) for _ in range(2)]; ends = [ok(cu.cuEventCreate(0)) for _ in range(2)]
        for stream in streams: ok(cu.cuStreamWaitEvent(stream, opened, 0))
        launch(function, streams[0]); launch(long, streams[1])
        for end, stream in zip(ends, streams): ok(cu.cuEventRecord(end, stream))
        ok(cu.cuCtxSynchronize()); answer([ok(cu.cuEventElapsedTime(opened, end)) for end in ends])
        """,
    )
    assert times == pytest.approx([60, 90], abs=0.01), "half each while both run, then alone"


def test_a_higher_priority_goes_first(machine: sim.Machine) -> None:
    low, high = sim_cuda.run(
        machine,
        """
        context(); function = kernel("spin_20ms"); opener = kernel("gate_400ms")
        gate = ok(cu.cuStreamCreate(1)); opened = ok(cu.cuEventCreate(0))
        launch(opener, gate); ok(cu.cuEventRecord(opened, gate))
        streams = [ok(cu.cuStreamCreateWithPriority(1, priority)) for priority in (0, -1)]
        ends = [ok(cu.cuEventCreate(0)) for _ in streams]
        for stream, end in zip(streams, ends):
            ok(cu.cuStreamWaitEvent(stream, opened, 0)); launch(function, stream); ok(cu.cuEventRecord(end, stream))
        ok(cu.cuCtxSynchronize()); answer([ok(cu.cuEventElapsedTime(opened, end)) for end in ends])
        """,
    )
    assert (low, high) == (pytest.approx(40, abs=0.01), pytest.approx(20, abs=0.01))


def test_the_legacy_stream_is_a_barrier_for_blocking_streams_only(machine: sim.Machine) -> None:
    assert sim_cuda.run(
        machine,
        """
        context(); function = kernel("spin_800ms")
        blocking, second, free = (ok(cu.cuStreamCreate(flag)) for flag in (0, 0, 1))
        launch(function, blocking); legacy = ok(cu.cuEventCreate(0)); ok(cu.cuEventRecord(legacy, 0))
        later = ok(cu.cuEventCreate(0)); ok(cu.cuEventRecord(later, second))
        aside = ok(cu.cuEventCreate(0)); ok(cu.cuEventRecord(aside, free)); ok(cu.cuEventSynchronize(aside))
        waiting = [int(cu.cuEventQuery(event)[0]) for event in (legacy, later)]
        ok(cu.cuStreamSynchronize(0))
        answer([waiting, int(cu.cuStreamQuery(blocking)[0]), ok(cu.cuEventElapsedTime(aside, legacy)) > 20])
        """,
    ) == [[600, 600], 0, True]


def test_host_functions_run_in_stream_order_and_hold_the_stream(machine: sim.Machine) -> None:
    assert sim_cuda.run(
        machine,
        """
        context(); stream = ok(cu.cuStreamCreate(1)); function = kernel("spin_400ms"); seen = []
        Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        done = ok(cu.cuEventCreate(0)); start = ok(cu.cuEventCreate(0))
        @Callback
        def call(data):
            seen.append(data); time.sleep(.02)
        pointer = cu.CUhostFn(_ptr=ctypes.addressof(call))
        ok(cu.cuEventRecord(start, stream)); launch(function, stream)
        for number in (1, 2): ok(cu.cuLaunchHostFunc(stream, pointer, number))
        ok(cu.cuEventRecord(done, stream)); before = list(seen)
        ok(cu.cuStreamSynchronize(stream))
        answer([before, seen, ok(cu.cuEventElapsedTime(start, done)) >= 440])
        """,
    ) == [[], [1, 2], True]


def test_who_waits_behind_a_host_function_leaves_the_processor(machine: sim.Machine) -> None:
    """What the card has to do behind it is some microseconds, which a waiter spun for again and again, for as long as the function lasted."""
    assert sim_cuda.run(
        machine,
        """
        context(); stream = ok(cu.cuStreamCreate(1)); function = kernel("spin_5us")
        Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        @Callback
        def call(data):
            time.sleep(.5)
        ok(cu.cuLaunchHostFunc(stream, cu.CUhostFn(_ptr=ctypes.addressof(call)), 0)); launch(function, stream)
        before = time.thread_time()
        ok(cu.cuStreamSynchronize(stream))
        answer(time.thread_time() - before < .2)
        """,
    )


def test_two_processes_get_slices_in_turn(machine: sim.Machine) -> None:
    code = """
        context(); function = kernel("spin_1ms"); stream = ok(cu.cuStreamCreate(1))
        answer("ready"); sys.stdin.readline()
        while True:
            for _ in range(100): launch(function, stream)
            ok(cu.cuStreamSynchronize(stream))
        """
    clients = [sim_cuda.start(machine, code) for _ in range(2)]
    try:
        for client in clients:
            assert client.stdout and client.stdout.readline() == '"ready"\n'
        for client in clients:
            assert client.stdin
            client.stdin.write("\n")
            client.stdin.flush()
        while (report := machine.report()).cards[0].busy_ns < 500 * MS:
            time.sleep(0.02)
        shares = [process.busy_ns / report.cards[0].busy_ns for process in report.cards[0].processes]
    finally:
        for client in clients:
            client.kill()
            client.communicate()
    # The report reads the card and its processes one after the other.
    assert len(shares) == 2 and sum(shares) == pytest.approx(1, abs=0.05)
    assert min(shares) > 0.3, "round robin"


def test_events_contain_the_other_process_slices(machine: sim.Machine) -> None:
    """Wall time between events grows while a neighbour computes; the process's own GPU time does not."""
    code = """
        context(); function = kernel("spin_60s"); launch(function); answer("running"); sys.stdin.readline()
        """
    neighbour = sim_cuda.start(machine, code)
    try:
        assert neighbour.stdout and neighbour.stdout.readline() == '"running"\n'
        elapsed = sim_cuda.run(
            machine,
            """
            context(); function = kernel("spin_100ms"); start, end = (ok(cu.cuEventCreate(0)) for _ in range(2))
            ok(cu.cuEventRecord(start, 0)); launch(function); ok(cu.cuEventRecord(end, 0)); ok(cu.cuEventSynchronize(end))
            answer(ok(cu.cuEventElapsedTime(start, end)))
            """,
        )
    finally:
        neighbour.kill()
        neighbour.communicate()
    # 50 slices of 2 ms, each followed by one of the neighbour's and two switches.
    assert 195 < elapsed < 215


def test_a_card_that_runs_to_completion_does_not_preempt(tmp_path: Path) -> None:
    card = sim.SimCard(slice_ns=2 * MS, switch_ns=50_000, run_to_completion=True)
    machine = sim.Machine.create(tmp_path / "machine", [card])
    neighbour = sim_cuda.start(
        machine, 'context(); launch(kernel("spin_1500ms")); answer("running"); sys.stdin.readline()'
    )
    try:
        assert neighbour.stdout and neighbour.stdout.readline() == '"running"\n'
        sim_cuda.run(machine, 'context(); launch(kernel("spin_1ms")); ok(cu.cuCtxSynchronize())')
        report = machine.report()
    finally:
        neighbour.kill()
        neighbour.communicate()
    assert report.cards[0].busy_ns == 1501 * MS, "the short kernel had to wait for all of the long one"


def test_a_full_queue_blocks_the_launch_until_the_card_has_caught_up(machine: sim.Machine) -> None:
    assert sim_cuda.run(
        machine,
        """
        context(); function = kernel("spin_100us"); start = time.monotonic()
        for _ in range(3000): launch(function)
        launching = time.monotonic() - start; ok(cu.cuCtxSynchronize()); answer(launching > .1)
        """,
    )
    assert busy_ns(machine) == 300 * MS


def test_copies_run_beside_kernels(machine: sim.Machine) -> None:
    assert (
        sim_cuda.run(
            machine,
            """
        context(); compute, copying = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1)); host = ok(cu.cuMemHostAlloc(1 << 20, 0))
        pointer = ok(cu.cuMemAlloc(1 << 20)); launch(kernel("spin_60s"), compute)
        ok(cu.cuMemcpyHtoDAsync(pointer, host, 1 << 20, copying)); ok(cu.cuStreamSynchronize(copying))
        answer(int(cu.cuStreamQuery(compute)[0]))
        """,
        )
        == 600
    )


@pytest.mark.parametrize("waiting", ["sync", "query"])
def test_a_stream_waits_for_an_event_of_another_card(machine: sim.Machine, waiting: str) -> None:
    """Also when nobody but the waiting stream looks: its card has the other one's timeline evaluated."""
    assert sim_cuda.run(
        machine,
        f"""
        first = context(0); there, event = ok(cu.cuStreamCreate(1)), ok(cu.cuEventCreate(0))
        launch(kernel("spin_50ms"), there); ok(cu.cuEventRecord(event, there))
        context(1); here = ok(cu.cuStreamCreate(1)); begin = time.monotonic()
        ok(cu.cuStreamWaitEvent(here, event, 0)); launch(kernel("spin_1ms"), here)
        if "{waiting}" == "sync": ok(cu.cuStreamSynchronize(here))
        while int(cu.cuStreamQuery(here)[0]): time.sleep(.001)
        answer([time.monotonic() - begin < 30, int(cu.cuEventQuery(event)[0])])
        """,
    ) == [True, 0]
    assert busy_ns(machine, 1) == MS
