"""The election in running programs: a kill, a term, a write that waited too long, a failure that nobody expected, wrong settings."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from scheduler_ext.engine.bindings import Refused
from scheduler_ext.main import main
from scheduler_ext.protocol.extender_v1 import BindingArgs
from scheduler_ext.sync.api import ApiServer
from scheduler_ext.sync.binder import Binder
from tests.scheduler_ext.extender_election import LABEL, Replica, World
from tests.scheduler_ext.extender_support import FakeApi, cards, eventually, node, pod
from tests.scheduler_ext.test_extender_command import Served
from tests.support import web

Start = Callable[..., Any]


def test_two_processes_hand_over_after_a_kill_and_after_a_term(api: FakeApi, tmp_path: Path) -> None:
    api.put("nodes", node("a", cards("a", 2)))
    options = ["--kubeconfig", api.kubeconfig(tmp_path), "--lease", "default/extender", "--lease-seconds", "1.2",
               "--api-timeout-seconds", "0.5"]  # fmt: skip
    options += ["--quotas", "default/quotas"]
    limits = "[{namespace: default, cores: 60}]"
    api.put("configmaps", {"metadata": {"namespace": "default", "name": "quotas"}, "data": {"quotas": limits}})
    for name in ("e1", "e2", "e3"):
        api.put("pods", pod(name, containers=[{"name": "main"}]))

    def role(name: str) -> str | None:
        return api.find("pods", f"default/{name}")["metadata"].get("labels", {}).get(LABEL)

    def filter_(served: Served, name: str) -> httpx.Response:
        """Asks until it leads: on a busy machine a lease of a second may lapse for a moment."""
        body = {"Pod": pod(name, 60, 5), "NodeNames": ["a"]}

        def answer() -> httpx.Response | None:
            got = web.post(f"{served.url}/scheduler/filter", json=body)
            return got if got.status_code != 503 else None

        found: httpx.Response = eventually(answer)
        return found

    running = [Served(*options, "--pod", "default/e1")]
    try:
        eventually(lambda: role("e1") == "leader")
        assert filter_(running[0], "p").json()["NodeNames"] == ["a"]
        running.append(Served(*options, "--pod", "default/e2"))
        eventually(lambda: role("e2") == "standby")
        assert web.get(f"{running[1].url}/readyz").status_code == 200
        for verb in ("filter", "predicates", "prioritize", "cpu/prioritize", "bind"):
            refused = web.post(f"{running[1].url}/scheduler/{verb}", content=b"{}")
            assert refused.status_code == 503 and "NotLeader" in refused.json()["Error"], verb
        assert web.get(f"{running[1].url}/explain/default/p").status_code == 503
        running[0].process.kill()
        eventually(lambda: role("e2") == "leader")
        assert role("e1") == "standby"

        def holds_to_the_quota() -> bool:
            """With q, for p was never bound; a leader that has lost its lease for a moment forgets q, too."""
            assert filter_(running[1], "q").json()["NodeNames"] == ["a"]
            return "QuotaExceeded" in filter_(running[1], "r").json()["FailedNodes"].get("a", "")

        eventually(holds_to_the_quota)
        running.append(Served(*options, "--pod", "default/e3"))
        assert running[1].stop() == 0
        eventually(lambda: role("e3") == "leader")
        taken = json.loads(json.dumps(api.find("leases", "default/extender")))
        taken["spec"]["holderIdentity"] = "somebody_else"
        api.put("leases", taken)
        assert running[2].process.wait(20) == 1
        running[2].stop()
        assert "the lease is gone or another replica" in running[2].log[-1]
    finally:
        for served in running:
            if served.process.poll() is None:
                served.process.send_signal(signal.SIGKILL)
                served.stop()


def test_a_write_that_waited_until_the_lease_was_over_is_not_sent(api: FakeApi, start: Start, tmp_path: Path) -> None:
    api.put("nodes", node("a", cards("a", 1)))
    api.put("pods", wanted := pod("p"))
    extender = start()
    assert extender.filter(wanted, ["a"])["NodeNames"] == ["a"]
    server = ApiServer.connect(api.kubeconfig(tmp_path), timeout_seconds=3)
    binder = Binder(server, extender.engine, extender.executor, lambda: "not any more")
    args = BindingArgs("p", "default", wanted["metadata"]["uid"], "a")
    refused = asyncio.run(binder._bind(args))
    assert isinstance(refused, Refused) and str(refused) == "NotLeader: not any more"
    assert api.bindings == []
    assert extender.bind(wanted, "a") == ""


def test_what_nobody_expected_ends_neither_the_election_nor_its_lease(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A token file that was unreadable for a moment ended the thread, and the replica stood by for ever, healthy to look at."""
    world = World()
    one = Replica(world, "one", lease_seconds=0.06, margin_seconds=0.0)
    broken = [OSError("the token file can't be read"), KeyError("spec")]
    call, world.call = (
        world.call,
        lambda who, act: (_ for _ in ()).throw(broken.pop()) if broken else call(who, act),
    )  # type: ignore[method-assign]
    one.election.worker.start()
    eventually(lambda: "given back" in str(one.election.standby_reason()))
    world.now += 2
    eventually(lambda: one.serves)
    assert one.election.worker.failures == 2 and one.election.worker.problem() is None
    one.election.stop()
    assert "election: an unexpected failure" in caplog.text


def test_settings_that_contradict_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in (
        (["--lease", "n/x", "--lease-seconds", "15"], "at least twice"), (["--pod", "n/x"], "give --lease too"),
        (["--lease", "x"], "--lease"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2 and expected in capsys.readouterr().err
