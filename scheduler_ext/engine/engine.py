"""The extender's one decision maker, of three parts that share its books and their one lock."""

from __future__ import annotations

from scheduler_ext.engine.bind import Committing
from scheduler_ext.engine.events import Intake


class Engine(Intake, Committing):
    """Thread-safe; no method waits for anything but the lock, and none does I/O."""
