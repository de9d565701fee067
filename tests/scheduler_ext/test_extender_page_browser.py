"""The page of the cluster in a real headless Chromium: what is drawn, by keyboard too, with hostile texts, dark, narrow, with 5,000 nodes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from scheduler_ext.engine.core import Engine
from tests.scheduler_ext import page_support
from tests.scheduler_ext.extender_support import NAMES, pod
from tests.support import genuine
from tests.support.browser import Browser, browser

pytestmark = pytest.mark.timeout(300)
# Where pictures go for people to look at; they are no part of a test's verdict.
PICTURES = os.environ.get("PAGE_PICTURES", "")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    try:
        with browser(tmp_path_factory.mktemp("browser")) as found:
            yield found
    except genuine.Unavailable as why:
        pytest.skip(str(why))


def picture(chromium: Browser, name: str) -> None:
    if PICTURES:
        chromium.picture(Path(PICTURES) / f"{name}.png")


def test_nodes_cards_and_shares_are_drawn_and_nothing_is_complained_of(chromium: Browser) -> None:
    with page_support.served(page_support.small()) as url:
        chromium.open(url)
        chromium.until("document.querySelectorAll('.row').length === 3")
        assert chromium.run("document.querySelectorAll('.row')[0].innerText").startswith("gpu-3\n1 unhealthy")
        assert chromium.run("document.querySelectorAll('.nodes .card').length") == 20
        assert chromium.run("document.querySelectorAll('.nodes .card > span').length") == 27
        assert chromium.run("document.querySelectorAll('.nodes .card.sick').length") == 1
        # The first share of 30 cores and 64 of 318 blocks is as wide and as high as that, the second begins where it ends.
        drawn = "getComputedStyle(document.querySelectorAll('.row')[%d].querySelectorAll('.card')[1].children[%d]).%s"
        row = chromium.run(
            "[...document.querySelectorAll('.row')].findIndex((row) => row.innerText.startsWith('gpu-1'))"
        )
        wide, high = (float(chromium.run(drawn % (row, 0, side)).removesuffix("px")) for side in ("width", "height"))
        assert abs(wide - 0.3 * 60) < 1 and abs(high - 34 * 64 / 318) < 1
        assert float(chromium.run(drawn % (row, 1, "left")).removesuffix("px")) == pytest.approx(wide, abs=1)
        chromium.run("document.querySelector('#bare').click()")
        assert chromium.run("document.querySelectorAll('.row')[0].innerText").startswith("gpu-4\nNoInventory")
        chromium.run("document.querySelector('#bare').click()")
        text = chromium.run("document.body.innerText + document.querySelector('details').textContent")
        assert "Waiting pods: 2" in text and "team-a/trainer-7" in text and "790 of 1000" in text
        chromium.run("document.querySelector('.pod button').click()")
        chromium.until("document.querySelector('.ways') && document.querySelector('.ways').innerText")
        picture(chromium, "small")
        assert chromium.console == []


def test_it_is_all_there_by_keyboard(chromium: Browser) -> None:
    with page_support.served(page_support.small()) as url:
        chromium.open(url)
        chromium.until("document.querySelectorAll('.row').length === 3")
        chromium.key("/")
        for letter in "h100":
            chromium.key(letter)
        chromium.until("document.querySelectorAll('.row').length === 2")
        chromium.key("Escape")
        chromium.key("j")
        selected = "document.querySelector('.row[aria-selected=true]').innerText"
        assert chromium.run(selected).startswith("gpu-2")
        chromium.key("Enter")
        chromium.until(
            "document.querySelector('dialog').open && document.querySelectorAll('dialog .block').length === 8"
        )
        assert "team-b/" in chromium.run("document.querySelector('dialog').innerText")
        picture(chromium, "node")
        chromium.key("Escape")
        chromium.until("!document.querySelector('dialog').open")
        chromium.key("?")
        assert "filter nodes" in chromium.until("document.querySelector('dialog').innerText")
        chromium.key("Escape")
        chromium.key("f")
        assert chromium.run("document.activeElement.getAttribute('aria-label')") == "cores"


def test_would_it_fit(chromium: Browser) -> None:
    fill = "((at, value) => { const field = document.querySelectorAll('form.tools input')[at]; field.value = value; field.dispatchEvent(new Event('input')); })"
    said = "document.querySelector('form.tools').nextElementSibling.innerText"
    with page_support.served(page_support.small()) as url:
        chromium.open(url)
        chromium.until("document.querySelectorAll('.row').length === 3")
        assert "Yes: 60 cores and 20 blocks would fit now on 2 cards of 2 nodes, gpu-1 first" in chromium.run(said)
        chromium.run(f"{fill}(0, 99)")
        chromium.run(f"{fill}(1, 300)")
        assert "No: no healthy card has 99 cores and 300 blocks free now." in chromium.run(said)
        chromium.run(f"{fill}(0, 45)")
        chromium.run(f"{fill}(1, 30)")
        assert chromium.run("document.querySelectorAll('.card.fits').length") > 0
        # What fits is what the scheduler takes: by its own code.
        engine = page_support.small()
        there = [name for name in ("gpu-1", "gpu-2", "gpu-3") if engine.filter(pod("p", 45, 30), [name]).chosen]
        rows = "[...document.querySelectorAll('.row')].filter((row) => row.querySelector('.card.fits')).map((row) => row.innerText.split('\\n')[0]).sort()"
        assert chromium.run(rows) == there


HOSTILE = "<img src=x onerror=document.title='taken'><script>document.title='taken'</script>'\"`${1}"


def test_what_tenants_write_stays_text(chromium: Browser) -> None:
    engine = page_support.small()
    page_support.put(engine, HOSTILE, "gpu-2", "GPU-gpu-2-7", 5, 5, HOSTILE)
    waits = pod("p", 30, 10, uid="p", annotations={NAMES.card_model: "x" * 5000})
    waits["metadata"] |= {"namespace": HOSTILE, "name": HOSTILE, "creationTimestamp": HOSTILE}
    engine.see_pod(waits)
    engine.see_quotas({"data": {"quotas": json.dumps([{"namespace": "team", "cores": 1}])}})  # takes no hostile names
    with page_support.served(engine) as url:
        chromium.open(url)
        chromium.until("document.querySelectorAll('.row').length === 3")
        assert HOSTILE in chromium.run("document.body.textContent")
        chromium.run("[...document.querySelectorAll('.row')].find((row) => row.innerText.startsWith('gpu-2')).click()")
        chromium.until("document.querySelectorAll('dialog .block').length === 8")
        assert HOSTILE in chromium.run("document.querySelector('dialog').innerText")
        assert chromium.run("document.title") == "vcuda: cluster"
        assert chromium.run("document.querySelectorAll('img, body script:not(:first-of-type)').length") == 0
        assert chromium.console == []
        # And if a script got in all the same, the browser would not run it, nor load anything from elsewhere.
        tried = "(() => { try { document.body.innerHTML = '<b>x</b>'; return 'made'; } catch (error) { return error.name; } })()"
        assert chromium.run(tried) == "TypeError"
        refused = "fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')"
        assert chromium.run(refused) == "refused"
        chromium.until("1")
        assert any("Content Security Policy" in line for line in chromium.console)


def test_a_token_is_asked_for_and_sent(chromium: Browser) -> None:
    def refusal(token: str, _path: str) -> HTTPStatus | None:
        return None if token == "good" else HTTPStatus.FORBIDDEN if token else HTTPStatus.UNAUTHORIZED

    enter = "((text) => { document.querySelector('.banner input').value = text; document.querySelector('.banner form').requestSubmit(); })"
    with page_support.served(page_support.small(), refusal) as url:
        chromium.open(url)
        assert "create token vcuda-reader" in chromium.until(
            "document.querySelector('.banner') && document.querySelector('.banner').innerText"
        )
        picture(chromium, "token")
        chromium.run(f"{enter}('bad')")
        chromium.until("document.querySelector('.banner').innerText.includes('may not see')")
        chromium.run(f"{enter}('good')")
        chromium.until("document.querySelectorAll('.row').length === 3")
        assert chromium.run("document.querySelector('.banner')") is None
        chromium.run("sessionStorage.clear()")


def test_an_empty_cluster_says_what_to_do(chromium: Browser) -> None:
    engine = Engine(NAMES)
    engine.synced("nodes")
    engine.synced("pods")
    with page_support.served(engine) as url:
        chromium.open(url)
        chromium.until("(document.body || '').innerText?.includes('nvidia-device-enable=enable')")
        picture(chromium, "empty")


def test_dark_and_narrow(chromium: Browser) -> None:
    with page_support.served(page_support.small()) as url:
        chromium.open(url, dark=True)
        chromium.until("document.querySelectorAll('.row').length === 3")
        assert chromium.run("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
        picture(chromium, "dark")
        chromium.key("t")
        chromium.key("t")
        assert chromium.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        chromium.run("localStorage.clear()")
        chromium.open(url, width=360, height=740)
        chromium.until("document.querySelectorAll('.pod').length === 2")
        assert chromium.run("document.documentElement.scrollWidth") == 360  # nothing has to be scrolled sideways
        picture(chromium, "phone")
        chromium.run("document.querySelector('.nodes').scrollIntoView()")
        chromium.until("document.querySelectorAll('.row').length === 3")
        height = chromium.run("document.querySelector('.row:last-child').getBoundingClientRect().height")
        assert height < 130  # two lines of cards and the name
        chromium.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        picture(chromium, "phone-nodes")


DRAWN = """
new MutationObserver(() => {
  if (!window.drawnAt && document.querySelector(".row"))
    requestAnimationFrame(() => requestAnimationFrame(() => { window.drawnAt ||= performance.now(); }));
}).observe(document, { childList: true, subtree: true });
"""
TIMES = """window.drawnAt && JSON.stringify([
  performance.getEntriesByName("first-contentful-paint")[0].startTime, window.drawnAt,
  [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")].map((one) => one.transferSize)])"""


def test_five_thousand_nodes(chromium: Browser) -> None:
    with page_support.served(page_support.large()) as url:
        chromium.open(url)
        chromium.until("document.querySelectorAll('.row').length > 3")
        assert chromium.run("document.querySelectorAll('.row').length") < 60
        if PICTURES:
            told = chromium.call("Page.addScriptToEvaluateOnNewDocument", source=DRAWN)
            for _ in range(3):  # the copy is made: what is left is the page's own time
                chromium.open(url)
                print("milliseconds to the first paint and to the rows, bytes:", chromium.until(TIMES))
            chromium.call("Page.removeScriptToEvaluateOnNewDocument", identifier=told["identifier"])
        picture(chromium, "large")
        chromium.run("scrollTo(0, document.documentElement.scrollHeight)")
        chromium.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        last = chromium.run("[...document.querySelectorAll('.row')].pop().id")
        assert last == "node-4989"
        chromium.run(
            "(() => { const field = document.querySelector('input[type=search]'); field.value = '0042'; field.dispatchEvent(new Event('input')); })()"
        )
        chromium.until("document.querySelectorAll('.row').length === 1")
        assert chromium.console == []
