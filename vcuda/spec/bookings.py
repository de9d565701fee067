"""What a node's manager gave each pod and claim: it publishes it in an annotation of its node, the extender reads it.

Only the manager writes there: unlike a pod's own annotations, no owner of a pod can change what it says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vcuda.quoted import quoted
from vcuda.spec.errors import InvalidInventory, Reason, what_is_wrong
from vcuda.spec.placement import MOST_BLOCKS

VERSION = 1
_MOST_CORES = 100_000  # of one card by one pod's containers together
_MOST_BYTES = 128 * 1024  # all annotations of an object have 256 KiB (apimachinery, TotalAnnotationSizeLimitB)
# Objects and lists: each pod, claim, and card of one. With real UIDs and UUIDs there is no room for more; reading what
# anybody writes with shorter ones would keep the extender busy.
_MOST_PARTS = 3000

# UUID → (cores, memory blocks)
Use = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Report:
    """What a manager says. By pod: what it was given, and the number of the last resize answer that is carried out.

    `resizes`: a pod that it does not name has carried out none; None: written by a manager that does not say. `claims`:
    what it has prepared, by claim; None the same. `complete`: there was room for all. `alive`: the pods that have ended
    by what their status says, and whose containers have processes, with a number that changes twice a minute: so who
    reads it knows that it is not an old word.
    """

    pods: Mapping[str, Use] = field(default_factory=dict)
    resizes: Mapping[str, int] | None = None
    claims: Mapping[str, Use] | None = None
    complete: bool = True
    alive: Mapping[str, int] = field(default_factory=dict)

    def has_carried_out(self, uid: str, number: int) -> bool:
        """Whether what it says of a pod follows this very answer: amounts alone may be those of an earlier one."""
        return self.resizes is None or self.resizes.get(uid, 0) == number


def encode(
    pods: Mapping[str, Use],
    resizes: Mapping[str, int],
    claims: Mapping[str, Use] | None = None,
    alive: Mapping[str, int] | None = None,
) -> str:
    """Render the annotation: compact JSON, in the order given; `alive` is left out where it names nobody.

    `{"version":1,"pods":{UID:{UUID:[CORES,BLOCKS],…},…},"resizes":{UID:NUMBER,…},"claims":{UID:{…},…},"alive":{UID:NUMBER,…}}`

    Those for which it has no room any more are left out, and it says `"partial":true`: what is not named is not known.
    """
    rows: dict[str, list[str]] = {"pods": [], "claims": []}
    beside: tuple[dict[str, int], dict[str, int]] = {}, {}
    size, parts, partial = 90, 5, ""
    for kind, uses in (("pods", pods), ("claims", claims or {})):
        for uid, use in uses.items():
            cards = {uuid: list(amounts) for uuid, amounts in use.items()}
            row = f"{json.dumps(uid)}:{json.dumps(cards, separators=(',', ':'))}"
            said = [resizes.get(uid, 0), (alive or {}).get(uid, 0)] if kind == "pods" else []
            size += len(row) + 1 + sum(len(json.dumps(uid)) + len(str(number)) + 2 for number in said if number)
            parts += 1 + len(cards)
            if size > _MOST_BYTES or parts > _MOST_PARTS:
                partial = ',"partial":true'
                break
            rows[kind].append(row)
            for numbers, number in zip(beside, said, strict=False):
                if number:
                    numbers[uid] = number
    carried_out, living = (json.dumps(numbers, separators=(",", ":")) for numbers in beside)
    its, theirs, news = ",".join(rows["pods"]), ",".join(rows["claims"]), f',"alive":{living}' if beside[1] else ""
    return f'{{"version":{VERSION},"pods":{{{its}}},"resizes":{carried_out},"claims":{{{theirs}}}{news}{partial}}}'


def decode(text: str) -> Report:
    """Parse the annotation. Raises InvalidInventory that says what is wrong with it."""
    try:
        if len(text) > _MOST_BYTES or text.count("{") + text.count("[") > _MOST_PARTS:
            raise ValueError(f"more than {_MOST_BYTES} characters, or {_MOST_PARTS} pods and cards")
        data = json.loads(text)
        if data["version"] != VERSION:
            raise ValueError(f"version {quoted(data['version'], 20)} is not {VERSION}")
        return Report(
            _uses(data["pods"]),
            _numbers(data["resizes"]) if "resizes" in data else None,
            _uses(data["claims"]) if "claims" in data else None,
            "claims" in data and not data.get("partial"),  # a manager that knew no claims said nothing of this either
            _numbers(data.get("alive", {})),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInventory(
            Reason.INVALID_INVENTORY,
            f"the node's annotation of bookings is malformed ({what_is_wrong(error)}); gpu-manager rewrites it",
        ) from error


def _uses(data: Mapping[str, Mapping[str, Sequence[object]]]) -> dict[str, Use]:
    return {uid: {uuid: _amounts(*amounts) for uuid, amounts in use.items()} for uid, use in data.items()}


def _numbers(data: Mapping[str, object]) -> dict[str, int]:
    found = {uid: number for uid, number in data.items() if type(number) is int}
    if len(found) != len(data):
        raise ValueError("what is said of a pod beside what it has must be a whole number")
    return found


def _amounts(cores: object, blocks: object) -> tuple[int, int]:
    if type(cores) is not int or type(blocks) is not int:
        raise ValueError("cores and blocks must be whole numbers")
    if not (0 <= cores <= _MOST_CORES and 0 <= blocks <= MOST_BLOCKS):
        raise ValueError(f"cores must be 0 to {_MOST_CORES} and blocks 0 to {MOST_BLOCKS}")
    return cores, blocks
