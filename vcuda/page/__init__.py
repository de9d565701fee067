"""The web pages of both daemons: each one file with its style and script inside, and the headers that it is sent with.

They are read-only, load nothing from elsewhere and hold no data: what names tenants they ask for, from where they came
from, as JSON. What anybody has written (names, reasons) reaches the page as text alone: the browser is told to run no
script but ours and to make no markup of strings (Content Security Policy, Trusted Types).
"""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources
from typing import NamedTuple


class Page(NamedTuple):
    """`kind`: its content type. `headers`: what else it is sent with."""

    body: bytes
    kind: str
    headers: tuple[tuple[str, str], ...]


@functools.cache
def of_cluster() -> Page:
    """Nodes, cards, shares, waiting pods, quotas: reads `cluster` and `explain/NAMESPACE/NAME` beside it."""
    return _built("vcuda: cluster", "cluster.js")


@functools.cache
def of_node() -> Page:
    """Cards and containers of one node: reads `usage` beside it."""
    return _built("vcuda: node", "node.js")


def _built(title: str, script: str) -> Page:
    frame, style, common, own = map(_read, ("frame.html", "style.css", "common.js", script))
    code = f'"use strict";\n{common}\n{own}'
    body = frame.replace("{title}", title).replace("{style}", style).replace("{script}", code)
    policy = (
        f"default-src 'none'; style-src {_source(style)}; script-src {_source(code)}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    headers = (
        ("Content-Security-Policy", policy),
        ("X-Content-Type-Options", "nosniff"),
        ("Referrer-Policy", "no-referrer"),
        ("Cross-Origin-Opener-Policy", "same-origin"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
        ("Cache-Control", "no-cache"),
    )
    return Page(body.encode(), "text/html; charset=utf-8", headers)


def _read(name: str) -> str:
    return (resources.files(__name__) / name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
