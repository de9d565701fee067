"""What the chart renders, by Helm's own engine, for the tests that look at it; without one those are skipped."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from deploy import manifests

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a tenth of the time, where libyaml is

helm_python = pytest.importorskip("helm_python", reason="Helm's engine (helm-python-sdk) has no wheel for this machine")


def objects(values: dict[str, Any] | None = None) -> dict[tuple[str, str], dict[str, Any]]:
    """Everything that is rendered, by kind and name."""
    rendered = manifests.render(values)
    documents = [
        document
        for name, text in rendered.items()
        if name.endswith(".yaml")
        for document in yaml.load_all(text, LOADER)
        if document
    ]
    found = {(item["kind"], item["metadata"]["name"]): item for item in documents}
    assert len(found) == len(documents)
    return found


def container(item: dict[str, Any]) -> dict[str, Any]:
    (only,) = item["spec"]["template"]["spec"]["containers"]
    return dict(only)


def rules(item: dict[str, Any]) -> set[tuple[str, str]]:
    return {(resource, verb) for rule in item["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
