"""What the page of the cluster reads: nodes, shares, waiting pods, quotas, the last hour; small, and without holding up anybody."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import socket
import threading
import time
from http import HTTPStatus
from typing import Any

import pytest

from scheduler_ext.engine.core import Engine
from scheduler_ext.http import overview as overview_http
from scheduler_ext.planning import overview
from scheduler_ext.state import waiting as waiting_pods
from tests.scheduler_ext import page_support
from tests.scheduler_ext.extender_engine import bound, engine_with
from tests.scheduler_ext.extender_support import NAMES, cards, node, pod
from tests.support import web
from vcuda import page

MOST_BYTES = 300_000


def seen(engine: Engine) -> dict[str, Any]:
    found = json.loads(json.dumps(overview.encode(engine.overview())))
    assert isinstance(found, dict)
    return found


def shares(data: dict[str, Any]) -> dict[str, list[list[list[int]]]]:
    """By node and card the (cores, blocks) of its shares, as the page reads them."""
    found = {}
    for name, _, groups, text in data["nodes"]:
        per_card = text.split("|")
        assert sum(count for *_, count in groups) == (len(per_card) if groups else 0)
        found[name] = [[data["kinds"][int(one)] for one in card.lstrip("!").split()] for card in per_card if groups]
    return found


def test_every_share_is_on_its_card_and_what_is_sick_is_marked() -> None:
    data = seen(page_support.small())
    by_node = shares(data)
    assert (
        by_node["gpu-1"][:3] == [[[100, 318]], [[30, 64], [30, 128]], [[50, 40], [20, 200]]] and by_node["gpu-4"] == []
    )
    rows = {row[0]: row for row in data["nodes"]}
    assert list(rows) == ["gpu-1", "gpu-2", "gpu-3", "gpu-4"]
    assert [card.startswith("!") for card in rows["gpu-3"][3].split("|")] == [False, False, True, False]
    assert [data["problems"][row[1]] for row in data["nodes"]] == ["", "", "", "NoInventory"]
    assert [[data["models"][model], blocks, count] for model, blocks, count in rows["gpu-1"][2]] == [
        ["NVIDIA H100 80GB HBM3", 318, 8]
    ]
    assert 0.3 < data["allocated"] < 0.9 and 0 <= data["fragmented"] < 0.5 and data["block_bytes"] == 2**28


def test_who_waits_is_there_with_a_reason_until_he_has_a_place_or_is_gone() -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    for name, cores, blocks in (("fits", 40, 10), ("large", 200, None), ("never", 30, None), ("unasked", 20, 5)):
        engine.see_pod(pod(name, cores, blocks, uid=name))
    first, large = pod("fits", 40, 10, uid="fits"), pod("large", 200, None, uid="large")
    assert engine.filter(large, ["a"]).chosen is None
    assert engine.filter(first, ["a"]).chosen == "a"
    waiting = {one["name"]: one for one in seen(engine)["waiting"]["pods"]}
    assert list(waiting) == ["large", "never", "unasked"] and seen(engine)["waiting"]["count"] == 3
    assert (
        waiting["large"]["why"] == "0 of 1 nodes fit: InsufficientWholeCards on 1"
        and waiting["large"]["asks"] == "2 whole cards"
    )
    assert (
        waiting["never"]["why"].startswith("IncompleteRequest: ") and "not asked about it" in waiting["unasked"]["why"]
    )
    write = engine.begin_bind("fits", "a")
    engine.see_pod(bound(first, write))  # type: ignore[arg-type]
    engine.lose_pod("large")
    engine.keep_pods(["fits", "unasked"], 0.0)
    assert [one["name"] for one in seen(engine)["waiting"]["pods"]] == ["unasked"]
    engine.remember()
    (look,) = seen(engine)["history"]
    assert look[1:] == [0.4, pytest.approx(look[2]), 1]


def test_who_was_chosen_a_place_and_lost_it_waits_again() -> None:
    engine, clock = engine_with(node("a", cards("a", 1)))
    one = pod("p", 40, 10, uid="p")
    engine.see_pod(one)
    assert engine.filter(one, ["a"]).chosen == "a" and seen(engine)["waiting"] == {"count": 0, "pods": []}
    clock.now += 1000
    engine.expire()
    (found,) = seen(engine)["waiting"]["pods"]
    assert "was not bound in time" in found["why"]


def test_quotas_are_shown_with_what_is_held() -> None:
    rows = {row["namespace"]: row for row in seen(page_support.small())["quotas"]}
    assert rows["team-a"]["limits"] == [1000, 3000, None] and rows["team-b"]["limits"] == [None, None, 2]
    names = {(row["namespace"], tuple(row["held"])) for row in rows.values()}
    assert names == {("team-a", (790, 2476, 2)), ("team-b", (590, 1211, 1))}


def test_a_node_says_whose_its_shares_are() -> None:
    engine = page_support.small()
    found = engine.node_detail("gpu-3")
    assert found is not None
    data = overview.encode_detail(found)
    names = [[share["name"] for share in card["shares"]] for card in data["cards"]]
    assert names == [["training-23", "notebook-24"], ["inference-25"], [], ["training-26"]]
    assert [card["healthy"] for card in data["cards"]] == [True, True, False, True]
    assert data["cards"][3]["shares"][0] == {
        "namespace": "team-a", "name": "training-26", "cores": 60, "blocks": 25, "state": "confirmed", "leaving": False
    }  # fmt: skip
    assert engine.node_detail("nobody") is None


def test_what_is_kept_of_waiting_pods_and_of_the_past_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_pods, "_MOST", 3)
    engine, _ = engine_with(node("a", cards("a", 1)))
    for number in range(10):
        engine.see_pod(pod(f"p{number}", 30, 10, uid=f"p{number}"))
    assert seen(engine)["waiting"]["count"] == 3
    engine.lose_pod("p0")
    engine.see_pod(pod("later", 30, 10, uid="later"))
    assert [one["name"] for one in seen(engine)["waiting"]["pods"]] == ["p1", "p2", "later"]
    for _ in range(200):
        engine.remember()
    assert len(seen(engine)["history"]) == 120


def test_many_wait_and_only_the_first_are_named() -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    for number in range(300):
        engine.see_pod(pod(f"p{number}", 30, 10, uid=f"p{number}"))
    data = seen(engine)["waiting"]
    assert data["count"] == 300 and len(data["pods"]) == 200


def test_five_thousand_nodes_are_300_kilobytes_with_the_page_and_the_lock_is_let_go_of() -> None:
    engine = page_support.large()
    taken = 0

    class Counting:
        def __enter__(self) -> None:
            nonlocal taken
            taken += 1
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    lock = engine._lock
    engine._lock = Counting()  # type: ignore[assignment]
    with page_support.served(engine) as url, web.Client(base_url=url, timeout=60) as client:
        html = client.get("/")
        # httpx unpacks: what came over the wire is what the length says.
        data = client.get("/cluster")
        assert data.headers["content-encoding"] == "gzip"
        size = len(html.content) + int(data.headers["content-length"])
        plain = client.get("/cluster", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers and plain.json() == data.json()
    assert len(shares(data.json())) == 5000 and size < MOST_BYTES, size
    assert taken >= 5000 / overview.AT_ONCE


def test_all_who_look_share_one_copy_and_who_leaves_begins_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = page_support.small()
    made, goes_on = [], threading.Event()
    real = engine.overview

    def slow() -> Any:
        made.append(1)
        assert goes_on.wait(30)
        return real()

    monkeypatch.setattr(engine, "overview", slow)
    with page_support.served(engine) as url, contextlib.ExitStack() as stack:
        port = int(url.rpartition(":")[2])
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port)) as gone:
                gone.sendall(b"GET /cluster HTTP/1.1\r\nhost: a\r\n\r\n")
                while not made:
                    time.sleep(0.01)
        stack.callback(goes_on.set)
        answers: list[int] = []
        asking = [
            threading.Thread(target=lambda: answers.append(web.get(f"{url}/cluster", timeout=30).status_code))
            for _ in range(4)
        ]
        for thread in asking:
            thread.start()
        assert web.get(f"{url}/healthz", timeout=30).status_code == 200  # meanwhile others are served
        goes_on.set()
        for thread in asking:
            thread.join(30)
        assert answers == [200] * 4 and len(made) == 1
        monkeypatch.setattr(overview_http, "_SECONDS", 0.0)
        assert web.get(f"{url}/cluster", timeout=30).status_code == 200


def test_who_may_not_see_tenants_gets_the_page_and_nothing_in_it() -> None:
    with page_support.served(page_support.small(), lambda _token, _path: HTTPStatus.FORBIDDEN) as url:
        html = web.get(url)
        assert html.status_code == 200 and "team-a" not in html.text
        for path in ("/cluster", "/cluster?node=gpu-1", "/explain/team-a/trainer-7"):
            refused = web.get(f"{url}{path}")
            assert refused.status_code == 403 and "team-a" not in refused.text.replace(path, "")


def test_a_cluster_without_cards_is_not_full() -> None:
    data = seen(engine_with(node("a", None))[0])
    assert (data["allocated"], data["fragmented"]) == (0, 0)


def test_a_standby_and_one_without_lists_say_so() -> None:
    with page_support.served(page_support.small(), standby="replica b leads") as url:
        found = web.get(f"{url}/cluster")
        assert found.status_code == 503 and found.json()["Error"] == "NotLeader: replica b leads"
    with page_support.served(Engine(NAMES)) as url:
        found = web.get(f"{url}/cluster")
        assert found.status_code == 503 and found.json()["Error"].startswith("NotSynced: ")


@pytest.mark.parametrize("made", [page.of_cluster(), page.of_node()])
def test_the_page_is_one_file_that_loads_and_runs_nothing_else(made: page.Page) -> None:
    text, headers = made.body.decode(), dict(made.headers)
    assert len(made.body) < 60_000 and len(gzip.compress(made.body)) < 20_000
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|\bimport\b|src=|@import|url\(",
        text,
    )
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "trusted-types 'none'" in policy
    assert "frame-ancestors 'none'" in policy and "connect-src 'self'" in policy
