"""The front: what the user's shell sees of a run. Passes signals on, ends as the command ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from vcuda.runs import processes
from vcuda.runs.errors import CommandError, RunError
from vcuda.runs.supervisor import Supervisor, Task

FORWARDED = frozenset(
    {
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGALRM,
    }
)
_SI_KERNEL = 0x80  # siginfo's code of a signal that the terminal sent: the command got it itself
_SECONDS_PER_LOOK = 1.0


@dataclass
class _Progress:
    """What is known of the run so far."""

    command_pid: int = 0
    status: int | None = None
    lingering: bool = False
    failure: CommandError | None = None


def run(task: Task, say: Callable[[str], None]) -> int:
    """Run the task's command under a supervisor; return its exit status (128 + signal if one ended it).

    Single-threaded callers only: it forks. Raises CommandError if the command can't be executed, RunError if supervisor
    and command were both killed before the command's end was known.
    """
    processes.adopt_orphans()  # should the supervisor be killed, the command becomes our child
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})
    near, far = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    supervisor = os.fork()
    if supervisor == 0:
        near.close()
        Supervisor(replace(task, mask=before), far).main()
    far.close()
    try:
        return _Launcher(task, near, supervisor, say).wait()
    finally:
        near.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Launcher:
    def __init__(self, task: Task, link: socket.socket, supervisor: int, say: Callable[[str], None]) -> None:
        self._task = task
        self._link = link
        self._link.setblocking(False)
        self._supervisor = supervisor
        self._keeper_gone = False
        self._say = say
        self._heard = b""
        self._progress = _Progress()

    def wait(self) -> int:
        progress = self._progress
        while True:
            self._listen()
            if progress.failure is not None:
                os.waitpid(self._supervisor, 0)
                raise progress.failure
            if progress.status is None:
                self._reap()
            if progress.status is not None:
                return self._end(progress.status)
            signal_info = signal.sigtimedwait([*FORWARDED, signal.SIGCHLD], _SECONDS_PER_LOOK)
            if signal_info is not None and signal_info.si_signo in FORWARDED and signal_info.si_code != _SI_KERNEL:
                self._forward(signal_info.si_signo)

    def _listen(self) -> None:
        """Read what the supervisor says, whole lines only."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while received := self._link.recv(4096):
                self._heard += received
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            word, _, rest = line.decode(errors="replace").partition(" ")
            if word == "started":
                self._progress.command_pid = int(rest)
            elif word == "ended":
                wait_status, lingering = rest.split()
                self._progress.status = processes.exit_status(int(wait_status))
                self._progress.lingering = lingering == "1"
            elif word == "report":
                self._say(rest)
            elif word == "failed":
                status, _, message = rest.partition(" ")
                self._progress.failure = CommandError(int(status), message)

    def _reap(self) -> None:
        """Notice a killed supervisor; then the command, adopted, is ours to wait for."""
        ended, left = processes.reap()
        if self._progress.command_pid in ended and not self._keeper_gone and self._supervisor not in ended:
            # The command is ours because its parent was killed, whose last thread may be about to end still.
            ended[self._supervisor] = os.waitpid(self._supervisor, 0)[1]
            more, left = processes.reap()
            ended |= more
        if self._supervisor in ended:
            self._keeper_gone = True
            self._listen()  # its last words
            if self._progress.status is None and self._progress.failure is None:
                self._say("the supervisor of this run was killed; the share stays booked while its processes live")
        progress = self._progress
        if progress.status is not None or progress.failure is not None:
            return
        if progress.command_pid in ended:
            progress.status = processes.exit_status(ended[progress.command_pid])
            containers = self._task.containers
            progress.lingering = left if containers is None else containers.live(command_runs=False)
        elif self._keeper_gone and not left:
            raise RunError("the supervisor of this run and its command were killed")

    def _forward(self, number: int) -> None:
        if not self._keeper_gone:
            with contextlib.suppress(OSError):
                self._link.send(bytes([number]))
        elif self._progress.command_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._progress.command_pid, number)

    def _end(self, status: int) -> int:
        if self._keeper_gone:
            for line in self._task.report():
                self._say(line)
        if self._progress.lingering:
            contained = self._task.containers is not None
            who = "the container keeps" if contained else "processes that the command left behind keep"
            self._say(f"{who} the share until {'it ends' if contained else 'they end'}; `vcuda ls` shows it")
        elif self._keeper_gone:
            self._task.finish()
        else:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._supervisor, 0)  # then the booking is out of the ledger
        return status
