"""A run's containers while they live: what docker or podman says of theirs, and who is written down."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vcuda.runs import container_life

NAMES = ("docker", "podman")
RESTART_SECONDS = 5.0  # so long a container that ended may take to run again
_SECONDS_BETWEEN_QUESTIONS = 0.5
_PATIENCE_SECONDS = 10.0
_COMING = ("created", "configured", "initialized", "restarting")


@dataclass(frozen=True)
class Told:
    """What an engine says of a container. `pid`: its first process, 0 while none runs; `coming`: one is about to."""

    exists: bool
    pid: int = 0
    coming: bool = False


@dataclass
class Engine:
    """The container whose ID the engine writes into `id_file`."""

    program: str
    id_file: Path
    environment: Mapping[str, str]

    def arguments(self) -> list[str]:
        """For `run`."""
        return ["--cidfile", str(self.id_file)]

    def ask(self) -> Told:
        """What it says of the container now. Raises OSError if it does not say."""
        try:
            container = self.id_file.read_text().strip()
        except FileNotFoundError:
            return Told(exists=False)
        question = [self.program, "inspect", "--type", "container"]
        question += ["--format", "{{.State.Pid}} {{.State.Status}} {{.State.Restarting}}", container]
        try:
            told = subprocess.run(
                question,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_PATIENCE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"{self.program} does not answer") from error
        words = told.stdout.split()
        if told.returncode != 0 or len(words) != 3 or not words[0].isdigit():
            return Told(exists=False)
        return Told(exists=True, pid=int(words[0]), coming=words[1] in _COMING or words[2] == "true")


@dataclass
class Containers:
    """Whether containers use the booking in the folder `entry`, or will. Without an engine a hook writes them down."""

    entry: Path
    engine: Engine | None = None
    clock: Callable[[], float] = time.monotonic
    _next: float = 0.0
    _outlived: bool = False  # the command ended, and a container did not
    _ended: float | None = None

    def live(self, *, command_runs: bool) -> bool:
        """Whether the booking must stay: the command runs, or a container, or one that ended may run again."""
        now = self.clock()
        told = Told(exists=True)
        if not container_life.living_at(self.entry) and (now >= self._next or not command_runs):
            self._next = now + _SECONDS_BETWEEN_QUESTIONS
            told = self._ask()
        if container_life.living_at(self.entry):
            self._ended = None
            self._outlived = self._outlived or not command_runs
            return True
        if command_runs or (told.exists and told.coming):
            return True
        if not (self._outlived and told.exists):
            return False
        self._ended = now if self._ended is None else self._ended
        return now - self._ended < RESTART_SECONDS

    def _ask(self) -> Told:
        """What the engine says; the container that it names is written down."""
        if self.engine is None:
            return Told(exists=True)
        try:
            told = self.engine.ask()
            if told.pid:
                container_life.note(self.entry, told.pid)
        except OSError:  # it does not answer, or the disk is full: for a while the container may live
            self._outlived = True
            return Told(exists=True)
        return told
