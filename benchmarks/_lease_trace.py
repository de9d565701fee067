"""Where the time of a shared card goes, by the words of its regions: `python -m benchmarks._lease_trace FOLDER [SECONDS]` beside what runs.

FOLDER is searched for the regions of containers (`limits` with `usage` beside it), until there are two of them. It reads them every few microseconds and
prints what part of the time the card had work by its tenants' predictions, and why not when it had none; and what became of each lease.
"""

from __future__ import annotations

import mmap
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct

from vcuda._native import ffi

FIND_SECONDS = 60.0
_WORD = Struct("<Q")
_SIGNED = Struct("<q")


def _offset(file: str, card: str, name: str) -> int:
    """Of a word of the first card; containers here have no other."""
    return int(ffi.offsetof(f"struct {file}", "cards") + ffi.offsetof(f"struct {card}", name))


_LEASE_END = _offset("vc_limits", "vc_card_limit", "lease_end_ns")
_FINISH, _WAITING, _CREDIT, _CHARGED, _WAITED = (
    _offset("vc_usage", "vc_card_usage", name)
    for name in ("predicted_finish_ns", "waiting_until_ns", "credit_ns", "gpu_ns", "waited_ns")
)


@dataclass
class Tenant:
    """One container's region, mapped to read."""

    name: str
    limits: mmap.mmap
    usage: mmap.mmap
    held: bool = False
    since_ns: int = 0
    charged_then: int = 0
    lengths_ns: list[int] = field(default_factory=list)
    charges_ns: list[int] = field(default_factory=list)
    first_launch_ns: list[int] = field(default_factory=list)
    launched: bool = True

    def limit(self, offset: int) -> int:
        return int(_WORD.unpack_from(self.limits, offset)[0])

    def word(self, offset: int) -> int:
        return int(_WORD.unpack_from(self.usage, offset)[0])

    @property
    def credit_ns(self) -> int:
        return int(_SIGNED.unpack_from(self.usage, _CREDIT)[0])


def find(folder: Path) -> list[Tenant]:
    until = time.monotonic() + FIND_SECONDS
    while time.monotonic() < until:
        regions = [path for path in folder.rglob("limits") if (path.parent / "usage").is_file()]
        if len(regions) > 1:
            return [open_region(path.parent) for path in sorted(regions)]
        time.sleep(0.1)
    raise SystemExit(f"lease_trace: fewer than two regions below {folder} within {FIND_SECONDS:.0f} s")


def open_region(folder: Path) -> Tenant:
    maps = []
    for name in ("limits", "usage"):
        with (folder / name).open("rb") as file:
            maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return Tenant(str(folder.parent.name), *maps)


def follow(tenant: Tenant, now_ns: int, holds: bool) -> None:
    """Note when it gets the lease, when it first launches in it, and when it loses it."""
    if holds and not tenant.held:
        tenant.since_ns, tenant.launched = now_ns, False
        tenant.charged_then = tenant.word(_CHARGED)
    elif holds and not tenant.launched and tenant.word(_CHARGED) != tenant.charged_then:
        tenant.launched = True
        tenant.first_launch_ns.append(now_ns - tenant.since_ns)
    elif tenant.held and not holds:
        tenant.lengths_ns.append(now_ns - tenant.since_ns)
        tenant.charges_ns.append(tenant.word(_CHARGED) - tenant.charged_then)
    tenant.held = holds


def state(tenants: Sequence[Tenant], now_ns: int) -> str:
    if any(tenant.word(_FINISH) > now_ns for tenant in tenants):
        return "work on the card, as predicted"
    holder = next((tenant for tenant in tenants if tenant.held), None)
    others = "" if any(not t.held and t.word(_WAITING) > now_ns for t in tenants) else ", nobody else waits"
    if holder is None:
        return f"none: nobody holds it{others}"
    if holder.word(_WAITING) <= now_ns:
        return f"none: its holder launches nothing{others}"
    return f"none: its holder waits, {'in debt' if holder.credit_ns <= 0 else 'in credit'}{others}"


def trace(tenants: Sequence[Tenant], seconds: float) -> Counter[str]:
    spent: Counter[str] = Counter()
    last = begun = time.monotonic_ns()
    while last - begun < seconds * 1e9:
        now = time.monotonic_ns()
        for tenant in tenants:
            follow(tenant, now, tenant.limit(_LEASE_END) != 0)
        spent[state(tenants, now)] += now - last
        last = now
    return spent


def shown(values: Sequence[int]) -> str:
    if not values:
        return "-"
    ordered = sorted(values)
    return f"{statistics.median(ordered) / 1e6:.2f} (p90 {ordered[int(0.9 * len(ordered))] / 1e6:.2f})"


def main(arguments: Sequence[str]) -> None:
    tenants = find(Path(arguments[0]))
    seconds = float(arguments[1]) if len(arguments) > 1 else 5.0
    before = [(tenant.word(_CHARGED), tenant.word(_WAITED)) for tenant in tenants]
    spent = trace(tenants, seconds)
    total = sum(spent.values())
    for what, took in spent.most_common():
        print(f"{100 * took / total:6.1f} %  {what}")
    for tenant, (charged, waited) in zip(tenants, before, strict=True):
        parts = [
            f"charged {(tenant.word(_CHARGED) - charged) / seconds / 1e7:.1f}",
            f"waited {(tenant.word(_WAITED) - waited) / seconds / 1e7:.1f}",
            f"{len(tenant.lengths_ns) / seconds:.0f} leases a second of ms {shown(tenant.lengths_ns)}",
            f"charged in each {shown(tenant.charges_ns)}",
            f"first launch after {shown(tenant.first_launch_ns)}",
        ]
        print(f"{tenant.name}: {', '.join(parts)}")


if __name__ == "__main__":
    main(sys.argv[1:])
