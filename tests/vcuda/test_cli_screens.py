"""`vcuda top`, in Python and static, as terminals of 80x24 and 120x40 show it: the screens are in the folder `screens`."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import screens
from vcuda import region
from vcuda.cli import main, show_command
from vcuda.driver import layout
from vcuda.region import CardLimit
from vcuda.runs.booking import Booking, Share
from vcuda.runs.view import RunView, ShareView

GIB = 1 << 30
SIZES = [(80, 24), (120, 40)]
GOLDEN = Path(__file__).with_name("screens")
SMOOTH = {"LC_ALL": "C.UTF-8", "TERM": "xterm"}
Figures = tuple[int, int, float | None, int | None, float | None, str]
FEW: list[Figures] = [
    (30, 50, 40.0, 4 * GIB, 12.4, "python train.py"),
    (50, 100, 100.0, 1023 << 20, 0.0, "python -m a.package.with.a.long.name --and-its=arguments " + "x" * 100),
    (100, 100, 99.6, 80 * GIB, None, "no limit"),
    (1, 1, 0.0, 0, 1e6, "waits"),
    (30, 30, None, None, None, "its region can't be read"),
    (30, 30, 3.0, GIB, 0.0, "\x1b[2J\nevil"),
]
CONTENTS = {"few": FEW, "none": [], "thirty": FEW * 5}


def runs(figures: list[Figures]) -> list[RunView]:
    made = []
    for at, (cores, limit, achieved, used, waited, command) in enumerate(figures):
        share = Share(f"GPU-{at:02}001e06-1", 0, cores, limit, 80 * GIB)
        booking = Booking(f"run-{at}", 0, 4194304 - at, float(at), command, "", (share,))
        process = region.ProcessUsage(0, 1, True, {})
        made.append(RunView(booking, (ShareView(share, limit, used, achieved, None, waited),), (process,)))
    return made


def in_terminal(columns: int, lines: int, act: Callable[[int, int], None], keys: bytes = b"") -> str:
    """What `act` writes to a terminal; it has the descriptors of both sides. `keys` are pressed after the first line."""
    near, far = pty.openpty()
    fcntl.ioctl(far, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))
    written = bytearray()

    def read() -> None:
        waiting = keys
        while True:
            try:
                written.extend(os.read(near, 65536))
            except OSError:  # the last one has closed it
                return
            if waiting and b"\n" in written:
                os.write(near, waiting)
                waiting = b""

    reader = threading.Thread(target=read)
    reader.start()
    try:
        act(near, far)
    finally:
        os.close(far)
        reader.join()
        os.close(near)
    return written.decode()


def before_the_end(written: str) -> str:
    """Without the return to the screen that was before, which an emulator without that other screen keeps."""
    return written.removesuffix("\x1b[?25h\x1b[?1049l")


def top(
    monkeypatch: pytest.MonkeyPatch, columns: int, lines: int, content: list[Figures], environment: dict[str, str]
) -> str:
    for name in ("COLUMNS", "LINES", "LC_ALL", "LC_CTYPE", "LANG", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def act(near: int, far: int) -> None:
        looks = []

        def look(_: object) -> list[RunView]:
            looks.append(1)
            if len(looks) == 2:
                os.write(near, b"q")  # read after the second screen
            return runs(content)

        monkeypatch.setattr(show_command, "look", look)
        with (
            open(far, "w", encoding="utf-8", closefd=False) as out,
            open(far, encoding="utf-8", closefd=False) as keyboard,
            monkeypatch.context() as patch,
        ):
            for name in ("stdout", "__stdout__"):
                patch.setattr(sys, name, out)
            patch.setattr(sys, "stdin", keyboard)
            assert main.main(["top"]) == 0

    return in_terminal(columns, lines, act)


@pytest.mark.parametrize(("columns", "lines"), SIZES)
@pytest.mark.parametrize("content", CONTENTS)
def test_top(monkeypatch: pytest.MonkeyPatch, columns: int, lines: int, content: str) -> None:
    written = before_the_end(top(monkeypatch, columns, lines, CONTENTS[content], SMOOTH))
    screens.check(GOLDEN / f"top-{content}-{columns}x{lines}.txt", screens.shown(written, columns, lines))


def test_top_in_an_ascii_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python writes UTF-8 in the C locale, whatever the terminal reads."""
    written = before_the_end(top(monkeypatch, 80, 24, FEW, {"LC_ALL": "C", "TERM": "xterm"}))
    assert written.isascii()
    screens.check(GOLDEN / "top-few-80x24-ascii.txt", screens.shown(written, 80, 24))


def test_top_on_a_dumb_terminal_is_the_same_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written = top(monkeypatch, 80, 24, FEW, {"LC_ALL": "C", "TERM": "dumb"})
    assert "\x1b" not in written
    screens.check(GOLDEN / "top-few-80x24-ascii.txt", screens.shown(written, 80, 24))


@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
@pytest.mark.parametrize(("columns", "lines"), SIZES)
def test_the_static_program(tmp_path: Path, columns: int, lines: int, locale: str) -> None:
    limits = [CardLimit(f"GPU-{at}123456789", at, GIB << at, 50, 50 + 50 * at, shared=True) for at in range(2)]
    region.create(tmp_path, limits)
    words = [str(layout.mine_of(layout.SHIMS_FOLDER)), "top", "--region", str(tmp_path)]

    def act(_: int, far: int) -> None:
        environment = {"TERM": "xterm", "LC_ALL": locale}
        subprocess.run(words, env=environment, stdin=far, stdout=far, stderr=far, timeout=60, check=True)

    written = before_the_end(in_terminal(columns, lines, act, b"q"))
    assert written.isascii() == (locale == "C")
    name = f"mine-{columns}x{lines}{'' if locale != 'C' else '-ascii'}.txt"
    screens.check(GOLDEN / name, screens.shown(written, columns, lines))
