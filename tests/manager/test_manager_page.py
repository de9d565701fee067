"""The page of a node in a real headless Chromium: cards and shares with bars from two readings, hostile names, a token."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from manager.observe import http
from manager.observe.report import CardReport, ContainerReport, NodeReport, ShareReport
from tests.manager.manager_support import node_report
from tests.support import genuine
from tests.support.browser import Browser, browser

pytestmark = pytest.mark.timeout(300)
HOSTILE = "<img src=x onerror=document.title='taken'>"
GIB = 2**30


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    try:
        with browser(tmp_path_factory.mktemp("browser")) as found:
            yield found
    except genuine.Unavailable as why:
        pytest.skip(str(why))


def report(at_s: float) -> NodeReport:
    """Two cards at a time: on the first one share that had half the card since the start, and one alone and uncapped."""
    card = CardReport(
        uuid="GPU-0", minor=0, model="Tesla T4", numa_node=0, memory_bytes=16 * GIB, memory_used_bytes=5 * GIB, gpu_percent=71,
        booked_cores=70, booked_memory_bytes=10 * GIB, healthy=True, problem="", other_memory_bytes=GIB,
    )  # fmt: skip
    sick = dataclasses.replace(
        card, uuid="GPU-1", minor=1, healthy=False, problem="Xid 79", memory_used_bytes=None, gpu_percent=None
    )
    share = ShareReport(
        uuid="GPU-0", minor=0, cores=30, core_limit=60, memory_limit_bytes=4 * GIB, memory_used_bytes=3 * GIB,
        memory_peak_bytes=4 * GIB, gpu_time_ns=int(5e8 * at_s), waited_ns=int(1e8 * at_s), launches=1, refusals=2,
    )  # fmt: skip
    alone = dataclasses.replace(share, cores=40, core_limit=40, gpu_time_ns=None, card_percent=33, refusals=0)
    containers = [
        ContainerReport(
            namespace=namespace, pod_name="train", pod_uid=namespace, container="main", cores=30, priority="normal",
            processes=2, cards=(one,),
        )
        for namespace, one in (("team-a", share), (HOSTILE, alone))
    ]  # fmt: skip
    return dataclasses.replace(node_report(*containers), cards=(card, sick), at_s=at_s, driver_version="580.1")


@pytest.fixture
def url() -> Iterator[str]:
    seconds = itertools.count(1)
    pages = http.Pages(lambda: b"", lambda: report(float(next(seconds))), list, list, "1.2.3")
    guard = {"good": None, "": HTTPStatus.UNAUTHORIZED}
    listener = http.listen("127.0.0.1", 0)
    server = http.WebServer(pages, listener, lambda token, _path: guard.get(token, HTTPStatus.FORBIDDEN))
    server.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    server.stop()


def test_cards_and_shares_live(chromium: Browser, url: str) -> None:
    enter = "((text) => { document.querySelector('.banner input').value = text; document.querySelector('.banner form').requestSubmit(); })"
    chromium.open(url, dark=True)
    chromium.until("!!document.querySelector('.banner input')")
    assert "team-a" not in chromium.run("document.documentElement.outerHTML")
    chromium.run(f"{enter}('good')")
    chromium.until("document.querySelectorAll('main > section > .block').length === 2")
    text = chromium.until(
        "document.body.innerText.includes('50 of 30 to 60') && document.body.innerText"
    )  # of two readings
    assert "33 of 40" in text and "unhealthy: Xid 79" in text and "2 refused" in text and "10 %" in text
    assert "3 GiB of 4 GiB" in text and "vcuda · node node-1" in text and HOSTILE in text
    assert (
        chromium.run("document.querySelectorAll('img').length") == 0
        and chromium.run("document.title") == "vcuda: node-1"
    )
    chromium.until("document.querySelectorAll('svg polyline').length === 2")
    if where := os.environ.get("PAGE_PICTURES"):
        chromium.picture(Path(where) / "daemon.png")
    assert [line for line in chromium.console if "401" not in line] == []
    chromium.run("sessionStorage.clear()")


def test_the_page_has_nothing_of_tenants_and_forbids_everything_foreign() -> None:
    pages = http.Pages(lambda: b"", lambda: report(1.0), list, list, "1.2.3")
    shown = pages.page("/")
    assert shown.status == HTTPStatus.OK and b"team-a" not in shown.body
    assert "default-src 'none'" in dict(shown.headers)["Content-Security-Policy"]
    assert b"/ for a browser" in pages.page("/nothing").body
