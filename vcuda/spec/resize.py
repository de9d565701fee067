"""Live resize: what the owner of a running pod asks in an annotation, and what the extender grants in a condition.

The annotation is a request and may say anything. The answer stands in the pod's status, which the rights to edit pods
do not reach (the subresource `pods/status` is one of its own), so the node's manager may obey it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vcuda.quoted import quoted
from vcuda.spec.errors import InvalidRequest, Reason
from vcuda.spec.names import Names
from vcuda.spec.placement import MOST_BLOCKS, CardShare, Placement
from vcuda.spec.request import ContainerRequest, Kind, PodRequest
from vcuda.spec.units import CORES_PER_CARD, parse_count

# What the annotation calls each amount, and the most that it may be.
_FIELDS = {"core": CORES_PER_CARD - 1, "memory": MOST_BLOCKS, "core-limit": CORES_PER_CARD}
_LONGEST = 256
_MOST_CHARS = 8192  # 64 containers by name have room; a longer text is not read
_VERSION = 1
_MOST_NUMBER = 2**53 - 1

# UUID → (cores, memory blocks)
Use = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Target:
    """What one container is to have of its card. `core_limit`: its elastic limit; None: as elastic as it was."""

    share: CardShare
    core_limit: int | None = None


@dataclass(frozen=True)
class Answer:
    """The extender's answer to `request` (`known_as` of the annotation), and all grants so far, by container.

    `goal`: what the whole pod is to book of each card then. `number`: of this answer, among those to the pod.
    """

    request: str
    granted: Mapping[str, Target] = field(default_factory=dict)
    refused: str = ""
    goal: Use = field(default_factory=dict)
    number: int = 0


def number_after(answer: Answer) -> int:
    """Another one than its own, which may have been forged: nobody orders answers by it."""
    return answer.number % _MOST_NUMBER + 1


def known_as(text: str) -> str:
    """The annotation's value, or a digest of one that is long."""
    return text if len(text) <= _LONGEST else hashlib.sha256(text.encode(errors="replace")).hexdigest()


def parse(text: str, request: PodRequest, names: Names) -> dict[str, dict[str, int]]:
    """`core=50,memory=12,core-limit=80` for the only share, else `NAME:core=50;NAME:memory=3` by container.

    Raises InvalidRequest (InvalidAnnotation) that says what to write instead.
    """
    resizable = [item for item in request.containers if item.kind is not Kind.INIT and not item.whole]
    found: dict[str, dict[str, int]] = {}
    if len(text) > _MOST_CHARS:
        _refuse(names, text, f"it has {len(text)} characters; it may have {_MOST_CHARS}")
    for part in text.split(";"):
        name, colon, amounts = part.strip().rpartition(":")
        if not part.strip() and ";" in text:
            _refuse(names, text, "nothing stands before or behind a ';'")
        if not colon and len(resizable) != 1:
            _refuse(names, text, "name the container, as in NAME:core=50")
        name = name.strip() or resizable[0].name
        if name in found:
            _refuse(names, text, f"it names container {quoted(name)} twice")
        _check(names, text, name, request.container(name))
        found[name] = _amounts(names, text, amounts)
    return found


def _refuse(names: Names, text: str, why: str) -> None:
    raise InvalidRequest(Reason.INVALID_ANNOTATION, f"annotation {names.resize} is {quoted(text, 80)}: {why}")


def _check(names: Names, text: str, name: str, container: ContainerRequest | None) -> None:
    if container is None:
        _refuse(names, text, f"no container {quoted(name)} of the pod has a share")
    elif container.whole:
        _refuse(names, text, f"container {quoted(name)} has whole cards, which have no other size")
    elif container.kind is Kind.INIT:
        _refuse(names, text, f"container {quoted(name)} is an init container, which has ended")


def _amounts(names: Names, text: str, amounts: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for item in amounts.split(","):
        key, _, value = (word.strip() for word in item.partition("="))
        if key not in _FIELDS or key in found:
            _refuse(names, text, 'write it as in "core=50,memory=12,core-limit=80", each once')
        try:
            found[key] = parse_count(value, key)
        except InvalidRequest as error:
            _refuse(names, text, error.message)
        if not 1 <= found[key] <= _FIELDS[key]:
            _refuse(names, text, f"{key} must be 1 to {_FIELDS[key]}")
    return found


def target(amounts: Mapping[str, int], share: CardShare, before: Target | None, names: Names) -> Target:
    """What one container is to have that has `share`, or was granted `before`. Raises InvalidRequest."""
    share = before.share if before is not None and before.share.uuid == share.uuid else share
    cores = amounts.get("core", share.cores)
    limit = amounts.get("core-limit", before.core_limit if before else None)
    if limit is not None and limit < cores:
        if "core-limit" in amounts:
            raise InvalidRequest(
                Reason.INVALID_ANNOTATION,
                f"annotation {names.resize}: core-limit {limit} is below the {cores} cores; the elastic limit must be "
                "at least the share",
            )
        limit = cores
    return Target(CardShare(share.uuid, cores, amounts.get("memory", share.memory_blocks)), limit)


def grants(answer: Answer, text: str, request: PodRequest, names: Names) -> bool:
    """Whether an answer gives what is asked, whatever request it says that it answers. Raises InvalidRequest."""
    wishes = parse(text, request, names)
    had = {name: answer.granted.get(name) for name in wishes}
    return not answer.refused and all(
        one is not None and target(wishes[name], one.share, one, names) == one for name, one in had.items()
    )


def applied(placement: Placement, granted: Mapping[str, Target]) -> Placement:
    """The placement with what was granted on the same cards."""
    return Placement(
        {
            name: tuple(
                granted[name].share if name in granted and granted[name].share.uuid == share.uuid else share
                for share in shares
            )
            for name, shares in placement.containers.items()
        }
    )


def promised(placement: Placement, request: PodRequest, granted: Mapping[str, Target]) -> Placement:
    """What each container is to have on the cards that the placement names: what was granted, else what its spec asks.

    Of the placement, which its owner may edit, no share's amounts are read. A whole card is as large as it says.
    """

    def amounts(name: str, share: CardShare) -> CardShare:
        asked = request.container(name)
        if asked is None or asked.whole:
            return share
        return CardShare(share.uuid, asked.cores_per_card, asked.memory_blocks)

    original = {name: tuple(amounts(name, share) for share in shares) for name, shares in placement.containers.items()}
    return applied(Placement(original), granted)


def as_asked(placement: Placement, request: PodRequest, granted: Mapping[str, Target]) -> Placement:
    """The placement with the pod's own amounts again where it says exactly what was granted since."""

    def original(name: str, share: CardShare) -> CardShare:
        asked = request.container(name)
        if asked is None or name not in granted or granted[name].share != share:
            return share
        return dataclasses.replace(share, cores=asked.cores_per_card, memory_blocks=asked.memory_blocks)

    return Placement(
        {name: tuple(original(name, share) for share in shares) for name, shares in placement.containers.items()}
    )


def most(one: Use, other: Use) -> dict[str, tuple[int, int]]:
    """The larger of two uses, for each card and amount."""
    none = (0, 0)
    return {
        uuid: (
            max(one.get(uuid, none)[0], other.get(uuid, none)[0]),
            max(one.get(uuid, none)[1], other.get(uuid, none)[1]),
        )
        for uuid in {**one, **other}
    }


def condition(answer: Answer, names: Names, now: str) -> dict[str, str]:
    """The condition of the pod that carries an answer. `now`: RFC 3339."""
    granted = {
        name: [item.share.uuid, item.share.cores, item.share.memory_blocks, item.core_limit]
        for name, item in answer.granted.items()
    }
    said = {
        "version": _VERSION,
        "request": answer.request,
        "granted": granted,
        "goal": answer.goal,
        "refused": answer.refused,
        "number": answer.number,
    }
    return {
        "type": names.resize,
        "status": "False" if answer.refused else "True",
        "reason": "ResizeRefused" if answer.refused else "ResizeGranted",
        "message": json.dumps(said, separators=(",", ":")),
        "lastTransitionTime": now,
    }


def read(pod: Mapping[str, Any], names: Names) -> Answer | None:
    """The last answer in a pod's status; None where there is none that can be understood."""
    status = pod.get("status")
    conditions = status.get("conditions") if isinstance(status, Mapping) else None
    for item in conditions if isinstance(conditions, list) else ():
        if isinstance(item, Mapping) and item.get("type") == names.resize:
            try:
                data = json.loads(str(item.get("message")))
                if data["version"] != _VERSION:
                    return None
                granted = {str(name): _granted(*row) for name, row in data["granted"].items()}
                goal = {str(uuid): _amounts_of(*row) for uuid, row in data["goal"].items()}
                return Answer(str(data["request"]), granted, str(data["refused"]), goal, _number(data.get("number", 0)))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                return None
    return None


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MOST_NUMBER:
        raise ValueError("an answer's number is a whole number")
    return value


def _amounts_of(cores: object, blocks: object) -> tuple[int, int]:
    if type(cores) is not int or type(blocks) is not int:
        raise ValueError("what a pod is to have of a card is [cores, blocks]")
    return cores, blocks


def _granted(uuid: object, cores: object, blocks: object, limit: object) -> Target:
    if not isinstance(uuid, str) or type(cores) is not int or type(blocks) is not int:
        raise ValueError("a grant is [uuid, cores, blocks, limit]")
    if not (limit is None or type(limit) is int):
        raise ValueError("a limit is a number or null")
    if not (1 <= cores < CORES_PER_CARD and 1 <= blocks <= MOST_BLOCKS):
        raise ValueError("no amounts of a share")
    if limit is not None and not cores <= limit <= CORES_PER_CARD:
        raise ValueError("no elastic limit of that share")
    return Target(CardShare(uuid, cores, blocks), limit)
