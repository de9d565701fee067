"""What the daemon refuses and why: stable reasons beside those of vcuda.spec, and failures that end the start."""

from __future__ import annotations

import enum

from vcuda.printable import told
from vcuda.spec.errors import SpecError


class Reason(enum.StrEnum):
    """Stable codes of refusals that only a node can make.

    They appear in events, metrics and tests; never rename one.
    """

    POD_UNKNOWN = "PodUnknown"
    POD_AMBIGUOUS = "PodAmbiguous"
    CALLS_DISAGREE = "CallsDisagree"
    DEVICE_NODES_MISSING = "DeviceNodesMissing"
    DRIVER_UNAVAILABLE = "DriverUnavailable"
    REGION_UNAVAILABLE = "RegionUnavailable"
    STATE_UNWRITABLE = "StateUnwritable"
    CARD_CHANGED = "CardChanged"
    NOT_ALLOCATED = "NotAllocated"
    BUSY = "Busy"
    SHARE_TOO_SMALL = "ShareTooSmall"
    CDI_UNAVAILABLE = "CdiUnavailable"
    OVERSELL_FORBIDDEN = "OversellForbidden"
    MOUNT_IN_THE_WAY = "MountInTheWay"
    VISIBLE_DEVICES_SET = "VisibleDevicesSet"
    CLAIM_UNREADABLE = "ClaimUnreadable"
    CLAIM_CHANGED = "ClaimChanged"
    DRIVER_LIMITS_UNAVAILABLE = "DriverLimitsUnavailable"


class Refusal(Exception):
    """A call that is answered with an error and an event; nothing is booked for it.

    `pods`: (namespace, name, UID) of the pods that the event is put on.
    """

    def __init__(self, reason: str, message: str, pods: tuple[tuple[str, str, str], ...] = ()) -> None:
        self.message = told(message)
        super().__init__(self.message)
        self.reason = str(reason)
        self.pods = pods

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"

    @classmethod
    def of(cls, error: SpecError) -> Refusal:
        return cls(error.reason, error.message)


class StartError(Exception):
    """The daemon can't start: one message for the operator that names the thing, the reason and the way out."""


class UnusableSettings(StartError):
    """It never can with these settings: with one of them, or a file, folder, port or address that it names."""
