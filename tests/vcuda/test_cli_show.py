"""`vcuda ls` and `vcuda show` in words and as JSON, and the machine that a command is about."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from vcuda import region, sim
from vcuda.cli import main
from vcuda.runs import cards, ledger, view
from vcuda.runs.booking import Booking, Share
from vcuda.runs.view import RunView, ShareView
from vcuda.spec.inventory import Card

GIB = 2**30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sim.Machine.create(tmp_path / "machine", [sim.SimCard(memory_bytes=8 * GIB)])
    return tmp_path / "machine"


def a_run(name: str, limit_in_force: int, *, known: bool, impossible: int = 0) -> RunView:
    uuid = f"GPU-{name * 8}"[:16]
    booking = Booking(name, 0, 77, 0.0, "python train.py", "/f", (Share(uuid, 0, 30, 50, 2 * GIB),))
    usage = region.CardUsage(
        uuid=uuid,
        memory_used_bytes=GIB,
        memory_peak_bytes=GIB,
        gpu_time_ns=1_500_000_000,
        waited_ns=250_000_000,
        launches=42,
        granted_cores=40.0,
    )
    share = ShareView(
        booking.shares[0],
        limit_in_force,
        GIB if known else None,
        12.4 if known else None,
        usage if known else None,
    )
    processes = (region.ProcessUsage(1, 4711, True, {uuid: GIB}, "train.py"),) if known else ()
    return RunView(booking, (share,), processes, impossible)


@pytest.fixture(autouse=True)
def one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process can ask one NVML only, and in this one another file of tests may have: `vcuda show` as a program is in test_cli_usage.py."""
    monkeypatch.setattr(cards, "discover", lambda _: (Card("GPU-1", 0, "Simulated", 8 * GIB),))


@pytest.fixture
def runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run that is metered and lent to, and one whose region can't be read and that is not."""
    found = [a_run("one", 50, known=True, impossible=3), a_run("two", 30, known=False)]
    (folder / "ledger").mkdir()  # without one nothing is looked at
    monkeypatch.setattr(view, "look", lambda *_: found)


def test_a_list_is_a_line_for_each_share_and_says_what_is_not_known(
    folder: Path, runs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["ls", f"--sim={folder}"]) == 0
    _, _, one, two = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert "30-50" in one and one[-7:-2] == ["12", "1", "GiB", "2", "GiB"]
    assert "30-(50)" in two and two[-6:-2] == ["?", "?", "2", "GiB"]


def test_on_80_columns_a_row_is_a_line_and_figures_stay_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run took six lines, and its card stood there in pieces."""
    run = a_run("GPU", 50, known=True)
    run = dataclasses.replace(
        run, booking=dataclasses.replace(run.booking, command="python train.py --epochs 300 --data d")
    )
    (folder / "ledger").mkdir()
    monkeypatch.setattr(view, "look", lambda *_: [run])
    card = Card("GPU-5c05da09-c2ad-5973-98ad-05124a8e079d", 0, "NVIDIA A100-SXM4-40GB", 40 * GIB)
    monkeypatch.setattr(cards, "discover", lambda _: (card,))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    for command, figures in (("ls", ["30-50", "12", "1 GiB", "2 GiB"]), ("show", ["100 / 100", "40 GiB / 40 GiB"])):
        assert main.main([command, f"--sim={folder}"]) == 0
        lines = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]
        assert max(map(len, lines)) <= 80
        assert len(lines) == (3 if command == "ls" else 6), lines
        assert all(figure in lines[2] for figure in figures) and "…" in lines[2]


def test_a_run_is_shown_with_its_time_its_processes_and_what_is_wrong(
    folder: Path, runs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["show", f"--sim={folder}", "one"]) == 0
    out = capsys.readouterr().out
    time = next(line for line in out.splitlines() if "1.500 s" in line).split()
    assert time[1:] == ["40", "1.500", "s", "0.250", "s", "42"]
    assert "3 processes met limits that make no sense and keep to the guaranteed cores" in out
    assert ["4711", "train.py", "1", "GiB"] in [line.split() for line in out.splitlines()]
    assert main.main(["show", f"--sim={folder}", "two"]) == 0
    out = capsys.readouterr().out
    assert ["?", "?", "?", "?"] in [line.split()[1:] for line in out.splitlines()]
    assert "make no sense" not in out and "program" not in out


def test_a_run_as_json_has_null_for_what_is_not_known(
    folder: Path, runs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: dict[str, Any] = {}
    for name in ("one", "two"):
        assert main.main(["show", f"--sim={folder}", "--json", name]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        shown[name] = row["shares"][0]
    assert (shown["one"]["launches"], shown["one"]["core_limit_in_force"]) == (42, 50)
    assert (shown["two"]["launches"], shown["two"]["memory_used_bytes"]) == (None, None)


def test_all_cards_are_shown_with_the_runs_below(folder: Path, runs: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["show", f"--sim={folder}"]) == 0
    out = capsys.readouterr().out
    assert "100 / 100" in out and "30-50" in out


def test_a_run_that_is_none_is_named_with_the_way_to_those_there_are(
    folder: Path, runs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["show", f"--sim={folder}", "three"]) == main.REFUSED
    assert capsys.readouterr().err == "vcuda: there is no run three; `vcuda ls` lists them\n"


# --- which machine ---
@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"vcuda-sim-{os.geteuid()}"


def test_sim_alone_makes_a_machine_once_says_so_and_uses_it_again(
    temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["show", "--sim", "--json"]) == 0
    first = capsys.readouterr()
    assert f"made the simulated machine {temporary} (" in first.err and "`vcuda sim` changes it" in first.err
    assert main.main(["show", "--sim", "--json"]) == 0
    again = capsys.readouterr()
    assert again.err == "" and json.loads(again.out) == json.loads(first.out)


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_what_another_user_put_in_the_machines_place_is_not_used(
    temporary: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    if kind == "file":
        temporary.touch()
    elif kind == "folder":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder to another user")
        temporary.mkdir()
        os.chown(temporary, 65534, 65534)
    else:
        (temporary.parent / "theirs").mkdir()
        temporary.symlink_to(temporary.parent / "theirs")
    assert main.main(["ls", "--sim"]) == main.REFUSED
    told = f"vcuda: {temporary} is not yours; name a simulated machine with --sim=DIR\n"
    assert capsys.readouterr().err == told


def test_without_sim_it_is_this_machine_and_the_ledger_of_all_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setattr(ledger, "default_folder", lambda: tmp_path / "ledger")
    assert main.main(["ls"]) == 0
    assert capsys.readouterr().out == "no run holds a share on this machine\n"
    assert main.main(["ls", "--json", "--ledger", str(tmp_path / "other")]) == main.REFUSED
    assert not (tmp_path / "ledger").exists() and not (tmp_path / "other").exists()  # looking makes none
