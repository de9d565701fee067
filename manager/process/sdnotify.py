"""systemd's readiness protocol: a datagram to $NOTIFY_SOCKET; silent where there is none (sd_notify(3))."""

from __future__ import annotations

import logging
import socket

log = logging.getLogger(__name__)


def notify(address: str | None, message: str) -> None:
    """Send `message` such as "READY=1"; without an address nothing happens, and a failure is no error."""
    if not address:
        return
    path = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.sendto(message.encode(), path)
    except OSError as error:
        log.debug("systemd was not told %r: %s", message, error)
