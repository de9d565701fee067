"""One of our real programs as a subprocess: start, wait until ready, show its last words if it dies, stop by PID."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

_TAIL_LINES = 15
_STOP_SECONDS = 8.0


class DaemonFailure(Exception):
    """A daemon died or is not ready in time; the message holds its last log lines."""


class Daemon:
    """`python -m MODULE ARGUMENTS`, its output in `log`, that of the run before in `previous_log`.

    May be started again after it ended; ends with the thread that starts it. `ended` is the status of its last run,
    as of subprocess, or None while it runs; `started_at` is in seconds since the epoch.
    """

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log = log
        self._command = [sys.executable, "-m", "localcluster.launch", module, *arguments]
        self.previous_log = log.with_name(f"{log.stem}.previous{log.suffix}")
        self.environment = {**os.environ, **environment}
        self.started_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def ended(self) -> int | None:
        return self._process.poll() if self._process is not None else None

    def start(self) -> None:
        if self._process is not None and self.log.exists():
            self.log.replace(self.previous_log)
        self.started_at = time.time()
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True, env=self.environment,
            )  # fmt: skip

    def output(self) -> str:
        """What it wrote since its last start."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def tail(self) -> str:
        return (
            "\n".join(f"    {line}" for line in self.output().splitlines()[-_TAIL_LINES:]) or "    (it wrote nothing)"
        )

    def check(self) -> None:
        """Raises DaemonFailure if it has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise DaemonFailure(
                f"{self.name} ended with status {self._process.returncode}; its last lines:\n{self.tail()}"
            )

    def wait_ready(self, url: str, seconds: float) -> None:
        """Wait until `url` answers 200. Raises DaemonFailure."""
        deadline = time.monotonic() + seconds
        answer = "no answer"
        while time.monotonic() < deadline:
            self.check()
            try:
                with urllib.request.urlopen(url, timeout=2):
                    return
            except urllib.error.HTTPError as error:
                answer = f"{error.code} {error.read(200).decode(errors='replace').strip()}"
            except OSError as error:
                answer = str(error)
            time.sleep(0.05)
        raise DaemonFailure(
            f"{self.name} is not ready after {seconds:.0f} s ({url}: {answer}); its last lines:\n{self.tail()}"
        )

    def wait_output(self, pattern: str, seconds: float) -> re.Match[str]:
        """Wait until its output matches. Raises DaemonFailure."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            match = re.search(pattern, self.output())
            if match:
                return match
            self.check()
            time.sleep(0.05)
        raise DaemonFailure(
            f"{self.name} did not say {pattern!r} within {seconds:.0f} s; its last lines:\n{self.tail()}"
        )

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(timeout=_STOP_SECONDS)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL if it takes too long."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
