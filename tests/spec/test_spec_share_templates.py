"""Templates of shares: a name says what its template holds, and nothing that no container could ask for."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given, strategies

from vcuda.spec.errors import InvalidRequest
from vcuda.spec.names import Names
from vcuda.spec.request import ContainerRequest, Kind, Priority
from vcuda.spec.share_templates import ShareTemplate


def test_a_share_becomes_a_template_with_its_amounts() -> None:
    asked = ContainerRequest("main", Kind.APP, 0, 30, 10, 50, oversell_blocks=20)
    template = ShareTemplate.of(asked, Priority.HIGH)
    assert template.name == "vcuda-30c-10m-50l-20o-high"
    made = template.template("team", Names("example.com"))
    assert made["metadata"]["namespace"] == "team" and made["metadata"]["name"] == template.name
    devices = made["spec"]["spec"]["devices"]
    (request,) = devices["requests"]
    assert request["exactly"] == {
        "deviceClassName": "vcuda.example.com",
        "capacity": {"requests": {"cores": "30", "memory": "2560Mi"}},
    }
    (config,) = devices["config"]
    assert config["requests"] == [request["name"]] and config["opaque"]["driver"] == "vcuda.example.com"
    assert config["opaque"]["parameters"] == {
        "apiVersion": "vcuda.example.com/v1", "kind": "ShareConfig", "coreLimit": 50, "oversell": "5Gi",
        "priority": "high",
    }  # fmt: skip


def test_whole_cards_are_asked_for_without_amounts_and_apart() -> None:
    template = ShareTemplate.of(ContainerRequest("main", Kind.APP, 0, 200, 0, 100), Priority.NORMAL)
    assert template.name == "vcuda-2x"
    devices = template.template("team", Names())["spec"]["spec"]["devices"]
    assert devices["requests"][0]["exactly"] == {"deviceClassName": "vcuda.tencent.com", "count": 2}
    assert devices["constraints"][0]["distinctAttribute"] == "vcuda.tencent.com/uuid"
    assert "config" not in devices


@pytest.mark.parametrize(
    "name",
    [
        "vcuda-30c", "vcuda-0c-1m", "vcuda-100c-1m", "vcuda-17x", "vcuda-30c-10m-20l", "vcuda-30c-10m-101l",
        "vcuda-30c-10m-9o", "vcuda-30c-10m-normal", "vcuda-030c-10m", "vcuda-30c-10m-", "train", "vcuda-30c-10m-high\n",
        "vcuda-1x-50l", "vcuda-\u0663c-1m", "vcuda-1c-1234567890m",
    ],
)  # fmt: skip
def test_other_names_are_none_of_ours(name: str) -> None:
    assert ShareTemplate.named(name) is None


@pytest.mark.parametrize("more", [{"memory_blocks": 10**9}, {"oversell_blocks": 10**9}])
def test_amounts_that_no_name_says_are_refused(more: dict[str, int]) -> None:
    """The pod would wait for a template that nobody ever makes."""
    asked = dataclasses.replace(ContainerRequest("main", Kind.APP, 0, 30, 10, 30), **more)
    with pytest.raises(InvalidRequest, match=r"main.*1000000000"):
        ShareTemplate.of(asked, Priority.NORMAL)


_PRIORITY = strategies.sampled_from(Priority)
_SHARES = strategies.builds(
    lambda cores, blocks, limit, more, priority: ShareTemplate(
        cores, blocks, 1, limit if limit > cores else 0, blocks + more if more else 0, priority
    ),
    strategies.integers(1, 99), strategies.integers(1, 4096), strategies.integers(0, 100), strategies.integers(0, 4096),
    _PRIORITY,
)  # fmt: skip
_WHOLE = strategies.builds(
    lambda cards, priority: ShareTemplate(cards=cards, priority=priority), strategies.integers(1, 16), _PRIORITY
)


@given(_SHARES | _WHOLE)
def test_a_name_says_all_and_may_be_an_objects(template: ShareTemplate) -> None:
    assert ShareTemplate.named(template.name) == template
    assert len(template.name) <= 63 and re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", template.name)
