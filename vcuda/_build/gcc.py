"""The compiler: which one, running it, and compiling many sources at a time."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType


class BuildError(Exception):
    """A native library could not be built; the message holds the command and the compiler's words."""


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "gcc"))


def machine() -> str:
    """What the compiler compiles for, such as x86_64. Raises BuildError."""
    said = run([*compiler(), "-dumpmachine"], "the compiler does not say for which machine it compiles")
    return said.stdout.partition("-")[0].strip()


def run(command: list[str], what: str) -> subprocess.CompletedProcess[str]:
    """Run a tool of the compiler. Raises BuildError that begins with `what` and holds the tool's words."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(
            f"{what}: {command[0]} can't be executed ({error.strerror}); install gcc and binutils"
        ) from error
    if result.returncode != 0:
        raise BuildError(f"{what}: {shlex.join(command)}\n{result.stderr}")
    return result


class Objects:
    """Object files in one folder, compiled on as many cores as this process may use.

    The same source with the same flags is compiled once, however many libraries ask for it. As a context manager it
    waits for the compilers that run, and drops what has not begun if the build has failed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="gcc")
        self._begun: dict[tuple[str, ...], Future[Path]] = {}

    def __enter__(self) -> Objects:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=error is not None)

    def begin(self, sources: Iterable[Path], flags: Iterable[str], what: str) -> list[Future[Path]]:
        """Begin to compile; each future gives the object, or BuildError that begins with `what`."""
        given = tuple(flags)
        return [self._one(source, given, what) for source in sources]

    def _one(self, source: Path, flags: tuple[str, ...], what: str) -> Future[Path]:
        key = (str(source), *flags)
        if key not in self._begun:
            output = self._folder / f"{len(self._begun)}-{source.stem}.o"
            command = [*compiler(), *flags, "-c", "-o", str(output), str(source)]

            def work() -> Path:
                run(command, what)
                return output

            self._begun[key] = self._pool.submit(work)
        return self._begun[key]
