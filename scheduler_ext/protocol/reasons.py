"""Refusal codes that only the extender gives; the shared ones are `vcuda.spec.errors.Reason`. Never rename one."""

from __future__ import annotations

import enum

from vcuda.spec.errors import Reason


class ExtenderReason(enum.StrEnum):
    """Stable codes of the extender's own refusals; they appear in answers, events, metrics and docs/extender.md."""

    UNKNOWN_NODE = "UnknownNode"  # the API server's watch has not shown this node
    NO_INVENTORY = "NoInventory"  # the manager has not published the node's cards
    UNPLACED_POD = "UnplacedPod"  # a pod runs there with a share on cards that nobody has written down
    NOT_CHOSEN = "NotChosen"  # it may fit, another node was better
    NOT_SYNCED = "NotSynced"  # the first lists are not complete, or a claim in a namespace with a quota is not seen yet
    QUOTA_EXCEEDED = "QuotaExceeded"  # the namespace may not hold so much there
    GANG_INCOMPLETE = "GangIncomplete"  # other pods of the gang are missing or have no place yet
    GANG_DOES_NOT_FIT = "GangDoesNotFit"  # this pod fits, the whole gang does not
    NOT_LEADER = "NotLeader"  # another replica serves, the lease could not be renewed, or it was made anew
    UNAUTHENTICATED = "Unauthenticated"  # the client has shown no certificate that counts
    OVERLOADED = "Overloaded"  # too much is being read or worked on at once
    NO_SUCH_POD = "NoSuchPod"
    OTHER_POD = "OtherPod"  # same name, other UID
    OTHER_NODE = "OtherNode"  # the pod is assumed on, or bound to, another node
    BIND_UNCERTAIN = "BindUncertain"  # a write was sent and nobody knows yet whether it took effect
    BIND_FAILED = "BindFailed"  # the API server refused the write


AnyReason = Reason | ExtenderReason

# Why a row (a node) can't take a request, as small integers for numpy; 0 is "it fits". The order is the order in
# which they are reported when several are true.
ROW_CODES: tuple[AnyReason | None, ...] = (
    None,
    ExtenderReason.UNKNOWN_NODE,
    ExtenderReason.NO_INVENTORY,
    Reason.INVALID_INVENTORY,
    Reason.NO_CARDS,
    ExtenderReason.UNPLACED_POD,
    Reason.UNHEALTHY_CARD,
    Reason.CARD_NOT_ALLOWED,
    Reason.INSUFFICIENT_WHOLE_CARDS,
    Reason.INSUFFICIENT_CORES,
    Reason.INSUFFICIENT_MEMORY,
    ExtenderReason.QUOTA_EXCEEDED,
)
CODE_OF: dict[AnyReason, int] = {reason: code for code, reason in enumerate(ROW_CODES) if reason is not None}
FITS = 0
_ASK_LESS = "or wait for pods to end (gpu-scheduler-extender explain says which)"
_WAYS_OUT: dict[AnyReason, str] = {
    ExtenderReason.UNKNOWN_NODE: "no watch has shown it yet: wait, or let the extender list and watch nodes",
    ExtenderReason.NO_INVENTORY: "no gpu-manager has published its cards: label it for one, or see that one's log",
    Reason.INVALID_INVENTORY: "its annotation of cards can't be read: restart gpu-manager there, which rewrites it",
    Reason.NO_CARDS: "gpu-manager finds no card there: see nvidia-smi, and its log",
    ExtenderReason.UNPLACED_POD: "nobody has written down which cards a pod there has: end it",
    Reason.UNHEALTHY_CARD: "all its cards are: see its events, and nvidia-smi there",
    Reason.CARD_NOT_ALLOWED: "the pod's annotations exclude its usable cards: change vcuda-card-model, vcuda-card-uuid",
    Reason.INSUFFICIENT_WHOLE_CARDS: f"too few of its cards are untouched: ask for fewer, {_ASK_LESS}",
    Reason.INSUFFICIENT_CORES: f"no card of it has as many free: ask for less, {_ASK_LESS}",
    Reason.INSUFFICIENT_MEMORY: f"no card of it with the cores has as much free: ask for less, {_ASK_LESS}",
}
# By code, what people read of a refusal: the reason and the way out.
REFUSALS = [f"{reason}: {_WAYS_OUT[reason]}" if reason in _WAYS_OUT else str(reason or "") for reason in ROW_CODES]

# Evicting pods can't cure these (or, for a quota, only some namespace's pods would), so kube-scheduler must not try
# preemption there.
UNRESOLVABLE = frozenset(
    {
        CODE_OF[ExtenderReason.UNKNOWN_NODE],
        CODE_OF[ExtenderReason.NO_INVENTORY],
        CODE_OF[Reason.INVALID_INVENTORY],
        CODE_OF[Reason.NO_CARDS],
        CODE_OF[Reason.UNHEALTHY_CARD],
        CODE_OF[Reason.CARD_NOT_ALLOWED],
        CODE_OF[ExtenderReason.QUOTA_EXCEEDED],
    }
)
