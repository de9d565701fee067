"""The benchmarks' measure of a real card, the kernels that ended, agrees with the books of a simulated one that is used as if it were real."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import _card, _throttle_bench
from benchmarks._throttle_bench import Bench, Load
from vcuda.runs.errors import RunError

KERNEL: _card.Options = {"kernel": "spin_1000us", "sync": 20}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A bench whose card is taken for a real one; `simulated` beside it is the same card with its books."""
    patch = pytest.MonkeyPatch()
    patch.setattr(_card, "CALIBRATION_ROUNDS", 1)
    patch.setattr(_card, "CALIBRATION_SECONDS", 0.4)
    patch.setattr(_card, "CALIBRATION_KERNEL", "calibration_100us")
    # A program alone is as fast as it ever was: beside other tests the simulated card's processor is not its own.
    once = _card.RealCard._rate
    patch.setattr(_card.RealCard, "_rate", lambda card, options: max(once(card, options) for _ in range(3)))
    patch.setattr(_throttle_bench, "WARM_SECONDS", 0.5)
    folder = tmp_path_factory.mktemp("bench")
    bench = Bench(folder)
    simulated = bench.card
    assert isinstance(simulated, _card.SimulatedCard)
    bench.card = _card.RealCard(
        simulated.uuid,
        simulated.minor,
        "taken for real",
        simulated.library,
        bench.program,
        simulated.environment(),
    )
    bench.books = simulated  # type: ignore[attr-defined]
    yield bench
    patch.undo()


def test_a_cap_counts_as_its_part_of_what_the_program_does_alone(bench: Bench) -> None:
    samples, answers = bench.run([Load(50, KERNEL)], 1.0, shared=False)
    assert 35 < sum(samples[0]) / len(samples[0]) < 65
    assert answers[0]["launches"] > 100


def test_kernels_that_ended_are_what_the_card_was_busy_with(bench: Bench) -> None:
    process = bench.start(bench.native_environment(), {**KERNEL, "seconds": 1.0})
    process.communicate(timeout=60)
    _, counted = bench.card.busy()
    watch = bench.card._watches[process.pid]  # type: ignore[attr-defined]
    kernels = round(counted[process.pid] / watch.kernel_ns)
    assert kernels == _card._count(watch.file) > 100


def test_graphs_count_every_kernel_in_them(bench: Bench) -> None:
    answer = bench.native({"kernel": "spin_100us", "graph": 5, "sync": 5, "seconds": 0.5})
    files = sorted(Path(bench.card._folder.name).glob("progress-*"), key=lambda file: file.stat().st_mtime_ns)  # type: ignore[attr-defined]
    assert _card._count(files[-1]) == 5 * answer["launches"] > 0


def test_without_a_real_card_the_real_driver_is_refused_and_auto_says_what_it_took(tmp_path: Path) -> None:
    said: list[str] = []
    try:
        _card.choose("real", tmp_path, tmp_path / "none")
    except RunError as error:
        assert isinstance(_card.choose("auto", tmp_path, tmp_path / "none", said.append), _card.SimulatedCard)
        assert said == [f"No real card: {error}. The simulated one is used."]
    except FileNotFoundError:
        pytest.skip("a real card is here")


@pytest.mark.parametrize("name", ["spin", "spin_10", "spin_us", "spin_1.5ms"])
def test_a_kernel_without_a_time_in_its_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="does not end with a time"):
        _card.duration_ns(name)


def test_times_in_kernel_names() -> None:
    assert [_card.duration_ns(name) for name in ("spin_10us", "spin_20ms")] == [10_000, 20_000_000]
