"""Units: cores (1/100 of a card), memory blocks (256 MiB), Kubernetes quantities, human-written bytes."""

from __future__ import annotations

import re

from vcuda.quoted import quoted
from vcuda.spec.errors import InvalidRequest, Reason

CORES_PER_CARD = 100
BLOCK_BYTES = 256 * 1024 * 1024

_MOST = 2**63 - 1  # Kubernetes quantities and byte counts are signed 64-bit on the wire
_LONGEST = 40  # characters; also keeps int() far from its own limit on digits

_TIMES = {
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60,
    "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18,
}  # fmt: skip
_PARTS = {"m": 10**3, "u": 10**6, "n": 10**9}
# The grammar of Kubernetes' resource.Quantity (apimachinery pkg/api/resource); ASCII digits only.
_QUANTITY = re.compile(
    r"(?P<sign>[+-]?)(?:(?P<whole>[0-9]+)(?:\.(?P<part>[0-9]*))?|\.(?P<only>[0-9]+))"
    r"(?:[eE](?P<exponent>[+-]?[0-9]{1,2})|(?P<suffix>[KMGTPE]i|[kMGTPEmun]|))"
)
_BYTES = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<suffix>[kmgtp]i?b?|b|)", re.IGNORECASE | re.ASCII)


def blocks_on_card(memory_bytes: int) -> int:
    """Memory blocks that a card of `memory_bytes` offers: whole blocks only, the rest is not for sale."""
    return max(0, memory_bytes) // BLOCK_BYTES


def parse_quantity(value: object) -> tuple[int, int] | None:
    """Parse a Kubernetes quantity (30, "500m", "2Gi", "3e1") into numerator and denominator, exactly; None if none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value, 1
    if not isinstance(value, str) or len(value) > _LONGEST:
        return None
    match = _QUANTITY.fullmatch(value.strip())
    if match is None:
        return None
    part = match["part"] or match["only"] or ""
    exponent, suffix = int(match["exponent"] or 0), match["suffix"] or ""
    number = int((match["whole"] or "") + part) * _TIMES.get(suffix, 1) * 10 ** max(0, exponent)
    divisor = 10 ** (len(part) + max(0, -exponent)) * _PARTS.get(suffix, 1)
    return (-number if match["sign"] == "-" else number), divisor


def parse_count(value: object, what: str) -> int:
    """Parse the amount of an extended resource, a whole Kubernetes quantity such as 30, "30", "1k" or "3e1".

    "30.0" and "30000m" are the same number; the API server would have rewritten them as "30". Raises
    InvalidRequest (InvalidQuantity) that names `what`: fractions and negative amounts of an extended resource do
    not exist in Kubernetes.
    """
    if isinstance(value, str) and len(value) <= 18 and value.isascii() and value.isdigit():
        return int(value)  # nearly every value, and the extender parses thousands a second
    found = parse_quantity(value)
    if found is None:
        problem = quoted(value)
    else:
        amount, rest = divmod(found[0], found[1])
        if 0 <= amount <= _MOST and not rest:
            return amount
        problem = "below 0" if amount < 0 else "above 2^63 - 1" if amount >= _MOST else f"{quoted(value)}, a fraction"
    raise InvalidRequest(Reason.INVALID_QUANTITY, f'{what} is {problem}; write a whole number such as "30"')


def parse_bytes(text: str, what: str = "memory") -> int:
    """Parse an amount of memory as people write it: "4GiB", "512M", "1.5 GB", "1073741824" (bytes).

    "Gi" and "GiB" are powers of 1024; "G" and "GB" are powers of 1000; upper and lower case mean the same, parts of a
    byte are dropped. Raises InvalidRequest (InvalidMemory).
    """
    match = _BYTES.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    if match is None:
        raise InvalidRequest(Reason.INVALID_MEMORY, f'{what} is {quoted(text)}; write for instance "4GiB" or "512MiB"')
    letters = match["suffix"].lower().removesuffix("b")
    power = " kmgtp".index(letters[0]) if letters else 0
    base = 1024 if letters.endswith("i") else 1000
    number, _, fraction = match["number"].partition(".")
    scale: int = base**power
    total = int(number) * scale + (int(fraction) * scale // 10 ** len(fraction) if fraction else 0)
    if total > _MOST:
        raise InvalidRequest(Reason.INVALID_MEMORY, f"{what} is {quoted(text)}; that is more than 8 EiB")
    return total


def format_bytes(memory_bytes: int) -> str:
    """Render bytes for people in the largest binary unit that keeps it readable: "2.5 GiB"."""
    value = float(memory_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
