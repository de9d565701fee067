"""Claims while a disk, a folder or the API server fails: an error in words, nothing half prepared, and well again afterwards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from localcluster.apiserver.faults import Fault, Request
from tests.manager.manager_claims import ClaimNode, booked, claim, error_of, result, uid_of
from tests.manager.manager_pods import container, pod
from vcuda import region


@pytest.mark.parametrize("fault", ["a file in the folder's place", "no room for the state"])
def test_no_room_for_what_must_be_written(claims: ClaimNode, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    driver = claims.start()
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    with monkeypatch.context() as patch:
        if fault.startswith("a file"):
            claims.cdi.write_text("in the way")
            answer = driver.prepare(item)[uid_of(item)]
            assert "CdiUnavailable" in answer.error and "--cdi-root" in answer.error
            assert booked(claims) == [(0, 0), (0, 0)] and not claims.region(item).exists()
            claims.cdi.unlink()
        else:
            assert claims.node.daemon is not None
            patch.setattr(claims.node.daemon.book.state, "append", _full)
            assert "StateUnwritable" in error_of(claims, item)
    assert driver.prepare(item)[uid_of(item)].devices
    assert booked(claims)[0] == (30, 10)


@pytest.mark.parametrize("what", ["no text", "a pipe", "a link"])
def test_something_else_in_place_of_the_runtimes_file(claims: ClaimNode, what: str) -> None:
    """A power cut, or another driver: it is written anew, and nothing waits for it."""
    driver = claims.start()
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    driver.prepare(item)
    text, path = claims.spec(item), next(claims.cdi.glob(f"*{uid_of(item)}.json"))
    path.unlink()
    if what == "no text":
        path.write_bytes(b"\xff\xfe")
    elif what == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(claims.node.directory / "elsewhere")
    answer = driver.prepare(item)[uid_of(item)]
    assert answer.devices and not answer.error
    assert claims.spec(item) == text and path.is_file() and not path.is_symlink()


def test_a_folder_in_place_of_the_runtimes_file(claims: ClaimNode) -> None:
    """Nothing is booked for the claim: kubelet must be able to forget it."""
    driver = claims.start()
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    path = claims.cdi / f"tencent.com-claim-{uid_of(item)}.json"
    path.mkdir(parents=True)
    assert "CdiUnavailable" in error_of(claims, item)
    assert not driver.unprepare(item)[uid_of(item)].error
    path.rmdir()


def test_a_defect_while_a_region_is_made_leaves_nothing(claims: ClaimNode, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = claims.start()
    item = claim("two", result(claims.cards[0], "one", 10), result(claims.cards[0], "other", 10))
    claims.put(item)
    make = region.create

    def fail(directory: Path, *arguments: Any) -> None:
        if directory.name == "other":
            raise OverflowError("int too big to convert")
        make(directory, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr("manager.regions.regions.region.create", fail)
        assert "int too big" in error_of(claims, item)
        assert not any((claims.node.directory / "vm/regions").iterdir())
    assert driver.prepare(item)[uid_of(item)].devices


def _full(*_: Any) -> None:
    from manager.allocations.state_file import StateError

    raise StateError("cannot write the state file: the disk is full; make room or make it writable")


def test_the_disk_fills_up_between_the_state_and_the_runtimes_file(
    claims: ClaimNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then even taking it back can't be written down: it stays booked, so that nobody else gets it, and is asked again."""
    driver = claims.start()
    daemon = claims.node.daemon
    assert daemon is not None
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    claims.cdi.write_text("in the way")
    append, calls = daemon.book.state.append, []

    def once(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) > 1:
            _full()
        append(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(daemon.book.state, "append", once)
        assert "CdiUnavailable" in driver.prepare(item)[uid_of(item)].error
    assert booked(claims)[0] == (30, 10)
    assert [found.key for found in daemon.book.state.read().values()] == [(uid_of(item), "gpu")]
    assert not driver.unprepare(item)[uid_of(item)].error
    claims.cdi.unlink()
    assert claims.left() == [] and booked(claims)[0] == (0, 0)


def test_reads_that_stall_leave_every_claim_an_answer(claims: ClaimNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may take its time-out, all together no more than the call's time."""
    monkeypatch.setattr("manager.dra.claims.READ_TIMEOUT_S", 0.3)
    monkeypatch.setattr("manager.dra.server.BUDGET_S", 0.5, raising=False)
    driver = claims.start()
    items = [claim(f"c{number}", result(claims.cards[0], cores=2)) for number in range(12)]
    claims.put(*items)
    api = claims.node.api
    assert api is not None
    note, asked = api.hook, []

    def stall(request: Request) -> Fault | None:
        if "/resourceclaims/" in request.path:
            asked.append(request.path)
            return Fault(late_s=2.0)
        return note(request)

    api.hook = stall
    answers = driver.prepare(*items)
    assert len(answers) == 12 and all("ClaimUnreadable" in answer.error for answer in answers.values())
    assert 1 <= len({*asked}) <= 4, asked
    api.hook = note
    monkeypatch.setattr("manager.dra.server.BUDGET_S", 20.0, raising=False)
    monkeypatch.setattr("manager.dra.claims.READ_TIMEOUT_S", 5.0)
    assert driver.prepare(items[-1])[uid_of(items[-1])].devices


def test_the_api_server_is_away(claims: ClaimNode) -> None:
    driver = claims.start()
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    assert claims.node.api is not None
    claims.node.api.failing = True
    assert "ClaimUnreadable" in error_of(claims, item)
    claims.node.api.failing = False
    assert driver.prepare(item)[uid_of(item)].devices


def test_a_lost_state_is_rebuilt_from_the_claims_of_living_pods(claims: ClaimNode) -> None:
    """A container runs on: its region must stay as it is, and what it has must not be given to another claim."""
    assert claims.node.api is not None
    user = pod("p", container("c", 0), uid="uid-p")
    user["spec"] |= {"resourceClaims": [{"name": "gpu", "resourceClaimName": "train"}]}
    user["spec"]["containers"][0]["resources"] = {}
    claims.node.api.put("pods", user)
    driver = claims.start()
    item, gone = claim("train", result(claims.cards[0], cores=60)), claim("gone", result(claims.cards[0], cores=10))
    claims.put(item, gone)
    driver.prepare(item, gone)
    inode = (claims.region(item) / "usage").stat().st_ino
    claims.node.stop()
    for path in (claims.node.directory / "checkpoint").glob("state.*"):
        path.write_text("damaged")
    claims.start()
    assert booked(claims)[0] == (60, 10)
    assert (claims.region(item) / "usage").stat().st_ino == inode and not claims.region(gone).exists()
    second = claim("second", result(claims.cards[0], cores=50))
    claims.put(second)
    assert "InsufficientCores" in error_of(claims, second)
