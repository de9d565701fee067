"""`vcuda top`: a line for each share that fits the terminal, what is used against what is promised, and inside a run that run alone."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import pytest

from tests.support.runs import Runner, wait_for
from vcuda import region, sim
from vcuda.cli import bars, top_command
from vcuda.runs.booking import Booking, Share
from vcuda.runs.view import RunView, ShareView

GIB = 2**30


def run_of(pid: int, achieved: float | None, used: int | None, command: str = "python train.py") -> RunView:
    share = Share("GPU-ac001e06-1", 0, 30, 50, 8 * GIB)
    booking = Booking(f"run-{pid}", 0, pid, float(pid), command, "", (share,))
    process = region.ProcessUsage(0, pid, True, {})
    return RunView(booking, (ShareView(share, 50, used, achieved, None, 12.4),), (process,) * 3)


RUNS = [
    run_of(4711, 40.0, 4 * GIB),
    run_of(123, 25.0, 6 * GIB, "\x1b[31mevil\nname " + "x" * 200),
    run_of(9, None, None),
]


def test_a_screen_of_80_columns_holds_everything_and_no_line_folds() -> None:
    assert top_command.render(RUNS, "run", 80, bars.ASCII) == [
        "    RUN CARD     GPU TIME            MEMORY                WAIT PIDS COMMAND",
        "      9 GPU-ac00 ???????? ?/30-50    ???????? ?/8G          12%    3 python trai",
        "    123 GPU-ac00 ####.... 25/30-50   ######.. 6G/8G         12%    3 \\x1b[31mevi",
        "   4711 GPU-ac00 #####+.. 40/30-50   ####.... 4G/8G         12%    3 python trai",
    ]


def test_a_wide_screen_shows_the_last_minute() -> None:
    past = {("run-4711", RUNS[0].shares[0].share.uuid): deque(index / 20 for index in range(20))}
    assert top_command.render(RUNS[:1], "run", 120, bars.BLOCKS, past)[1] == (
        "   4711 GPU-ac00 █████▓·· 40/30-50   ████···· 4G/8G         12%    3 ▁▁▂▂▂▃▃▃▄▄▅▅▅▆▆▆▇▇▇█ python train.py"
    )


@pytest.mark.parametrize(("sort", "first"), [("cores", "4711"), ("memory", "123"), ("run", "9")])
def test_what_is_sorted_by_comes_first(sort: str, first: str) -> None:
    assert top_command.render(RUNS, sort, 80, bars.ASCII)[1].split()[0] == first


def test_bars_mark_what_is_beyond_the_guarantee_and_lines_show_the_last_minute() -> None:
    assert bars.ASCII.bar(1.5, 8, 0.5) == "####++++"
    assert bars.ASCII.bar(0.0, 4) == "...."
    assert bars.BLOCKS.sparkline([None, 0.0, 0.5, 1.0], 5) == "  ▁▅█"
    assert bars.glyphs("latin-1") is bars.glyphs(None) is bars.ASCII and bars.glyphs("utf-8") is bars.BLOCKS
    assert [bars.short_bytes(count) for count in (None, 512 << 20, 4 * GIB + GIB // 10, 1023 << 20)] == [
        "?", "512M", "4.1G", "1023M"
    ]  # fmt: skip


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    sim.Machine.create(tmp_path / "machine", [sim.SimCard(memory_bytes=8 * GIB)])
    return Runner(tmp_path / "machine")


def test_inside_a_run_it_shows_that_run_without_flags_and_so_do_ls_and_show(runner: Runner) -> None:
    other = runner.start(*runner.run("sleep", "60"))
    wait_for("the other run", runner.bookings)
    inside = f"{sys.executable} -m vcuda.cli.main"
    command = f"{inside} top --json --interval 0; echo; {inside} ls --json --interval 0; echo; {inside} ls --all --json; {inside} show"
    done = runner.call(
        *runner.run(
            "sh", "-c", command.replace("; echo;", "; echo ----;").replace("--all --json;", "--all --json; echo ----;")
        )
    )
    assert done.returncode == 0, done.stderr
    mine, listed, everyone, shown = done.stdout.split("----\n")
    assert len(json.loads(mine)) == len(json.loads(listed)) == 1
    assert json.loads(mine)[0]["pid"] == json.loads(listed)[0]["pid"] != other.pid
    assert len(json.loads(everyone)) == 2
    assert "cores in force" in shown
    other.terminate()
    other.communicate(timeout=60)


def test_on_a_terminal_it_lives_until_q_and_leaves_the_terminal_as_it_was(runner: Runner) -> None:
    front = runner.start(*runner.run("sleep", "60"))
    wait_for("the run", runner.bookings)
    leader, follower = pty.openpty()
    environment = runner.environment(TERM="xterm", COLUMNS="80", LINES="24", LC_ALL="C.UTF-8")
    process = subprocess.Popen(
        runner.words("top", "--interval", "0.1"),
        env=environment,
        stdin=follower,
        stdout=follower,
        stderr=subprocess.PIPE,
    )
    os.close(follower)
    written, deadline = b"", time.monotonic() + 60
    while written.count(b"COMMAND") < 2 and time.monotonic() < deadline:
        if select.select([leader], [], [], 1)[0]:
            written += os.read(leader, 65536)
    os.write(leader, b"mq")
    assert process.wait(timeout=60) == 0, process.communicate()[1]
    while select.select([leader], [], [], 0.2)[0]:
        try:
            written += os.read(leader, 65536)
        except OSError:  # the last one has closed it
            break
    os.close(leader)
    assert written.endswith(b"\x1b[?25h\x1b[?1049l") and b"sleep 60" in written
    front.terminate()
    front.communicate(timeout=60)
    dumb = runner.call("top")
    assert (dumb.returncode, dumb.stdout) == (0, "no run holds a share on this machine\n")
