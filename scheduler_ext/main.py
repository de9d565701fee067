"""The command `gpu-scheduler-extender`, from its first moment on: to end while it starts is no failure."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from vcuda.extras import needed


def _ended(*_: object) -> None:
    sys.exit(0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; see `commands.line`."""
    # Before everything is imported, which takes a second on a busy node. A container's first process would not even
    # notice the signal without a handler.
    before = signal.signal(signal.SIGTERM, _ended)
    with needed("gpu-scheduler-extender", "extender"):
        from scheduler_ext.commands import line

    if not line.serves(words := list(sys.argv[1:] if arguments is None else arguments)):
        signal.signal(signal.SIGTERM, before)
    return line.run(words)


if __name__ == "__main__":
    sys.exit(main())
