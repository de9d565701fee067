"""The bypass audit: what processes hold on the cards, by the driver, against the ledgers of their containers.

Bypassing the shim can't be prevented in user space; what a container holds beyond its ledger, and who uses a card past
our library (manager.audit.shim_bypass), is shown, told to its pod and, by `--audit-policy`, gets no more memory
(`refuse`) or ends the pod (`evict`). Processes of no container with a share are summed per card.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from manager.allocations.record import Allocation
from manager.audit.consequences import Tell
from manager.audit.owners import Key, Owners
from manager.audit.shim_bypass import BypassWatch
from manager.cards.driver import CardProcess
from vcuda.logs import fields
from vcuda.region import Usage
from vcuda.spec.units import BLOCK_BYTES

# A reading of the driver and one of the ledger are not of the same moment: only what stays is told.
LASTING_AUDITS = 2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """One audit's findings. `beyond`: bytes held beyond the ledger, by container and card UUID, 0 included.

    `others`: bytes of processes of no container with a share, by card UUID. Cards that do not say are in neither.
    `without_shim`: how many processes use the card past our library, by container and card UUID. `listed`: bytes that
    the driver lists for a container's processes, less the managed memory that it may have, by its ledger; by container
    and card UUID.
    """

    beyond: Mapping[tuple[Key, str], int] = field(default_factory=dict)
    others: Mapping[str, int] = field(default_factory=dict)
    without_shim: Mapping[tuple[Key, str], int] = field(default_factory=dict)
    listed: Mapping[tuple[Key, str], int] = field(default_factory=dict)


def compare(
    allocations: Sequence[Allocation],
    usages: Mapping[Key, Usage],
    held: Mapping[str, Iterable[CardProcess]],
    owners: Owners,
) -> Finding:
    """One audit.

    `held`: the processes of each card that says, by UUID; `usages`: the ledgers that could be read; others count as
    empty.
    """
    by_driver: dict[tuple[Key, str], int] = {}
    others: dict[str, int] = {}
    for uuid, processes in held.items():
        others[uuid] = 0
        for process in processes:
            key = owners.container(process.pid, uuid)
            if key is not None:
                by_driver[key, uuid] = by_driver.get((key, uuid), 0) + (process.memory_bytes or 0)
            else:
                others[uuid] += process.memory_bytes or 0
    beyond, listed = {}, dict(by_driver)
    elsewhere: dict[Key, list[str]] = {}
    for (key, uuid), much in by_driver.items():
        if much:
            elsewhere.setdefault(key, []).append(uuid)
    for item in allocations:
        usage = usages.get(item.key)  # one that can't be read counts nothing: its container may have damaged it
        # What the tenant writes is believed as far as its share goes: processes that see limits of their own, mounted
        # over ours, count truly what they hold beyond it. Managed memory need not be on the card.
        may = {share.uuid: max(share.memory_blocks, item.oversell_blocks) * BLOCK_BYTES for share in item.shares}
        cards = usage.cards if usage is not None else ()
        ledger = {
            card.uuid: card.ledger_bytes if item.whole else min(card.ledger_bytes, may.get(card.uuid, 0))
            for card in cards
        }
        own = (share.uuid for share in item.shares if share.uuid in held)
        for uuid in (*own, *elsewhere.get(item.key, ())):
            beyond[item.key, uuid] = max(0, by_driver.get((item.key, uuid), 0) - ledger.get(uuid, 0))
        for card in cards:
            if (item.key, card.uuid) in listed:
                listed[item.key, card.uuid] -= min(card.managed_bytes, may.get(card.uuid, 0))
    return Finding(beyond, others, listed=listed)


class Auditor:
    """Audits when asked, remembers what lasts, and tells it once."""

    def __init__(
        self,
        *,
        processes: Callable[[str], Sequence[CardProcess] | None],
        usage: Callable[[Allocation], Usage | None],
        tell: Tell,
        owners: Owners,
        bypass: BypassWatch | None = None,
    ) -> None:
        """`processes` of a card by its UUID, None if it does not say; `tell` is called once per container."""
        self._processes, self._usage, self._tell = processes, usage, tell
        self._owners, self._bypass = owners, bypass
        self._seen: dict[tuple[Key, str], int] = {}
        self.finding = Finding()

    def audit(self, allocations: Sequence[Allocation], cards: Iterable[str], tolerance_bytes: int) -> None:
        """Compare once. What is beyond the tolerance in LASTING_AUDITS audits in a row is told."""
        held = {uuid: found for uuid in cards if (found := self._processes(uuid)) is not None}
        # Nobody holds anything beyond a ledger on cards without a process: the ledgers of an idle node are not read.
        ledgers = {item.key: self._usage(item) for item in allocations} if any(held.values()) else {}
        usages = {key: usage for key, usage in ledgers.items() if usage is not None}
        owners = self._owners.among(allocations, usages)
        finding = compare(allocations, usages, held, owners)
        if self._bypass is not None:
            past = self._bypass.look(allocations, owners, held)
            finding = replace(finding, without_shim=past)
        self.finding = finding
        over = {at: much for at, much in self.finding.beyond.items() if much > tolerance_bytes}
        self._seen = {at: self._seen.get(at, 0) + 1 for at in over}
        for item in allocations:
            for (key, uuid), times in self._seen.items():
                if key == item.key and times == LASTING_AUDITS:
                    message = (
                        f"container {item.container} holds {over[key, uuid] >> 20} MiB of card {uuid} beyond what its "
                        "shim has counted within its share: it bypasses its limit, or its modules need more than "
                        "--audit-tolerance"
                    )
                    log.warning(
                        "%s: %s", item.name, message, extra=fields(item.fields, uuid=uuid, reason="MemoryUnaccounted")
                    )
                    self._tell(item, "MemoryUnaccounted", message)
