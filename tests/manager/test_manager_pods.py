"""Kubelet's list of pods: parsed piece by piece, with the same result as at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager import kubelet_pods
from manager.kubelet_pods import PodListParser

TEXTS = st.text(alphabet='a"\\\\{}[],:', max_size=8) | st.just('},{"metadata":{')
VALUES = st.recursive(
    TEXTS | st.integers() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.just("metadata"), inner, max_size=3)
    ),
    max_leaves=8,
)
PODS = st.lists(
    st.fixed_dictionaries({"metadata": st.dictionaries(TEXTS, VALUES, max_size=2), "spec": VALUES}),
    max_size=5,
)


def encode(items: Any, *, spaces: bool = False) -> bytes:
    document = {"kind": "PodList", "metadata": {}, "items": items}
    return json.dumps(document, separators=None if spaces else (",", ":")).encode() + b"\n"


@given(st.lists(PODS, min_size=1, max_size=3), st.booleans())
def test_pieces_are_the_whole(lists: list[list[dict[str, Any]]], spaces: bool) -> None:
    parser = PodListParser()
    for items in lists:
        assert parser.parse(encode(items, spaces=spaces)) == items


def test_only_new_pods_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = PodListParser()
    pods = [{"metadata": {"name": f"p{index}", "uid": f"uid-{index:032}"}, "spec": {}} for index in range(50)]
    first = parser.parse(encode(pods[:49]))
    parsed: list[bytes] = []
    loads = kubelet_pods.orjson.loads
    monkeypatch.setattr(kubelet_pods.orjson, "loads", lambda text: parsed.append(text) or loads(text))
    second = parser.parse(encode(pods))
    assert second == pods
    # What is around the pods, the one that was the last, and the new one.
    assert [(b'"p48"' in text, b'"p49"' in text) for text in parsed] == [
        (False, False),
        (True, False),
        (False, True),
    ]
    assert all(one is other for one, other in zip(first[:48], second, strict=False))
    parsed.clear()
    assert parser.parse(encode(pods)) is second  # asked again for the next resource
    assert not parsed
    shuffled = [pods[0], *reversed(pods[1:49]), pods[49]]  # kubelet keeps its pods in a map
    assert parser.parse(encode(shuffled)) == shuffled
    assert len(parsed) == 1


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b'{"items":[1]}', b'{"items":{}}', b'{"items":[{"metadata":{}]}']
)
def test_what_is_no_list_of_pods_is_an_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        PodListParser().parse(text)
