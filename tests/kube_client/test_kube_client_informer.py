"""Threads that go on whatever they meet, and informers that resume where they were."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from vcuda.kube import informer as informers
from vcuda.kube.client import Client
from vcuda.kube.endpoint import Endpoint
from vcuda.kube.errors import ApiError, ApiUnreachable, KubeError
from vcuda.kube.informer import Handlers, Informer
from vcuda.kube.worker import Worker


def eventually(check: Callable[[], Any], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.005)


@contextlib.contextmanager
def running(worker: Worker) -> Iterator[None]:
    worker.start()
    try:
        yield
    finally:
        worker.stop()
        worker.join(5)
        assert not worker._thread.is_alive()


def test_a_worker_survives_everything_and_says_what_keeps_failing(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[float] = []
    told: list[int] = []

    def work() -> None:
        calls.append(time.monotonic())
        if len(calls) <= 6:
            raise OSError("no token file")

    worker = Worker("sweeper", work, longest_wait=0.02, failed=lambda: told.append(1))
    with running(worker):
        eventually(lambda: worker.problem() is not None or len(calls) > 6)
        eventually(lambda: len(calls) > 8)
        assert worker.problem() is None and worker.failures == 6 == len(told)
    assert "sweeper: an unexpected failure" in caplog.text and "no token file" in caplog.text


def test_what_fails_for_ever_is_named_and_what_is_expected_is_not() -> None:
    def work() -> None:
        raise ZeroDivisionError("a defect")

    worker = Worker("keeper", work, longest_wait=0.01)
    with running(worker):
        eventually(lambda: worker.problem() is not None)
        assert "keeper has failed" in str(worker.problem()) and "a defect" in str(worker.problem())

    def away() -> None:
        raise ApiUnreachable("away")

    patient = Worker("patient", away, longest_wait=0.01, expected=KubeError)
    with running(patient):
        eventually(lambda: patient.failures > 8)
        assert patient.problem() is None


@pytest.mark.parametrize("stood", [0.0, 60.0])
def test_the_pause_behind_a_watch_that_stood_is_a_short_one(stood: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch is cut now and then; counted as one row of failures, the pauses came to half a minute for ever."""
    monkeypatch.setattr(informers, "_STOOD", stood)
    server = Server(event("ADDED", "9"), ApiUnreachable("it was cut off"))
    one, _ = informer(server)
    waits: list[float] = []
    monkeypatch.setattr(one.worker._stop, "wait", waits.append)
    with running(one.worker):
        eventually(lambda: len(waits) >= 10)
    assert (max(waits[:10]) <= 0.4) == (stood == 0.0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_ended_all_the_same_is_named() -> None:
    def work() -> None:
        raise SystemExit

    worker = Worker("w", work)
    worker.start()
    worker.join(5)
    assert worker.problem() == "w has ended; see the log"


class Server:
    """Lists object a at version 7; each watch shows `events` and ends, or breaks with an exception among them."""

    def __init__(self, *events: Any) -> None:
        self.events = events
        self.lists, self.watched_from = 0, list[str]()
        self.at = ""

    def pages(self, *_: str) -> Iterator[tuple[list[dict[str, Any]], str]]:
        self.lists += 1
        yield [{"metadata": {"name": "a"}}], "7"

    def version(self, *_: str) -> str:
        return self.at

    def watch(self, _kind: str, _namespace: str, version: str, _selector: str, **_: Any) -> Server:
        self.watched_from.append(version)
        return self

    def lines(self, _rest: float = 0.0) -> Iterator[bytes]:
        for event in self.events:
            if isinstance(event, Exception):
                raise event
            yield json.dumps(event).encode()

    def close(self) -> None: ...

    parsed = Client(cast(Endpoint, None)).parsed


def informer(server: Server, **options: Any) -> tuple[Informer, list[Any]]:
    seen: list[Any] = []
    handlers = Handlers(
        "nodes",
        lambda thing: seen.append(("seen", thing["metadata"]["name"])) or thing["metadata"]["name"],
        lambda thing: seen.append(("lost", thing["metadata"]["name"])),
        lambda keys, _: seen.append(("listed", sorted(keys))),
    )
    return Informer(cast(Client, server), handlers, **options), seen


def event(kind: str, version: str, name: str = "b") -> dict[str, Any]:
    return {"type": kind, "object": {"metadata": {"name": name, "resourceVersion": version}}}


def test_it_lists_once_and_resumes_from_the_last_version_it_saw() -> None:
    server = Server(event("ADDED", "9"), event("BOOKMARK", "11"), event("DELETED", "12"))
    one, seen = informer(server)
    one.once()
    one.once()
    assert server.lists == 1 and server.watched_from == ["7", "12"]
    assert seen[:4] == [("seen", "a"), ("listed", ["a"]), ("seen", "b"), ("lost", "b")]


def test_it_says_when_nothing_is_heard_and_when_a_watch_has_begun_again() -> None:
    server, said = Server(event("ADDED", "9")), list[str]()
    one, _ = informer(server)
    its = one._handlers._replace(cut=lambda: said.append("cut"), follows=lambda: said.append("follows"))
    one = Informer(cast(Client, server), its)
    one.once()
    server.events = (event("ADDED", "10"), ApiUnreachable("it was cut off"))
    with pytest.raises(ApiUnreachable):
        one.once()
    assert said == ["follows", "cut", "follows", "cut"]


@pytest.mark.parametrize(("silent", "times"), [(70.0, 1), (80.0, 2)])
def test_what_comes_behind_a_silence_longer_than_a_bookmark_takes_may_be_late(
    silent: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, said = [1000.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Silent(Server):
        def lines(self, _rest: float = 0.0) -> Iterator[bytes]:
            for line in super().lines():
                yield line
                now[0] += silent

    one, _ = informer(server := Silent(event("ADDED", "9"), event("DELETED", "10")))
    one = Informer(cast(Client, server), one._handlers._replace(follows=lambda: said.append("follows")))
    one.once()
    assert len(said) == times


@pytest.mark.parametrize(
    "gone", [{"type": "ERROR", "object": {"code": 410, "message": "too old"}}, ApiError(410, "too old")]
)
def test_a_version_that_is_too_old_is_a_new_list_and_no_failure(gone: Any) -> None:
    server = Server(gone)
    one, _ = informer(server)
    one.once()
    one.once()
    assert server.lists == 2


def test_a_server_that_went_back_is_listed_again(caplog: pytest.LogCaptureFixture) -> None:
    """etcd was restored: by the version of a list of one object, before the next watch."""
    server = Server(event("ADDED", "9"))
    one, _ = informer(server)
    one.once()
    server.at = "8"
    with caplog.at_level("INFO"):
        one.once()
    assert server.lists == 1 and server.watched_from == ["7"]
    one.once()
    assert server.lists == 2 and server.watched_from == ["7", "7"]
    assert "went back from version 9 to 8" in caplog.text


@pytest.mark.parametrize("noticed", ["before the watch", "by the list alone", "not at all"])
def test_a_list_of_a_server_that_went_back_is_told_apart(noticed: str) -> None:
    """What it does not show was not deleted."""
    server = Server(event("ADDED", "9" if noticed != "not at all" else "7"))
    told: list[str] = []
    handlers = Handlers(
        "nodes", lambda thing: str(thing["metadata"]["name"]), lambda _: None, lambda *_: told.append("listed"),
        relisted=lambda *_: told.append("relisted"),
    )  # fmt: skip
    one = Informer(cast(Client, server), handlers)
    one.once()
    if noticed == "before the watch":
        server.at = "8"
    else:
        server.events = (ApiError(410, "too old"),)
    one.once()
    server.events = (event("BOOKMARK", "7"),)
    one.once()
    assert told == ["listed", "listed" if noticed == "not at all" else "relisted"]
    server.at = ""
    server.events = (ApiError(410, "too old"),)
    one.once()
    server.events = (event("BOOKMARK", "7"),)
    one.once()
    assert told[2:] == ["listed"]


@pytest.mark.parametrize("kind", ["BOOKMARK", "MODIFIED", "DELETED"])
def test_an_event_older_than_the_one_before_it_is_not_believed(kind: str) -> None:
    server = Server(event("ADDED", "9"), event(kind, "8", "c"), event("ADDED", "10", "d"))
    one, seen = informer(server)
    one.once()
    assert [what for what in seen if what[1] in ("c", "d")] == []
    one.once()
    assert server.lists == 2


def test_versions_that_are_no_numbers_are_not_compared() -> None:
    server = Server(event("ADDED", "b"), event("ADDED", "a"))
    one, _ = informer(server)
    one.once()
    one.once()
    assert server.lists == 1


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        (ApiError(403, "nodes is forbidden"), ApiError, "403: nodes is forbidden"),
        ({"type": "ERROR", "object": {"code": None, "message": "no code"}}, ApiError, "500: no code"),
        (
            {"type": "ERROR", "object": {"code": 500, "message": "long \n " * 1000}},
            ApiError,
            "^.* 500: (long ){39}long…$",
        ),
        ({"type": "ERROR"}, ApiError, "500: "),
        ({"type": "ERROR", "object": "x"}, ApiError, "500: "),
    ],
)
def test_what_ends_a_watch_is_named_and_it_goes_on_where_it_was(
    wrong: Any, kind: type[Exception], message: str
) -> None:
    server = Server(event("ADDED", "9"), wrong)
    one, _ = informer(server)
    with pytest.raises(kind, match=message):
        one.once()
    server.events = (event("BOOKMARK", "10"),)
    one.once()
    assert (server.lists, server.watched_from) == (1, ["7", "9"])


BROKEN = [
    {"type": "ADDED"},
    {"type": "ADDED", "object": None},
    {"type": "MODIFIED", "object": "x"},
    {"type": "DELETED", "object": {}},
    {"type": "ADDED", "object": {"metadata": "x"}},
    {"object": {"metadata": [1]}},
    {},
    [],
    ["ADDED"],
    "ADDED",
    7,
    None,
]


@pytest.mark.parametrize("broken", BROKEN)
def test_an_event_of_a_wrong_shape_is_skipped_and_made_up_for(
    broken: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended the watch, which began again where it was: with that event."""
    server, failed = Server(event("ADDED", "9"), broken, event("ADDED", "10", "c")), list[int]()
    one, seen = informer(server, failed=lambda: failed.append(1))
    one.once()
    assert ("seen", "c") in seen and len(failed) == 1 and server.lists == 1
    assert "nodes: an event was skipped: _Unreadable('it" in caplog.text
    server.events = (event("BOOKMARK", "11"),)
    one.once()
    assert server.watched_from == ["7", "10"] and server.lists == 1, "the last list is too young for another"
    monkeypatch.setattr(informers, "_BETWEEN_LISTS", 0.0)
    one.once()
    one.once()
    assert server.lists == 2
    assert len([one for one in caplog.records if one.levelname == "WARNING"]) == 1, "told once a minute"


def test_a_server_that_sends_nothing_else_is_no_reason_to_spin() -> None:
    server, failed = Server(*BROKEN), list[int]()
    one, _ = informer(server, failed=lambda: failed.append(1))
    with running(one.worker):
        time.sleep(1.0)
    assert server.lists == 1 and len(server.watched_from) < 6


def test_an_object_that_is_gone_but_names_nobody_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(informers, "_BETWEEN_LISTS", 0.0)
    server = Server({"type": "DELETED", "object": {"metadata": {"resourceVersion": "9"}}})
    one, _ = informer(server)
    one.once()
    one.once()
    assert server.lists == 2


def test_a_version_of_any_length_is_no_number() -> None:
    server = Server(event("ADDED", "9" * 5000), event("ADDED", "10", "c"))
    one, seen = informer(server)
    one.once()
    assert ("seen", "c") in seen


def test_a_watch_that_ends_at_once_does_not_spin() -> None:
    """24 lists a second were seen of such a server."""
    server = Server()
    one, _ = informer(server)
    with running(one.worker):
        time.sleep(1.0)
    assert server.lists == 1 and len(server.watched_from) < 6


def test_a_malformed_object_is_skipped_and_a_handlers_other_failures_are_the_workers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failed: list[int] = []
    server = Server({"type": "ADDED", "object": {"metadata": {}}}, event("ADDED", "9"))
    one, seen = informer(server, failed=lambda: failed.append(1))
    one.once()
    assert ("seen", "b") in seen and failed == [1] and "nodes: an object was skipped" in caplog.text


@pytest.mark.parametrize("when", ["while it waits", "while it asks for the watch"])
def test_stopping_wakes_an_informer_that_waits_for_its_server(when: str) -> None:
    closed = threading.Event()

    class Waiting(Server):
        def lines(self, _rest: float = 0.0) -> Iterator[bytes]:
            closed.wait(20)
            raise ApiUnreachable("broke off")
            yield b""

        def close(self) -> None:
            closed.set()

        def watch(self, *args: Any, **named: Any) -> Any:
            found = super().watch(*args, **named)
            if when != "while it waits":
                one.stop()  # there is nothing to close yet: it waited for 90 s
            return found

    server = Waiting()
    one, _ = informer(server)
    one.start()
    eventually(lambda: server.watched_from)
    assert one.unheard_seconds() < 5
    if when == "while it waits":
        one.stop()
    one.worker.join(5)
    assert not one.worker._thread.is_alive() and one.worker.failures == 0


def test_a_watch_that_can_be_begun_again_is_an_answer_however_little_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    one, _ = informer(server := Server(event("ADDED", "9")))
    now[0] += 30
    assert one.unanswered_seconds() == 30
    with pytest.raises(ApiUnreachable, match="at once"):
        one.once()
    assert one.unanswered_seconds() == 0
    now[0] += 90
    server.events = ()
    with pytest.raises(ApiUnreachable, match="at once"):
        one.once()
    assert one.unanswered_seconds() == 0 and one.unheard_seconds() == 90

    def fail(*_: str) -> str:
        raise ApiUnreachable("it hangs")

    monkeypatch.setattr(server, "version", fail)
    now[0] += 100
    with pytest.raises(ApiUnreachable, match="it hangs"):
        one.once()
    assert one.unanswered_seconds() == 100
