"""What a node's manager gave each pod, as it publishes it in an annotation of its node and the extender reads it.

Only the manager writes there: unlike a pod's own annotations, no owner of a pod can change what it says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from vcuda.spec.errors import InvalidInventory, Reason
from vcuda.spec.placement import MOST_BLOCKS

VERSION = 1
_MOST_CORES = 100_000  # of one card by one pod's containers together
_MOST_BYTES = 128 * 1024  # all annotations of an object have 256 KiB (apimachinery, TotalAnnotationSizeLimitB)

# UUID → (cores, memory blocks)
Use = Mapping[str, tuple[int, int]]


def encode(pods: Mapping[str, Use]) -> str:
    """Render the annotation: compact JSON, `{"version":1,"pods":{UID:{UUID:[CORES,BLOCKS],…}}}`, in the order given.

    Pods for which it has no room any more are left out: what is not named is not known.
    """
    rows, size = [], 32
    for uid, use in pods.items():
        cards = {uuid: list(amounts) for uuid, amounts in use.items()}
        row = f"{json.dumps(uid)}:{json.dumps(cards, separators=(',', ':'))}"
        size += len(row) + 1
        if size > _MOST_BYTES:
            break
        rows.append(row)
    return f'{{"version":{VERSION},"pods":{{{",".join(rows)}}}}}'


def decode(text: str) -> dict[str, dict[str, tuple[int, int]]]:
    """Parse the annotation. Raises InvalidInventory that says what is wrong with it."""
    try:
        data = json.loads(text)
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']!r:.20} is not {VERSION}")
        return {uid: {uuid: _amounts(*amounts) for uuid, amounts in use.items()} for uid, use in data["pods"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInventory(
            Reason.INVALID_INVENTORY,
            f"the node's annotation of bookings is malformed ({error!s:.120}); gpu-manager rewrites it",
        ) from error


def _amounts(cores: object, blocks: object) -> tuple[int, int]:
    if type(cores) is not int or type(blocks) is not int:
        raise ValueError("cores and blocks must be whole numbers")
    if not (0 <= cores <= _MOST_CORES and 0 <= blocks <= MOST_BLOCKS):
        raise ValueError(f"cores must be 0 to {_MOST_CORES} and blocks 0 to {MOST_BLOCKS}")
    return cores, blocks
