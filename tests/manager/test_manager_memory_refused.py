"""Refused memory is told to the pod: once, with figures, at most every ten minutes, and not again by the next daemon."""

from __future__ import annotations

from typing import Any

from tests.manager import manager_pods
from vcuda.region import CardUsage, Usage
from vcuda.spec.placement import CardShare

MIB = 2**20
CARD = "GPU-1"


def test_each_rise_is_told_but_no_more_often_than_every_ten_minutes() -> None:
    from manager.audit.refusals import BETWEEN_EVENTS_S, LOOK_EVERY_S, Refusals

    now, counts, told = 100.0, {"old": 3, "new": 2}, []
    items = {
        name: manager_pods.allocation(CardShare(CARD, 10, 4), pod_uid=name, pod_name=name, container="train")
        for name in counts
    }

    def usage(item: object) -> Usage:
        name = item.pod_name  # type: ignore[attr-defined]
        return Usage(
            (CardUsage(uuid=CARD, memory_used_bytes=900 * MIB, memory_peak_bytes=1000 * MIB, ledger_bytes=893 * MIB,
                       refusals=counts[name]),), ()
        )  # fmt: skip

    watch = Refusals(usage, lambda item, reason, message: told.append((item.pod_name, reason, message)), lambda: now)

    def look(found: list[Any]) -> None:
        nonlocal now
        watch.look(found)
        watch.look([])  # so soon nothing is read
        now += LOOK_EVERY_S

    look([items["old"]])
    look(list(items.values()))
    look(list(items.values()))
    assert told == [
        (
            "new",
            "MemoryRefused",
            "container train was refused GPU memory 2 times because its share is full, not the card: of card GPU-1 900 MiB of 1 GiB "
            "are in use, 7 MiB of it overhead, 1000 MiB at most. Its standard error says how much was asked for; ask for more "
            "vcuda-memory or use less",
        )
    ]
    counts["new"] += 100
    look(list(items.values()))
    assert len(told) == 1
    now += BETWEEN_EVENTS_S
    look(list(items.values()))
    assert "refused GPU memory 100 times" in told[1][2]
    look([])
    look(list(items.values()))  # a namesake with the same key begins anew
    assert len(told) == 4
