"""The command `gpu-manager`: settings in, exit code out; every expected failure is one line on standard error."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import vcuda
from vcuda.extras import needed

with needed("gpu-manager", "node"):
    from manager import daemon, doctor
    from manager.config import reader
    from manager.config.settings import ENV_PREFIX, Settings
    from manager.errors import StartError, UnusableSettings
    from manager.process import instance_lock
    from vcuda import heap, logs
    from vcuda.printable import printable_lines
    from vcuda.settings import describe

_FILES = 16384
_BARE = (
    "it serves the kubelet of a cluster's node, and nothing says that this is one: "
    "no flag, no variable GPU_MANAGER_…, no service account of a pod. "
    "In a cluster install the chart (docs/operations.md). To serve the kubelet of this machine all the same, "
    "name it: --device-plugin-path=/var/lib/kubelet/device-plugins. To share this machine's cards without a cluster: "
    "vcuda run. --help lists the flags; gpu-manager doctor looks at the machine"
)


def main() -> int:
    """0: ended by a signal; 1: could not start; 2: settings that can't work.

    `gpu-manager doctor [flags]` looks at the node and ends; without flags, with the settings of the daemon that runs.
    """
    examine = sys.argv[1:2] == ["doctor"]
    if not examine and _is_bare(sys.argv[1:], os.environ):
        print(f"gpu-manager: {_BARE}", file=sys.stderr)
        return 2
    try:
        parsed = reader.parse(sys.argv[1 + examine :], os.environ)
    except StartError as error:
        print(f"gpu-manager: {printable_lines(str(error))}", file=sys.stderr)
        return 2
    if parsed is None:
        print(f"gpu-manager {vcuda.__version__}")
        return 0
    if examine:
        told = [word for word in sys.argv[2:] if not word.startswith("--log-format=")]
        return _doctor(parsed.settings) if told else _doctor_of_the_daemon(parsed.settings)
    _raise_files()
    # After 100 admissions beside 200 shares (benchmarks/manager.py) the daemon has 70 MiB with it and 76 without.
    heap.keep_few_heaps()
    logs.configure(parsed.settings.log_format, parsed.settings.log_level)
    log = logging.getLogger("manager")
    log.info("gpu-manager %s: %s", vcuda.__version__, ", ".join(describe(parsed.settings)))
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
        return 2 if isinstance(error, UnusableSettings) else 1
    log.info("stopped")
    return 0


def _is_bare(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether nothing says that this is a cluster's node: no flag, no variable of ours, no service account."""
    ours = any(name.startswith(ENV_PREFIX) for name in environment)
    return not (arguments or ours or "KUBERNETES_SERVICE_HOST" in environment or "NODE_NAME" in environment)


def _signals(*numbers: int) -> Callable[[float | None], int | None]:
    """Waits for the next of these, at most the seconds that are given; None: none came.

    Python's handlers run in the main thread, which nobody wakes when another thread takes the signal: a pipe does.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in numbers:
        signal.signal(number, lambda *_: None)

    def next_signal(timeout_s: float | None) -> int | None:
        return os.read(reading, 1)[0] if select.select([reading], [], [], timeout_s)[0] else None

    return next_signal


def _raise_files() -> None:
    """As many open files as we may have: runtimes give 1024, and a burst of connections must not fail pods."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _doctor_of_the_daemon(wanted: Settings) -> int:
    """With the flags and variables of the daemon that runs here, where there is one that can be read."""
    holder = instance_lock.holder(wanted.checkpoint_path)
    if holder is not None:
        pid = holder.pid
        with contextlib.suppress(OSError, StartError, StopIteration):
            words = _words(pid, "cmdline")
            begin = next(i for i, word in enumerate(words) if word == "manager.main" or word.endswith("/gpu-manager"))
            environment = dict(word.split("=", 1) for word in _words(pid, "environ") if "=" in word)
            parsed = reader.parse(words[begin + 1 :], environment)
            if parsed is not None:
                print(f"with the settings of the daemon that runs here, process {pid}", file=sys.stderr)
                return _doctor(dataclasses.replace(parsed.settings, log_format=wanted.log_format), environment)
    print("no running daemon was found: with the default settings; give the daemon's flags for others", file=sys.stderr)
    return _doctor(wanted)


def _words(pid: int, name: str) -> list[str]:
    return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="surrogateescape").rstrip("\0").split("\0")


def _doctor(wanted: Settings, environment: Mapping[str, str] = os.environ) -> int:
    """0 if nothing fails, else 1."""
    logging.disable()  # what is wrong stands in the table
    checks = doctor.examine(wanted, environment)
    sys.stdout.write(doctor.as_json(checks) if wanted.log_format == "json" else doctor.text(checks))
    return int(any(check.verdict is doctor.Verdict.FAIL for check in checks))


if __name__ == "__main__":
    sys.exit(main())
