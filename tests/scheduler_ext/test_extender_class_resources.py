"""Pods that ask by an operator's DeviceClass as an extended resource: refused where a quota counts, and only there."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from scheduler_ext.engine import claims
from scheduler_ext.protocol.reasons import ExtenderReason
from tests.scheduler_ext.extender_claims import device_class, extended
from tests.scheduler_ext.extender_support import NAMES, node, plain_pod
from tests.scheduler_ext.test_extender_claims_rules import QUOTA, asks, engine_with, refusal
from vcuda.spec.claims import maybe_of_classes
from vcuda.spec.errors import Reason


def test_a_class_that_was_not_seen_lets_no_pod_pass_a_quota_that_asks_by_its_resource() -> None:
    """kube-scheduler knew it before our watch did, and its pods passed."""
    one = extended("deviceclass.resource.kubernetes.io/new")
    engine = engine_with(quotas=QUOTA)
    assert engine.asks_as_extended(one, ["a"]) and engine.claims_unseen(one, ["a"])
    reason, message = refusal(asks(engine, one))
    assert (
        reason is ExtenderReason.NOT_SYNCED
        and "has not yet shown DeviceClass new, for which container 'main' asks" in message
    )
    engine.see_class(device_class("new", "device.driver == 'nic'"))
    assert not engine.asks_as_extended(one, ["a"]) and not engine.claims_unseen(one, ["a"])
    assert asks(engine_with(), one) is None


@pytest.mark.parametrize("resource", ["deviceclass.resource.kubernetes.io/gold", "example.com/gold"])
def test_a_pod_that_asks_by_a_class_as_an_extended_resource_is_refused_where_a_quota_counts(resource: str) -> None:
    for quotas in (QUOTA, "[]"):
        engine = engine_with(quotas=quotas)
        engine.see_class(device_class("silver", extendedResourceName="example.com/gold"))
        engine.see_class(device_class("gold", extendedResourceName="example.com/gold"))
        assert engine.asks_as_extended(extended(resource), ["a"])
        verdict = asks(engine, extended(resource))
        if quotas == "[]":
            assert verdict is None
            continue
        reason, message = refusal(verdict)
        assert reason is Reason.INVALID_POD and resource in message and "of DeviceClass gold in its place" in message
        engine.lose_class("gold")
        assert engine.asks_as_extended(extended("example.com/gold"), ["a"])
        engine.keep_classes([])
        assert engine.asks_as_extended(extended("example.com/gold"), ["a"]) is (
            quotas == QUOTA
        )  # as one that was not shown


GANG = {"metadata": {"annotations": {NAMES.gang: "g/2"}}}


def in_gang(one: dict[str, Any]) -> dict[str, Any]:
    return one | {"metadata": one["metadata"] | GANG["metadata"]}


def test_a_resource_that_no_node_and_no_class_has_is_one_of_a_class_that_was_not_seen() -> None:
    """kube-scheduler asks only about pods whose resources it knows: of a node, or else of a class."""
    one = extended("example.com/gold")
    for engine, pod in ((engine_with(quotas=QUOTA), one), (engine_with(), in_gang(one))):
        assert engine.asks_as_extended(pod, ["a"]) and engine.claims_unseen(pod, ["a"])
        reason, message = refusal(asks(engine, pod))
        assert (
            reason is ExtenderReason.NOT_SYNCED
            and "shown a DeviceClass for example.com/gold, for which container 'main' asks" in message
        )
        engine.see_class(device_class("nic", "device.driver == 'nic'", extendedResourceName="example.com/gold"))
        assert not engine.asks_as_extended(pod, ["a"]) and not engine.claims_unseen(pod, ["a"])
        engine.lose_class("nic")
        assert engine.claims_unseen(pod, ["a"])
        engine.see_class(device_class("gold", extendedResourceName="example.com/gold"))
        assert not engine.claims_unseen(pod, ["a"])
        assert refusal(asks(engine, pod))[0] is Reason.INVALID_POD
    assert asks(engine_with(), one) is None and not engine_with().claims_unseen(one, ["a"])  # nothing depends on it


def test_the_resource_of_a_device_plugin_waits_for_no_class() -> None:
    engine, one = engine_with(quotas=QUOTA), extended("example.com/foo")
    other = node("other", None)
    for amount in ("4", "0", "4"):
        other["status"]["allocatable"]["example.com/foo"] = amount
        engine.see_node(other)
        assert bool(engine.claims_unseen(one, ["other"])) is (amount == "0")
        assert bool(engine.claims_unseen(in_gang(one), ["other"])) is (amount == "0")
        assert engine.claims_unseen(one, ["a"])
    engine.lose_node("other")
    assert engine.claims_unseen(one, ["other"])


@pytest.mark.parametrize("seen", [True, False], ids=["a class of our cards", "a class that was not seen"])
def test_what_one_node_has_of_a_resource_lets_no_pod_pass_on_another(seen: bool) -> None:
    """While a cluster moves from a device plugin to claims, a node with the plugin gives the same name."""
    engine, one = engine_with(quotas=QUOTA), extended("example.com/gold")
    other = node("other", None)
    other["status"]["allocatable"]["example.com/gold"] = "4"
    engine.see_node(other)
    if seen:
        engine.see_class(device_class("gold", extendedResourceName="example.com/gold"))
    for pod in (one, in_gang(one)):
        assert not engine.asks_as_extended(pod, ["other"]) and asks(engine, pod, "other") is None
        for nodes in (["a"], ["a", "other"]):
            assert engine.asks_as_extended(pod, nodes)
        assert refusal(asks(engine, pod, "a"))[0] is (Reason.INVALID_POD if seen else ExtenderReason.NOT_SYNCED)
        verdict = asks(engine, pod, "a", "other")
        assert verdict is not None and verdict.refusal is None and list(verdict.passed) == ["other"]


def test_what_a_filter_takes_for_doubtful_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times, of 64 containers 1 ms each."""
    engine, one = engine_with(quotas=QUOTA), extended("example.com/gold")
    worked_out = mock.Mock(wraps=maybe_of_classes)
    monkeypatch.setattr(claims, "maybe_of_classes", worked_out)
    assert engine.asks_as_extended(one, ["a"]) and engine.claims_unseen(one, ["a"])
    assert refusal(asks(engine, one))[0] is ExtenderReason.NOT_SYNCED
    worked_out.assert_called_once()


@pytest.mark.parametrize("missing", ["deviceclasses", "quotas"])
def test_before_the_first_lists_a_resource_that_may_be_a_classs_counts_where_a_quota_may(missing: str) -> None:
    engine, one = engine_with(quotas=QUOTA), extended("example.com/gold")
    other = node("other", None)
    other["status"]["allocatable"]["example.com/gold"] = "4"
    engine.see_node(other)
    engine.see_class(device_class("nic", "device.driver == 'nic'", extendedResourceName="example.com/gold"))
    assert not engine.asks_as_extended(one, ["other"])
    if missing == "quotas":
        engine = engine_with()
        engine.see_node(other)
        engine.expect_quotas()
    engine.expect_claims()
    assert engine.asks_as_extended(one, ["other"]) and engine.asks_as_extended(one, ["a"])


@pytest.mark.parametrize(
    "resource",
    ["cpu", "memory", "hugepages-2Mi", "attachable-volumes-aws-ebs", "kubernetes.io/foo", "sub.kubernetes.io/foo",
     "requests.example.com/foo", NAMES.core, NAMES.memory],
)  # fmt: skip
def test_what_is_no_extended_resource_of_a_class_waits_for_none(resource: str) -> None:
    assert not engine_with(quotas=QUOTA).asks_as_extended(extended(resource), ["a"])


def test_none_of_a_resource_waits_for_no_class() -> None:
    one = plain_pod("p")
    one["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "0"}}
    assert not engine_with(quotas=QUOTA).asks_as_extended(one, ["a"])


@pytest.mark.parametrize("resource", ["deviceclass.resource.kubernetes.io/gold", "example.com/gold"])
def test_a_pod_of_a_gang_that_asks_by_a_class_as_an_extended_resource_is_refused(resource: str) -> None:
    """The gang's other pods have no place when kube-scheduler makes its claim."""
    engine = engine_with()
    engine.see_class(device_class("gold", extendedResourceName="example.com/gold"))
    reason, message = refusal(asks(engine, in_gang(extended(resource))))
    assert reason is Reason.INVALID_POD and "of DeviceClass gold in its place" in message


@pytest.mark.parametrize("name", [NAMES.core, NAMES.memory, 7, None, "x" * 2**20])
def test_no_class_takes_the_resources_that_count_shares(name: Any) -> None:
    engine = engine_with(quotas=QUOTA)
    engine.see_class(device_class("gold", extendedResourceName=name))
    engine.see_class(device_class("nic", "device.driver == 'nic'", extendedResourceName="example.com/nic"))
    for resource in (str(name), "example.com/nic", "deviceclass.resource.kubernetes.io/nic"):
        assert not engine.asks_as_extended(extended(resource), ["a"])
