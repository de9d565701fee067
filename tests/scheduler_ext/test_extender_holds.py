"""What a heavy request must not do to light ones: keep the loop, the engine's lock, or Python's."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, cast

import orjson
import pytest

from scheduler_ext.commands import serve
from scheduler_ext.engine import claims as gang_claims
from scheduler_ext.engine import garbage, preempt_time, watched
from scheduler_ext.engine.claim_book import ClaimBook
from scheduler_ext.engine.core import Engine
from scheduler_ext.http.app import Extender
from scheduler_ext.planning import defrag, explain, pieces
from scheduler_ext.protocol.extender_v1 import Victims
from scheduler_ext.scoring import placing, typical_pods
from scheduler_ext.scoring.scores import Scores
from scheduler_ext.settings import Settings
from scheduler_ext.state.node_names import NodeNames
from scheduler_ext.sync.api import ApiServer
from scheduler_ext.sync.binder import Binder
from tests.scheduler_ext.extender_claims import ask, claim, node_slices, user
from tests.scheduler_ext.extender_engine import Clock, engine_with
from tests.scheduler_ext.extender_support import NAMES, cards, node, pod

MANY = 1500  # nodes; more than one request may score itself


def asking(one: dict[str, Any], names: list[str]) -> bytes:
    return orjson.dumps({"Pod": one, "NodeNames": names})


def large() -> tuple[Engine, Clock, list[str]]:
    names = [f"n{at}" for at in range(MANY)]
    engine, clock = engine_with(*(node(name, cards(name, 1)) for name in names))
    return engine, clock, names


async def answered(extender: Extender, body: bytes) -> Any:
    answer = extender.filter(body)
    assert not isinstance(answer, bytes), "it is scored first"
    return orjson.loads(await answer)["NodeNames"]


def test_a_class_that_nobody_scored_ahead_is_scored_a_few_nodes_at_a_time_and_others_come_between() -> None:
    """In a mix of 432 classes each filter kept all others waiting for 14 ms."""
    engine, clock, names = large()
    extender = Extender(engine, cast(Binder, None))
    known = asking(pod("known", 10, 1, uid="k"), names)
    two = [pod(name, 20 + at, 2, uid=name) for at, name in enumerate(("first", "second"))]

    async def asked() -> list[Any]:
        await answered(extender, known)
        tasks = [asyncio.create_task(answered(extender, asking(one, names))) for one in two]
        turns = 0
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            turns += 1
            assert isinstance(extender.filter(known), bytes), "who is known waits for nobody"
        assert turns > len(two) * MANY / 256, "one of them at a time"
        # A new version of what is expected makes all scores old, at most once a minute.
        clock.now += 61
        for at in range(40):
            engine.cache.count_demand(f"other-{at}", engine.cache.asked(pod("other", 77, 7))[1])
        await answered(extender, known)
        return [task.result() for task in tasks]

    other, _, _ = large()
    other.filter(pod("known", 10, 1, uid="k"), names)
    assert asyncio.run(asked()) == [[other.filter(one, names).chosen] for one in two]


def test_a_gangs_first_pod_is_scored_a_few_nodes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, names = large()
    behind: list[bool] = []
    table = Scores.table

    def noted(self: Scores, shape: Any, cluster: Any, typical: Any) -> Any:
        if self is engine.cache.scores:
            behind.append(self.far_behind(shape, cluster, typical))
        return table(self, shape, cluster, typical)

    monkeypatch.setattr(Scores, "table", noted)
    member = pod("m", 50, 5, uid="m", annotations={NAMES.gang: "job/20"})
    assert asyncio.run(answered(Extender(engine, cast(Binder, None)), asking(member, names)))
    assert behind and not any(behind)


def test_a_pod_with_claims_of_a_new_class_is_scored_a_few_nodes_at_a_time_and_others_come_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A claim of 32 requests kept all others waiting for 82 ms."""
    behind: list[bool] = []
    table = Scores.table

    def noted(self: Scores, shape: Any, cluster: Any, typical: Any) -> Any:
        behind.append(self.far_behind(shape, cluster, typical))
        return table(self, shape, cluster, typical)

    monkeypatch.setattr(Scores, "table", noted)
    engines = []
    for _ in range(2):
        engine, _, names = large()
        for name in names:
            for one in node_slices(name, cards(name, 4)):
                engine.see_slice(one)
        engine.see_claim(claim("c", *(ask(f"r{at}", 1 + at, 1) for at in range(8)), uid="c"))
        engines.append(engine)
    one = user("p", "c", uid="p")
    extender = Extender(engines[0], cast(Binder, None))
    engines[0].prepare(pod("known", 10, 1, uid="k"))
    known = asking(pod("known", 10, 1, uid="k"), names)

    async def asked() -> Any:
        answer = extender.filter_claims(asking(one, names))
        assert not isinstance(answer, bytes), "it is scored first"
        task, turns = asyncio.ensure_future(answer), 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
            assert isinstance(extender.filter(known), bytes), "others wait for nothing"
        assert turns > MANY * 8 / 256
        return orjson.loads(task.result())["NodeNames"]

    decided = engines[1].filter_claims(one, names)
    behind.clear()
    assert decided is not None and asyncio.run(asked()) == [decided.chosen]
    assert behind and not any(behind)
    assert isinstance(extender.filter_claims(asking(one, names)), bytes), "its class is known now"


def test_many_changes_of_few_nodes_are_no_reason_to_score_a_few_at_a_time() -> None:
    engine, _, names = large()
    waiting = pod("p", 10, 1, uid="p")
    engine.prepare(waiting)
    for at in range(MANY):
        engine.see_node(node("n0", cards("n0", 1), cpu=f"{at + 1}"))
    assert engine.filter_briefly(waiting, names) is not None
    for name in names:
        engine.see_node(node(name, cards(name, 1), cpu="7"))
    waiting["metadata"]["uid"] = "q"
    assert engine.filter_briefly(waiting, names) is None
    assert not engine.holds("q")


def test_what_is_expected_is_worked_out_beside_the_requests_and_without_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With thousands of kinds of pods that takes 0.1 s, and whoever asked first in a minute did it for all."""
    clock = Clock()
    engine = Engine(NAMES, clock=clock)
    engine.learn()  # as a worker does from the beginning
    engine.see_node(node("a", cards("a", 8)))
    made: list[bool] = []
    compiled = typical_pods._compiled

    def noted(*rest: Any) -> Any:
        made.append(engine._lock.locked())
        return compiled(*rest)

    monkeypatch.setattr(typical_pods, "_compiled", noted)
    engine.synced("nodes")
    engine.synced("pods")
    assert len(made) == 1, "before anybody asks"
    version = engine.cache.typical().version
    for at in range(200):
        assert engine.filter(pod(f"p{at}", 1, 1), ["a"]).chosen == "a"
        clock.now += 1
    assert len(made) == 1
    engine.learn()
    assert made == [True, False] and engine.cache.typical().version == version + 1
    engine.learn()
    clock.now += 61
    engine.learn()
    assert len(made) == 2, "the same mix is not compiled anew"
    engine.see_node(node("b", cards("b", 1, model="L4")))
    assert engine.cache.typical().rent.shape[1] == 2, "arrays are as long as there are models"


def test_the_thread_that_takes_down_the_history_learns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, learnt = engine_with(node("a", cards("a")))[0], list[int]()
    monkeypatch.setattr(engine, "learn", lambda: learnt.append(1))
    engine.remember()
    assert learnt


def waits(engine: Engine, names: list[str]) -> dict[str, Any]:
    """A pod that fits nowhere."""
    waiting = pod("waits", 100, None, uid="w")
    waiting["spec"]["priority"] = 10
    engine.filter(waiting, names)
    return waiting


def placed(name: str, at: int) -> dict[str, Any]:
    placement = orjson.dumps({"version": 1, "containers": {"main": [[f"GPU-{name}-{at % 2}", 5, 1]]}}).decode()
    return pod(f"{name}-{at}", 5, 1, uid=f"{name}-{at}", node=name, annotations={NAMES.placement: placement})


def full() -> tuple[Engine, list[str], dict[str, Any]]:
    names = [f"n{at}" for at in range(300)]
    engine, _ = engine_with(*(node(name, cards(name, 2)) for name in names))
    for name in names:
        for at in range(4):
            engine.see_pod(placed(name, at))
    return engine, names, waits(engine, names)


HEAVY: dict[str, Callable[[Engine, list[str], dict[str, Any]], Any]] = {
    "explain": lambda engine, _, __: explain.explanation(engine.evidence(uid="w")),
    "defrag": lambda engine, _, __: defrag.plan(engine.snapshot(), 20),
    "preempt": lambda engine, names, asks: engine.preempt(
        asks, {name: Victims(tuple(f"{name}-{at}" for at in range(4)), 0) for name in names}
    ),
}


@pytest.mark.parametrize("what", HEAVY)
def test_a_long_plan_rests_between_any_two_calls_of_c(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it has Python's lock back before anybody else has woken up: light filters waited up to 60 ms."""
    engine, names, asks = full()
    calls: list[str] = []

    def noted(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*rest: Any, **named: Any) -> Any:
            calls.append(kind)
            return real(*rest, **named)

        return call

    monkeypatch.setattr(pieces, "rest", noted("rest", pieces.rest))
    monkeypatch.setattr(placing, "plan", noted("call", placing.plan))
    monkeypatch.setattr(NodeNames, "put", noted("call", NodeNames.put))
    assert HEAVY[what](engine, names, asks)
    rests = "".join("r" if call == "rest" else "c" for call in calls)
    assert "c" in rests and "cc" not in rests


@pytest.mark.parametrize("what", ["explain", "preempt"])
def test_a_long_plan_frees_its_copy_a_little_at_a_time(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once is one step of Python's: 18 ms for 95,000 shares, in which nothing else ran."""
    engine, names, asks = full()
    freed: list[int] = []
    let_go = pieces.let_go

    def noted(parts: list[Any]) -> None:
        freed.append(sum(map(len, parts)))
        let_go(parts)
        assert not parts

    monkeypatch.setattr(pieces, "let_go", noted)
    for bound in ("SECONDS", "LONGEST", "AT_ONCE"):
        monkeypatch.setattr(preempt_time, bound, 600.0)  # for all nodes
    HEAVY[what](engine, names, asks)
    assert sum(freed) == 4 * len(names)


def test_who_has_not_rested_for_a_while_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 100.0, list[float]()
    monkeypatch.setattr(pieces.time, "perf_counter", lambda: now)
    monkeypatch.setattr(pieces.time, "sleep", slept.append)
    monkeypatch.delattr(pieces._local, "rested", raising=False)
    pieces.rest()
    pieces.rest()
    assert len(slept) == 1
    now += 0.01
    pieces.rest()
    assert len(slept) == 2 and min(slept) > 0


class Counted:
    """The engine's lock, and how often it was taken."""

    def __init__(self) -> None:
        self._lock, self.taken = threading.Lock(), 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self.taken += 1

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_what_a_list_shows_no_more_is_forgotten_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 95,000 pods half were gone after a cut watch: 0.4 s in which nobody was answered."""
    engine, names, _ = full()
    lock = engine._lock = Counted()  # type: ignore[assignment]
    holds: dict[str, dict[int, int]] = {"pods": {}, "nodes": {}}

    def noted(what: str, real: Callable[[str], None]) -> Callable[[str], None]:
        def lose(one: str) -> None:
            holds[what][lock.taken] = holds[what].get(lock.taken, 0) + 1
            real(one)

        return lose

    monkeypatch.setattr(engine._intake, "lose_pod", noted("pods", engine._intake.lose_pod))
    monkeypatch.setattr(engine._nodes, "lose_node", noted("nodes", engine._nodes.lose_node))
    engine.keep_pods([f"{name}-0" for name in names], 2000.0)
    engine.keep_nodes(names[:10])
    assert sum(holds["pods"].values()) == 3 * len(names) and sum(holds["nodes"].values()) == len(names) - 10
    assert max(holds["pods"].values()) <= 128 and max(holds["nodes"].values()) <= 128
    assert engine.figures()["confirmed"] == len(names) and engine.figures()["nodes"] == 10


@pytest.mark.parametrize(("cores", "fits"), [(5, True), (30, False)], ids=["fits", "does not fit"])
def test_a_gangs_claims_are_reserved_a_few_at_a_time_and_others_come_between(
    cores: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,024 pods of eight claims each kept all others waiting for 0.2 s, and for 0.02 s when their places lapsed."""
    monkeypatch.setattr(gang_claims, "_AT_ONCE", 8 * gang_claims._BOOKED)
    monkeypatch.setattr(watched, "_LOST_AT_ONCE", 8)
    engine, clock = engine_with(*(node(name, cards(name, 2)) for name in ("a", "b")))
    for one in (*node_slices("a", cards("a", 2)), *node_slices("b", cards("b", 2))):
        engine.see_slice(one)
    size, members = 20, []
    for at in range(size):
        its = [f"c{at}-{number}" for number in range(2)]
        for name in its:
            engine.see_claim(claim(name, ask("r", cores, 1), uid=name))
        members.append(user(f"p{at}", *its, uid=f"p{at}", annotations={NAMES.gang: f"job/{size}"}))
        engine.see_pod(members[-1])
    lock = engine._lock = Counted()  # type: ignore[assignment]
    booked: dict[str, dict[int, int]] = {"assume": {}, "give_up": {}}

    def noted(what: str) -> None:
        real = getattr(ClaimBook, what)

        def work(self: ClaimBook, *rest: Any, **named: Any) -> Any:
            booked[what][lock.taken] = booked[what].get(lock.taken, 0) + 1
            return real(self, *rest, **named)

        monkeypatch.setattr(ClaimBook, what, work)

    for what in booked:
        noted(what)
    extender = Extender(engine, cast(Binder, None))
    known = asking(pod("known", 10, 1, uid="k"), ["a", "b"])
    engine.prepare(pod("known", 10, 1, uid="k"))

    async def asked() -> Any:
        answer = extender.filter_claims(asking(members[0], ["a", "b"]))
        assert not isinstance(answer, bytes), "much is to be booked"
        task = asyncio.ensure_future(answer)
        while not task.done():
            await asyncio.sleep(0)
            assert isinstance(extender.filter(known), bytes), "others wait for nothing"
        return orjson.loads(task.result())

    found = asyncio.run(asked())
    held = engine.figures()["claims_assumed"]
    assert (bool(found["NodeNames"]), held) == (fits, 2 * size if fits else 0), found
    clock.now += 1000
    engine.expire()
    assert engine.figures()["claims_assumed"] == 0
    assert sum(booked["assume"].values()) == (2 * size if fits else 12)
    assert max(max(of.values()) for of in booked.values()) <= 12, booked


def run(program: str) -> list[str]:
    program = f"import gc, sys, weakref\nfrom scheduler_ext.engine import garbage\n{program}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()


def test_what_lives_long_is_not_looked_at_by_each_collection() -> None:
    """A full one looked at everything that had come since the start: 38 ms after a few explanations, 0.3 s in the end."""
    program = """
{begin}
kept = [[at] for at in range(300_000)]
print(len(gc.get_objects(generation=2)))
"""
    assert int(run(program.format(begin="pass"))[0]) > 250_000
    assert int(run(program.format(begin="garbage.begin()"))[0]) < 20_000


def test_garbage_that_lived_long_is_found_when_there_is_twice_as_much() -> None:
    program = """
class One: pass
garbage._COUNTED_EVERY = 0
garbage.begin()
garbage.look_at_all()
one = One()
one.itself, gone = one, weakref.ref(one)
kept = [[at] for at in range(100_000)]
del one
print(gone() is None)
kept += [[at] for at in range(2_000_000)]
print(gone() is None)
"""
    assert run(program) == ["False", "True"]


def test_the_extender_has_its_collections_and_switches_set(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(garbage, "begin", lambda: begun.append("garbage"))

    class Stopped(Exception):
        pass

    def replica(*_: object) -> None:
        begun.append("replica")
        raise Stopped

    monkeypatch.setattr(serve, "_Replica", replica)
    with contextlib.suppress(Stopped):
        serve.run(Settings(), cast(ApiServer, None))
    assert begun == ["garbage", "replica"]
    assert run("garbage.begin()\nprint(sys.getswitchinterval())") == ["0.0005"]


def test_once_the_first_lists_are_in_all_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(garbage, "look_at_all", lambda: looks.append(1))
    engine, _ = engine_with(node("a", cards("a")))
    engine.synced("pods")
    assert len(looks) == 1
