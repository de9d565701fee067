"""Peers beside ours, with small libraries in their place: their variables reach them, and one that crashes, hangs or limits nothing is reported."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks import _peer_rows, _throttle_bench, peers
from benchmarks._peer_rows import Cell, Row, Rows
from benchmarks._systems import Nothing, Ours, System
from benchmarks._throttle_bench import Bench

NOTES_VARIABLES = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void begin(void)
{
    FILE *file = fopen(getenv("CUDA_DEVICE_MEMORY_SHARED_CACHE"), "ax");
    if (!file) /* another program's limits are there */
        abort();
    fprintf(file, "%s %s\\n", getenv("CUDA_DEVICE_MEMORY_LIMIT"), getenv("CUDA_DEVICE_SM_LIMIT"));
    fclose(file);
    puts("{a library that prints lines of its own}");
    fflush(stdout);
}
"""
CRASHES = "__attribute__((constructor)) static void begin(void) { *(volatile int *)8 = 1; }"
HANGS = "#include <unistd.h>\n__attribute__((constructor)) static void begin(void) { pause(); }"
MEMORY, TIME, LAUNCH, CHEAT = "plain", "50 alone, 1 ms", "limited", "new_streams"
KINDS = ("plain", "pitched", "managed", "default pool", "own pool", "mapped", "array", "mipmap", "graph", "mix")


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rows:
    """All rows, short."""
    monkeypatch.setattr(_throttle_bench, "WARM_SECONDS", 0.5)
    monkeypatch.setattr(_peer_rows, "CHEAT_SECONDS", 0.5)
    made = Rows(Bench(tmp_path), quick=True)
    made.seconds, made.launches = 1.0, 2_000
    return made


@pytest.fixture
def table(tmp_path: Path) -> peers.Table:
    return peers.Table([], {"cards": []}, tmp_path / "figures.json", (tmp_path / "complaints").open("w+"))


def row(rows: Rows, title: str) -> Row:
    return next(each for each in rows if each.title == title)


def library(folder: Path, code: str) -> Path:
    source, built = folder / "peer.c", folder / "libvgpu.so"
    source.write_text(code)
    subprocess.run([os.environ.get("CC", "gcc"), "-shared", "-fPIC", "-o", built, source], check=True)
    return built


def measured(table: peers.Table, rows: Rows, system: System, *titles: str) -> list[dict[str, object]]:
    """What the table notes of that system in those rows."""
    table.systems = [system]
    rows.bench.complaints = table.complaints
    for title in titles:
        table.add(row(rows, title))
    return [made["systems"][system.name] for made in table.rows]


def test_every_part_is_there(rows: Rows) -> None:
    titles = [each.title for each in rows]
    assert set(KINDS) < set(titles)
    assert {f"{cap} alone, 10 us" for cap in (10, 50)} | {"30 beside 70, 1 ms", CHEAT, "limited", "unlimited"} < set(
        titles
    )
    assert {each.part for each in rows} == {
        _peer_rows.MEMORY,
        _peer_rows.TIME,
        _peer_rows.LAUNCH,
        _peer_rows.ON_CARD,
        _peer_rows.CHEATS,
    }


def test_a_peer_that_limits_nothing_is_measured_and_told_of(
    rows: Rows, table: peers.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = peers.peer(["hami@1a2b3c", str(library(tmp_path, NOTES_VARIABLES))])
    cells = measured(table, rows, made, MEMORY, TIME, LAUNCH, CHEAT)
    assert [cell.get("beyond") for cell in cells] == [True, True, False, True], cells
    assert not table.remarks, "each program found a folder of its own"
    table.sum_up()
    said = capsys.readouterr().out
    assert "a library that prints" not in said
    assert "hami@1a2b3c: in 3 of 4 rows its limit did not hold" in said
    noted = {file.read_text() for file in tmp_path.glob("hami@1a2b3c-*/cudevshr.cache")}
    assert noted > {"1024m 50\n", "4096m 90\n"}


def test_a_peer_that_crashes_its_program_is_reported(rows: Rows, table: peers.Table, tmp_path: Path) -> None:
    made = peers.peer(["broken", str(library(tmp_path, CRASHES)), "LIMIT={cores}"])
    cells = measured(table, rows, made, MEMORY, TIME, LAUNCH, CHEAT)
    assert all("ended with SIGSEGV" in str(cell["failed"]) for cell in cells), cells
    assert len(table.remarks) == 4
    assert row(rows, MEMORY).measure(Ours()).beyond is False, "the row after it is measured"


def test_a_peer_that_hangs_is_ended_and_reported(
    rows: Rows, table: peers.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_peer_rows, "FILL_SECONDS", 1.0)
    rows.bench.patience_s = 1.0
    made = peers.peer(["stuck", str(library(tmp_path, HANGS)), "LIMIT={cores}"])
    began = time.monotonic()
    cells = measured(table, rows, made, MEMORY, TIME, LAUNCH, CHEAT)
    assert time.monotonic() - began < 60
    assert [str(cell["failed"]) for cell in cells] == [
        "memory_load was not done after 1 s",
        "throttle_load was not done 1 s later",
        "throttle_load was not done 1 s later",
        "it put nothing on the card",
    ]


def test_ours_holds_in_memory_time_and_cheats(rows: Rows, table: peers.Table) -> None:
    cells = measured(table, rows, Ours(), *KINDS, "50 alone, 1 ms", "told to be the total")
    assert [cell.get("beyond") for cell in cells] == [False] * len(cells), cells
    assert cells[-1]["values"] == [1024.0]


def test_a_process_for_which_another_left_no_room_is_refused_and_does_not_wait(rows: Rows) -> None:
    began = time.monotonic()
    cell = row(rows, "plain, two processes").measure(Ours())
    assert cell.values == [1024.0, 2.0] and time.monotonic() - began < _peer_rows.FILL_SECONDS


def test_what_is_without_any_share_is_never_beyond_a_limit(rows: Rows, table: peers.Table) -> None:
    (cell,) = measured(table, rows, Nothing(), MEMORY)
    assert cell["beyond"] is False and cell["values"] > [4096.0]  # type: ignore[operator]


def test_a_row_is_on_disk_before_the_next_begins(table: peers.Table) -> None:
    def fails(system: System) -> Cell:
        raise RuntimeError(f"{system.name} fell over")

    table.systems = [Ours()]
    table.add(Row("part", "first", lambda _: Cell("1", [1.0])))
    table.add(Row("part", "second", fails))
    assert table.json
    text = table.json.read_text()
    assert '"first"' in text and "vcuda fell over" in text
    assert table.remarks == ["vcuda, second: vcuda fell over"]
