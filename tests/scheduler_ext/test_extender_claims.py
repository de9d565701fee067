"""Claims in the engine: cards are chosen as for pods with resources, booked at once, and given once."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies

from scheduler_ext.engine.core import Engine
from scheduler_ext.protocol.extender_v1 import Verdict
from scheduler_ext.scoring import scores
from scheduler_ext.scoring.scores import Scores
from scheduler_ext.scoring.typical_pods import Workload
from scheduler_ext.state.shape import Shape, Step
from tests.scheduler_ext.extender_claims import allocated, ask, claim, device_class, node_slices, user
from tests.scheduler_ext.extender_support import NAMES, cards, node
from vcuda.spec.devices import device_name
from vcuda.spec.errors import Reason
from vcuda.spec.inventory import Card
from vcuda.spec.request import Policy


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(clock: Clock) -> Engine:
    made = Engine(NAMES, clock=clock)
    for name in ("a", "b"):
        made.see_node(node(name, None))
        for one in node_slices(name):
            made.see_slice(one)
    for kind in ("nodes", "pods"):
        made.synced(kind)
    return made


def asks(engine: Engine, pod: dict[str, Any], names: tuple[str, ...] = ("a", "b")) -> Verdict | None:
    return engine.filter_claims(pod, names)


def chosen(verdict: Verdict | None) -> str:
    assert verdict is not None and verdict.chosen is not None and verdict.refusal is None
    return verdict.chosen


def free(engine: Engine, name: str) -> list[int]:
    cluster = engine._claims.cluster
    return [int(cores) for cores in cluster.free_cores[cluster.index[name], : len(cluster.cards[cluster.index[name]])]]


def test_one_node_passes_and_what_is_allocated_counts_once(engine: Engine) -> None:
    thing, pod = claim("c"), user("p", "c")
    engine.see_claim(thing)
    node_name = chosen(asks(engine, pod))
    assert free(engine, node_name) == [70, 100]  # the first that fits, as kube-scheduler takes it
    engine.see_claim(allocated(thing, (node_name, f"GPU-{node_name}-1", 30, 10)))
    assert free(engine, node_name) == [100, 70]  # what it took in fact
    assert asks(engine, pod) is None  # all that kube-scheduler offers now is the claim's node


def test_a_share_goes_to_the_node_where_the_extender_puts_pods(engine: Engine) -> None:
    """70 cores of a card of node b are taken: what is left there is what 30 cores fill."""
    engine.see_claim(allocated(claim("old"), ("b", "GPU-b-0", 70, 20)))
    engine.see_claim(claim("c"))
    assert chosen(asks(engine, user("p", "c"))) == "b" and free(engine, "b") == [0, 100]


def test_two_whole_cards_are_two_and_take_all(engine: Engine) -> None:
    engine.see_claim(claim("c", ask(cores=None, blocks=None, count=2)))
    assert free(engine, chosen(asks(engine, user("p", "c")))) == [0, 0]


def test_shares_that_must_differ_are_on_different_cards_and_others_beside_each_other(engine: Engine) -> None:
    apart = [{"requests": ["share"], "distinctAttribute": f"{NAMES.driver}/uuid"}]
    engine.see_claim(claim("c", ask(count=2), constraints=apart))
    assert free(engine, chosen(asks(engine, user("p", "c"), ("a",)))) == [70, 70]
    engine.see_claim(claim("d", ask(count=2)))
    assert free(engine, chosen(asks(engine, user("q", "d"), ("b",)))) == [40, 100]


def test_a_card_without_cores_or_memory_left_is_passed_over(engine: Engine) -> None:
    engine.see_claim(allocated(claim("old"), ("a", "GPU-a-0", 10, 35)))
    engine.see_claim(claim("c"))
    asks(engine, user("p", "c"), ("a",))
    assert free(engine, "a") == [90, 70]


def test_several_claims_of_a_pod_go_to_one_node(engine: Engine) -> None:
    engine.see_claim(allocated(claim("old"), ("a", "GPU-a-0", 60, 20), ("a", "GPU-a-1", 60, 20)))
    for name in ("c", "d", "e"):
        engine.see_claim(claim(name, ask(cores=60)))
    assert chosen(asks(engine, user("p", "c", "d"))) == "b" and free(engine, "b") == [40, 40]
    assert asks(engine, user("q", "c", "d", "e")) is None  # kube-scheduler knows better whether they fit


def test_only_nodes_that_were_offered_are_chosen(engine: Engine) -> None:
    engine.see_claim(claim("c"))
    assert chosen(asks(engine, user("p", "c"), ("b",))) == "b"
    assert asks(engine, user("p", "c"), ("unknown",)) is None


def test_a_pod_that_is_asked_about_again_holds_one_place(engine: Engine) -> None:
    engine.see_claim(claim("c"))
    for names in (("a",), ("b",), ("b",)):
        asks(engine, user("p", "c"), names)
    assert free(engine, "a") == [100, 100] and free(engine, "b") == [70, 100]


def test_a_claim_that_kube_scheduler_took_back_is_decided_anew(engine: Engine) -> None:
    """Where no node fits any more, its PostFilter removes the allocation."""
    thing = claim("c")
    engine.see_claim(allocated(thing, ("a", "GPU-a-0", 30, 10)))
    engine.see_claim(thing)
    assert free(engine, "a") == [100, 100]
    assert chosen(asks(engine, user("p", "c"), ("a",))) == "a"


def test_a_claim_of_another_class_that_lost_our_devices_holds_nothing(engine: Engine) -> None:
    """While it has them it is booked; after that nothing in it says that it ever was ours."""
    thing = claim("c")
    thing["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] = "another"
    engine.see_claim(allocated(thing, ("a", "GPU-a-0", 30, 10)))
    assert free(engine, "a") == [70, 100]
    engine.see_claim(thing)
    assert free(engine, "a") == [100, 100]
    engine.see_claim(allocated(thing, ("a", "GPU-a-1", 30, 10)))
    assert free(engine, "a") == [100, 70]
    engine.lose_claim("default", "c")
    assert free(engine, "a") == [100, 100]


def test_another_word_of_the_claim_before_it_is_allocated_changes_nothing(engine: Engine) -> None:
    thing = claim("c")
    engine.see_claim(thing)
    asks(engine, user("p", "c"), ("a",))
    engine.see_claim({**thing, "metadata": {**thing["metadata"], "finalizers": ["x/y"]}})
    assert free(engine, "a") == [70, 100]


def test_a_claim_or_pod_that_goes_gives_its_cards_back(engine: Engine, clock: Clock) -> None:
    engine.see_claim(allocated(claim("old"), ("a", "GPU-a-0", 60, 20)))
    engine.lose_claim("default", "old")
    engine.see_claim(claim("c"))
    asks(engine, user("p", "c", uid="u"), ("a",))
    engine.lose_pod("u")
    assert free(engine, "a") == [100, 100]
    asks(engine, user("p", "c", uid="v"), ("a",))
    engine.keep_claims([])
    assert free(engine, "a") == [100, 100]


def test_claims_are_counted(engine: Engine) -> None:
    engine.see_claim(allocated(claim("old"), ("a", "GPU-a-0", 60, 20)))
    engine.see_claim(claim("c"))
    asks(engine, user("p", "c"))
    text = engine.metrics.render().decode()
    assert "vcuda_extender_claims_allocated 1.0" in text and "vcuda_extender_claims_assumed 1.0" in text
    assert 'state="claims' not in text


def test_what_was_never_allocated_is_free_again(engine: Engine, clock: Clock) -> None:
    engine.see_claim(claim("c"))
    asks(engine, user("p", "c"), ("a",))
    clock.now += 299
    engine.expire()
    assert free(engine, "a") == [70, 100]
    clock.now += 2
    engine.expire()
    assert free(engine, "a") == [100, 100]


def test_a_claim_of_the_same_name_is_another_one(engine: Engine) -> None:
    engine.see_claim(allocated(claim("c", uid="1"), ("a", "GPU-a-0", 60, 20)))
    engine.see_claim(claim("c", uid="2"))
    assert free(engine, "a") == [100, 100]


def test_claims_are_booked_whichever_comes_first_their_cards_or_they(engine: Engine) -> None:
    engine.see_node(node("late", None))
    engine.see_claim(allocated(claim("old"), ("late", "GPU-late-1", 60, 20)))
    for one in node_slices("late"):
        engine.see_slice(one)
    assert free(engine, "late") == [100, 40]
    engine.keep_slices([])
    assert "late" not in engine._claims.cluster.index
    for one in node_slices("late", generation=2):
        engine.see_slice(one)
    assert free(engine, "late") == [100, 40]


def test_a_pool_counts_when_all_slices_of_its_newest_generation_are_there(engine: Engine) -> None:
    many = tuple(Card(f"GPU-x-{at}", at, "A100", 10 << 30) for at in range(65))
    first, second = node_slices("x", many, generation=2)
    engine.see_slice(first)
    assert "x" not in engine._claims.cluster.index
    engine.see_slice(second)
    assert len(free(engine, "x")) == 65
    newer, _ = node_slices("x", many, generation=3)
    engine.see_slice(newer)
    assert len(free(engine, "x")) == 65


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"pool": {"name": "b", "generation": 9, "resourceSliceCount": 1}}},
        {"spec": {"driver": "gpu.nvidia.com"}},
        {"spec": {"nodeName": None}},
    ],
)
def test_slices_of_other_drivers_and_of_anothers_pool_are_passed_over(engine: Engine, change: dict[str, Any]) -> None:
    (one,) = node_slices("c", cards("forged"))
    one["metadata"]["name"] = "forged"
    engine.see_slice({**one, "spec": {**one["spec"], **change["spec"]}})
    assert set(engine._claims.cluster.index) == {"a", "b"} and len(free(engine, "b")) == 2


def test_a_tainted_card_is_given_to_nobody(engine: Engine) -> None:
    (one,) = node_slices("a", generation=2)
    one["spec"]["devices"][0]["taints"] = [{"key": f"{NAMES.driver}/xid", "effect": "NoSchedule"}]
    engine.see_slice(one)
    engine.see_claim(claim("c"))
    asks(engine, user("p", "c"), ("a",))
    assert free(engine, "a") == [100, 70]


def test_a_policy_of_the_pod_counts(engine: Engine) -> None:
    engine.see_claim(allocated(claim("old"), ("b", "GPU-b-0", 70, 20)))
    engine.see_claim(claim("c"))
    assert chosen(asks(engine, user("p", "c", annotations={NAMES.policy: "spread"}))) == "a"
    verdict = asks(engine, user("p", "c", annotations={NAMES.policy: "best"}))
    assert verdict is not None and verdict.refusal is not None and verdict.refusal[0] is Reason.INVALID_ANNOTATION


def test_claims_of_others_and_allocated_ones_let_all_nodes_pass(engine: Engine) -> None:
    other = ask()
    other["exactly"]["deviceClassName"] = "gpu.nvidia.com"
    engine.see_class(device_class("gpu.nvidia.com", "device.driver == 'gpu.nvidia.com'"))
    engine.see_claim(claim("theirs", other))
    engine.see_claim(allocated(claim("old"), ("a", "GPU-a-0", 60, 20)))
    assert asks(engine, user("p", "theirs", "old")) is None
    assert not engine.claims_unseen(user("p", "theirs", "old"), ["a"]) and engine.claims_unseen(user("p", "new"), ["a"])


def test_a_claim_that_no_card_can_give_is_refused_with_the_reason(engine: Engine) -> None:
    engine.see_claim(claim("c", ask(cores=150)))
    verdict = asks(engine, user("p", "c"))
    assert verdict is not None and verdict.refusal is not None and not verdict.curable
    assert verdict.refusal[0] is Reason.INVALID_CORES and "claim c" in verdict.refusal[1]


def test_a_claim_made_of_a_template_is_found_by_the_pod_s_status(engine: Engine) -> None:
    engine.see_claim(claim("p-gpu-x7k2p"))
    pod = user("p")
    pod["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "train"}]
    assert asks(engine, pod) is None
    pod["status"]["resourceClaimStatuses"] = [{"name": "gpu", "resourceClaimName": "p-gpu-x7k2p"}]
    assert chosen(asks(engine, pod)) in ("a", "b")


def test_the_nodes_cpu_counts_as_in_the_other_book(engine: Engine) -> None:
    engine.see_claim(claim("c"))
    engine.filter_claims(user("p", "c"), ("a", "b"))
    there, here = engine.cache.cluster, engine._claims.cluster
    assert here.free_cpu[here.index["a"]] == there.free_cpu[there.index["a"]] == 64000


_ODD = ["", None, 7, [], {}, "x" * 300, {"a": 1}, -1, 10**30, "1e30"]


@given(
    strategies.recursive(
        strategies.sampled_from(_ODD),
        lambda inner: (
            strategies.lists(inner, max_size=3)
            | strategies.dictionaries(
                strategies.sampled_from(
                    [
                        "devices",
                        "requests",
                        "exactly",
                        "name",
                        "deviceClassName",
                        "capacity",
                        "cores",
                        "memory",
                        "count",
                        "status",
                        "allocation",
                        "results",
                        "driver",
                        "pool",
                        "device",
                        "consumedCapacity",
                        "config",
                        "opaque",
                        "constraints",
                    ]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_an_odd_claim_never_stops_the_watch(odd: Any) -> None:
    engine = Engine(NAMES)
    base = {"metadata": {"name": "c", "namespace": "default", "uid": "u"}}
    for part in (
        {"spec": odd},
        {"status": odd},
        {"spec": {"devices": odd}},
        {"status": {"allocation": {"devices": {"results": odd}}}},
    ):
        engine.see_claim({**base, **part})
        engine.filter_claims(user("p", "c"), ("a",))


def test_the_book_is_what_the_claims_hold_whatever_comes_in_which_order(engine: Engine) -> None:
    """300 random steps of claims, pods, allocations, removals and new slices."""
    dice = random.Random(7)
    api: dict[str, dict[str, Any]] = {}
    for step in range(300):
        name, turn = f"c{dice.randrange(12)}", dice.random()
        if turn < 0.4:
            if name not in api:
                api[name] = claim(name, ask(cores=dice.choice([20, 30, 60]), blocks=dice.choice([5, 10])))
                engine.see_claim(api[name])
            asks(engine, user(f"p{name}", name, uid=f"u{name}"))
        elif turn < 0.7 and name in api:
            where = dice.choice("ab")
            api[name] = allocated(api[name], (where, f"GPU-{where}-{dice.randrange(2)}", dice.choice([20, 30]), 5))
            engine.see_claim(api[name])
        elif turn < 0.8 and name in api:
            engine.lose_claim("default", name)
            del api[name]
        elif turn < 0.9 and name in api:
            api[name] = {**api[name], "status": {}}
            engine.see_claim(api[name])
        else:
            (one_slice,) = node_slices("a", generation=step + 2)
            engine.see_slice(one_slice)
    for name in api:
        engine.lose_pod(f"u{name}")
    held: dict[str, int] = {}
    for thing in api.values():
        for result in (thing["status"].get("allocation") or {"devices": {"results": []}})["devices"]["results"]:
            held[result["device"]] = held.get(result["device"], 0) + int(result["consumedCapacity"]["cores"])
    for name in ("a", "b"):
        assert free(engine, name) == [100 - held.get(device_name(card.uuid), 0) for card in cards(name)]


def test_a_node_is_weighed_by_the_card_that_kube_scheduler_would_take(clock: Clock) -> None:
    """Where the best card of a node is not the first that fits, the node is as good as that first one."""
    dice, differ = random.Random(1), 0
    for _ in range(40):
        engine = Engine(NAMES, clock=clock)
        for name in "abc":
            engine.see_node(node(name, None))
            for one in node_slices(name):
                engine.see_slice(one)
            held = ((name, f"GPU-{name}-{at}", dice.choice([10, 45, 60, 70]), 5) for at in (0, 1))
            engine.see_claim(allocated(claim(f"old-{name}"), *held))
        engine.see_claim(claim("c"))
        best = {}
        for kind in (scores.first_fitting, scores.allowed_cards):
            book, shape = engine._claims.cluster, Shape((Step(30, 10, 1, False, False, 0),), Policy.FGD)
            book.take_over(np.arange(3), np.full(3, 64000), np.full(3, 2**38))
            table = Scores(allowed=kind).table(shape, book, Workload().typical(book, 0.0))
            best[kind] = book.names[scores.cheapest(table, book, np.arange(3)) or 0]
        differ += best[scores.first_fitting] != best[scores.allowed_cards]
        assert chosen(asks(engine, user("p", "c"), ("a", "b", "c"))) == best[scores.first_fitting]
    assert differ


@pytest.mark.parametrize(
    "spec", [None, {}, {"resourceClaims": 7}, {"resourceClaims": [None, {"resourceClaimTemplateName": 3}]}]
)
def test_an_odd_pod_never_stops_the_watch(engine: Engine, spec: Any) -> None:
    engine.see_pod({"metadata": {"name": "p", "namespace": "default", "uid": "u"}, "spec": spec})
    assert engine.missing_templates() == []


def selecting(expression: str, **fields: Any) -> dict[str, Any]:
    one = ask(**fields)
    one["exactly"]["selectors"] = [{"cel": {"expression": expression}}]
    return one


_NAME = f'device.attributes["{NAMES.driver}"].productName'


@pytest.mark.parametrize(
    ("expression", "where"),
    [
        (f'{_NAME} == "L4"', "b"),
        (f" {_NAME.replace(chr(34), chr(39))}=='L4' ", "b"),
        (f'{_NAME} in ["H100", "L4"]', "b"),
        (f'{_NAME}.startsWith("L")', "b"),
        (f'{_NAME}.startsWith("A1")', "a"),
        (f'{_NAME}.endsWith("4")', "b"),
        (f'{_NAME} == "L4" || true', "a"),
        # What is not read is kube-scheduler's alone: the better node of all.
        (f'{_NAME}.matches("L4")', "a"),
    ],
)
def test_a_selector_of_models_is_read_where_it_is_a_usual_one(expression: str, where: str) -> None:
    """Node a is the better one for 30 cores: 70 of a card are taken there."""
    engine = Engine(NAMES)
    for name, model in (("a", "A100"), ("b", "L4")):
        engine.see_node(node(name, None))
        for one in node_slices(name, cards(name, model=model)):
            engine.see_slice(one)
    engine.see_claim(allocated(claim("old"), ("a", "GPU-a-0", 70, 20)))
    engine.see_claim(claim("c", selecting(expression)))
    assert chosen(asks(engine, user("p", "c"))) == where


def test_on_a_node_of_several_models_the_selected_card_is_booked() -> None:
    engine = Engine(NAMES)
    engine.see_node(node("a", None))
    mixed = (*cards("a", 1), *(Card("GPU-other", 1, "L4", 10 << 30),))
    for one in node_slices("a", mixed):
        engine.see_slice(one)
    engine.see_claim(claim("c", selecting(f'{_NAME} == "L4"')))
    assert chosen(asks(engine, user("p", "c"), ("a",))) == "a" and free(engine, "a") == [100, 70]
    engine.see_claim(claim("d", selecting(f'{_NAME} == "T4"')))
    assert asks(engine, user("q", "d"), ("a",)) is None
