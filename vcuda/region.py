"""Regions: a container's limits and usage, two files that the interposer's processes share (`vcuda/abi/region.abi`).

The limits are written here and read by tenants; the usage is written by tenants and only ever read here, with
pread and every value bounded, because a tenant may write anything into it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vcuda._native import ffi, lib
from vcuda.quoted import quoted

Priority = Literal["low", "normal", "high"]

LIMITS_NAME = "limits"
USAGE_NAME = "usage"

_PRIORITIES: dict[Priority, int] = {
    "low": lib.VC_PRIORITY_LOW,
    "normal": lib.VC_PRIORITY_NORMAL,
    "high": lib.VC_PRIORITY_HIGH,
}
_ERROR_BYTES = 512


class RegionError(Exception):
    """A region can't be made, changed or read; the message names the file, the reason and the way out."""


@dataclass(frozen=True)
class CardLimit:
    """What one container may use of one card.

    `cores` are guaranteed hundredths of the card, `core_limit` the most it may use when the card is idle (1 <= cores
    <= core_limit <= 100). A `whole` card is not limited below the card. `shared`: another container is placed on the
    card too. `context_bytes`: what a CUDA context takes on this card, 0 if unknown; `overhead_bytes`: device memory
    that the container uses beside its allocations, as measured from outside (`write_overhead` changes it, `update` does
    not). `physical_bytes`: the share is oversold; what exceeds this, up to `memory_bytes`, becomes managed memory.
    """

    uuid: str
    minor: int
    memory_bytes: int
    cores: int
    core_limit: int
    whole: bool = False
    shared: bool = False
    priority: Priority = "normal"
    context_bytes: int = 0
    overhead_bytes: int = 0
    physical_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class CardUsage:
    """One card's figures of a container, all its living processes together; the counters include the dead.

    `memory_used_bytes` is `ledger_bytes` (what the shims have charged) plus the overhead. Of the ledger,
    `managed_bytes` need not be on the card, and `oversold_bytes` of these were asked for as plain memory. `ledger_mark`
    is another one whenever the ledger has changed; `unsettled`: an allocation was under way, so that `reserved_bytes`
    are more than `ledger_bytes`. `hidden_bytes`: what the kernel witnesses beyond what the slots say; more than 0 twice
    in a row means that somebody overwrote them. `granted_cores` is the share of the card's time in force now, in
    hundredths of the card: what the arbiter grants, or the guaranteed share while there is none.
    """

    uuid: str
    memory_used_bytes: int = 0
    memory_peak_bytes: int = 0
    gpu_time_ns: int = 0
    waited_ns: int = 0
    launches: int = 0
    refusals: int = 0
    unknown_symbols: int = 0
    ledger_bytes: int = 0
    managed_bytes: int = 0
    oversold_bytes: int = 0
    oversold_allocations: int = 0
    reserved_bytes: int = 0
    hidden_bytes: int = 0
    ledger_mark: int = 0
    unsettled: bool = False
    granted_cores: float = 0.0


@dataclass(frozen=True)
class ProcessUsage:
    """One process's slot. `pid` counts in the container's PID namespace (inode `pid_namespace`), -1 if impossible."""

    slot: int
    pid: int
    alive: bool
    memory_bytes: Mapping[str, int]
    command: str = ""
    pid_namespace: int = 0


@dataclass(frozen=True)
class Usage:
    """What a container's processes say they use; three are events counted by the shims.

    `limits_impossible`: processes that met GPU-time limits which make no sense, and keep to the guaranteed share.
    """

    cards: tuple[CardUsage, ...]
    processes: tuple[ProcessUsage, ...]
    limits_unreadable: int = 0
    slot_shortage: int = 0
    limits_impossible: int = 0
    account_damaged: int = 0
    refused: bool = False


def create(directory: Path | str, cards: Sequence[CardLimit], *, usage_directory: Path | str | None = None) -> None:
    """Write `limits` (0444) into `directory`, `usage` (0666, all blocks allocated) into `usage_directory` or there.

    Atomic: both files or neither. The directories must exist. Raises RegionError; an existing region is never replaced,
    because running processes may have it mapped.
    """
    array = _card_array(cards)
    error = ffi.new("char[]", _ERROR_BYTES)
    usage = _path(usage_directory if usage_directory is not None else directory, USAGE_NAME)
    if lib.vc_native_create(_path(directory, LIMITS_NAME), usage, array, len(cards), error, _ERROR_BYTES) != 0:
        raise _error(error)


def update(directory: Path | str, cards: Sequence[CardLimit]) -> None:
    """Change the limits of a running container in place; its processes see them at their next call.

    The cards and their order must be those that the region was created with. Raises RegionError.
    """
    array = _card_array(cards)
    error = ffi.new("char[]", _ERROR_BYTES)
    if lib.vc_native_update(_path(directory, LIMITS_NAME), array, len(cards), error, _ERROR_BYTES) != 0:
        raise _error(error)


def write_overhead(directory: Path | str, overhead_bytes: Sequence[int]) -> None:
    """Write what the container uses beside its ledger on each of its cards, in their order. Raises RegionError."""
    error = ffi.new("char[]", _ERROR_BYTES)
    array = ffi.new("uint64_t[]", list(overhead_bytes))
    path = _path(directory, LIMITS_NAME)
    if lib.vc_native_write_overhead(path, array, len(overhead_bytes), error, _ERROR_BYTES) != 0:
        raise _error(error)


def refuse(directory: Path | str, refused: bool) -> None:
    """Refuse all GPU memory to a container from now on, whatever its limits say, or no longer. Raises RegionError."""
    error = ffi.new("char[]", _ERROR_BYTES)
    if lib.vc_native_refuse(_path(directory, LIMITS_NAME), int(refused), error, _ERROR_BYTES) != 0:
        raise _error(error)


def read_limits(directory: Path | str) -> tuple[CardLimit, ...]:
    """Read the limits in force. Raises RegionError."""
    limits = ffi.new("struct vc_limits *")
    error = ffi.new("char[]", _ERROR_BYTES)
    if lib.vc_native_read_limits(_path(directory, LIMITS_NAME), limits, error, _ERROR_BYTES) != 0:
        raise _error(error)
    return tuple(_card_limit(limits.cards[index]) for index in range(limits.card_count))


def read_usage(directory: Path | str, *, usage_directory: Path | str | None = None) -> Usage:
    """Read what the container's processes use; safe against anything that they do to the file. Raises RegionError."""
    uuids = [card.uuid for card in read_limits(directory)]
    report = ffi.new("struct vc_usage_report *")
    error = ffi.new("char[]", _ERROR_BYTES)
    usage = _path(usage_directory if usage_directory is not None else directory, USAGE_NAME)
    if lib.vc_native_read_usage(_path(directory, LIMITS_NAME), usage, report, error, _ERROR_BYTES) != 0:
        raise _error(error)
    return Usage(
        cards=tuple(_card_usage(uuid, report.cards[index]) for index, uuid in enumerate(uuids)),
        processes=tuple(_process(report.processes[index], uuids) for index in range(report.process_count)),
        limits_unreadable=report.limits_unreadable,
        slot_shortage=report.slot_shortage,
        limits_impossible=report.limits_impossible,
        account_damaged=report.account_damaged,
        refused=bool(report.refused),
    )


def _path(directory: Path | str, name: str) -> bytes:
    return os.fsencode(os.path.join(directory, name))  # noqa: PTH118 - for 200 regions in every audit a Path costs four times as much


def _error(text: Any) -> RegionError:
    return RegionError(ffi.string(text).decode(errors="replace"))


def _card_array(cards: Sequence[CardLimit]) -> Any:
    array = ffi.new("struct vc_card_limit[]", max(1, len(cards)))
    for target, card in zip(array, cards, strict=False):
        uuid = card.uuid.encode()
        if not 0 < len(uuid) < lib.VC_UUID_BYTES:
            raise RegionError(f"card UUID {quoted(card.uuid)} must have 1 to {lib.VC_UUID_BYTES - 1} bytes")
        target.uuid = uuid
        try:
            target.memory_bytes = card.memory_bytes
            target.context_bytes = card.context_bytes
            target.overhead_bytes = card.overhead_bytes
            target.physical_bytes = card.physical_bytes or 0
            target.cores = card.cores
            target.core_limit = card.core_limit
            target.minor = card.minor
        except OverflowError as error:
            raise RegionError(f"card {card.uuid} has an impossible limit ({error}): {card}") from error
        target.flags = (lib.VC_CARD_WHOLE if card.whole else 0) | (lib.VC_CARD_SHARED if card.shared else 0)
        if card.physical_bytes is not None:
            if not 0 < card.physical_bytes <= card.memory_bytes:
                raise RegionError(
                    f"card {card.uuid} has {card.physical_bytes} physical bytes of {card.memory_bytes}; an oversold "
                    "share has more than 0 and at most its limit"
                )
            target.flags |= lib.VC_CARD_OVERSELL
        target.priority = _PRIORITIES[card.priority]
    return array


def _card_limit(card: Any) -> CardLimit:
    names: dict[int, Priority] = {value: name for name, value in _PRIORITIES.items()}
    return CardLimit(
        uuid=ffi.string(card.uuid).decode(errors="replace"),
        minor=card.minor,
        memory_bytes=card.memory_bytes,
        cores=card.cores,
        core_limit=card.core_limit,
        whole=bool(card.flags & lib.VC_CARD_WHOLE),
        shared=bool(card.flags & lib.VC_CARD_SHARED),
        priority=names.get(card.priority, "normal"),
        context_bytes=card.context_bytes,
        overhead_bytes=card.overhead_bytes,
        physical_bytes=card.physical_bytes if card.flags & lib.VC_CARD_OVERSELL else None,
    )


def _card_usage(uuid: str, card: Any) -> CardUsage:
    return CardUsage(
        uuid=uuid,
        memory_used_bytes=card.memory_used_bytes,
        memory_peak_bytes=card.memory_peak_bytes,
        gpu_time_ns=card.gpu_ns,
        waited_ns=card.waited_ns,
        launches=card.launches,
        refusals=card.memory_refusals,
        unknown_symbols=card.unknown_symbols,
        ledger_bytes=card.ledger_bytes,
        managed_bytes=card.managed_bytes,
        oversold_bytes=card.oversold_bytes,
        oversold_allocations=card.oversold_allocations,
        reserved_bytes=card.reserved_bytes,
        hidden_bytes=card.hidden_bytes,
        ledger_mark=card.ledger_mark,
        unsettled=bool(card.unsettled),
        granted_cores=card.granted_ppm / 10_000,
    )


def _process(process: Any, uuids: Sequence[str]) -> ProcessUsage:
    return ProcessUsage(
        slot=process.slot,
        pid=process.pid,
        alive=bool(process.alive),
        memory_bytes={uuid: process.memory_bytes[index] for index, uuid in enumerate(uuids)},
        command=ffi.string(process.comm).decode(errors="replace"),
        pid_namespace=process.pid_namespace,
    )
