"""Kubelet's list of pods: parsed piece by piece, with the same result as at once."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.kubelet import incremental_json
from manager.kubelet.incremental_json import Form, Pieces
from manager.kubelet.pods import PodListParser, essential

TEXTS = st.text(alphabet='a"\\\\{}[],:', max_size=8) | st.just('},{"metadata":{')
VALUES = st.recursive(
    TEXTS | st.integers(-(2**53), 2**53) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.just("metadata"), inner, max_size=3),
    max_leaves=8,
)
PODS = st.lists(
    st.fixed_dictionaries({"metadata": st.dictionaries(TEXTS, VALUES, max_size=2), "spec": VALUES}),
    max_size=5,
)


def encode(items: Any, *, spaces: bool = False) -> bytes:
    document = {"kind": "PodList", "metadata": {}, "items": items}
    return json.dumps(document, separators=None if spaces else (",", ":")).encode() + b"\n"


def texts(pods: list[Any]) -> list[str]:
    """Comparable, and in no order, as kubelet lists them."""
    return sorted(json.dumps(pod, sort_keys=True) for pod in pods)


@given(st.lists(PODS, min_size=1, max_size=3), st.booleans())
def test_pieces_are_the_whole(lists: list[list[dict[str, Any]]], spaces: bool) -> None:
    parser = PodListParser()
    for items in [*lists, *reversed(lists)]:
        assert texts(parser.parse(encode(items, spaces=spaces))) == texts([essential(item) for item in items])


def a_pod(index: int, **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": f"p{index}", "uid": f"uid-{index:032}"}, "spec": {}, **more}


def test_only_new_pods_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = PodListParser()
    pods = [a_pod(index) for index in range(50)]
    first = parser.parse(encode(pods[:49]))
    parsed: list[bytes] = []
    loads = incremental_json.orjson.loads
    monkeypatch.setattr(incremental_json.orjson, "loads", lambda text: parsed.append(text) or loads(text))
    second = parser.parse(encode(pods))
    assert second == pods
    # What is around the pods, and the new one.
    assert [(b'"p48"' in text, b'"p49"' in text) for text in parsed] == [(False, False), (False, True)]
    assert all(one is other for one, other in zip(first, second, strict=False))
    for order in (pods, [pods[49], *reversed(pods[:49])]):  # kubelet keeps its pods in a map
        parsed.clear()
        assert parser.parse(encode(order)) is second
        assert len(parsed) == 1


def test_a_pod_that_has_changed_is_another_and_one_that_has_gone_is_gone() -> None:
    parser = PodListParser()
    pods = [a_pod(index, status={"phase": "Pending"}) for index in range(5)]
    first = parser.parse(encode(pods))
    pods[2] = a_pod(2, status={"phase": "Pending", "reason": "x"})  # begins as the known one does
    second = parser.parse(encode(pods))
    assert texts(second) == texts(pods) and texts(first) != texts(pods)
    assert texts(parser.parse(encode(pods[1:]))) == texts(pods[1:])
    assert texts(parser.parse(encode([pods[1], *pods[1:]]))) == texts([pods[1], *pods[1:]])


def test_what_no_rule_reads_is_not_kept() -> None:
    names = ("name", "resources", "restartPolicy")
    container = {"name": "c", "resources": {"limits": {"a": 1}}, "restartPolicy": "Always"}
    pod = {
        "metadata": {"uid": "u", "annotations": {"a": "b"}, "labels": {}, "deletionTimestamp": "t"},
        "spec": {"nodeName": "n", "initContainers": [container], "containers": [container, 7]},
        "status": {"phase": "Failed", "reason": "r"},
    }
    full = json.loads(json.dumps(pod))
    full["metadata"]["managedFields"] = [{}]
    full["spec"]["volumes"] = [{}]
    full["spec"]["containers"][0] |= {"env": [{}], "image": "i"}
    full["status"]["conditions"] = [{}]
    (kept,) = PodListParser().parse(encode([full]))
    assert kept == pod and tuple(kept["spec"]["containers"][0]) == names
    odd: dict[str, Any] = {"metadata": [], "spec": 7, "status": None}
    assert essential(odd) == odd and essential({"spec": {"containers": 3}}) == {"spec": {"containers": 3}}


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{", b"{}", b'{"items":[1]}', b'{"items":{}}', b'{"items":[{"metadata":{}]}', b'{"items":[{},]}'],
)
def test_what_is_no_list_of_pods_is_an_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        PodListParser().parse(text)


@pytest.mark.parametrize(("right", "wrong"), [(b"},{", b"}x{"), (b"},{", b"}{"), (b"}]}", b"},]}"), (b"}]}", b"}x]}")])
def test_what_stands_between_known_pods_is_read_too(right: bytes, wrong: bytes) -> None:
    parser = PodListParser()
    data = encode([a_pod(0), a_pod(1)])
    parser.parse(data)
    assert data.count(right) == 1
    with pytest.raises(ValueError):
        parser.parse(data.replace(right, wrong))


class _Meddling(bytes):
    """A key in whose hashing another document is parsed: as when another thread runs between two steps of this one."""

    meddle: ClassVar[Callable[[], None]]

    def __hash__(self) -> int:
        type(self).meddle()
        return super().__hash__()


def test_two_threads_never_get_each_others_pods() -> None:
    """An admission and garbage collection share the parser; the wrong list would fail a pod with PodUnknown."""
    form = Form(b'"items":[', b"]", b"},{", lambda data, at: _Meddling(data[at : at + 9]), lambda _: True)
    _Meddling.meddle = lambda: None
    pieces = Pieces(form, lambda item: item)
    mine, others = (b'{"items":[{"uid":"%d"},{"uid":"%d"}]}' % pair for pair in ((1, 2), (3, 4)))
    pieces.parse(mine)
    hashes = 0
    threads: list[threading.Thread] = []

    def meddle() -> None:
        nonlocal hashes
        hashes += 1
        if hashes == 4 and not threads:  # the last item is about to be kept
            threads.append(threading.Thread(target=pieces.parse, args=(others,)))
            threads[0].start()
            threads[0].join(0.2)

    _Meddling.meddle = meddle
    assert pieces.parse(mine) == [{"uid": "1"}, {"uid": "2"}]
    threads[0].join()
