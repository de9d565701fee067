"""Run a few failed tests once more, by themselves, and say which of them fail only beside others.

A test that fails among thousands on a busy machine and passes alone has a race, or waits too briefly: a defect to mend, and
no reason to stop everybody else's change. One that fails alone too fails the run, and so do more than `MOST` failures.

    python -m tests.support.alone STATUS [PYTEST ARGUMENTS]    STATUS: the exit status of the run before, whose cache says what failed
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MOST = 3
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main(status: int, arguments: list[str], last_failed: Path = LAST_FAILED) -> int:
    """The exit status of the whole: `status`, or 0 if at most `MOST` tests failed and each passes by itself."""
    if status != pytest.ExitCode.TESTS_FAILED or not last_failed.is_file():
        return status
    failed = sorted(json.loads(last_failed.read_text()))
    if not 0 < len(failed) <= MOST or not all("::" in test for test in failed):
        return status
    print(f"\n{len(failed)} failed; each once more, by itself", flush=True)
    for test in failed:
        if subprocess.run([sys.executable, "-m", "pytest", *arguments, test], check=False).returncode != 0:
            print(f"FAILED by itself too: {test}", flush=True)
            return status
    for test in failed:
        print(
            f"FLAKY: {test} failed beside others and passed by itself: it has a race or waits too briefly; mend it",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
