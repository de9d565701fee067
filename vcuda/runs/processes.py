"""The few system calls behind a run's processes: adopting orphans, starting the command, reaping, closing files."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from vcuda.quoted import quoted
from vcuda.runs import group
from vcuda.runs.errors import CommandError

_PR_SET_CHILD_SUBREAPER = 36
_LOWEST_HELD = 200  # shells and programs use the first few descriptors by number


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def inheritable_copy(descriptor: int) -> int:
    """A duplicate that children inherit across exec, out of the way of those that programs use by number."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD, _LOWEST_HELD)
    except OSError:  # a low limit on open files
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD, 3)


def start(
    command: Sequence[str], environment: Mapping[str, str], mask: Collection[int], control_group: Path | None = None
) -> int:
    """Fork and execute the command with the given signal mask, in the control group; return its process ID.

    Raises CommandError with the status that a shell would give (126: not executable, 127: not found).
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would keep that
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if control_group is not None:
                _join(control_group)
            os.execvpe(command[0], list(command), dict(environment))
        except OSError as error:
            os.write(writing, str(error.errno).encode())
        finally:
            os._exit(127)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        failure = pipe.read()  # the end of file comes with a successful exec
    if failure:
        os.waitpid(pid, 0)
        reason = int(failure)
        status = 127 if reason in (errno.ENOENT, errno.ENOTDIR) else 126
        raise CommandError(status, f"can't execute {quoted(command[0], 200)}: {os.strerror(reason)}")
    return pid


def _join(control_group: Path) -> None:
    """Says so on standard error where it can't be: the run goes on."""
    try:
        group.join(control_group)
    except OSError as error:
        text = (
            "vcuda: our library alone holds this run's memory, the driver does not: its process can't be put into "
            f"the control group {control_group}: {error.strerror}\n"
        )
        with contextlib.suppress(OSError):
            os.write(2, text.encode())


def reap() -> tuple[dict[int, int], bool]:
    """Collect all children that ended: process ID → wait status; and whether any child is left."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, False
        if pid == 0:
            return ended, True
        ended[pid] = status


def exit_status(wait_status: int) -> int:
    """What a shell would show: the exit status, or 128 + the signal's number."""
    code = os.waitstatus_to_exitcode(wait_status)
    return 128 - code if code < 0 else code


def close_all_but(kept: Collection[int]) -> None:
    """Close what was inherited from whoever started us, so that nobody waits for an end of file that we hold back."""
    for name in [entry.name for entry in Path("/proc/self/fd").iterdir()]:
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def forget_terminal(kept: Collection[int]) -> None:
    """Own session, stdin and stdout on /dev/null, everything else closed but `kept`."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    close_all_but({0, 1, 2, *kept})


def silence() -> None:
    """Let go of stderr too: from now on nobody listens."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    os.close(nothing)
