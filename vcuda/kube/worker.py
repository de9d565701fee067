"""Threads that a daemon needs: whatever they meet, they go on, and what keeps failing is seen from outside."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)
_FIRST_WAIT = 0.2
_PATIENCE = 5  # failures in a row before `problem` speaks


class Worker:
    """Repeats `work` in a thread until it is stopped.

    After a success it waits `pause` seconds, after a failure longer and longer, up to `longest_wait`. An `expected`
    failure (the API server is away) is a warning; any other exception is a defect: it is logged with its traceback, and
    `problem` names it while it goes on. `failed` is told of every failure, for a metric.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], object],
        *,
        pause: float = 0.0,
        longest_wait: float = 30.0,
        expected: type[Exception] | tuple[type[Exception], ...] = (),
        failed: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name
        self.failures = 0  # since it started
        self._work, self._pause, self._longest_wait = work, pause, longest_wait
        self._expected, self._failed = expected, failed
        self._failed_in_a_row = 0
        self._in_a_row = 0  # of unexpected ones
        self._last = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """Ask the thread to end after the work under way."""
        self._stop.set()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for its end, at most `timeout` seconds; whether it has ended, or never began."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def went_well(self) -> None:
        """For the work to say, where it goes on for long and ends by a failure: the next pause is a short one."""
        self._failed_in_a_row = 0

    def problem(self) -> str | None:
        """Why only a restart of the program can help, or None."""
        if self._thread.ident is not None and not self._thread.is_alive() and not self.stopped:
            return f"{self.name} has ended; see the log"
        if self._in_a_row >= _PATIENCE:
            return f"{self.name} has failed {self._in_a_row} times in a row: {self._last}; see the log"
        return None

    def _run(self) -> None:
        while not self.stopped:
            wait = self._pause
            try:
                self._work()
                self._failed_in_a_row = self._in_a_row = 0
            except Exception as error:  # noqa: BLE001 - a thread that is needed never ends by what it meets
                if self.stopped:
                    return  # closing what it was reading from ends it
                self._failed_in_a_row += 1
                self.failures += 1
                times = 2.0 ** min(self._failed_in_a_row, 30)
                wait = min(self._longest_wait, _FIRST_WAIT * times) * random.uniform(0.5, 1.0)
                self._report(error, wait)
            self._stop.wait(wait)

    def _report(self, error: Exception, wait: float) -> None:
        if isinstance(error, self._expected):
            self._in_a_row = 0
            _log.warning("%s: %s; trying again in %.1f s", self.name, error, wait)
        else:
            self._in_a_row += 1
            self._last = f"{type(error).__name__}: {error!s:.200}"
            _log.error("%s: an unexpected failure; trying again in %.1f s", self.name, wait, exc_info=error)
        self._failed()
