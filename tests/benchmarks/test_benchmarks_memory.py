"""A short stress run of the memory limits: every allocator of the mix is at work, the limit is reached and never exceeded."""

from __future__ import annotations

from pathlib import Path

from benchmarks import memory


def test_a_short_stress_run_reaches_the_limit_and_neither_exceeds_it_nor_leaves_anything(
    tmp_path: Path,
) -> None:
    stress = memory.Bench(tmp_path).stress(8_000, 1)
    assert stress.peak_bytes <= stress.limit_bytes
    assert stress.peak_in_ledger_bytes <= stress.limit_bytes
    assert (stress.left_bytes, stress.left_in_ledger_bytes) == (0, 0)
    assert stress.refused > 0 and sum(stress.kills_by_tenth) == stress.kills > 0
    assert len(stress.allocators) == 14
    assert all(granted > 0 for granted, _ in stress.allocators.values()), stress.allocators


def test_the_same_seed_gives_the_same_processes() -> None:
    assert memory.mixes(50_000, 3) == memory.mixes(50_000, 3) != memory.mixes(50_000, 4)
    assert sum(mix.operations for mix in memory.mixes(50_000, 3)) == 50_000
