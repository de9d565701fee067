"""What a user of the plugin is told instead of a traceback."""

from __future__ import annotations


class PluginError(Exception):
    """The message names the thing, the reason and the way out."""
