"""What a container's runtime calls when it makes a container with a run's CDI device: the booking lives with it.

`python -m vcuda.runs.container_hook ENTRY`, with the container's state on standard input (OCI runtime specification).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vcuda.runs import container_life, ledger


def main() -> int:
    """0, or 1 with the reason on stderr: then the runtime does not start the container."""
    entry = Path(sys.argv[1])
    try:
        pid = json.load(sys.stdin)["pid"]
        if not (entry / ledger.BOOKING_NAME).exists():
            raise FileNotFoundError(f"its run has ended; start `vcuda run --cdi` again ({entry} is gone)")
        if type(pid) is not int or not container_life.note(entry, pid):
            raise ValueError("its first process has ended")
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"vcuda: the container can't have the share: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
