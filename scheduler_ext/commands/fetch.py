"""Asking a serving extender, for the commands that print its answers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vcuda.kube.config import Login
from vcuda.kube.endpoint import Endpoint
from vcuda.kube.errors import ApiError, KubeError


class CannotFetch(Exception):
    """No answer came; the message says why."""


def add_options(parser: argparse.ArgumentParser, url_parser: argparse._ActionsContainer | None = None) -> None:
    """Where the extender is. `url_parser`: a group in which --url excludes other sources."""
    (url_parser or parser).add_argument(
        "--url", default="http://127.0.0.1:3456", help="the extender (default %(default)s)"
    )
    parser.add_argument("--ca", metavar="FILE", help="certificates to trust, for https (default: the system's)")


def fetch(options: argparse.Namespace, path: str, seconds: float) -> dict[str, Any]:
    """The extender's JSON answer. Raises CannotFetch."""
    login = Login(options.url.rstrip("/"), ca=Path(options.ca) if options.ca else None)
    try:
        data = json.loads(
            Endpoint(login, agent="gpu-scheduler-extender", who=options.url).raw("GET", path, timeout=seconds)
        )
    except ApiError as error:
        raise CannotFetch(f"{error!s:.400}") from error
    except (KubeError, ValueError) as error:
        raise CannotFetch(f"{error!s:.400}; name the extender by --url") from error
    if not isinstance(data, dict):
        raise CannotFetch(f"{options.url} answered 200 with something else than an object")
    return data
