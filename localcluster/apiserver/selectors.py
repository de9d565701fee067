"""Label and field selectors of list and watch requests, compiled to a predicate."""

from __future__ import annotations

import re

from localcluster.apiserver import errors
from localcluster.apiserver.store import JsonObject, Selector

_SET = re.compile(r"(?P<key>[\w./-]+)\s+(?P<not>not)?in\s+\((?P<values>[^)]*)\)|(?P<plain>[^,]+)")
_FIELDS = {
    "metadata.name", "metadata.namespace", "spec.nodeName", "spec.schedulerName", "spec.restartPolicy",
    "spec.unschedulable", "status.phase", "involvedObject.name", "involvedObject.namespace", "involvedObject.kind",
    "involvedObject.uid", "reason", "type", "spec.driver",
}  # fmt: skip


def _field(item: JsonObject, path: str) -> str:
    value: object = item
    for part in path.split("."):
        value = value.get(part, "") if isinstance(value, dict) else ""
    return "" if value is None else str(value)


def _terms(text: str) -> list[tuple[str, bool, str]]:
    terms = []
    for term in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"([^=!]+)(==?|!=)(.*)", term)
        if match is None:
            raise errors.bad_request(f"unable to parse field selector {term!r}")
        if match[1] not in _FIELDS:
            raise errors.bad_request(f"field label not supported: {match[1]}")
        terms.append((match[1], match[2] != "!=", match[3]))
    return terms


def _label_test(term: re.Match[str]) -> Selector:
    if term["key"]:
        values = {value.strip() for value in term["values"].split(",")}
        key, inside = term["key"], not term["not"]
        return lambda item: (_labels(item).get(key) in values) is inside
    plain = term["plain"].strip()
    comparison = re.fullmatch(r"([\w./-]+)\s*(==?|!=)\s*([\w.-]*)", plain)
    if comparison:
        key, equal, value = comparison[1], comparison[2] != "!=", comparison[3]
        return lambda item: (_labels(item).get(key) == value) is equal
    if not re.fullmatch(r"!?[\w./-]+", plain):
        raise errors.bad_request(f"unable to parse label selector {plain!r}")
    key, present = plain.lstrip("!"), not plain.startswith("!")
    return lambda item: (key in _labels(item)) is present


def _labels(item: JsonObject) -> dict[str, str]:
    return item["metadata"].get("labels") or {}


def compile_selectors(label_selector: str, field_selector: str) -> Selector:
    """One predicate for both; empty texts select everything. Raises ApiError 400 for what can't be parsed."""
    fields = _terms(field_selector)
    labels = [_label_test(match) for match in _SET.finditer(label_selector) if match[0].strip()]
    return lambda item: (
        all((_field(item, path) == value) is equal for path, equal, value in fields)
        and all(test(item) for test in labels)
    )
