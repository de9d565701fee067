"""The scheduler extender. May import vcuda.spec only."""

from __future__ import annotations

import importlib.metadata

DISTRIBUTION = "vcuda-gpu-manager"


def version() -> str:
    """The installed version, or "unknown" when run from a bare checkout."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
