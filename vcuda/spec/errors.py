"""Refusals and their stable reasons. A reason is a machine-readable code; the message names the way out."""

from __future__ import annotations

import enum

from vcuda.printable import told
from vcuda.quoted import quoted


class Reason(enum.StrEnum):
    """Stable codes; they appear in events, metrics, HTTP answers and tests. Never rename one."""

    INVALID_POD = "InvalidPod"
    INVALID_QUANTITY = "InvalidQuantity"
    INVALID_CORES = "InvalidCores"
    INVALID_MEMORY = "InvalidMemory"
    INVALID_ANNOTATION = "InvalidAnnotation"
    INVALID_CLAIM = "InvalidClaim"
    INVALID_SHARE_CONFIG = "InvalidShareConfig"
    UNDECIDED_CLASS = "UndecidedClass"
    INCOMPLETE_REQUEST = "IncompleteRequest"
    INVALID_PLACEMENT = "InvalidPlacement"
    INVALID_INVENTORY = "InvalidInventory"
    NO_CARDS = "NoCards"
    UNHEALTHY_CARD = "UnhealthyCard"
    UNKNOWN_CARD = "UnknownCard"
    INSUFFICIENT_CORES = "InsufficientCores"
    INSUFFICIENT_MEMORY = "InsufficientMemory"
    INSUFFICIENT_WHOLE_CARDS = "InsufficientWholeCards"
    CARD_NOT_ALLOWED = "CardNotAllowed"


class SpecError(Exception):
    """Base of all refusals: `reason` for programs, `str(error)` for people."""

    def __init__(self, reason: Reason, message: str) -> None:
        message = told(message)
        super().__init__(reason, message)  # what pickle hands back to this constructor
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


class InvalidRequest(SpecError):
    """A pod asks for something that no card can ever give."""


class InvalidPlacement(SpecError):
    """A placement annotation is malformed or does not match the pod's request."""


class InvalidInventory(SpecError):
    """A node's inventory annotation is malformed."""


class DoesNotFit(SpecError):
    """A valid request finds no room now."""


def what_is_wrong(error: Exception) -> str:
    """Why a text could not be read, in words for people: of what Python raised on it."""
    if isinstance(error, KeyError):
        return f"it has no {quoted(error.args[0])}"
    if isinstance(error, (TypeError, AttributeError, RecursionError)):
        return "it has another form"
    return f"{error!s:.120}"
