"""Overhead: when a sample counts, how the figure moves, how a container asks for one, what the quota makes of it."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import share as shares
from tests.support.share import MIB, Share
from vcuda import region
from vcuda.overhead import Meter, Questions
from vcuda.sim import Machine, SimCard

LIMIT = 256 * MIB


def ledger(used: int, managed: int = 0, mark: int = 1, unsettled: bool = False) -> region.CardUsage:
    return region.CardUsage(
        uuid="GPU-1", memory_used_bytes=used, ledger_bytes=used, managed_bytes=managed, reserved_bytes=used + 500 * unsettled,
        ledger_mark=mark, unsettled=unsettled,
    )  # fmt: skip


def settled(meter: Meter, card: region.CardUsage, driver_bytes: int) -> int:
    for _ in range(2):
        meter.take("c", card, card, driver_bytes)
    return meter.figure("c")


def test_overhead_is_what_the_driver_says_beyond_the_ledger_once_two_samples_agree() -> None:
    meter = Meter()
    assert meter.figure("c") == 0
    assert meter.take("c", ledger(100), ledger(100), 130) == 0
    assert meter.take("c", ledger(100), ledger(100), 130) == 30
    assert meter.take("c", ledger(100), ledger(100), 110) == 30  # a module was unloaded, or memory is on its way
    assert meter.take("c", ledger(100), ledger(100), 110) == 10
    assert settled(meter, ledger(100), 80) == 0  # a context that costs less than it was charged


def test_one_odd_sample_moves_nothing() -> None:
    meter = Meter()
    settled(meter, ledger(100), 130)
    assert meter.take("c", ledger(100), ledger(100), 900) == 30
    assert meter.take("c", ledger(100), ledger(100), 130) == 30
    assert meter.take("c", ledger(100), ledger(100), 0) == 30


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ledger(600, mark=1), ledger(100, mark=2)),  # freed between the readings: no phantom of 500
        (ledger(100, mark=1), ledger(600, mark=2)),
        (ledger(100, unsettled=True), ledger(100)),
        (ledger(100), ledger(100, unsettled=True)),
    ],
)
def test_a_sample_around_which_the_ledger_changed_does_not_count(
    before: region.CardUsage, after: region.CardUsage
) -> None:
    meter = Meter()
    settled(meter, ledger(100), 130)
    for _ in range(5):
        assert meter.take("c", before, after, 600) == 30


def test_a_ledger_that_never_rests_hides_nothing() -> None:
    """A tenant can keep its ledger changing for ever; what exceeds all that it reserved is its own all the same."""
    for restless in (ledger(100, unsettled=True), ledger(100, mark=2)):
        meter = Meter()
        found = [meter.take("c", ledger(100), restless, 5000) for _ in range(6)]
        assert found[:4] == [0] * 4
        assert found[4:] == [5000 - restless.reserved_bytes] * 2


def test_memory_that_comes_and_goes_is_no_overhead() -> None:
    meter = Meter()
    for held in (
        900,
        130,
        700,
        900,
        130,
        800,
    ) * 3:  # allocated and freed between the two readings of the ledger
        assert meter.take("c", ledger(100), ledger(100, mark=2), held) <= 30


def test_managed_memory_is_no_overhead_whether_the_driver_counts_it_or_not() -> None:
    for driver_bytes in (
        130,
        530,
    ):  # 500 managed bytes lie on the host, or on the card and in the process's figure
        meter = Meter()
        settled(meter, ledger(100), 130)
        assert settled(meter, ledger(600, managed=500), driver_bytes) == 30
    meter = Meter()
    settled(meter, ledger(100), 130)
    assert settled(meter, ledger(600, managed=500), 640) == 40  # more than all of it explains
    assert settled(meter, ledger(600, managed=500), 120) == 20  # less than without any


def test_containers_that_are_gone_are_forgotten() -> None:
    meter = Meter()
    settled(meter, ledger(100), 130)
    meter.keep(["other"])
    assert meter.figure("c") == 0


def test_a_container_asks_by_touching_its_file(tmp_path: Path) -> None:
    questions = Questions()
    for name in ("a", "b"):
        (tmp_path / name).write_text("x")
    questions.follow({name: tmp_path / name for name in ("a", "b", "absent")})
    assert questions.read() == set()
    os.utime(tmp_path / "b")
    assert select.select([questions.descriptor], [], [], 10)[0]
    assert questions.read() == {"b"} and questions.read() == set()
    (tmp_path / "b").unlink()
    (tmp_path / "b").write_text("made anew")
    questions.follow({name: tmp_path / name for name in ("a", "b")})
    questions.read()
    os.utime(tmp_path / "b")
    assert questions.read() == {"b"}
    questions.follow({"a": tmp_path / "a"})
    questions.read()
    os.utime(tmp_path / "b")
    assert questions.read() == set()
    questions.close()
    questions.close()


def test_overhead_is_written_beside_the_limits_and_survives_their_update(tmp_path: Path) -> None:
    cards = [region.CardLimit(f"GPU-{n}", n, LIMIT, 50, 50) for n in range(2)]
    region.create(tmp_path, cards)
    region.write_overhead(tmp_path, [5, 6])
    region.update(tmp_path, cards)
    assert [card.overhead_bytes for card in region.read_limits(tmp_path)] == [5, 6]
    usage = region.read_usage(tmp_path).cards[0]
    assert (usage.memory_used_bytes, usage.ledger_bytes) == (5, 0)
    with pytest.raises(region.RegionError, match="it has 2 cards, not 1"):
        region.write_overhead(tmp_path, [5])
    assert [card.overhead_bytes for card in region.read_limits(tmp_path)] == [5, 6]


@pytest.fixture
def share(tmp_path: Path) -> Iterator[Share]:
    machine = Machine.create(tmp_path / "machine", [SimCard()])
    yield shares.simulated(tmp_path / "share", machine, [shares.limit(machine, memory_bytes=LIMIT)])


def test_new_overhead_is_counted_against_new_allocations_only(share: Share) -> None:
    process = share.start("""
        begin()
        held = alloc(100 * MIB)[1]
        answer(info()[0])
        for line in sys.stdin:
            answer([info()[0] // MIB, alloc(50 * MIB)[0], call("cuMemsetD8_v2", held, 1, size(4096))])
    """)
    assert process.stdin and process.stdout
    assert int(process.stdout.readline()) == LIMIT - 164 * MIB
    for overhead, expected in ((80, [12, 2, 0]), (400, [0, 2, 0]), (0, [92, 0, 0])):
        region.write_overhead(share.region_directory, [overhead * MIB])
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"{expected}\n"
    process.communicate(timeout=60)


@contextlib.contextmanager
def measured(share: Share, overhead_bytes: int) -> Iterator[list[int]]:
    """Somebody measures the share's overhead when he is asked; one item for each time."""
    questions = Questions()
    questions.follow({"share": share.region_directory / region.USAGE_NAME})
    asked: list[int] = []
    end = threading.Event()

    def measure() -> None:
        while not end.is_set():
            if select.select([questions.descriptor], [], [], 0.05)[0] and questions.read():
                asked.append(1)
                region.write_overhead(share.region_directory, [overhead_bytes])

    thread = threading.Thread(target=measure)
    thread.start()
    try:
        yield asked
    finally:
        end.set()
        thread.join()


def test_nothing_is_refused_for_overhead_that_is_gone(share: Share) -> None:
    """What held it may have ended since somebody measured it: an importer of memory that its exporter has freed, say."""
    region.write_overhead(share.region_directory, [150 * MIB])
    with measured(share, 0) as asked:
        code = "begin(); results = []\nfor _ in range(9): results.append(alloc(100 * MIB)[0]); time.sleep(0.12)\nanswer(results)"
        results = share.run(code)
    # The answer is waited for at most 20 ms; on a slow machine a later call finds it.
    assert results.count(0) == 1 and asked


def test_free_memory_is_asked_for_where_somebody_measures_and_only_after_something_was_done(
    share: Share,
) -> None:
    """An inference server's first question must know the code that its warm-up has loaded."""
    region.write_overhead(share.region_directory, [0])
    with measured(share, 30 * MIB) as asked:
        code = "begin(); free = [info()[0] // MIB]; until = time.monotonic() + 20"
        code += "\nwhile free[-1] != 256 - 64 - 30 and time.monotonic() < until: free.append(info()[0] // MIB)"
        free = share.run(code + "\nfree += [info()[0] // MIB for _ in range(50)]; answer(free)")
    # The first question waits at most 20 ms for the answer; on a slow machine a later one knows it.
    assert set(free[:-51]) <= {256 - 64} and set(free[-51:]) == {256 - 64 - 30}
    assert len(asked) == 1


def test_nobody_is_asked_where_nobody_measures(share: Share) -> None:
    questions = Questions()
    questions.follow({"share": share.region_directory / region.USAGE_NAME})
    share.run("begin(); answer(info())")
    assert questions.read() == set()
