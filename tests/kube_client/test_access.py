"""Who may see pages that name tenants: what the API server is asked about tokens that anybody can make up."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, cast

import pytest

from vcuda.kube.access import Access
from vcuda.kube.client import Client


class Api:
    def __init__(self) -> None:
        self.tokens: list[str] = []

    def call(self, _method: str, _path: str, body: dict[str, Any], **_: Any) -> dict[str, Any]:
        spec = body["spec"]
        if body["kind"] == "SubjectAccessReview":
            return {"status": {"allowed": True}}
        self.tokens.append(spec["token"])
        return {"status": {"authenticated": spec["token"] == "admin", "user": {"username": "admin"}}}


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("vcuda.kube.access.time.monotonic", lambda: now[0])
    return now


def test_of_made_up_tokens_ten_a_second_are_asked_about(api: Api, clock: list[float]) -> None:
    asked = Access(cast(Client, api))
    answers = [asked.refusal(f"made up {number}", "/cluster") for number in range(1000)]
    assert answers[:20] == [HTTPStatus.UNAUTHORIZED] * 20
    assert set(answers[20:]) == {HTTPStatus.TOO_MANY_REQUESTS} and len(api.tokens) == 20
    clock[0] += 1
    assert [asked.refusal(f"later {number}", "/cluster") for number in range(1000)].count(HTTPStatus.UNAUTHORIZED) == 10


def test_who_was_allowed_lately_is_asked_about_and_remembered_beside_made_up_tokens(
    api: Api, clock: list[float]
) -> None:
    asked = Access(cast(Client, api))
    assert asked.refusal("admin", "/cluster") is None
    for minute in range(3):
        for number in range(1000):
            asked.refusal(f"made up {minute} {number}", "/cluster")
        before = len(api.tokens)
        assert asked.refusal("admin", "/cluster") is None
        assert asked.refusal("admin", f"/explain/{minute}") is None
        assert api.tokens[before:].count("admin") == (1 if minute == 0 else 2)
        clock[0] += 60
