"""Events that repeat: one object whose count rises, of bounded number, whatever is lost on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from localcluster.apiserver.faults import Fault, Request
from localcluster.apiserver.server import Server
from vcuda.kube import events
from vcuda.kube.client import Client
from vcuda.kube.config import Login
from vcuda.kube.endpoint import Endpoint
from vcuda.kube.errors import ApiError, ApiUnreachable

POD = {"kind": "Pod", "namespace": "default", "name": "p", "uid": "u"}
SOURCE = {"component": "gpu-manager", "host": "n"}


class Told:
    """A correlator before the stand-in API server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.correlator = events.Correlator()
        self.client = Client(Endpoint(Login(server.url, token=lambda: server.token), agent="test"))

    def say(self, message: str, *, kind: str = "Warning", reason: str = "MemoryRefused", **about: str) -> None:
        self.correlator.send(self.client, SOURCE, self.correlator.note(POD | about, kind, reason, message))

    @property
    def there(self) -> list[dict[str, Any]]:
        return list(self.client.call("GET", "/api/v1/namespaces/default/events")["items"])

    def counts(self) -> list[tuple[str, int]]:
        return [(event["message"], event["count"]) for event in self.there]


@pytest.fixture
def told() -> Iterator[Told]:
    server = Server()
    server.start()
    yield Told(server)
    server.stop()


def test_what_is_said_again_raises_the_count_and_has_the_last_words(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 0.0)
    told.say("refused 512 MiB: 3 times")
    monkeypatch.setattr("time.time", lambda: 3600.0)
    told.say("refused 1.5 GiB: 12 times")
    (event,) = told.there
    assert (event["count"], event["message"]) == (2, "refused 1.5 GiB: 12 times")
    assert (event["firstTimestamp"], event["lastTimestamp"]) == ("1970-01-01T00:00:00Z", "1970-01-01T01:00:00Z")
    assert event["involvedObject"]["uid"] == "u" and event["source"] == SOURCE


def test_other_words_objects_reasons_and_kinds_are_other_events(told: Told) -> None:
    for card in (0, 1):
        told.say(f"card {card}: Xid 79")
    told.say("card 0: Xid 48")
    told.say("container 7 waits")
    told.say("container 8 waits")
    told.say("card GPU-1-1 is gone")
    told.say("card GPU-1-2 is gone")
    told.say("card 0: Xid 79", uid="v")
    told.say("card 0: Xid 79", reason="CardUnhealthy")
    told.say("30 cores", kind="Normal")
    told.say("40 cores", kind="Normal")
    assert [event["count"] for event in told.there] == [1] * 11


def test_of_one_reason_about_one_object_there_are_nine_events_at_most(told: Told) -> None:
    """A tenant names its processes as it likes."""
    for number in range(50):
        told.say(f"process called x{number}")
    counts = dict(told.counts())
    assert len(counts) == 9 and counts["(combined from similar events): process called x49"] == 42


def test_what_is_remembered_is_bounded(told: Told) -> None:
    for number in range(2000):
        told.correlator.note(POD | {"uid": f"u{number}"}, "Warning", "MemoryRefused", "x" * 5000)
    assert len(told.correlator._series) == 512
    said = told.correlator.note(POD | {"uid": "u1999"}, "Warning", "MemoryRefused", "x" * 5000)
    assert said.count == 2 and len(said.message) == 1024


def test_an_event_that_kubernetes_has_forgotten_is_made_anew_and_counts_from_there(told: Told) -> None:
    told.say("no room")
    told.say("no room")
    (old,) = told.there
    told.server.remove("events", f"default/{old['metadata']['name']}")
    told.say("no room")
    (new,) = told.there
    assert new["count"] == 1 and new["metadata"]["name"] != old["metadata"]["name"]
    told.say("no room")
    assert told.counts() == [("no room", 2)]


@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_an_answer_that_is_lost_counts_nothing_twice(told: Told, method: str) -> None:
    if method == "PATCH":
        told.say("no room")
    lost: list[str] = []

    def hook(request: Request) -> Fault | None:
        if request.method != method:
            return None
        lost.append(request.path)
        return Fault(0, done=True)

    told.server.hook = hook
    said = told.correlator.note(POD, "Warning", "MemoryRefused", "no room")
    with pytest.raises(ApiUnreachable):
        told.correlator.send(told.client, SOURCE, said)
    told.server.hook = lambda _: None
    told.say("no room")  # the next one, and the try that comes with it
    assert lost and told.counts() == [("no room", 3 if method == "PATCH" else 2)]


def test_a_refused_event_is_an_error(told: Told) -> None:
    told.server.hook = lambda request: Fault(403) if request.method != "GET" else None
    with pytest.raises(ApiError, match="403"):
        told.say("no room")
