"""A new daemon starts while the old one serves, and follows it: no call of kubelet's fails, one at a time has the book."""

from __future__ import annotations

import os
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import claims as bench
from localcluster.kubelet import claims as kubelet
from localcluster.kubelet.claims import ClaimDriver
from manager import doctor
from manager.cards import nvml
from manager.cards.driver import Driver
from manager.config.reader import parse
from manager.daemon import Daemon
from manager.doctor import Verdict
from manager.dra import relay
from manager.process import instance_lock
from manager.standby import Standby
from tests.manager.manager_claims import ClaimNode, claim, result
from tests.manager.manager_pods import NAMES, eventually
from vcuda.driver.root import HostRoot


@pytest.fixture
def old(claims: ClaimNode) -> ClaimDriver:
    """The driver of the daemon that has the node, as kubelet knows it before there is another."""
    return claims.start()


@pytest.fixture
def second(claims: ClaimNode, old: ClaimDriver) -> Iterator[Standby]:
    """Stands by for the daemon of `claims`."""
    parsed = parse(claims.node.arguments(*claims.arguments()), {})
    assert parsed is not None
    made = Standby(parsed.settings, nvml.open_driver)
    assert not made.take()
    made.wait()
    yield made
    made.close()


def newest(claims: ClaimNode, than: ClaimDriver) -> ClaimDriver:
    """The instance that kubelet calls when it is another one."""
    return eventually(lambda: found if (found := claims.driver()) is not than else None, "another instance")  # type: ignore[no-any-return]


def ask(standby: Standby, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{standby.port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def prepared(driver: ClaimDriver, item: dict[str, Any]) -> bool:
    answer = driver.prepare(item)[item["metadata"]["uid"]]
    return bool(answer.devices) and not answer.error


def follow(claims: ClaimNode, standby: Standby) -> Daemon:
    """What `run` does when the node is free."""
    assert standby.take()
    parsed = parse(claims.node.arguments(*claims.arguments()), {})
    assert parsed is not None
    claims.node.daemon = Daemon(
        parsed.settings, {}, lambda: claims.node.arbiter, shims=claims.node.shims, standby=standby
    )
    claims.node.daemon.start()
    return claims.node.daemon


def test_no_call_of_kubelets_fails_while_the_daemon_is_updated() -> None:
    """A short version of the benchmark's updates; `python -m benchmarks.claims` counts more of them, and more calls.

    A machine with other work carries out no 200 calls in a second: whose turn at the book does not come in 4 s is told that it is busy.
    """
    found = bench.update(2, beside=True, every_s=0.05, at_once=8)
    assert found.calls > 50 and not found.failed, found.failed[:5]


def test_one_that_stands_by_passes_calls_on_and_has_no_book(
    claims: ClaimNode, old: ClaimDriver, second: Standby
) -> None:
    first = claims.node.daemon
    assert first is not None
    driver = newest(claims, old)
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    assert prepared(driver, item)
    assert [one.pod_name for one in first.allocator.allocations] == ["train"]
    assert not driver.unprepare(item)[item["metadata"]["uid"]].error
    assert first.allocator.allocations == () and claims.left() == []


def test_readiness_of_one_that_stands_by_is_that_kubelet_knows_it(
    claims: ClaimNode, old: ClaimDriver, second: Standby
) -> None:
    assert ask(second, "/healthz")[0] == 200
    assert ask(second, "/readyz") == (503, "not registered with kubelet\n")
    newest(claims, old)
    status, text = ask(second, "/readyz")
    assert status == 200 and "another gpu-manager holds" in text
    status, text = ask(second, "/usage")
    assert status == 503 and "ask that one" in text, "its shares must not be counted twice"


def test_beside_one_that_is_frozen_each_claim_hears_it_and_readiness_says_it(
    claims: ClaimNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stopped keeps its lock and its sockets: the kernel connects, and nobody answers."""
    monkeypatch.setattr(relay, "LIMIT_S", 1.0)
    monkeypatch.setattr(relay, "_PROBE_S", 0.5)
    monkeypatch.setattr(kubelet, "_CALL_SECONDS", 3600.0)  # the limit is ours
    parsed = parse(claims.node.arguments(*claims.arguments()), {})
    assert parsed is not None
    lock = instance_lock.attempt(parsed.settings.checkpoint_path, "f0f0")
    assert lock is not None
    folder = claims.node.directory / "plugins" / NAMES.driver
    folder.mkdir(parents=True)
    claims.registry.mkdir()
    made = Standby(parsed.settings, nvml.open_driver)
    with lock, socket.socket(socket.AF_UNIX) as endpoint, socket.socket(socket.AF_UNIX) as registration:
        endpoint.bind(str(folder / "dra-f0f0.sock"))
        endpoint.listen(16)
        try:
            assert not made.take()
            made.wait()
            driver = claims.driver()
            assert ask(made, "/readyz")[0] == 200, "without that socket, the one that serves may be of no claims"
            registration.bind(str(claims.registry / f"{NAMES.driver}-f0f0-reg.sock"))
            registration.listen(16)
            items = [claim("one"), claim("two")]
            why = f"the gpu-manager that serves this node (pid {os.getpid()}) does not answer"
            for call in (driver.prepare, driver.unprepare):
                answers = call(*items)
                assert {uid: why in answer.error for uid, answer in answers.items()} == {
                    item["metadata"]["uid"]: True for item in items
                }
            status, text = ask(made, "/readyz")
            assert status == 503 and why in text
            assert ask(made, "/healthz")[0] == 200, "its own process is well: nobody is to end it"
        finally:
            made.close()


def test_nobody_is_told_that_one_is_ready_before_its_driver_is_open(claims: ClaimNode, old: ClaimDriver) -> None:
    """By the device plugin alone it is ready at once, and then the old one may be ended."""
    parsed = parse(claims.node.arguments("--protocols=device-plugin"), {})
    assert parsed is not None
    asked: list[str] = []

    def opening(root: HostRoot) -> Driver:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{made.port}/readyz", timeout=0.5).close()
            asked.append("ready")
        except TimeoutError:
            asked.append("no answer")
        return nvml.open_driver(root)

    made = Standby(parsed.settings, opening)
    try:
        assert not made.take()
        made.wait()
        assert asked == ["no answer"]
        assert ask(made, "/readyz")[0] == 200
    finally:
        made.close()


def standing_by(text: str) -> float:
    (found,) = re.findall(r'^vcuda_manager_standby_seconds\{node="node-1"\} (\S+)$', text, re.MULTILINE)
    return float(found)


def test_both_show_that_one_stands_by_and_the_doctor_names_it(
    claims: ClaimNode, old: ClaimDriver, second: Standby
) -> None:
    first = claims.node.daemon
    assert first is not None
    status, text = ask(second, "/metrics")
    assert status == 200 and standing_by(text) > 0
    assert set(re.findall(r"^\w+", text, re.MULTILINE)) == {"vcuda_manager_standby_seconds"}, "cards count once"
    assert standing_by(first.metrics.exposition().decode()) > 0
    (check,) = doctor._standby(first.settings)
    assert check.verdict is Verdict.WARN and f"process {os.getpid()} has stood by for" in check.details
    claims.node.stop()
    daemon = follow(claims, second)
    assert standing_by(daemon.metrics.exposition().decode()) == 0
    assert [check.verdict for check in doctor._standby(daemon.settings)] == [Verdict.OK]


def test_the_second_of_two_that_stand_by_is_seen_when_the_first_has_gone(
    claims: ClaimNode, old: ClaimDriver, second: Standby
) -> None:
    first = claims.node.daemon
    assert first is not None
    parsed = parse(claims.node.arguments(*claims.arguments()), {})
    assert parsed is not None
    third = Standby(parsed.settings, nvml.open_driver)
    try:
        assert not third.take()
        second.close()
        assert standing_by(first.metrics.exposition().decode()) == 0
        assert not third.take()
        assert standing_by(first.metrics.exposition().decode()) > 0
    finally:
        third.close()


def test_a_call_waits_for_the_book_and_the_first_ones_leaving_takes_nothing_along(
    claims: ClaimNode, old: ClaimDriver, second: Standby
) -> None:
    before, after = claim("before", result(claims.cards[0])), claim("after", result(claims.cards[1]))
    claims.put(before, after)
    assert prepared(old, before)
    driver = newest(claims, old)
    claims.node.stop()
    answers: list[bool] = []
    call = threading.Thread(target=lambda: answers.append(prepared(driver, after)))
    call.start()
    call.join(0.3)
    assert call.is_alive(), "nobody has the book"
    daemon = follow(claims, second)
    call.join(20)
    assert answers == [True]
    assert {one.pod_name for one in daemon.allocator.allocations} == {"before", "after"}
    claims.watcher.look()
    assert claims.watcher.drivers[NAMES.driver] is driver, "kubelet has it from before"
    assert prepared(driver, before)


def test_sockets_that_a_kill_has_left_go_and_those_of_the_living_stay(
    claims: ClaimNode, old: ClaimDriver, second: Standby
) -> None:
    left = (
        claims.node.directory / "plugins" / NAMES.driver / "dra-0123abcd.sock",
        claims.registry / f"{NAMES.driver}-reg.sock",
    )
    for path in left:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    newest(claims, old)
    claims.node.stop()
    claims.node.start(*claims.arguments(f"--checkpoint-path={claims.node.directory}/other"))
    eventually(lambda: not any(path.exists() for path in left), "the end of dead sockets")
    assert second.front.sockets._intact()


def test_one_that_is_killed_is_followed_as_one_that_ends() -> None:
    """The kernel lets go of its lock, and kubelet has the other one already."""
    with bench.claim_node() as here:
        here.start()
        old = here.detach()
        here.spawn()
        eventually(lambda: here.look() == 2, "the second one's registration")
        old.kill()
        old.wait(10)
        eventually(here.serves, "the second one's turn")
        item = here.claim("train", here.cards()[0], 30, 8)
        driver = here.watcher.drivers[NAMES.driver]
        assert prepared(driver, item) and here.state() == {item["metadata"]["uid"]}
        here.kill()
