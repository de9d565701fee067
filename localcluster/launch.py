"""Runs a module as a program that ends with its parent: `python -m localcluster.launch MODULE ARGUMENT…`.

Without this, our daemons would outlive a deployment that was killed with SIGKILL.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

from localcluster.runner import linux


def main() -> None:
    """The parent's thread that started us is what counts to the kernel; it must live as long as the deployment."""
    parent = os.getppid()
    linux.die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the deployment has ended")
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
