"""Claims and what else the extender promises: quotas, gangs, explain, metrics and the page know them."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_ext.engine.core import Engine
from scheduler_ext.planning import explain, overview
from scheduler_ext.protocol.extender_v1 import Verdict, Victims
from scheduler_ext.protocol.reasons import ExtenderReason
from tests.scheduler_ext.extender_claims import allocated, ask, claim, node_slices, user
from tests.scheduler_ext.extender_support import NAMES, cards, node, pod
from tests.scheduler_ext.test_extender_claims import Clock, free
from vcuda.spec.errors import Reason

QUOTA = "- {namespace: default, cores: 60}"


def engine_with(*, quotas: str = "[]", clock: Clock | None = None, nodes: str = "ab") -> Engine:
    """Nodes a and b with two cards each for claims; node s has two for shares."""
    made = Engine(NAMES, clock=clock or Clock(), gang_seconds=100)
    for name in nodes:
        made.see_node(node(name, None))
        for one in node_slices(name):
            made.see_slice(one)
    made.see_node(node("s", cards("s")))
    made.see_quotas({"data": {"quotas": quotas}})
    for kind in ("nodes", "pods"):
        made.synced(kind)
    return made


def refusal(verdict: Verdict | None) -> tuple[Any, str]:
    assert verdict is not None and verdict.chosen is None and verdict.refusal is not None and not verdict.curable
    return verdict.refusal


def asks(engine: Engine, one: dict[str, Any], *names: str) -> Verdict | None:
    engine.see_pod(one)
    return engine.filter_claims(one, names or ("a", "b"))


def told(engine: Engine, one: dict[str, Any]) -> dict[str, Any]:
    found = explain.explanation(engine.evidence(namespace="default", name=one["metadata"]["name"]))
    assert found is not None
    return found


# --- quotas ---


def test_a_quota_counts_what_claims_hold_and_are_expected_to_get() -> None:
    engine = engine_with(quotas=QUOTA)
    for name in "cd":
        engine.see_claim(claim(name))
        assert asks(engine, user(f"p{name}", name)) is not None
    engine.see_claim(claim("e"))
    reason, message = refusal(asks(engine, user("pe", "e")))
    assert reason is ExtenderReason.QUOTA_EXCEEDED
    assert "may hold 60 cores, holds 60, and the pod would add 30" in message
    engine.lose_claim("default", "c")
    assert engine.filter_claims(user("pe", "e"), ("a", "b")) is not None


def test_claims_and_shares_count_together_in_either_direction() -> None:
    engine = engine_with(quotas=QUOTA)
    engine.see_claim(allocated(claim("c"), ("a", "GPU-a-0", 40, 10)))
    verdict = engine.filter(pod("p", 30, 10), ("s",))
    assert verdict.chosen is None and "holds 40, and the pod would add 30" in verdict.quota
    assert engine.filter(pod("q", 20, 10), ("s",)).chosen == "s"
    engine.see_claim(claim("d", ask(cores=10)))
    assert refusal(asks(engine, user("pd", "d")))[0] is ExtenderReason.QUOTA_EXCEEDED


HALVES = [ask("s", 50, 2), ask("t", 50, 2)]


@pytest.mark.parametrize("limit", [0, 1])
@pytest.mark.parametrize("one_claim", [True, False])
def test_a_quota_of_cards_counts_halves_before_they_are_given_as_it_does_afterwards(
    limit: int, one_claim: bool
) -> None:
    """Two claims' halves of one card were refused as a card, and then held none: any number passed where one did."""
    engine = engine_with(quotas=f"- {{namespace: default, cards: {limit}}}", nodes="a")
    for name in "pq":
        those = [claim(name, *HALVES)] if one_claim else [claim(f"{name}{at}", one) for at, one in enumerate(HALVES)]
        for one in those:
            engine.see_claim(one)
        found = asks(engine, user(name, *(one["metadata"]["name"] for one in those)), "a")
        passes = not one_claim or (limit == 1 and name == "p")
        assert found is not None and (found.chosen == "a") == passes, name
    held = engine.overview().quotas[0].held
    assert held == ((100, 4, 1) if one_claim and limit else (0, 0, 0) if one_claim else (200, 8, 0))


def test_a_whole_card_beside_half_of_another_is_one_of_a_quota_whichever_claims_they_are_of() -> None:
    engine = engine_with(quotas="- {namespace: default, cards: 1}", nodes="a")
    engine.see_claim(claim("x", ask("s", 50, 2)))
    engine.see_claim(claim("y", ask("s", None, None)))
    assert (found := asks(engine, user("p", "x", "y"), "a")) is not None and found.chosen == "a"
    assert engine.overview().quotas[0].held[2] == 1
    engine = engine_with(quotas="- {namespace: default, cards: 0}", nodes="a")
    engine.see_claim(claim("x", ask("s", 50, 2)))
    engine.see_claim(claim("y", ask("s", None, None)))
    assert refusal(asks(engine, user("p", "x", "y"), "a"))[0] is ExtenderReason.QUOTA_EXCEEDED


def test_a_quota_on_models_counts_claims_on_such_cards_and_follows_new_slices() -> None:
    quota = "- {namespace: default, models: [A100], cores: 60}"
    engine = engine_with(quotas=quota)
    engine.see_claim(allocated(claim("c"), ("a", "GPU-a-0", 40, 10)))
    assert "holds 40" in engine.filter(pod("p", 30, 10), ("s",)).quota
    for one in node_slices("a", cards("a", model="L40S"), generation=2):
        engine.see_slice(one)
    assert engine.filter(pod("p", 30, 10), ("s",)).chosen == "s"
    engine.see_claim(claim("d", ask(cores=60)))
    verdict = asks(engine, user("pd", "d"))  # 30 + 60 would be too many on A100, so node b is closed
    assert verdict is not None and verdict.chosen == "a"


def test_a_quota_on_nodes_closes_those_nodes_alone() -> None:
    engine = engine_with(quotas="- {namespace: default, nodes: {pool: small}, cores: 20}")
    one = node("a", None)
    one["metadata"]["labels"] = {"pool": "small"}
    engine.see_node(one)
    engine.see_claim(claim("c"))
    assert refusal(asks(engine, user("p", "c"), "a"))[0] is ExtenderReason.QUOTA_EXCEEDED
    verdict = asks(engine, user("p", "c"))
    assert verdict is not None and verdict.chosen == "b"


def test_where_a_quota_must_hold_kube_scheduler_is_not_left_to_guess() -> None:
    """Without one all nodes pass where our book sees no room."""
    for quotas in ("[]", QUOTA):
        engine = engine_with(quotas=quotas)
        engine.see_claim(
            allocated(claim("old", ask(cores=100)), *((n, f"GPU-{n}-{i}", 90, 10) for n in "ab" for i in (0, 1)))
        )
        engine.lose_claim("default", "old")
        other = allocated(claim("old"), *((n, f"GPU-{n}-{i}", 90, 10) for n in "ab" for i in (0, 1)))
        other["metadata"]["namespace"] = "other"
        engine.see_claim(other)
        engine.see_claim(claim("c"))
        verdict = asks(engine, user("p", "c"))
        if quotas == "[]":
            assert verdict is None
        else:
            assert refusal(verdict)[0] is Reason.INSUFFICIENT_CORES


def test_a_claim_that_several_pods_share_counts_once() -> None:
    engine = engine_with(quotas="- {namespace: default, cores: 30}")
    engine.see_claim(claim("c"))
    for name in ("p", "q"):
        assert asks(engine, user(name, "c")) is not None


def test_a_claim_counts_as_the_most_that_its_alternatives_may_get_until_one_is_given() -> None:
    """An author may write a first alternative that no card meets, and kube-scheduler gives the second."""
    never = [{"cel": {"expression": "false"}}]
    bodies = [ask(cores=1, blocks=1)["exactly"] | {"name": "decoy", "selectors": never}, ask(cores=90)["exactly"]]
    either = {"name": "gpu", "firstAvailable": [*bodies[:1], bodies[1] | {"name": "real"}]}
    engine = engine_with(quotas=QUOTA)
    engine.see_claim(claim("c", either))
    reason, message = refusal(asks(engine, user("p", "c")))
    assert reason is ExtenderReason.QUOTA_EXCEEDED and "the pod would add 90" in message
    assert "request 'gpu' has alternatives" in message and "leave out those that do not fit" in message
    engine.see_quotas({"data": {"quotas": "- {namespace: default, cores: 100}"}})
    assert asks(engine, user("p", "c")) is not None
    assert [one.held[0] for one in engine.overview().quotas] == [90]
    engine.see_claim(
        allocated(claim("c", either, uid=engine._claim_book.claim("default", "c").uid), ("a", "GPU-a-0", 1, 1))
    )  # type: ignore[union-attr]
    assert [one.held[0] for one in engine.overview().quotas] == [1], "what was given is the truth"


def test_a_claim_that_was_not_seen_passes_no_quota() -> None:
    for quotas in ("[]", QUOTA):
        engine = engine_with(quotas=quotas)
        one = user("p", "c", "unseen")
        engine.see_claim(claim("c"))
        verdict = asks(engine, one)
        if quotas == "[]":
            assert verdict is not None and verdict.chosen is not None
            continue
        reason, message = refusal(verdict)
        assert reason is ExtenderReason.NOT_SYNCED and "has not yet shown claim default/unseen" in message
        theirs = claim("unseen", {"name": "nic", "exactly": {"deviceClassName": "nic"}})
        engine.see_claim(theirs)
        assert asks(engine, one) is not None


def test_the_standing_of_quotas_and_plans_count_claims() -> None:
    engine = engine_with(quotas=QUOTA)
    engine.see_claim(allocated(claim("c"), ("a", "GPU-a-0", 40, 10)))
    assert [one.held for one in engine.overview().quotas] == [(40, 10, 0)]
    _, _, quotas = engine.snapshot().rebuilt()
    assert "the others hold 40" in quotas.over("default", (), "s", {"GPU-s-0": (30, 1)})
    found = engine.simulate(pod("p", 30, 10), ("s",), {})
    assert "holds 40" in found["s"]


# --- gangs ---


def member(name: str, size: int = 3, claims: tuple[str, ...] | None = None) -> dict[str, Any]:
    claims = claims if claims is not None else (f"c-{name}",)
    return user(name, *claims, uid=name, annotations={NAMES.gang: f"train/{size}"})


def test_a_member_of_a_gang_whose_claim_was_not_seen_does_not_begin_alone() -> None:
    engine = engine_with()
    reason, message = refusal(asks(engine, member("p", claims=("unseen",))))
    assert reason is ExtenderReason.NOT_SYNCED and "its gang leaves no guess" in message


def test_no_member_of_a_gang_passes_before_all_exist_and_have_a_place() -> None:
    engine = engine_with()
    for name in "xy":
        engine.see_claim(claim(f"c-{name}", ask(cores=100)))
        engine.see_pod(member(name))
    reason, message = refusal(asks(engine, member("x")))
    assert reason is ExtenderReason.GANG_INCOMPLETE and "2 of its 3 pods" in message
    engine.see_pod(member("z"))
    reason, message = refusal(asks(engine, member("x")))
    assert reason is ExtenderReason.GANG_INCOMPLETE and "claims of pod z" in message
    engine.see_claim(claim("c-z", ask(cores=100)))
    assert {asks(engine, member(name)).chosen for name in "xyz"} <= {"a", "b"}  # type: ignore[union-attr]
    assert sorted(free(engine, "a") + free(engine, "b")) == [0, 0, 0, 100]


def test_a_gang_that_does_not_fit_as_a_whole_holds_nothing() -> None:
    engine = engine_with(nodes="a")
    for name in "xyz":
        engine.see_claim(claim(f"c-{name}", ask(cores=100)))
        engine.see_pod(member(name))
    reason, message = refusal(asks(engine, member("x"), "a"))
    assert reason is ExtenderReason.GANG_DOES_NOT_FIT and "needs 3 places at once, 2 are there now" in message
    assert free(engine, "a") == [100, 100]


def test_the_places_of_a_gang_are_nobody_elses_until_its_deadline() -> None:
    clock = Clock()
    engine = engine_with(clock=clock, nodes="a", quotas="- {namespace: default, cores: 1000}")
    for name in "xy":
        engine.see_claim(claim(f"c-{name}", ask(cores=100)))
        engine.see_pod(member(name, 2))
    assert asks(engine, member("x", 2), "a") is not None
    engine.see_claim(claim("other", ask(cores=50)))
    assert refusal(asks(engine, user("other", "other"), "a"))[0] is Reason.INSUFFICIENT_CORES
    clock.now += 101
    engine.expire()
    assert free(engine, "a") == [100, 100], "the first one's own place, too: it is the gang's deadline"
    assert asks(engine, user("other", "other"), "a") is not None


def test_a_place_of_a_gang_is_not_left_to_who_has_no_quota_either() -> None:
    """Where our book sees no room, all nodes pass but those of which that is a gang's place: kube-scheduler knows none."""
    clock = Clock()
    engine = engine_with(clock=clock)
    for name in "wxyz":
        engine.see_claim(claim(f"c-{name}", ask(cores=80)))
        engine.see_pod(member(name, 4))
    first = asks(engine, member("w", 4))
    assert first is not None and first.chosen == "a"
    engine.see_claim(claim("other", ask(cores=50)))
    reason, message = refusal(asks(engine, user("other", "other")))
    assert reason is ExtenderReason.GANG_DOES_NOT_FIT and "kept for the pods of a gang, for 100 s at most" in message
    engine.see_node(node("c", None))
    verdict = asks(engine, user("other", "other"), "a", "b", "c")
    assert verdict is not None and (verdict.chosen, verdict.passed) == (None, ("c",)), "our book knows no card of c"
    assert {asks(engine, member(name, 4)).chosen for name in "xyz"} == {"a", "b"}  # type: ignore[union-attr]
    assert asks(engine, user("other", "other")) is None, "no place is kept any more: kube-scheduler knows all"


def test_a_place_of_a_gang_that_lapsed_is_anybodys() -> None:
    clock = Clock()
    engine = engine_with(clock=clock, nodes="a")
    for name in "xy":
        engine.see_claim(claim(f"c-{name}", ask(cores=80)))
        engine.see_pod(member(name, 2))
    assert asks(engine, member("x", 2), "a") is not None
    engine.see_claim(claim("other", ask(cores=50)))
    refusal(asks(engine, user("other", "other"), "a"))
    clock.now += 101
    engine.expire()
    verdict = asks(engine, user("other", "other"), "a")
    assert verdict is not None and verdict.chosen == "a"


def gangs_counted(engine: Engine) -> dict[str, float]:
    lines = engine.metrics.render().decode().splitlines()
    return {one.split('"')[1]: float(one.split()[-1]) for one in lines if one.startswith("vcuda_extender_gangs_total")}


def test_a_gang_of_claims_whose_members_have_all_asked_has_one_deadline_too() -> None:
    """Members that asked kept their cards for `--assume-seconds` from then on, each for itself."""
    clock = Clock()
    engine = engine_with(clock=clock)
    for name in "xyz":
        engine.see_claim(claim(f"c-{name}", ask(cores=100)))
        engine.see_pod(member(name))
    for name in "xyz":
        assert asks(engine, member(name)).chosen  # type: ignore[union-attr]
        clock.now += 40
    assert asks(engine, member("x")).chosen, "it was tried again: the deadline stays"  # type: ignore[union-attr]
    engine.expire()
    assert gangs_counted(engine) == {"reserved": 1, "lapsed": 1}
    assert free(engine, "a") + free(engine, "b") == [100] * 4
    for name in "xyz":
        assert asks(engine, member(name)).chosen  # type: ignore[union-attr]
    engine.see_claim(allocated(claim("c-x", ask(cores=100)), ("a", "GPU-a-0", 100, 40)))
    clock.now += 101
    engine.expire()
    assert free(engine, "a") + free(engine, "b") == [0, 100, 100, 100], "what is allocated stays"
    assert gangs_counted(engine) == {"reserved": 2, "lapsed": 2}
    assert asks(engine, member("y")).chosen  # type: ignore[union-attr]
    clock.now += 200
    engine.expire()
    assert sorted(free(engine, "a") + free(engine, "b")) == [0, 0, 100, 100], "a gang that runs: its own time"
    clock.now += 101
    engine.expire()
    assert gangs_counted(engine) == {"reserved": 2, "lapsed": 2}


def test_gangs_of_claims_are_counted_as_those_of_shares() -> None:
    clock = Clock()
    engine = engine_with(clock=clock, nodes="a")

    def counted() -> dict[str, float]:
        return gangs_counted(engine)

    for name in "xyz":
        engine.see_claim(claim(f"c-{name}", ask(cores=100)))
        engine.see_pod(member(name))
    refusal(asks(engine, member("x"), "a"))
    assert counted() == {"refused": 1}
    for one in node_slices("b"):
        engine.see_slice(one)
    engine.see_node(node("b", None))
    assert all(asks(engine, member(name)).chosen for name in "xy")  # type: ignore[union-attr]
    assert counted() == {"refused": 1, "reserved": 1}, "with its first member"
    clock.now += 101
    engine.expire()
    assert counted() == {"refused": 1, "reserved": 1, "lapsed": 1}


def test_a_gang_keeps_within_the_quota_as_a_whole() -> None:
    engine = engine_with(quotas="- {namespace: default, cores: 250}")
    for name in "xyz":
        engine.see_claim(claim(f"c-{name}", ask(cores=100)))
        engine.see_pod(member(name))
    assert refusal(asks(engine, member("x")))[0] is ExtenderReason.GANG_DOES_NOT_FIT
    assert free(engine, "a") + free(engine, "b") == [100] * 4


def test_a_later_member_of_a_gang_that_runs_is_placed_by_itself() -> None:
    engine = engine_with()
    engine.see_claim(allocated(claim("c-x"), ("a", "GPU-a-0", 30, 10)))
    engine.see_pod(member("x"))
    engine.see_claim(claim("c-new"))
    verdict = asks(engine, member("new"))
    assert verdict is not None and verdict.chosen is not None


def test_members_that_share_a_claim_take_it_once() -> None:
    engine = engine_with()
    engine.see_claim(claim("all", ask(cores=100)))
    for name in "xyz":
        engine.see_pod(member(name, claims=("all",)))
    assert asks(engine, member("x", claims=("all",))) is not None
    assert sorted(free(engine, "a") + free(engine, "b")) == [0, 100, 100, 100]


def test_a_member_that_goes_or_renames_its_gang_counts_no_more() -> None:
    engine = engine_with()
    for name in "xyz":
        engine.see_claim(claim(f"c-{name}"))
        engine.see_pod(member(name))
    engine.lose_pod("y")
    engine.see_pod(user("z", "c-z", uid="z", annotations={NAMES.gang: "another/2"}))
    assert "1 of its 3 pods" in refusal(asks(engine, member("x")))[1]
    engine.keep_pods(["x"], 1e9)
    assert engine._claims._users.keys() == {"x"} and list(engine._claims._gangs) == [("default", "train")]


# --- explain, metrics, the page ---


def test_explain_tells_of_a_pods_claims() -> None:
    engine = engine_with()
    one = user("p", "c", "late")
    engine.see_claim(claim("c"))
    asks(engine, one, "a")
    found = told(engine, one)
    assert found["state"] == "assumed" and "claim late has not been made yet" in found["summary"]
    assert found["claims"] == [
        {"name": "c", "state": "assumed", "node": "a", "cards": {"GPU-a-0": {"cores": 30, "memory_blocks": 10}}},
        {"name": "late", "state": "missing", "node": None, "cards": {}},
    ]
    engine.see_claim(allocated(claim("c"), ("a", "GPU-a-1", 30, 10)))
    found = told(engine, one)
    assert found["state"] == "allocated", "it said that the pod had been released"
    assert found["summary"].startswith("waits to be bound to node a by kube-scheduler; claim c is allocated on node a")
    one["spec"]["nodeName"] = "a"
    engine.see_pod(one)
    found = told(engine, one)
    assert found["summary"].startswith("runs on node a; claim c is allocated on node a")
    assert found["claims"][0]["cards"] == {"GPU-a-1": {"cores": 30, "memory_blocks": 10}}


def test_explain_tells_what_no_card_can_give_and_what_nobody_has() -> None:
    engine = engine_with(nodes="a")
    engine.see_claim(claim("c", ask(cores=150)))
    asks(engine, one := user("p", "c"), "a")
    found = told(engine, one)
    assert found["state"] == "refused" and found["claims"][0]["state"] == "impossible"
    assert "150" in found["claims"][0]["problem"]
    engine.see_claim(allocated(claim("old"), ("a", "GPU-a-0", 90, 10), ("a", "GPU-a-1", 90, 10)))
    engine.see_claim(claim("d"))
    asks(engine, one := user("q", "d"), "a")
    found = told(engine, one)
    assert found["state"] == "waiting" and "InsufficientCores on 1" in found["summary"]
    assert "claim d has no place yet" in found["summary"]


def test_metrics_count_the_cards_for_claims() -> None:
    engine = engine_with()
    engine.see_claim(allocated(claim("c"), ("a", "GPU-a-0", 40, 10)))
    text = engine.metrics.render().decode()
    assert "vcuda_extender_claim_cards 4.0" in text and "vcuda_extender_claim_free_cores 360.0" in text
    assert "vcuda_extender_cards 2.0" in text and "vcuda_extender_free_cores 200.0" in text


def test_the_page_shows_cards_for_claims_who_has_them_and_who_waits() -> None:
    engine = engine_with()
    engine.see_claim(allocated(claim("c"), ("a", "GPU-a-0", 40, 10)))
    engine.see_claim(claim("w", ask(cores=150)))
    asks(engine, user("waits", "w"))
    data = overview.encode(engine.overview())
    rows = {row[0]: row for row in data["nodes"]}
    assert data["problems"][rows["a"][1]] == "" and rows["a"][2] == [[0, 40, 2]] and rows["a"][3] == "0|"
    assert data["kinds"] == [(40, 10)] and data["allocated"] == pytest.approx(40 / 600, abs=1e-4)
    (waits,) = data["waiting"]["pods"]
    assert waits["name"] == "waits" and waits["asks"] == "claims w" and "150" in waits["why"]
    found = engine.node_detail("a")
    assert found is not None
    (share,) = overview.encode_detail(found)["cards"][0]["shares"]
    assert (share["name"], share["cores"], share["state"]) == ("claim c", 40, "confirmed")


def test_a_pod_whose_claim_is_expected_somewhere_does_not_wait_on_the_page() -> None:
    engine = engine_with()
    engine.see_claim(claim("c"))
    asks(engine, user("p", "c"))
    assert engine.overview().waiting_count == 0 and engine.overview().waiting == []


def test_no_claim_is_a_victim_and_a_pod_with_claims_is_proposed_as_it_was() -> None:
    """Its end frees no card that a share may have; kube-scheduler wants its cpu."""
    engine = engine_with()
    engine.see_claim(allocated(claim("c"), ("s", "GPU-s-0", 100, 40)))
    one = user("p", "c", uid="p")
    one["spec"]["nodeName"] = "s"
    engine.see_pod(one)
    full = pod("full", 100, 40, uid="full", node="s")
    engine.see_pod(full)
    urgent = pod("urgent", 100, 40)
    urgent["spec"]["priority"] = 10
    answer = engine.preempt(urgent, {"s": Victims(("p",), 0)})
    assert set(answer["s"].uids) == {"p", "full"}


def test_a_gang_of_which_some_have_shares_and_some_claims_never_starts() -> None:
    clock = Clock()
    engine = engine_with(clock=clock)
    engine.see_claim(claim("c"))
    by_claim = user("pc", "c", uid="pc", annotations={NAMES.gang: "g/2"})
    by_share = pod("ps", 50, 1, uid="ps", annotations={NAMES.gang: "g/2"})
    engine.see_pod(by_share)
    assert engine.filter(by_share, ["s"]).chosen == "s" and engine.gang_waits("ps")
    assert "1 of its 2 pods with claims" in refusal(asks(engine, by_claim))[1]
    clock.now += 101
    engine.expire()
    assert refusal(engine.filter(by_share, ["s"]))[0] is ExtenderReason.GANG_INCOMPLETE
    assert engine.figures()["reserved"] == 0
