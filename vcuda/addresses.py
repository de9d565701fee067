"""Addresses of servers, ours and others', where IPv6 may be all there is: its addresses stand in brackets."""

from __future__ import annotations

import ipaddress
import re
import socket

from vcuda.quoted import quoted

_ALL = ("0.0.0.0", "::", "")
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"  # RFC 1123
_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*\.?")


def bracketed(host: str) -> str:
    """A host as it stands before a port in URLs and logs. Raises ValueError for what is neither name nor address."""
    try:
        found = ipaddress.ip_address(host[1:-1] if host[:1] + host[-1:] == "[]" else host)
    except ValueError:
        if not _NAME.fullmatch(host):
            raise ValueError(f"{quoted(host, 80)} is no host") from None
        return host
    return f"[{found}]" if found.version == 6 else str(found)


def with_port(host: str, port: int) -> str:
    """For logs and messages; a host that is none is shown as it is."""
    try:
        return f"{bracketed(host)}:{port}"
    except ValueError:
        return f"{quoted(host, 80)}:{port}"


def server_url(text: str) -> str:
    """`http://HOST:PORT` or `https://HOST:PORT`; brackets are added where a manifest could not. Raises ValueError."""
    match = re.fullmatch(r"(https?://)([^/?#@\s]+):([0-9]{1,5})/?", text)
    if match is None or not 0 < int(match[3]) < 65536:
        raise ValueError("it has more or less than a scheme, a host and a port")
    return f"{match[1]}{bracketed(match[2])}:{match[3]}"


def listen(address: str, port: int, backlog: int) -> socket.socket:
    """A listening socket; "all addresses" are IPv6's and IPv4's, where the machine has both. Raises OSError."""
    if address in _ALL and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
        except OSError:
            if address == "::":
                raise
            address = "0.0.0.0"  # the kernel knows IPv6, but this network has none
    family = socket.getaddrinfo(address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return socket.create_server((address, port), family=family, backlog=backlog)
