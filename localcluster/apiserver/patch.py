"""Merge patch (RFC 7386) and the part of strategic merge patch that clients of ours use."""

from __future__ import annotations

import copy
from typing import Any

from localcluster.apiserver import errors

# Lists that a strategic merge patch merges by a key; every other list is replaced. Source: the patchMergeKey tags of
# k8s.io/api/core/v1 types.
_MERGE_KEYS = {
    "conditions": "type", "containers": "name", "initContainers": "name", "ephemeralContainers": "name", "env": "name",
    "volumes": "name", "volumeMounts": "mountPath", "addresses": "type", "podIPs": "ip", "ownerReferences": "uid",
}  # fmt: skip
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"


def apply(target: Any, patch: Any, content_type: str) -> Any:
    """The patched copy of `target`. Raises ApiError 415 for other kinds of patch, 400 for one that is no object."""
    kind = content_type.partition(";")[0].strip()
    if kind not in (MERGE, STRATEGIC):
        raise errors.ApiError(415, "UnsupportedMediaType", f"patch type {kind!r} is not supported; send {MERGE}")
    if not isinstance(patch, dict):
        raise errors.bad_request("the patch is not a JSON object")
    return _merge(copy.deepcopy(target), patch, strategic=kind == STRATEGIC)


def _merge(target: Any, patch: dict[str, Any], *, strategic: bool) -> dict[str, Any]:
    result = target if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif strategic and name.startswith("$"):
            continue  # directives such as $setElementOrder: order means nothing to a stand-in
        elif isinstance(value, dict):
            result[name] = _merge(result.get(name), value, strategic=strategic)
        elif strategic and isinstance(value, list) and name in _MERGE_KEYS:
            result[name] = _merge_list(result.get(name) or [], value, _MERGE_KEYS[name])
        else:
            result[name] = copy.deepcopy(value)
    return result


def _merge_list(target: list[Any], patch: list[Any], key: str) -> list[Any]:
    result = list(target)
    for item in patch:
        if not isinstance(item, dict) or key not in item:
            raise errors.bad_request(f"an item of the patched list lacks its merge key {key!r}")
        place = next((i for i, old in enumerate(result) if old.get(key) == item[key]), None)
        if item.get("$patch") == "delete":
            result = [old for old in result if old.get(key) != item[key]]
        elif place is None:
            result.append(_merge({}, item, strategic=True))
        else:
            result[place] = _merge(result[place], item, strategic=True)
    return result
