"""What a request to bind can come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler_ext.protocol.reasons import AnyReason


@dataclass(frozen=True, slots=True)
class Refused:
    """A bind or decision that is not carried out: `reason` for programs, `message` for people."""

    reason: AnyReason
    message: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


@dataclass(frozen=True, slots=True)
class Write:
    """What Bind has to write."""

    node: str
    annotations: Mapping[str, str]


class AlreadyBound:
    """The pod is on the node that Bind names; nothing is left to write."""
