"""What can go wrong before the command of a run starts."""

from __future__ import annotations


class RunError(Exception):
    """The run is refused or can't be set up: nothing stays booked. The text is for the user and names the way out."""


class CommandError(Exception):
    """The command itself could not be executed; `status` is what a shell would end with (126 or 127)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message

    def __str__(self) -> str:
        return self.message
