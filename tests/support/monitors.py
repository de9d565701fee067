"""Counts what a container's monitor runs, while coverage is measured.

A monitor starts without `site` and with an empty environment, so coverage does not start by itself in it; and its child
leaves the root that the counts are written to. So the monitor is begun here, and the counts' folder goes along.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_CONFIG = "COVERAGE_PROCESS_CONFIG"  # set by coverage for the processes that this one starts
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from tests.support import monitors; "
    "monitors.begin({config!r}, {folder!r}, {packages!r}); from localcluster.runner.supervisor import main; main()"
)


def begin(config: str, folder: str, packages: str) -> None:
    """In the monitor: start counting, and have each new root show `folder`, below its own /tmp."""
    os.environ[_CONFIG] = config
    sys.path.append(packages)
    import coverage

    coverage.process_startup()
    from localcluster.runner import linux

    pivot_root = linux.pivot_root

    def keeping_the_folder(root: str) -> None:
        Path(root + folder).mkdir(parents=True)
        linux.bind(folder, root + folder, read_only=False)
        pivot_root(root)

    linux.pivot_root = keeping_the_folder


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """In the tests' process: monitors that it starts are counted, if it is counted itself."""
    if _CONFIG not in os.environ:
        yield
        return
    import coverage

    from localcluster.runner import runtime

    settings = json.loads(base64.b64decode(os.environ[_CONFIG]))
    wanted = Path(settings["data_file"])
    with tempfile.TemporaryDirectory(prefix="vcuda-counts-", dir="/tmp") as folder:
        settings["data_file"] = f"{folder}/{wanted.name}"
        config = base64.b64encode(json.dumps(settings).encode()).decode()
        packages = str(Path(coverage.__file__).parents[1])
        before = runtime._BOOT
        runtime._BOOT = _BOOT.format(config=config, folder=folder, packages=packages)
        try:
            yield
        finally:
            runtime._BOOT = before
            for counts in Path(folder).iterdir():
                shutil.move(counts, wanted.parent / counts.name)
