"""The supervisor: the process between `vcuda run` and its command; it outlives both and ends the booking.

It is the parent of the command and adopts every descendant that is orphaned, so it knows when the last one is gone,
also of those that closed all their files. It lives in a session of its own: no terminal and no signal to the command's
process group reaches it. `vcuda run` (the front) talks to it by lines of text over a socket.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from vcuda.runs import processes
from vcuda.runs.arbitration import PERIOD_SECONDS, Arbitration
from vcuda.runs.engine import Containers
from vcuda.runs.errors import CommandError

_IGNORED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGPIPE,
)


@dataclass(frozen=True)
class Task:
    """What to run, and how to let go of it.

    `finish` takes the booking out of the ledger; `report` tells before that what was used.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    mask: Collection[int]
    held: frozenset[int]  # descriptors that must stay open: the booking's lock, the ledger
    duty: Arbitration
    finish: Callable[[], None]
    report: Callable[[], Sequence[str]] = tuple
    control_group: Path | None = None
    containers: Containers | None = None  # those count instead of the command's descendants


class Supervisor:
    """Runs in a fork of the front; `main` never returns."""

    def __init__(self, task: Task, link: socket.socket) -> None:
        self._task = task
        self._link: socket.socket | None = link
        self._front = os.getppid()
        self._pid = 0
        self._wait_status: int | None = None
        self._reported = False

    def main(self) -> NoReturn:
        status = 0
        try:
            self._run()
        except BaseException:  # noqa: BLE001 - a fork must never unwind into its parent's code
            traceback.print_exc(file=sys.stderr)
            status = 70
        finally:
            os._exit(status)

    def _run(self) -> None:
        processes.adopt_orphans()
        try:
            self._pid = processes.start(
                self._task.command, self._task.environment, self._task.mask, self._task.control_group
            )
        except CommandError as error:
            self._task.finish()
            self._tell(f"failed {error.status} {error.message}")
            return
        wakeup, waker = self._take_signals()
        self._tell(f"started {self._pid}")
        assert self._link is not None
        processes.forget_terminal({*self._task.held, self._link.fileno(), wakeup.fileno(), waker.fileno()})
        next_tick = 0.0
        while self._look_after_children():
            if time.monotonic() >= next_tick:
                self._task.duty.tick()
                next_tick = time.monotonic() + PERIOD_SECONDS
            sources: list[socket.socket | int] = [wakeup] if self._link is None else [wakeup, self._link]
            questions = self._task.duty.questions
            if questions >= 0:
                sources.append(questions)
            readable, _, _ = select.select(sources, [], [], max(0.0, next_tick - time.monotonic()))
            if questions in readable:
                self._task.duty.answer()
            if wakeup in readable:
                wakeup.recv(4096)
            if self._link in readable:
                self._obey()
        self._task.duty.close()
        self._tell_report()
        self._task.finish()
        self._report(lingering=False)

    def _take_signals(self) -> tuple[socket.socket, socket.socket]:
        """A pair whose first end becomes readable when a child ends; signals that end programs are not for us."""
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        return reading, writing

    def _look_after_children(self) -> bool:
        """Reap; whether any process of the tree is left, or of a container."""
        ended, left = processes.reap()
        first = self._pid in ended and self._wait_status is None
        if first:
            self._wait_status = ended[self._pid]
        if self._task.containers is not None:  # an engine leaves processes behind that last as long as the machine
            left = self._task.containers.live(command_runs=self._wait_status is None)
        if first and left:
            self._report(lingering=True)
        return left

    def _obey(self) -> None:
        """The front forwards signals, one byte each; its end means that it was killed: the command goes on."""
        assert self._link is not None
        try:
            numbers = self._link.recv(64)
        except OSError:
            numbers = b""
        if not numbers:
            self._let_go()
            return
        for number in numbers:
            if self._wait_status is None:
                os.kill(self._pid, number)  # not reaped yet, so the ID is still the command's

    def _report(self, *, lingering: bool) -> None:
        if self._reported or self._wait_status is None:
            return
        self._reported = True
        if lingering:
            self._tell_report()
        self._tell(f"ended {self._wait_status} {int(lingering)}")
        if lingering:
            self._let_go()

    def _tell_report(self) -> None:
        if self._link is not None:
            for line in self._task.report():
                self._tell(f"report {line}")

    def _let_go(self) -> None:
        """Nobody listens any more: hold neither the socket nor stderr."""
        if self._link is not None:
            self._link.close()
        self._link = None
        processes.silence()

    def _tell(self, line: str) -> None:
        if self._link is None:
            return
        try:
            self._link.sendall(f"{line}\n".encode())
            if os.getppid() == self._front:
                os.kill(self._front, signal.SIGCHLD)  # it sleeps in sigtimedwait
        except OSError:
            self._let_go()
