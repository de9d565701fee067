"""Answers of which one object is nested deeper than a parser goes: the others are read, and null stands for the depth."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any, cast

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kube_client.test_kube_client_endpoint import server
from vcuda.kube.client import Client
from vcuda.kube.errors import ApiError, ApiUnreachable
from vcuda.kube.informer import Handlers, Informer
from vcuda.kube.nesting import MOST_LEVELS, as_text, cut, loads

_DEEP = 5_000  # levels; Kubernetes takes parameters of 10 KiB
_PARSERS = pytest.mark.parametrize("parse", [json.loads, orjson.loads])

_texts = st.text(st.sampled_from('[]{}"\\,:\u00e9 a'), max_size=6)
_documents = st.recursive(
    st.none() | st.booleans() | st.integers() | _texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts, inner, max_size=4),
    max_leaves=40,
)


def named(name: str, deep: int = 0) -> bytes:
    thing = json.dumps({"metadata": {"name": name, "resourceVersion": "9"}, "parameters": "DEEP"}).encode()
    return thing.replace(b'"DEEP"', b'{"a":[' * (deep // 2) + b"]}" * (deep // 2) or b"null")


def answer(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


def followed(client: Client) -> list[str]:
    seen: list[str] = []

    def name(thing: Any) -> str:
        return str(thing["metadata"]["name"])

    def gone(thing: Any) -> None:
        seen.append(name(thing))

    Informer(client, Handlers("resourceclaims", name, gone, lambda keys, _: seen.extend(sorted(keys))))._list()
    return seen


@_PARSERS
def test_of_a_list_with_one_deep_object_every_object_is_read(parse: Callable[[bytes], Any]) -> None:
    items = b",".join([named("a"), named("deep", _DEEP), named("b")])
    with server([answer(b'{"metadata":{"resourceVersion":"5"},"items":[%b]}' % items)]) as endpoint:
        assert followed(Client(endpoint, parse=parse)) == ["a", "b", "deep"]


@_PARSERS
def test_a_deep_object_s_event_is_read(parse: Callable[[bytes], Any]) -> None:
    client = Client(cast(Any, None), parse=parse)
    found = client.parsed(b'{"type":"ADDED","object":%b}' % named("deep", _DEEP))
    assert found["object"]["metadata"]["name"] == "deep"
    assert depth(found) == MOST_LEVELS


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (rb"\ud800", "\ufffd"),
        (rb"\uDFff.", "\ufffd."),
        (rb"\ud83d\ude00", "\U0001f600"),
        (rb"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (rb"\\ud800 \\\ud800\u0041", "\\ud800 \\\ufffdA"),
        (b"a\xffb", "a\ufffdb"),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),
    ],
)
@_PARSERS
def test_what_is_no_text_hides_no_object(sent: bytes, read: str, parse: Callable[[bytes], Any]) -> None:
    """A tenant's claim whose parameters held half of a surrogate pair ended the watch of all claims, and each list after it."""
    body = b'{"metadata":{"resourceVersion":"5"},"items":[%b]}' % named("a").replace(b"null", b'{"x":"%b"}' % sent)
    with server([answer(body)]) as endpoint:
        assert followed(Client(endpoint, parse=parse)) == ["a"]
    found = Client(cast(Any, None), parse=parse).parsed(body)
    assert found["items"][0]["parameters"] == {"x": read}


def test_a_malformed_object_at_the_parser_s_own_bound_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    thing = orjson.loads(b"[" * 1000 + b"]" * 1000)
    one = Informer(cast(Any, None), Handlers("resourceclaims", repr, print, print))
    assert one._take(lambda found: repr(found) * 0 or found["metadata"], {"deep": thing}) is None
    assert "resourceclaims: an object was skipped" in caplog.text


def test_an_error_that_is_nested_too_deep_is_an_error_of_ours() -> None:
    body = b'{"message":"no","x":%b}' % (b"[" * _DEEP + b"]" * _DEEP)
    with server([answer(body, b"403 Forbidden")]) as endpoint, pytest.raises(ApiError, match=r"403: no$"):
        Client(endpoint).call("GET", "/x")


@pytest.mark.parametrize("wrong", [b"[" * _DEEP, b"]" * _DEEP, b'"' * 3, b'{"a":' * _DEEP + b"1", b"", b"\\"])
@_PARSERS
def test_what_is_not_json_stays_so(wrong: bytes, parse: Callable[[bytes], Any]) -> None:
    with pytest.raises(ApiUnreachable, match="not JSON"):
        Client(cast(Any, None), parse=parse).parsed(wrong)


def depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


def shallow(value: Any, levels: int) -> Any:
    """The document with null for what is deeper, by a walk over its values."""
    if isinstance(value, dict):
        return {key: shallow(item, levels - 1) for key, item in value.items()} if levels else None
    if isinstance(value, list):
        return [shallow(item, levels - 1) for item in value] if levels else None
    return value


@given(_documents, st.integers(1, 6), st.sampled_from([None, 2]), st.booleans())
def test_the_cut_is_the_document_with_its_deep_parts_null(value: Any, levels: int, indent: Any, ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii).encode()
    assert json.loads(cut(text, levels)) == shallow(value, levels)
    if depth(value) <= levels:
        assert cut(text, levels) is text


@given(st.lists(st.sampled_from(["a", r"\n", r"\u00e9", r"\\", r"\ud83d", r"\ude00", "u", "d", "800"])).map("".join))
def test_only_halves_of_pairs_are_replaced(text: str) -> None:
    whole = json.loads(f'"{text}"')
    pairs = whole.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert json.loads(as_text(f'"{text}"'.encode())) == pairs


@given(st.binary() | st.text(st.sampled_from('[]{}"\\,:1')).map(str.encode))
def test_no_text_makes_another_error_than_the_parser_s(text: bytes) -> None:
    cut(text, 2)
    as_text(text)
    with contextlib.suppress(ValueError):
        loads(text, orjson.loads)
