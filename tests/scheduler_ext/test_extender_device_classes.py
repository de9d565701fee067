"""DeviceClasses of operators: their claims are counted and placed as those of our own class, or told why not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies

from scheduler_ext.engine.core import Engine
from scheduler_ext.protocol.reasons import ExtenderReason
from tests.scheduler_ext.conftest import Running
from tests.scheduler_ext.extender_claims import (
    allocated,
    ask,
    claim,
    configured,
    device_class,
    extended,
    node_slices,
    of_class,
    user,
)
from tests.scheduler_ext.extender_support import NAMES, FakeApi, cards, eventually, node
from tests.scheduler_ext.test_extender_claims import Clock, chosen, free
from tests.scheduler_ext.test_extender_claims_rules import QUOTA, asks, engine_with, refusal, told
from vcuda.spec.errors import Reason
from vcuda.spec.inventory import Card

OURS = f"device.driver == '{NAMES.driver}'"
MODEL = f"device.attributes['{NAMES.driver}'].productName"
UNREAD = f"{OURS} && {MODEL}.matches('L4')"


def gold(name: str = "c", *expressions: str, cores: int = 30, uid: str | None = None, **fields: Any) -> dict[str, Any]:
    """A claim of class gold."""
    return claim(name, of_class(ask(cores=cores), "gold", *expressions), uid=uid, **fields)


def undecided(engine: Engine, *expressions: str) -> str:
    """Why a claim of class gold is refused where a quota counts it."""
    engine.see_claim(gold("c", *expressions))
    reason, message = refusal(asks(engine, user("p", "c")))
    assert reason is Reason.UNDECIDED_CLASS
    assert message.startswith("claim c: DeviceClass 'gold' of request 'share': ")
    return message


# --- counted and placed ---


def test_a_claim_of_an_operators_class_counts_in_a_quota() -> None:
    engine = engine_with(quotas=QUOTA)
    engine.see_class(device_class("gold"))
    for name in "cd":
        engine.see_claim(gold(name))
        assert asks(engine, user(f"p{name}", name)) is not None
    engine.see_claim(gold("e"))
    reason, message = refusal(asks(engine, user("pe", "e")))
    assert reason is ExtenderReason.QUOTA_EXCEEDED and "holds 60, and the pod would add 30" in message


@pytest.mark.parametrize("first", ["class", "claim"])
def test_it_is_placed_whichever_comes_first_its_class_or_it(first: str) -> None:
    engine = engine_with()
    steps = [lambda: engine.see_class(device_class("gold")), lambda: engine.see_claim(gold())]
    for step in steps if first == "class" else steps[::-1]:
        step()
    assert free(engine, chosen(asks(engine, user("p", "c")))) == [70, 100]


def test_a_class_of_anothers_devices_is_none_of_our_business() -> None:
    engine = engine_with(quotas=QUOTA)
    for at, expressions in enumerate(
        (
            ["device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'"],
            ["device.attributes['gpu.nvidia.com'].type.matches('g.u')"],
            ["device.driver == 'x' || device.driver == 'y'", "something.new(device) ? 1.5 > {'a': 2}['a'] : true"],
            [f"device.driver != '{NAMES.driver}'"],
            [OURS, "device.allowMultipleAllocations == false"],
        )
    ):
        engine.see_class(device_class("gold", *expressions, config=[{"opaque": {"driver": NAMES.driver}}]))
        engine.see_claim(gold(f"c{at}", cores=9999))
        assert asks(engine, user(f"p{at}", f"c{at}", uid=f"u{at}")) is None
        assert [one.state for one in engine._claims.status(f"u{at}")] == ["foreign"]


def test_selectors_of_the_class_and_the_claim_hold_together() -> None:
    """The class means two models, the claim one of them and another."""
    engine = Engine(NAMES)
    for name, model in (("a", "A100"), ("b", "L4"), ("h", "H100")):
        engine.see_node(node(name, None))
        for one in node_slices(name, cards(name, model=model)):
            engine.see_slice(one)
    engine.see_claim(allocated(claim("old"), ("a", "GPU-a-0", 70, 20)))  # where 30 cores would go best
    engine.see_class(device_class("gold", f"{OURS} && {MODEL} in ['L4', 'H100']"))
    engine.see_claim(gold("c", f"{MODEL} in ['A100', 'L4']"))
    assert chosen(asks(engine, user("p", "c"), "a", "h", "b")) == "b"


def test_a_class_by_an_attribute_of_cards_books_such_a_card() -> None:
    engine = Engine(NAMES)
    engine.see_node(node("a", None))
    (one,) = node_slices("a", (Card("GPU-0", 0, "A100", 10 << 30), Card("MIG-1", 1, "A100", 10 << 30)))
    for device, kind in zip(one["spec"]["devices"], ("gpu", "mig"), strict=True):
        device["attributes"] |= {"type": {"string": kind}, "driverVersion": {"version": "580.1.2"}}
    engine.see_slice(one)
    version = f"device.attributes['{NAMES.driver}'].driverVersion.isGreaterThan(semver('570.0.0'))"
    engine.see_class(device_class("gold", OURS, f"device.attributes['{NAMES.driver}'].type == 'mig' && {version}"))
    engine.see_claim(gold())
    assert chosen(asks(engine, user("p", "c"), "a")) == "a" and free(engine, "a") == [100, 70]


def test_the_claims_configuration_goes_over_its_classes() -> None:
    """A limit of the class's below what is asked is no obstacle where the claim says another."""
    engine = engine_with()
    engine.see_class(device_class("gold", config=configured(coreLimit=20)))
    engine.see_claim(gold("c"))
    reason, message = refusal(asks(engine, user("p", "c")))
    assert reason is Reason.INVALID_SHARE_CONFIG and "coreLimit is 20, below the 30 cores" in message
    engine.see_claim(gold("d", config=configured(coreLimit=50)))
    assert chosen(asks(engine, user("q", "d")))


# --- what can't be told ---


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (None, "its selectors do not say whose devices it means; add device.driver == 'vcuda.tencent.com', or"),
        ({"selectors": []}, "its selectors do not say whose devices it means; add"),
        (device_class("", "device.driver.startsWith('vcuda')")["spec"], "its selectors do not say whose devices"),
        (device_class("", UNREAD)["spec"], "has matches(), which is not read here; write it in a form of docs/dra.md"),
        (device_class("", "(" * 9000)["spec"], "has more than 24 levels of brackets, which is not read here"),
        (device_class("", "a" * 2**20)["spec"], "has more than 10240 characters, which is not read here"),
        (device_class("", "device.driver == 'nic' |")["spec"], "has '|', which is not read here"),
        (7, "spec is not an object; correct the class"),
        ({"selectors": 7}, "spec.selectors is not a list of objects; correct the class"),
        ({"selectors": [7]}, "spec.selectors is not a list of objects; correct the class"),
        ({"selectors": [{"cel": 7}]}, "spec.selectors.cel is not an object; correct the class"),
        ({"selectors": [{"cel": {"expression": 7}}]}, "has its early end, which is not read here"),
    ],
)  # fmt: skip
def test_a_class_that_may_mean_our_cards_is_told_where_a_quota_counts(spec: Any, why: str) -> None:
    engine = engine_with(quotas=QUOTA)
    engine.see_class({"metadata": {"name": "gold"}, "spec": spec})
    message = undecided(engine)
    assert why in message and len(message) < 700


def test_elsewhere_its_claims_pass_and_book_nothing_and_explain_tells_why() -> None:
    engine = engine_with()
    engine.see_class(device_class("gold", UNREAD))
    engine.see_claim(gold())
    assert asks(engine, user("p", "c")) is None
    assert free(engine, "a") == free(engine, "b") == [100, 100]
    found = told(engine, user("p"))
    assert found["claims"][0]["state"] == "undecided" and "matches()" in found["claims"][0]["problem"]
    assert found["summary"].startswith(
        "nobody knows here whether its claims ask for cards of ours; all nodes were left"
    )
    assert "claim c UndecidedClass: DeviceClass 'gold' of request 'share': its selector" in found["summary"]
    engine.see_claim(allocated(gold("c", uid="u"), ("a", "GPU-a-1", 30, 10)))
    assert free(engine, "a") == [100, 70]


def test_a_class_that_nobody_has_shown_is_told_and_counts_once_it_is_there() -> None:
    engine = engine_with(quotas=QUOTA)
    assert "the API server has shown no such class; make it, or correct the claim's" in undecided(engine)
    engine.see_class(device_class("gold"))
    assert chosen(asks(engine, user("p", "c")))


def test_the_claims_own_selectors_may_say_what_its_class_does_not() -> None:
    engine = engine_with(quotas=QUOTA)
    engine.see_class(device_class("gold", "true"))
    undecided(engine, "device.driver.startsWith('v')")
    engine.see_claim(gold("d", OURS))
    assert chosen(asks(engine, user("q", "d")))
    engine.see_claim(gold("e", "device.driver == 'gpu.nvidia.com'"))
    assert asks(engine, user("r", "e")) is None


def test_a_gang_waits_for_a_class_that_can_be_read() -> None:
    engine = engine_with()
    gang = {NAMES.gang: "train/2"}
    engine.see_class(device_class("gold", UNREAD))
    engine.see_claim(claim("plain"))
    engine.see_claim(gold())
    engine.see_pod(user("q", "c", annotations=gang))
    reason, message = refusal(asks(engine, user("p", "plain", annotations=gang)))
    assert reason is ExtenderReason.GANG_INCOMPLETE and "claim c: UndecidedClass: DeviceClass 'gold'" in message
    assert refusal(asks(engine, user("q", "c", annotations=gang)))[0] is Reason.UNDECIDED_CLASS
    assert free(engine, "a") == free(engine, "b") == [100, 100]


def test_places_kept_for_a_gang_are_not_left_to_it() -> None:
    engine = engine_with(nodes="a")
    gang = {NAMES.gang: "train/2"}
    for name in "cd":
        engine.see_claim(claim(name, ask(cores=100, blocks=40)))
        engine.see_pod(user(f"p{name}", name, uid=f"u{name}", annotations=gang))
    assert chosen(asks(engine, user("pc", "c", uid="uc", annotations=gang), "a")) == "a"
    engine.see_class(device_class("gold", UNREAD))
    engine.see_claim(gold("e"))
    assert refusal(asks(engine, user("pe", "e"), "a"))[0] is ExtenderReason.GANG_DOES_NOT_FIT


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (configured(limit=3), "unknown field 'limit'"),
        ([{"opaque": {"driver": NAMES.driver}}], "the parameters are None; they must be an object"),
        (7, "spec.config is not a list of objects"),
    ],
)
def test_a_class_with_a_configuration_that_is_wrong_gives_nobody_anything(config: Any, why: str) -> None:
    engine = engine_with()
    engine.see_class(device_class("gold", config=config))
    engine.see_claim(gold())
    _, message = refusal(asks(engine, user("p", "c")))
    assert message.startswith("claim c: DeviceClass 'gold' of request 'share': ") and why in message


def test_of_a_claim_that_is_larger_than_any_need_be_the_classes_are_read() -> None:
    engine = engine_with(quotas=QUOTA)
    long = [f"{MODEL} == '{'x' * 900}'"] * 30
    engine.see_class(device_class("gold", "device.driver == 'nic'"))
    engine.see_claim(gold("c", *long))
    assert asks(engine, user("p", "c")) is None
    engine.see_class(device_class("gold"))
    reason, message = refusal(asks(engine, user("p", "c")))
    assert reason is Reason.UNDECIDED_CLASS and "is more than 16384 bytes" in message


# --- a class that changes ---


def test_a_class_that_changes_or_goes_is_read_again() -> None:
    engine = engine_with(quotas=QUOTA)
    engine.see_claim(gold())
    for expressions, expected in (
        (["device.driver == 'nic'"], None),
        (["true"], Reason.UNDECIDED_CLASS),
        ([OURS, f"{MODEL} == 'T4'"], Reason.CARD_NOT_ALLOWED),
    ):
        engine.see_class(device_class("gold", *expressions))
        verdict = asks(engine, user("p", "c"))
        assert (verdict if verdict is None else refusal(verdict)[0]) == expected
    engine.lose_class("gold")
    assert refusal(asks(engine, user("p", "c")))[0] is Reason.UNDECIDED_CLASS
    engine.see_class(device_class("gold"))
    assert chosen(asks(engine, user("p", "c")))
    engine.keep_classes([])
    engine.see_claim(gold("d"))
    assert refusal(asks(engine, user("q", "d")))[0] is Reason.UNDECIDED_CLASS


@pytest.mark.parametrize("change", ["another's", "unknown", "unread"])
def test_what_was_booked_stays_when_the_class_changes(change: str) -> None:
    clock = Clock()
    engine = engine_with(clock=clock)
    engine.see_class(device_class("gold"))
    thing, there = gold("c", uid="u1"), gold("d", uid="u2")
    engine.see_claim(allocated(there, ("b", "GPU-b-1", 40, 10)))
    engine.see_claim(thing)
    assert chosen(asks(engine, user("p", "c", uid="u"), "a")) == "a"
    if change == "unknown":
        engine.lose_class("gold")
    else:
        engine.see_class(device_class("gold", UNREAD if change == "unread" else "device.driver == 'nic'"))
    assert (free(engine, "a"), free(engine, "b")) == ([70, 100], [100, 60])
    engine.see_claim({**thing, "metadata": {**thing["metadata"], "finalizers": ["x/y"]}})
    told(engine, user("p"))
    assert (free(engine, "a"), free(engine, "b")) == ([70, 100], [100, 60])
    engine.see_claim(allocated(thing, ("a", "GPU-a-1", 30, 10)))
    assert (free(engine, "a"), free(engine, "b")) == ([100, 70], [100, 60])
    for name in "cd":
        engine.lose_claim("default", name)
    assert (free(engine, "a"), free(engine, "b")) == ([100, 100], [100, 100])


@pytest.mark.parametrize("end", ["late", "pod", "claim", "list", "other uid", "allocated elsewhere"])
def test_what_stayed_booked_so_is_given_back_as_ever(end: str) -> None:
    clock = Clock()
    engine = engine_with(clock=clock)
    engine.see_class(device_class("gold"))
    thing = gold("c", uid="u1")
    engine.see_claim(thing)
    asks(engine, user("p", "c", uid="u"), "a")
    engine.see_class(device_class("gold", "device.driver == 'nic'"))
    engine.see_claim(thing)
    assert free(engine, "a") == [70, 100]
    if end == "late":
        clock.now += 301
        engine.expire()
    elif end == "pod":
        engine.lose_pod("u")
    elif end == "claim":
        engine.lose_claim("default", "c")
    elif end == "list":
        engine.keep_claims([])
    elif end == "other uid":
        engine.see_claim(gold("c", uid="u2"))
    else:
        results = [{"request": "share", "driver": "nic", "pool": "a", "device": "nic-0"}]
        engine.see_claim({**thing, "status": {"allocation": {"devices": {"results": results}}}})
    assert free(engine, "a") == [100, 100]


# --- hostile and many ---


@pytest.mark.parametrize("data", [{}, {"metadata": 7}, {"metadata": {"name": 7}}, {"metadata": {"name": "x" * 2**20}}])
def test_a_class_without_a_name_of_a_bounded_length_is_no_class(data: dict[str, Any]) -> None:
    engine = engine_with()
    with pytest.raises(ValueError, match=r"a DeviceClass whose name is .{1,80}$"):
        engine.see_class(data)


_EXPRESSION = strategies.text(strategies.sampled_from("device.driver=='x'&|!()[]{}?:,.\"\\ in0.5e<>-+"), max_size=60)


@given(
    strategies.recursive(
        strategies.sampled_from(["", None, 7, [], {}, "x" * 300, -1, 10**30, OURS, UNREAD, "true"]) | _EXPRESSION,
        lambda inner: (
            strategies.lists(inner, max_size=3)
            | strategies.dictionaries(
                strategies.sampled_from(
                    [
                        "selectors",
                        "cel",
                        "expression",
                        "config",
                        "opaque",
                        "driver",
                        "parameters",
                        "extendedResourceName",
                    ]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_an_odd_class_never_stops_the_watch_nor_books(odd: Any) -> None:
    engine = engine_with(quotas=QUOTA)
    for spec in (odd, {"selectors": odd}, {"selectors": [{"cel": {"expression": odd}}]}, {"config": odd}):
        engine.see_class({"metadata": {"name": "gold"}, "spec": spec})
        engine.see_claim(gold("c", *([odd] if isinstance(odd, str) else [])))
        verdict = asks(engine, user("p", "c"))
        assert verdict is None or verdict.refusal is not None or free(engine, chosen(verdict)) == [70, 100]
        engine.lose_claim("default", "c")


def test_ten_thousand_classes_and_a_class_that_changes_without_end() -> None:
    """A change costs what it costs to read one class, however many claims name it; they are read when asked about."""
    engine = engine_with(quotas=QUOTA)
    for number in range(10_000):
        engine.see_class(device_class(f"class-{number}", extendedResourceName=f"example.com/{number}"))
    for number in range(200):
        engine.see_claim(gold(f"c{number}"))
    kinds: list[Callable[[], object]] = [
        lambda: engine.see_class(device_class("gold")),
        lambda: engine.see_class(device_class("gold", "device.driver == 'nic'")),
        lambda: engine.lose_class("gold"),
    ]
    for number in range(3000):
        kinds[number % 3]()
        if number % 50 == 0:
            verdict = asks(engine, user("p", "c7"))
            if number % 3 == 0:
                assert chosen(verdict)
            else:
                assert verdict is None or refusal(verdict)[0] is Reason.UNDECIDED_CLASS
    engine.keep_classes(["class-1"])
    assert engine._claim_book.classes() == ["class-1"]
    assert sorted(engine._claim_book.extended) == [
        "deviceclass.resource.kubernetes.io/class-1", "example.com/1",
    ]  # fmt: skip


# --- as a program ---


def test_a_class_that_kube_scheduler_knows_first_is_waited_for(api: FakeApi, start: Callable[..., Running]) -> None:
    """It asks only about pods whose claims' classes it has seen."""
    for one in node_slices("a"):
        api.put("resourceslices", one)
    api.put("nodes", node("a", None))
    api.put("resourceclaims", gold("c"))
    extender = start(claims=True)
    extender.engine.see_quotas({"data": {"quotas": QUOTA}})
    found: list[dict[str, Any]] = []
    body = {"Pod": user("p", "c"), "NodeNames": ["a"]}
    asking = threading.Thread(target=lambda: found.append(extender.post("/scheduler/claims/filter", body)))
    asking.start()
    eventually(lambda: extender.engine.claims_unseen(user("p", "c"), ["a"]))
    api.put("deviceclasses", device_class("gold"))
    asking.join(20)
    assert found[0]["NodeNames"] == ["a"]


def test_the_watch_of_classes_is_followed(api: FakeApi, start: Callable[..., Running]) -> None:
    for name in ("a", "b"):
        api.put("nodes", node(name, None))
        for one in node_slices(name):
            api.put("resourceslices", one)
    api.put("deviceclasses", device_class("gold"))
    extender = start(claims=True)
    extender.engine.see_quotas({"data": {"quotas": QUOTA}})
    api.put("resourceclaims", gold("c"))
    eventually(lambda: not extender.engine.claims_unseen(user("p", "c"), ["a"]))

    def passed(pod: dict[str, Any]) -> list[str]:
        body = {"Pod": pod, "NodeNames": ["a", "b"]}
        return list(extender.post("/scheduler/claims/filter", body)["NodeNames"])

    assert len(passed(user("p", "c"))) == 1
    assert passed(extended("deviceclass.resource.kubernetes.io/gold")) == []
    api.remove("deviceclasses", "gold")
    eventually(lambda: passed(user("p", "c")) == [])
    api.put("deviceclasses", device_class("gold", "device.driver == 'nic'"))
    eventually(lambda: passed(user("p", "c")) == ["a", "b"])
    assert passed(extended("deviceclass.resource.kubernetes.io/gold")) == ["a", "b"]


def test_a_class_that_changes_a_hundred_times_a_second_holds_up_nobody(
    api: FakeApi, start: Callable[..., Running]
) -> None:
    for one in node_slices("a"):
        api.put("resourceslices", one)
    api.put("nodes", node("a", None))
    extender = start(claims=True)
    api.put("resourceclaims", claim("own"))
    eventually(lambda: not extender.engine.claims_unseen(user("p", "own"), ["a"]))
    ended = threading.Event()

    def changes() -> None:
        number = 0
        while not ended.wait(0.01):
            number += 1
            api.put("deviceclasses", device_class("gold", OURS if number % 2 else "device.driver == 'nic'"))

    changing = threading.Thread(target=changes)
    changing.start()
    try:
        for number in range(30):
            body = {"Pod": user(f"p{number}", "own"), "NodeNames": ["a"]}
            assert extender.post("/scheduler/claims/filter", body)["NodeNames"] == ["a"]
    finally:
        ended.set()
        changing.join()
    api.put("deviceclasses", device_class("gold"))
    api.put("resourceclaims", gold("late"))
    eventually(lambda: not extender.engine.claims_unseen(user("q", "late"), ["a"]))
    extender.engine.see_quotas({"data": {"quotas": "[{namespace: default, cores: 50}]"}})
    body = {"Pod": user("q", "late"), "NodeNames": ["a"]}
    eventually(lambda: "QuotaExceeded" in str(extender.post("/scheduler/claims/filter", body)))
