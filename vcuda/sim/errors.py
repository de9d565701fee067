"""The one error of the simulated machine."""

from __future__ import annotations


class SimError(Exception):
    """A simulated machine can't be made, found or changed; the message names what, why, and the way out."""
