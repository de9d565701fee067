"""Connections that a server in this very process has accepted."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path


def nodelay_of_accepted(port: int) -> list[bool]:
    """Whether each connection accepted on `port` of the loopback answers at once (TCP_NODELAY)."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        number = int(path.name)
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            here = socket.socket(fileno=os.dup(number))
        except OSError:
            continue  # closed since it was listed
        with here:
            try:
                if here.family in (socket.AF_INET, socket.AF_INET6) and here.getsockname()[1] == port:
                    here.getpeername()  # a listener has none
                    found.append(bool(here.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            except OSError:
                continue
    return found
