"""The monitor of one container, a process of its own: builds its root, starts its command, reports how it ended.

Started by the runtime as `python -S -E -c ... CONFIG`; standard library only, so that it starts quickly. Commands
arrive as lines on stdin: `TERM` signals the command, `KILL` ends everything. End of file means that the runtime is
gone: everything ends.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

from localcluster.runner import config as configs
from localcluster.runner import linux, rootfs

EXEC_FAILED = 127
_CHILD_POLL_SECONDS = 0.02


class Monitor:
    """Runs one container and everything below it."""

    def __init__(self, config: configs.ContainerConfig) -> None:
        self._config = config
        self._state = configs.ContainerState()
        self._child = 0
        self._main = 0

    def run(self) -> int:
        linux.become_subreaper()
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # A terminal's Ctrl-C reaches the whole foreground group; the runtime decides what it means.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        error = self._start()
        if error:
            self._kill_all()
            self._report("failed", error=error, finished_at=time.time(), exit_code=128)
            return 1
        self._report("running", pid=self._main, started_at=time.time())
        status = self._supervise(wake_read)
        self._kill_all()
        code = os.waitstatus_to_exitcode(status)
        self._report(
            "exited",
            finished_at=time.time(),
            exit_code=code if code >= 0 else 128 - code,
            signal=max(0, -code),
        )
        return 0

    def _report(self, phase: str, **fields: object) -> None:
        self._state.phase = phase
        for name, value in fields.items():
            setattr(self._state, name, value)
        path = self._config.state_path
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self._state)), encoding="utf-8")
        partial.replace(path)

    # --- start ---
    def _prepare(self) -> None:
        self._config.log_path.touch()

    def _start(self) -> str:
        """Fork and start the command. Returns an error message, or an empty string once the command was executed."""
        self._prepare()
        ready_read, ready_write = os.pipe()
        mapped_read, mapped_write = os.pipe()
        report_read, report_write = os.pipe2(os.O_CLOEXEC)
        self._child = os.fork()
        if self._child == 0:
            os.close(ready_read)
            os.close(mapped_write)
            self._in_child(ready_write, mapped_read, report_write)
        for descriptor in (ready_write, mapped_read, report_write):
            os.close(descriptor)
        if os.read(ready_read, 1):  # else it failed, and says why below
            if self._config.isolation is configs.Isolation.USER_AND_MOUNT:
                self._map_identities()
            os.write(mapped_write, b"x")
        os.close(ready_read)
        os.close(mapped_write)
        self._main = self._child
        with os.fdopen(report_read, encoding="utf-8", errors="replace") as report:
            for line in report:
                kind, _, text = line.rstrip("\n").partition(" ")
                if kind == "error":
                    return text
                self._main = int(text)
        return ""

    def _map_identities(self) -> None:
        """Root maps every identity to itself; an ordinary user becomes root of a namespace that has only this user."""
        proc = Path(f"/proc/{self._child}")
        if os.geteuid() == 0:
            (proc / "uid_map").write_text("0 0 4294967295", encoding="ascii")
            (proc / "gid_map").write_text("0 0 4294967295", encoding="ascii")
        else:
            (proc / "setgroups").write_text("deny", encoding="ascii")
            (proc / "uid_map").write_text(f"0 {os.geteuid()} 1", encoding="ascii")
            (proc / "gid_map").write_text(f"0 {os.getegid()} 1", encoding="ascii")

    def _in_child(self, ready: int, mapped: int, report: int) -> None:
        try:
            linux.die_with_parent(signal.SIGKILL)
            self._enter_namespaces(ready, mapped)
            self._execute(report)
        except (OSError, ValueError) as error:
            os.write(report, f"error {' '.join(str(error).split())}\n".encode())
        finally:
            os._exit(EXEC_FAILED)

    def _enter_namespaces(self, ready: int, mapped: int) -> None:
        isolation = self._config.isolation
        flags = 0
        if isolation is configs.Isolation.USER_AND_MOUNT:
            flags |= linux.CLONE_NEWUSER
        if isolation.real_mounts:
            flags |= linux.CLONE_NEWNS | linux.CLONE_NEWUTS | (linux.CLONE_NEWPID if self._config.pid_namespace else 0)
        if flags:
            linux.unshare(flags)
        os.write(ready, b"x")
        os.close(ready)
        os.read(mapped, 1)
        os.close(mapped)
        if not isolation.real_mounts:
            return
        if isolation is configs.Isolation.USER_AND_MOUNT and os.geteuid() != 0:
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
        if self._config.hostname:
            linux.sethostname(self._config.hostname)
        rootfs.RootBuilder(self._config).build()

    def _execute(self, report: int) -> None:
        config = self._config
        if config.pid_namespace and config.isolation.real_mounts:
            init = os.fork()
            if init != 0:
                os.write(report, f"pid {init}\n".encode())
                os.close(report)
                os._exit(mirror(init))
            linux.die_with_parent(signal.SIGKILL)
            linux.mount("proc", str(config.root_path) + "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | 8)
        self._become_command()

    def _enter_root(self) -> None:
        """The last steps that need the host's files: standard streams, then the container's root."""
        log = os.open(self._config.log_path, os.O_WRONLY | os.O_APPEND)
        null = os.open("/dev/null", os.O_RDONLY)
        if self._config.isolation.real_mounts:
            linux.pivot_root(str(self._config.root_path))
            linux.drop_capabilities()
        os.setsid()
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)

    def _become_command(self) -> None:
        config = self._config
        self._enter_root()
        # Handlers are reset by exec, what was ignored is not.
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        try:
            os.chdir(config.working_directory)
        except OSError as error:
            raise OSError(error.errno, f"working directory {config.working_directory}: {error.strerror}") from error
        try:
            os.execvpe(config.command[0], list(config.command), config.environment)
        except OSError as error:
            raise OSError(error.errno, f"exec {config.command[0]!r}: {error.strerror}") from error

    # --- run and end ---
    def _supervise(self, wake: int) -> int:
        """Wait for the command, obeying stdin and reaping orphans. Returns the command's wait status."""
        commands = sys.stdin.fileno()
        watched = [wake, commands]
        while True:
            status = self._reap()
            if status is not None:
                return status
            for descriptor in select.select(watched, [], [])[0]:
                if descriptor == wake:
                    os.read(wake, 4096)
                    continue
                text = os.read(commands, 4096)
                if b"KILL" in text or not text:
                    self._kill_all(reap=False)
                    if not text:
                        watched = [wake]
                elif b"TERM" in text:
                    _signal(self._main, signal.SIGTERM)

    def _reap(self) -> int | None:
        """Collect whoever has ended; the command's status once it has."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return None
            if pid == 0:
                return None
            if pid == self._child:
                return status

    def _kill_all(self, *, reap: bool = True) -> None:
        """SIGKILL every process below this one, until none is left; a fork in between is caught by the next round."""
        while True:
            below = descendants(os.getpid())
            for pid in below:
                _signal(pid, signal.SIGKILL)
            if not reap:
                return
            try:
                while os.waitpid(-1, os.WNOHANG)[0] != 0:
                    pass
            except ChildProcessError:
                return
            time.sleep(_CHILD_POLL_SECONDS)


def mirror(pid: int) -> int:
    """Wait for the namespace's first process and end the same way as it."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    return code


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended first: that is what was wanted


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, nearest first; those that end while we look are left out."""
    found: list[int] = []
    queue = [pid]
    while queue:
        for task in Path(f"/proc/{queue.pop(0)}/task").glob("*/children"):
            try:
                children = [int(child) for child in task.read_text(encoding="ascii").split()]
            except OSError:
                continue
            found += children
            queue += children
    return found


def main() -> None:
    """Run the container whose configuration file is the first argument."""
    config = configs.load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.exit(Monitor(config).run())
