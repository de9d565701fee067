"""Pods that ask for shares as resources become pods that ask by claims, where the namespace wants it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings, strategies

from scheduler_ext.admission.rules import Rules, Verdict, decide, decide_claim, decide_class
from scheduler_ext.protocol.admission_v1 import Review
from scheduler_ext.state.claims import asking, claim_of, open_spec
from tests.scheduler_ext.extender_claims import ask, claim, device_class
from tests.scheduler_ext.extender_support import NAMES, container, plain_pod, pod
from tests.scheduler_ext.test_admission_rules import review
from vcuda.spec.device_classes import EXTENDED_PREFIX
from vcuda.spec.errors import Reason
from vcuda.spec.request import Priority, asks_for_share
from vcuda.spec.share_templates import ShareTemplate

_CLAIMS = Rules(claims=True)


def claims_of(after: dict[str, Any]) -> dict[str, str]:
    """Template by claim name."""
    return {one["name"]: one.get("resourceClaimTemplateName") for one in after["spec"]["resourceClaims"]}


def used(after: dict[str, Any], key: str = "containers") -> list[list[str]]:
    return [[one["name"] for one in each["resources"].get("claims", [])] for each in after["spec"][key]]


def test_a_share_becomes_a_claim_and_the_resources_go() -> None:
    thing = pod(
        "p", containers=[container("main", 30, 10)], annotations={NAMES.core_limit: "50", NAMES.priority: "high"}
    )
    thing["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "1", NAMES.core: "30", NAMES.memory: "10"}
    _, after = review(thing, _CLAIMS)
    assert not asks_for_share(after, NAMES)
    assert claims_of(after) == {"vcuda-0": ShareTemplate(30, 10, core_limit=50, priority=Priority.HIGH).name}
    assert used(after) == [["vcuda-0"]]
    resources = after["spec"]["containers"][0]["resources"]
    assert resources["requests"] == {"cpu": "1"}
    assert NAMES.core not in resources["limits"] and NAMES.memory not in resources["limits"]


@pytest.mark.parametrize("kind", ["limits", "requests"])
def test_a_pod_that_asks_by_our_class_as_an_extended_resource_is_refused(kind: str) -> None:
    thing = plain_pod("p")
    resource = EXTENDED_PREFIX + NAMES.driver
    thing["spec"]["containers"][0]["resources"] = {kind: {resource: "1"}}
    for rules in (_CLAIMS, Rules()):
        verdict, _ = review(thing, rules)
        assert verdict.refusal is not None and verdict.refusal.reason is Reason.INVALID_POD
        assert resource in verdict.refusal.message and "name a ResourceClaim" in verdict.refusal.message
    assert review(thing, operation="UPDATE")[0] == Verdict(), "it is too late to refuse it"


_HOSTILE = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.text(max_size=5),
    lambda inner: (
        strategies.lists(inner, max_size=2) | strategies.dictionaries(strategies.sampled_from(("name", "a")), inner)
    ),
    max_leaves=4,
)


def _paths(thing: Any, *above: Any) -> Iterator[tuple[Any, ...]]:
    yield above
    pairs = thing.items() if isinstance(thing, dict) else enumerate(thing) if isinstance(thing, list) else ()
    for key, value in pairs:
        yield from _paths(value, *above, key)


def _with(thing: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy_ = copy.copy(thing)
    copy_[path[0]] = _with(thing[path[0]], path[1:], value)
    return copy_


def _whole_pod() -> dict[str, Any]:
    thing = pod("p", containers=[container("main", 30, 10)], init=[container("warm", 30, 10)])
    thing["spec"]["resourceClaims"] = [{"name": "net", "resourceClaimName": "net"}]
    thing["spec"]["containers"][0]["resources"]["claims"] = [{"name": "net"}]
    return thing


def _whole_claim() -> dict[str, Any]:
    either = {"name": "either", "firstAvailable": [ask()["exactly"] | {"name": "x", "selectors": [{"cel": {}}]}]}
    config = {"driver": NAMES.driver, "parameters": {"apiVersion": NAMES.config_version, "kind": "ShareConfig"}}
    config["parameters"] |= {"coreLimit": 50, "priority": "low", "oversell": "4Gi"}  # type: ignore[operator]
    return claim("c", ask(count=2), either, config=[{"requests": ["share"], "opaque": config}])


@pytest.mark.parametrize("path", list(_paths(_whole_pod()))[1:], ids=str)
@settings(max_examples=12)
@given(value=_HOSTILE)
def test_a_pod_is_answered_whatever_one_of_its_fields_holds(path: tuple[Any, ...], value: Any) -> None:
    for rules in (_CLAIMS, Rules()):
        for operation in ("CREATE", "UPDATE"):
            thing = _with(_whole_pod(), path, value)
            decide(Review("r", operation, "team", "alice", thing, _whole_pod()), rules)


@pytest.mark.parametrize("path", list(_paths(_whole_claim()))[1:], ids=str)
@settings(max_examples=12)
@given(value=_HOSTILE)
def test_a_claim_is_answered_whatever_one_of_its_fields_holds(path: tuple[Any, ...], value: Any) -> None:
    """And read by the extender's watch."""
    thing = _with(_whole_claim(), path, value)
    for kind, body in (("ResourceClaim", thing), ("ResourceClaimTemplate", {"spec": thing})):
        decide_claim(Review("r", "CREATE", "team", "alice", body, {}, kind), _CLAIMS)
    asking(claim_of(thing, NAMES), open_spec(thing, NAMES)[0], NAMES, {})


def test_without_the_rule_a_pod_keeps_its_resources() -> None:
    _, after = review(pod("p", containers=[container("main", 30, 10)]))
    assert asks_for_share(after, NAMES) and "resourceClaims" not in after["spec"]


def test_every_container_gets_a_claim_beside_what_the_pod_names_itself() -> None:
    thing = pod("p", containers=[container("a", 30, 10), container("b", 30, 10), container("c", 200, None)])
    thing["spec"]["resourceClaims"] = [{"name": "vcuda-0", "resourceClaimName": "net"}]
    thing["spec"]["containers"][0]["resources"]["claims"] = [{"name": "vcuda-0"}]
    _, after = review(thing, _CLAIMS)
    assert claims_of(after) == {
        "vcuda-0": None,
        "vcuda-1": "vcuda-30c-10m",
        "vcuda-2": "vcuda-30c-10m",
        "vcuda-3": "vcuda-2x",
    }
    assert used(after) == [["vcuda-0", "vcuda-1"], ["vcuda-2"], ["vcuda-3"]]


def test_an_init_container_uses_the_equal_share_of_an_app_container() -> None:
    """Claims are held all the pod's life: one of its own would take a second share beside the first."""
    thing = pod(
        "p", containers=[container("main", 30, 10)], init=[container("warm", 30, 10), container("large", 60, 10)]
    )
    _, after = review(thing, _CLAIMS)
    assert claims_of(after) == {"vcuda-0": "vcuda-30c-10m", "vcuda-1": "vcuda-60c-10m"}
    assert (used(after), used(after, "initContainers")) == ([["vcuda-0"]], [["vcuda-0"], ["vcuda-1"]])


def test_what_no_card_can_give_is_refused_before() -> None:
    verdict, _ = review(pod("p", containers=[container("main", 150, 10)]), _CLAIMS)
    assert verdict.refusal is not None and "150" in str(verdict.refusal)


def test_a_pod_of_a_gang_stays_in_it() -> None:
    verdict, after = review(pod("p", containers=[container("main", 30, 10)], annotations={NAMES.gang: "g/2"}), _CLAIMS)
    assert verdict.refusal is None and used(after) == [["vcuda-0"]]
    assert after["metadata"]["annotations"][NAMES.gang] == "g/2"


@pytest.mark.parametrize("annotation", [NAMES.card_model, NAMES.card_uuid])
def test_a_choice_of_cards_that_no_template_says_is_refused(annotation: str) -> None:
    verdict, _ = review(pod("p", containers=[container("main", 30, 10)], annotations={annotation: "L4"}), _CLAIMS)
    assert verdict.refusal is not None and "selector" in verdict.refusal.message


def test_a_pod_with_a_node_keeps_its_resources_and_says_why() -> None:
    thing = pod("p", containers=[container("main", 30, 10)])
    thing["spec"]["nodeName"] = "n"
    verdict, after = review(thing, _CLAIMS)
    assert asks_for_share(after, NAMES) and any("nodeName" in warning for warning in verdict.warnings)


def test_a_second_review_changes_nothing_more() -> None:
    _, once = review(pod("p", containers=[container("main", 30, 10)]), _CLAIMS)
    verdict, twice = review(once, _CLAIMS)
    assert verdict == Verdict() and twice == once


@pytest.mark.parametrize("operation", ["UPDATE", "CREATE"])
def test_pods_without_a_share_stay_as_they_are(operation: str) -> None:
    thing = plain_pod("p")
    assert review(thing, _CLAIMS, operation=operation)[1] == thing


def judged(spec: Any, kind: str = "ResourceClaim", operation: str = "CREATE", namespace: str = "team") -> Verdict:
    thing = {"spec": {"spec": spec} if kind == "ResourceClaimTemplate" else spec}
    return decide_claim(Review("r", operation, namespace, "alice", thing, {}, kind), _CLAIMS)


def configured(**parameters: Any) -> dict[str, Any]:
    """A claim with a ShareConfig."""
    config = {"apiVersion": NAMES.config_version, "kind": "ShareConfig", **parameters}
    opaque = {"driver": NAMES.driver, "parameters": config}
    return {"devices": {"requests": [ask()], "config": [{"requests": ["share"], "opaque": opaque}]}}


@pytest.mark.parametrize("kind", ["ResourceClaim", "ResourceClaimTemplate"])
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"devices": {"requests": [ask(cores=150)]}}, Reason.INVALID_CORES),
        ({"devices": {"requests": [ask(blocks=None)]}}, Reason.INCOMPLETE_REQUEST),
        (configured(coreLimit=20), Reason.INVALID_SHARE_CONFIG),
        (configured(corelimit=50), Reason.INVALID_SHARE_CONFIG),
        (configured(coreLimit=50, priority="high"), None),
        ({"devices": {"requests": [{"name": "x", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]}}, None),
        ({"devices": 7}, Reason.INVALID_CLAIM),
        (None, None),
    ],
)
def test_claims_that_no_card_can_serve_are_refused_before_a_pod_waits(
    kind: str, spec: Any, reason: Reason | None
) -> None:
    refusal = judged(spec, kind).refusal
    assert (refusal.reason if refusal else None) is reason


def test_claims_that_are_there_and_those_of_exempt_namespaces_pass() -> None:
    bad = {"devices": {"requests": [ask(cores=150)]}}
    assert judged(bad, operation="UPDATE") == Verdict()
    assert (
        decide_claim(Review("r", "CREATE", "team", "alice", {"spec": bad}, {}), Rules(exempt=frozenset({"team"})))
        == Verdict()
    )


def of_class(thing: Any, operation: str = "CREATE") -> Verdict:
    return decide_class(Review("r", operation, "", "alice", thing, {}, "DeviceClass"), _CLAIMS)


@pytest.mark.parametrize("operation", ["CREATE", "UPDATE"])
def test_a_class_for_our_cards_with_a_wrong_configuration_is_refused(operation: str) -> None:
    config = configured(corelimit=50)["devices"]["config"]
    refusal = of_class(device_class("gold", config=config), operation).refusal
    assert refusal is not None and refusal.reason is Reason.INVALID_SHARE_CONFIG and "'corelimit'" in refusal.message
    assert of_class(device_class("gold", config=configured(coreLimit=50)["devices"]["config"])) == Verdict()
    assert of_class(device_class("nic", "device.driver == 'nic'", config=config)) == Verdict()


def test_a_class_of_which_nobody_knows_whose_it_is_is_made_with_a_warning() -> None:
    for thing in (device_class("gold", "true"), {"metadata": {"name": "gold"}}, {**device_class("gold"), "spec": 7}):
        verdict = of_class(thing)
        assert verdict.refusal is None and verdict.warnings[0].startswith(
            "in namespaces with a quota its claims wait: "
        )
    for thing in ({}, {"metadata": {"name": 7}}, device_class("gold"), device_class("nic", "device.driver == 'nic'")):
        assert of_class(thing) == Verdict()
