"""What another user chose, in a run's command line or an entry's name, reaches no terminal raw: tables, refusals, warnings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.runs import Runner, wait_for
from vcuda import sim

GIB = 2**30
HOSTILE = "\x1b[2J\x1b]0;owned\x07 \x9b31m [red]x[/red]\n 999 root \u202e\u2066"


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    sim.Machine.create(tmp_path / "machine", [sim.SimCard(memory_bytes=8 * GIB)])
    return Runner(tmp_path / "machine")


def clean(text: str) -> str:
    assert all(char == "\n" or char.isprintable() for char in text), ascii(text)
    assert not any(line.startswith(" 999") for line in text.splitlines())
    return text


def test_a_command_line_is_shown_as_text_wherever_it_is_told(runner: Runner) -> None:
    program = runner.machine / "\x1b[31mmine"
    program.symlink_to("/bin/sh")
    holder = runner.start(
        *runner.run(
            str(program), "-c", "while sleep 0.1; do :; done", HOSTILE, share=("--core", "90", "--memory", "1GiB")
        )
    )
    try:
        (booking,) = wait_for("the booking", runner.bookings)
        listed = clean(runner.call("ls").stdout)
        assert "x1b[31mmine" in listed
        assert "[red]x[/red]" in clean(runner.call("top", "--once").stdout + runner.call("ls", COLUMNS="400").stdout)
        clean(runner.call("show", str(booking.pid)).stdout)
        refused = runner.call(*runner.run("true", share=("--core", "50", "--memory", "1GiB")))
        assert refused.returncode == 125 and "x1b[31mmine" in clean(refused.stderr)
    finally:
        holder.terminate()
        holder.communicate()


@pytest.mark.parametrize("words", [("ls",), ("doctor",), ("run", "--core", "10", "--memory", "1GiB", "--", "true")])
def test_the_name_of_an_entry_is_shown_as_text(runner: Runner, words: tuple[str, ...]) -> None:
    entry = runner.ledger / f"run-{HOSTILE.replace('/', '|')}"
    entry.mkdir(parents=True)
    runner.ledger.chmod(0o1777)
    os.mkfifo(entry / "booking")
    told = runner.call(*words)
    assert clean(told.stdout + told.stderr).count("ignoring") == 1 and "\\n 999 root" in told.stderr
    assert "\\u202e" in told.stderr
