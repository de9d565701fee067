"""The HTTP server itself: what its answers carry, and how it ends."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

import pytest

from manager.observe import http
from manager.observe.report import NodeReport


@pytest.fixture
def server() -> Iterator[str]:
    """The address of a running one."""
    report = NodeReport("node-1", "none", "", "", "watched", (), ())
    pages = http.Pages(lambda: b"", lambda: report, list, lambda: ["not yet"], "1.2.3")
    listener = http.listen("127.0.0.1", 0)
    made = http.WebServer(http.application(pages), listener)
    made.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    made.stop()
    assert not made._thread.is_alive()


def test_an_answer_says_when_it_was_given(server: str) -> None:
    before = datetime.now(UTC)
    with urllib.request.urlopen(f"{server}/version", timeout=10) as answer:
        dates = answer.headers.get_all("Date")
    assert len(dates) == 1
    second = timedelta(seconds=1)  # what a Date leaves out
    assert before - second < parsedate_to_datetime(dates[0]) <= datetime.now(UTC)
