"""Programs that a GPU-time limit is not made for stay within it: the short form of `python -m benchmarks.cheats`.

Upper bounds are asserted: a busy machine gives a program less in the end. At first it may give more: who is to be killed or to end in the
middle of a kernel has the card until it is let run to its end and somebody sees it, and pays for that later.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks._cheats_tamper import TAMPERINGS
from benchmarks._throttle_bench import Load
from benchmarks.cheats import MEMORY_BYTES, Table

CAP = 10
TOLERANCE_POINTS = 5.0


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    yield Table(tmp_path_factory.mktemp("cheats"), 1.5)


@pytest.mark.parametrize(
    "pattern",
    [
        "sets",
        "tiny_copies",
        "copies_unified",
        "capture_destroyed",
        "capture_left_open",
        "new_streams",
        "bursts_in_turn",
        "long_behind_a_short_one",
        "long_behind_slow_launches",
        "threads_48",
        "polled_by_threads",
        "copies_peer",
        "copies_peer_3d",
        "modules_reloaded",
        "stopped_after_launch",
        "stopped_in_turn",
        "run_in_turn",
        "stopped_beside_a_sibling",
        "killed_after_launch",
        "killed_within_permit",
        "ended_after_launch",
        "exec_after_launch",
        "ended_with_own",
        "ended_with_capture",
        "no_memory",
        "no_descriptors",
        "no_threads",
        "helper_ended",
        "helper_held",
        "no_current",
        "foreign_stream",
        "capture_toggled",
        "capture_toggled_by_threads",
        "capture_joined",
        "left_by_threads",
        "left_on_own",
        "left_on_destroyed",
        "left_among_destroyed",
        "left_while_capturing",
        "left_before_capture",
        "left_in_another_context",
        "kernel_times_change_between_copies",
        "long_behind_a_callback",
    ],
)
def test_a_cap_is_not_got_around(table: Table, pattern: str) -> None:
    # So short a run of copies between contexts had 7 to 18 points, before and after other changes; the fault gave 52.
    most = CAP + (3 if pattern == "copies_peer_3d" else 1) * TOLERANCE_POINTS
    got, charged = table.alone(pattern, CAP, enough=most - 0.1)
    assert got < most, f"charged {charged:.1f}"


@pytest.mark.parametrize(
    "pattern",
    [
        "long_behind_a_short_one_and_unloads",
        "long_behind_a_short_one_by_children",
        "long_behind_a_short_one_beside_captures",
        "stopped_behind_hidden_work",
        "stopped_behind_hidden_long_work",
    ],
)
def test_what_samples_find_at_first_is_found_again_and_again(tmp_path: Path, pattern: str) -> None:
    """80.8 points of 50 were had by who unloaded a module now and then, 60.7 by children that ended before samples were sure, 62 beside captures, and by two
    that stood still behind it in turn."""
    table = Table(tmp_path, 4)
    for _ in range(3):  # children have 51 to 56 points in so short a run: each begins before samples are sure
        got, _ = table.alone(pattern, 50)
        if got < 50 + TOLERANCE_POINTS:
            break
    assert got < 50 + TOLERANCE_POINTS


@pytest.mark.parametrize(
    "name", ["credit without bound", "the fill clock in the past", "all of it", "all of it, 8 processes"]
)
def test_what_a_container_writes_into_its_usage_file_gives_it_nothing(table: Table, name: str) -> None:
    """97 to 100 points of the card were had, and the limit times as many as there were processes."""
    tampering = next(each for each in TAMPERINGS if each.name == name)
    got, _ = table.alone(tampering.pattern, CAP, tampering)
    assert got < CAP + TOLERANCE_POINTS


def test_what_a_stopped_process_leaves_is_charged_whatever_its_container_writes(table: Table) -> None:
    """100 points of 10 were had for as long as it lasted: what siblings and the arbiter knew of it was in the file."""
    tampering = next(each for each in TAMPERINGS if each.name == "nothing left by stopped ones")
    most = CAP + TOLERANCE_POINTS
    got, _ = table.alone(tampering.pattern, CAP, tampering, enough=most - 0.1)  # a third of a second at once
    assert got < most


@pytest.mark.parametrize("name", ["all paid for by the killed", "nothing left by the killed", "dummies that have work"])
def test_what_the_killed_leave_is_charged_whatever_their_container_writes(table: Table, name: str) -> None:
    """36 to 91 points of 10 were had, within the milliseconds before anybody is taken to stand still."""
    tampering = next(each for each in TAMPERINGS if each.name == name)
    most = CAP + TOLERANCE_POINTS
    got, _ = table.alone(tampering.pattern, CAP, tampering, enough=most - 0.1)
    assert got < most


def test_what_several_processes_found_is_known_whatever_their_container_writes(table: Table) -> None:
    """15 to 20 points of 10 were had by children that each ended before their own samples were sure, charged 10."""
    tampering = next(each for each in TAMPERINGS if each.name == "nothing found by the young")
    most = CAP + TOLERANCE_POINTS
    got, _ = table.alone(tampering.pattern, CAP, tampering, enough=most - 0.1)
    assert got < most


def test_processes_that_begin_together_are_not_charged_for_each_other(table: Table) -> None:
    """Six that began with a kernel of 20 ms each were charged 590 ms for 120, and had nothing for five seconds."""
    got, _ = table.alone("run_in_turn", CAP)
    assert got > 1  # from the second second on


def test_siblings_of_one_that_stands_still_go_on(table: Table) -> None:
    """They had 0.0 points of 50, charged 100, though the card had nothing of the one that was stopped."""
    for _ in range(3):  # a busy machine gives a program less
        got, charged = table.alone("sibling_stopped", 50)
        if got > 40 and charged < got + 5:
            break
    assert got > 40
    assert charged < got + 5


def test_short_processes_are_charged_what_they_had(table: Table) -> None:
    """40 points of 50 were had, charged 46: what nobody had measured before was taken to last until its process was found to have ended."""
    for _ in range(3):  # a busy machine finds later that one has ended
        got, charged = table.alone("short_processes", 50)
        if charged < got + 3:
            break
    assert charged < got + 3


def test_a_stream_that_is_wrongly_thought_idle_is_measured_right(table: Table) -> None:
    """Sets whose call takes the host long: 76.7 points of 50 were had, because what lay before the mark was taken off as the call's."""
    got, charged = table.alone("sets", 50)
    assert (
        got < 1.35 * charged
    )  # the fault gave 1.5; a host that is held up before the mark costs up to 0.24 now and then


@pytest.mark.parametrize(
    "pattern", ["callbacks_before_legacy", "long_callbacks_before_legacy", "callbacks_of_a_thread_before_legacy"]
)
def test_what_the_legacy_stream_waits_for_elsewhere_is_not_charged(table: Table, pattern: str) -> None:
    """2.4 to 20 points of the card were charged for kernels that took less than one."""
    for _ in range(3):  # where the simulated card is not let run, its work is seen for longer than it takes
        got, charged = table.alone(pattern, 50)
        if charged < got + 1.5:
            break
    assert charged < got + 1.5


def test_who_waited_for_a_lease_behind_a_copy_is_not_thought_to_wait_for_it_still(table: Table) -> None:
    """Two whose steps begin with a copy have as much of the card as two that wait for it (the fault gave 0.8 to 0.85 of that, now 1.0)."""
    for _ in range(3):  # other programs take the processors from one of the two: 0.91 once
        got, could = table.both("training_steps"), table.both("training_steps_that_wait")
        if got > 0.92 * could:
            break
    assert got > 0.92 * could


def test_what_another_threads_capture_took_the_mark_of_is_charged_for_its_own_time_only(table: Table) -> None:
    """The wait for the gate was charged with it: 200 ms for 20, so that 0.5 to 7 points of 10 were had."""
    runs = [table.alone("capture_toggled", CAP) for _ in range(3)]
    assert sum(charged for _, charged in runs) < sum(got for got, _ in runs) + 5


@pytest.mark.parametrize("pattern", ["destroyed_at_work", "priorities", "streams_in_turn"])
def test_what_runs_beside_another_stream_or_is_left_on_a_destroyed_one_is_not_paid_twice(
    table: Table, pattern: str
) -> None:
    """50 points were charged for 34 to 40, and for 43 to 45 in the last two."""
    for _ in range(3):  # a card that is not let run seems to work for longer: 44 for 20 once
        got, charged = table.alone(pattern, 50)
        if charged < got + 5:
            break
    assert charged < got + 5


def test_a_kernel_that_is_long_for_once_is_charged_though_nobody_waits_or_launches_again(
    table: Table,
) -> None:
    """It was proven short, so no mark is behind it: 49 points of the card were had for a charge of nothing."""
    got, _, charged = table.beside("long_and_left_alone")
    assert charged > got / 2


@pytest.mark.parametrize(
    "pattern", ["long_among_priorities", "long_among_short_ones_on_own", "long_behind_a_waited_short_one"]
)
def test_what_runs_on_into_a_neighbours_lease_is_charged_for_its_own_time(table: Table, pattern: str) -> None:
    """Its estimate was charged, the mean of short and long ones: 47 to 53 points of the card were had for 17 to 24, at the neighbour's cost; 37 for 20."""
    got, _, charged = table.beside(pattern)
    assert got < 1.25 * charged


def test_events_in_idle_contexts_leave_the_neighbour_its_leases(table: Table) -> None:
    """For each record the card turned to its context, in the middle of a neighbour's lease: it had 47 points of 70."""
    for _ in range(3):  # a busy machine gives it less
        _, neighbour, _ = table.beside("events_in_idle_contexts")
        if neighbour > 60:
            break
    assert neighbour > 60


def test_what_a_copy_was_before_is_charged_for_its_own_slice(table: Table) -> None:
    """Half of what it had was taken for the neighbour's, which had its slice before: 28 points of the card were had for 16, and the neighbour had 66.6."""
    runs = [table.beside("short_and_long_between_copies") for _ in range(3)]
    assert sum(got for got, _, _ in runs) < 1.2 * sum(charged for _, _, charged in runs)


def test_what_has_begun_holds_the_lease_until_it_is_over(table: Table) -> None:
    """What ran before it took less than was thought, so it was expected to end later than was predicted: 20 points of 30 were had, and 30 charged."""
    runs = [table.beside("short_and_long_by_argument") for _ in range(3)]
    assert sum(charged for _, _, charged in runs) < 1.2 * sum(got for got, _, _ in runs)


def test_what_is_hidden_beside_who_waits_for_each_kernel_is_found(tmp_path: Path) -> None:
    """No busy stream was told from one that waits for the other's slices: 40 points of 30 were had for 15, 69 of 50 for 19."""
    table = Table(tmp_path, 4)
    loads = [Load(cores, memory_bytes=MEMORY_BYTES) for cores in (30, 70)]
    with table.system.shares(table.bench, loads, shared=True) as (share, other):
        neighbour = table._start("one_by_one", other.environment, 600)
        try:
            got, _, charged = table.measure("long_behind_a_short_one", share, neighbour.pid)
        finally:
            table._end(neighbour)
    assert got < 1.7 * charged


def test_the_table_knows_its_rows(table: Table, tmp_path: Path) -> None:
    assert {"steady", "killed_in_mid_kernel"} <= set(table.patterns())
