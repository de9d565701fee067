"""Gangs: pods of one namespace that are placed all together or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vcuda.quoted import quoted
from vcuda.spec.errors import InvalidRequest, Reason
from vcuda.spec.names import OLD_POD_GROUP_NAME_LABEL, OLD_POD_GROUP_SIZE_LABEL, POD_GROUP_LABEL, Names

MOST_MEMBERS = 1024
_LONGEST_NAME = 253


@dataclass(frozen=True)
class Gang:
    """`size` counts the pods with a share that must have a place before any of them is bound."""

    name: str
    size: int


def _size(text: str, where: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 6 else 0
    if not 1 <= number <= MOST_MEMBERS:
        raise InvalidRequest(
            Reason.INVALID_ANNOTATION, f"{where} is {quoted(text)}; a gang has 1 to {MOST_MEMBERS} pods"
        )
    return number


def may_name(pod: Mapping[str, Any], names: Names) -> bool:
    """Whether a pod may be of a gang: read without judging."""
    # From JSON they are dicts; to ask an abstract class instead is a call in Python each time.
    metadata = pod.get("metadata")
    if not isinstance(metadata, (dict, Mapping)):
        return False
    annotations, labels = metadata.get("annotations"), metadata.get("labels")
    return (isinstance(annotations, (dict, Mapping)) and names.gang in annotations) or (
        isinstance(labels, (dict, Mapping)) and OLD_POD_GROUP_SIZE_LABEL in labels
    )


def parse(annotations: Mapping[str, str], labels: Mapping[str, str], names: Names) -> Gang | None:
    """The gang that a pod names, or None. Raises InvalidRequest (InvalidAnnotation).

    Either our annotation, "NAME/SIZE" or "SIZE" beside the label scheduling.x-k8s.io/pod-group; or the two labels of
    the coscheduling plugin's first version. That label alone has no size (a PodGroup object does) and is not ours to
    judge.
    """
    text = annotations.get(names.gang)
    if text is None:
        name, size = labels.get(OLD_POD_GROUP_NAME_LABEL), labels.get(OLD_POD_GROUP_SIZE_LABEL)
        return Gang(name, _size(size, f"label {OLD_POD_GROUP_SIZE_LABEL}")) if name and size is not None else None
    where = f"annotation {names.gang}"
    name, slash, size = text.strip().rpartition("/")
    if not slash:
        name = labels.get(POD_GROUP_LABEL, "")
    if not name or len(name) > _LONGEST_NAME:
        raise InvalidRequest(
            Reason.INVALID_ANNOTATION,
            f'{where} is {quoted(text)}; write "NAME/SIZE", or "SIZE" beside the label {POD_GROUP_LABEL}',
        )
    return Gang(name, _size(size, where))
