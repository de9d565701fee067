"""What tests of `vcuda run` share: a simulated machine, the command line as a subprocess, waiting with a deadline."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import leftovers
from vcuda.runs.booking import Booking
from vcuda.runs.ledger import Ledger

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 30.0


def wait_for(what: str, condition: Callable[[], Any]) -> Any:
    """Poll until the condition gives something true, and return that; fail with `what` after a generous time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {PATIENCE_SECONDS:.0f} s")
        time.sleep(0.02)


def wait_for_keeper(supervisor: int) -> int:
    """Until it has told the front whom it started, takes no signals and has a session of its own: it is killed as one that runs. Returns it."""
    wait_for("the supervisor looks after its command", lambda: os.getsid(supervisor) == supervisor)
    return supervisor


def alive(pid: int) -> bool:
    """Whether the process runs: neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@dataclass(frozen=True)
class Runner:
    """`vcuda` on one simulated machine, in a clean environment."""

    machine: Path

    def environment(self, **more: str) -> dict[str, str]:
        # COVERAGE_… is there while coverage is measured; by its marks a process is known as a test's.
        clean = ("PATH", "HOME", "LANG", "COVERAGE_PROCESS_CONFIG", *leftovers.MARKS)
        kept = {key: os.environ[key] for key in clean if key in os.environ}
        return {**kept, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **more}

    def words(self, *arguments: str) -> list[str]:
        first, *rest = arguments
        return [sys.executable, "-m", "vcuda.cli.main", first, f"--sim={self.machine}", *rest]

    def call(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.words(*arguments),
            env=self.environment(**more),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        settings: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "stdin": subprocess.DEVNULL,
        }
        return subprocess.Popen(self.words(*arguments), env=self.environment(), text=True, **(settings | options))

    def run(self, *command: str, share: Sequence[str] = ("--core", "30", "--memory", "1GiB")) -> list[str]:
        return ["run", *share, "--", *command]

    @property
    def ledger(self) -> Path:
        return self.machine / "ledger"

    def bookings(self) -> list[Booking]:
        if not self.ledger.exists():
            return []
        ledger = Ledger.open(self.ledger, lambda _message: None)
        try:
            return ledger.bookings()
        finally:
            ledger.close()

    def entries(self) -> list[str]:
        """Names of all entries, living or not."""
        return [path.name for path in self.ledger.iterdir() if path.name.startswith(("run-", ".new-"))]
