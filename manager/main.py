"""The command `gpu-manager`: settings in, exit code out; every expected failure is one line on standard error."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable

import vcuda
from manager import daemon, doctor
from manager.config import reader
from manager.config.settings import Settings
from manager.errors import StartError
from manager.process import logs
from vcuda.settings import describe

_FILES = 16384
# mallopt(3): without a limit glibc keeps up to eight heaps per core, one for every thread that ever parsed a list of
# pods. After 100 admissions beside 200 shares (benchmarks/manager.py) the daemon has 70 MiB with it and 76 without.
_M_ARENA_MAX = -8


def main() -> int:
    """0: ended by a signal; 1: could not start; 2: wrong settings.

    `gpu-manager doctor [flags]` looks at the node and ends.
    """
    examine = sys.argv[1:2] == ["doctor"]
    try:
        parsed = reader.parse(sys.argv[1 + examine :], os.environ)
    except StartError as error:
        print(f"gpu-manager: {error}", file=sys.stderr)
        return 2
    if parsed is None:
        print(f"gpu-manager {vcuda.__version__}")
        return 0
    if examine:
        return _doctor(parsed.settings)
    _raise_files()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 2)
    logs.configure(parsed.settings.log_format, parsed.settings.v)
    log = logging.getLogger("manager")
    log.info("gpu-manager %s: %s", vcuda.__version__, " ".join(describe(parsed.settings)))
    for warning in parsed.warnings:
        log.warning("%s", warning)
    next_signal = _signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def reread() -> Settings:
        again = reader.parse(sys.argv[1:], os.environ)
        return again.settings if again is not None else parsed.settings

    try:
        daemon.run(parsed.settings, os.environ, next_signal, reread, lambda: doctor.look(sys.argv[1:]))
    except StartError as error:
        log.error("%s", error)
        return 1
    log.info("stopped")
    return 0


def _signals(*numbers: int) -> Callable[[], int]:
    """Waits for the next of these.

    Python's handlers run in the main thread, which nobody wakes when another thread takes the signal: a pipe does.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    return lambda: os.read(reading, 1)[0]


def _raise_files() -> None:
    """As many open files as we may have: runtimes give 1024, and a burst of connections must not fail pods."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _doctor(wanted: Settings) -> int:
    """0 if nothing fails, else 1."""
    logging.disable()  # what is wrong stands in the table
    checks = doctor.examine(wanted, os.environ)
    sys.stdout.write(doctor.as_json(checks) if wanted.log_format == "json" else doctor.text(checks))
    return int(any(check.verdict is doctor.Verdict.FAIL for check in checks))


if __name__ == "__main__":
    sys.exit(main())
