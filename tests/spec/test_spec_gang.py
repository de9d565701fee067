"""Gangs in pods: our annotation, the field's labels, and what is neither."""

from __future__ import annotations

import pytest

from vcuda.spec import gang
from vcuda.spec.errors import InvalidRequest
from vcuda.spec.gang import Gang
from vcuda.spec.names import Names

NAMES = Names()
OLD = "pod-group.scheduling.sigs.k8s.io/"


@pytest.mark.parametrize(
    ("annotation", "labels", "expected"),
    [
        (None, {}, None),
        ("train/4", {}, Gang("train", 4)),
        (" a/b/16 ", {}, Gang("a/b", 16)),
        ("4", {"scheduling.x-k8s.io/pod-group": "g"}, Gang("g", 4)),
        ("own/2", {"scheduling.x-k8s.io/pod-group": "g"}, Gang("own", 2)),
        (None, {"scheduling.x-k8s.io/pod-group": "g"}, None),
        (None, {OLD + "name": "g", OLD + "min-available": "8"}, Gang("g", 8)),
        (None, {OLD + "name": "g"}, None),
        (None, {OLD + "min-available": "8"}, None),
    ],
)
def test_names_and_sizes(annotation: str | None, labels: dict[str, str], expected: Gang | None) -> None:
    annotations = {} if annotation is None else {NAMES.gang: annotation}
    assert gang.parse(annotations, labels, NAMES) == expected


@pytest.mark.parametrize("text", ["", "/", "x/", "/4", "x/0", "x/1025", "x/-1", "x/١", "4", "x" * 300 + "/2"])
def test_malformed_ones_name_the_annotation(text: str) -> None:
    with pytest.raises(InvalidRequest, match="vcuda-gang"):
        gang.parse({NAMES.gang: text}, {}, NAMES)


def test_a_malformed_label_is_named() -> None:
    with pytest.raises(InvalidRequest, match="min-available"):
        gang.parse({}, {OLD + "name": "g", OLD + "min-available": "many"}, NAMES)
