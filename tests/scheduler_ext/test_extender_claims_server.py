"""Claims over HTTP and with an API server: the filter's answer, what the watches bring, templates made and removed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from localcluster.apiserver.faults import Fault, Request
from scheduler_ext.http import app
from scheduler_ext.sync import templates
from scheduler_ext.sync.api import ApiServer
from scheduler_ext.sync.lanes import Lanes
from tests.scheduler_ext.conftest import Running
from tests.scheduler_ext.extender_claims import allocated, claim, node_slices, user
from tests.scheduler_ext.extender_support import FakeApi, eventually, node, plain_pod

NAME = "vcuda-30c-10m"


@pytest.fixture
def extender(api: FakeApi, start: Callable[..., Running]) -> Running:
    for name in ("a", "b"):
        api.put("nodes", node(name, None))
        for one in node_slices(name):
            api.put("resourceslices", one)
    return start(claims=True)


def asks(extender: Running, pod: dict[str, Any], *names: str) -> list[str]:
    answer = extender.post("/scheduler/claims/filter", {"Pod": pod, "NodeNames": list(names)})
    assert answer["Error"] == "" and not answer["FailedAndUnresolvableNodes"]
    return list(answer["NodeNames"])


def test_a_pod_with_a_claim_gets_one_node_and_others_pass(api: FakeApi, extender: Running) -> None:
    api.put("resourceclaims", claim("c"))
    eventually(lambda: not extender.engine.claims_unseen(user("p", "c"), ["a"]))
    assert len(asks(extender, user("p", "c"), "a", "b")) == 1
    assert asks(extender, plain_pod("q"), "a", "b", "c") == ["a", "b", "c"]


@pytest.mark.parametrize("key", ["containers", "initContainers"])
def test_a_pod_that_asks_by_our_class_as_an_extended_resource_is_refused(extender: Running, key: str) -> None:
    """Its claim is made after filter has answered, so no quota could count it."""
    one = plain_pod("p")
    resource = "deviceclass.resource.kubernetes.io/vcuda.tencent.com"
    one["spec"][key] = [{"name": "main", "resources": {"limits": {resource: "2"}}}]
    answer = extender.post("/scheduler/claims/filter", {"Pod": one, "NodeNames": ["a", "b"]})
    assert answer["NodeNames"] == []
    for why in answer["FailedAndUnresolvableNodes"].values():
        assert why.startswith("InvalidPod: container 'main' asks for " + resource) and "ResourceClaimTemplate" in why
    one["spec"][key][0]["resources"]["limits"] = {"deviceclass.resource.kubernetes.io/nic": "1"}
    assert asks(extender, one, "a", "b") == ["a", "b"]


def test_a_claim_that_kube_scheduler_knows_first_is_waited_for(api: FakeApi, extender: Running) -> None:
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.extend(asks(extender, user("p", "late"), "a", "b")))
    asking.start()
    api.put("resourceclaims", claim("late"))
    asking.join(20)
    assert len(found) == 1


def test_a_claim_that_never_comes_holds_up_nobody(extender: Running) -> None:
    assert asks(extender, user("p", "never"), "a", "b") == ["a", "b"]


def test_in_a_namespace_with_a_quota_a_claim_that_is_not_seen_lets_no_pod_through(
    api: FakeApi, extender: Running
) -> None:
    extender.engine.see_quotas({"data": {"quotas": "[{namespace: default, cores: 0}]"}})
    api.put("resourceclaims", claim("seen"))
    eventually(lambda: not extender.engine.claims_unseen(user("p", "seen"), ["a"]))
    for names in (["never"], ["seen", "never"]):
        body = {"Pod": user("p", *names), "NodeNames": ["a", "b"]}
        answer = extender.post("/scheduler/claims/filter", body)
        assert answer["NodeNames"] == [] and "NotSynced" in str(answer)
    extender.engine.see_quotas({"data": {"quotas": "[{namespace: default, cores: 100}]"}})
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.extend(asks(extender, user("q", "late"), "a", "b")))
    asking.start()
    api.put("resourceclaims", claim("late"))
    asking.join(20)
    assert len(found) == 1


def test_a_resource_that_never_is_a_classs_is_waited_for_once(
    extender: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another scheduler extender's, of which no class ever comes."""
    extender.engine.see_quotas({"data": {"quotas": "[{namespace: default, cores: 0}]"}})
    monkeypatch.setattr(app, "_UNSEEN_SECONDS", 0.1)
    for name in "pq":
        one = plain_pod(name)
        one["spec"]["containers"] = [{"name": "main", "resources": {"limits": {"example.com/theirs": "1"}}}]
        answer = extender.post("/scheduler/claims/filter", {"Pod": one, "NodeNames": ["a", "b"]})
        assert answer["NodeNames"] == [] and "a DeviceClass for example.com/theirs" in str(answer)
        monkeypatch.setattr(app, "_UNSEEN_SECONDS", 3600)


def test_ever_new_names_of_resources_are_waited_for_a_twentieth_of_the_time(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each cost kube-scheduler, which asks about one pod after the other, two seconds."""
    monkeypatch.setattr(app, "_UNSEEN_SECONDS", 0.2)
    monkeypatch.setattr(app, "_VAIN_AHEAD", 0.4)
    extender = start(claims=True)
    extender.engine.see_quotas({"data": {"quotas": "[{namespace: default, cores: 0}, {namespace: other, cores: 0}]"}})

    def waited(name: str, namespace: str) -> bool:
        one = plain_pod(name)
        one["metadata"]["namespace"] = namespace
        one["spec"]["containers"] = [{"name": "main", "resources": {"limits": {f"example.com/{name}": "1"}}}]
        before = time.monotonic()
        answer = extender.post("/scheduler/claims/filter", {"Pod": one, "NodeNames": ["a", "b"]})
        assert answer["NodeNames"] == [] and f"a DeviceClass for example.com/{name}" in str(answer)
        return time.monotonic() - before >= 0.2

    assert [waited(f"r{number}", "default") for number in range(6)] == [True] * 3 + [False] * 3
    assert waited("theirs", "other"), "another namespace's are waited for"


def test_what_the_watch_shows_is_booked_and_goes(api: FakeApi, extender: Running) -> None:
    thing = allocated(claim("old"), ("a", "GPU-a-0", 60, 20))
    api.put("resourceclaims", thing)

    def allocated_claims() -> float:
        return extender.engine.figures()["claims_allocated"]

    eventually(lambda: allocated_claims() == 1)
    api.remove("resourceclaims", "default/old")
    eventually(lambda: allocated_claims() == 0)


def inline(failed: Callable[[], object] = lambda: None, clock: Callable[[], float] = lambda: 0.0) -> Lanes:
    return Lanes(failed, clock=clock, start=lambda work: work())


def names_template(name: str, template: str = NAME) -> dict[str, Any]:
    pod = user(name)
    pod["spec"]["resourceClaims"] = [{"name": "vcuda-0", "resourceClaimTemplateName": template}]
    return pod


def test_a_template_is_made_when_a_pod_names_it_and_removed_long_after_the_last(
    api: FakeApi, start: Callable[..., Running], tmp_path: Any
) -> None:
    now = [1000.0]
    extender = start(claims=True, clock=lambda: now[0])
    server = ApiServer.connect(api.kubeconfig(tmp_path), timeout_seconds=3)
    api.put("pods", names_template("p"))
    eventually(extender.engine.missing_templates)
    templates.keep(server, extender.engine, inline())
    templates.keep(server, extender.engine, inline())
    made = api.find("resourceclaimtemplates", f"default/{NAME}")
    assert made["spec"]["spec"]["devices"]["requests"][0]["exactly"]["capacity"]["requests"]["cores"] == "30"
    api.remove("pods", "default/p")
    now[0] += 601
    assert extender.engine.unused_templates() == []
    eventually(lambda: not extender.engine.missing_templates() and not extender.engine._templates._users)
    now[0] += 599
    assert extender.engine.unused_templates() == []
    now[0] += 2
    templates.keep(server, extender.engine, inline())
    assert not api.store("resourceclaimtemplates").list(None)


def test_somebody_elses_template_of_that_name_stays(api: FakeApi, start: Callable[..., Running], tmp_path: Any) -> None:
    now = [1000.0]
    extender = start(claims=True, clock=lambda: now[0])
    theirs = {"metadata": {"name": NAME, "namespace": "default"}, "spec": {"spec": {}}}
    api.put("resourceclaimtemplates", theirs)
    api.put("pods", names_template("p"))
    eventually(lambda: extender.engine._templates._users and extender.engine._templates._known)
    api.remove("pods", "default/p")
    eventually(lambda: not extender.engine._templates._users)
    now[0] += 3600
    assert extender.engine.missing_templates() == [] == extender.engine.unused_templates()


def test_a_namespace_gets_no_more_templates_than_so_many(start: Callable[..., Running]) -> None:
    engine = start(claims=True).engine
    for number in range(1, 400):
        engine.see_pod(names_template(f"p{number}", f"vcuda-30c-{number}m"))
    engine.see_pod(names_template("odd", "vcuda-100c-1m"))
    assert len(engine.missing_templates()) == 256


def refusing(api: FakeApi, namespace: str, status: int) -> list[str]:
    """What is tried where no template can be made, as it comes."""
    tried: list[str] = []

    def hook(request: Request) -> Fault | None:
        if request.method != "POST" or f"/namespaces/{namespace}/" not in request.path:
            return None
        tried.append(request.body["metadata"]["name"])
        return Fault(status)

    api.hook = hook
    return tried


@pytest.mark.parametrize("status", [403, 404, 500])
def test_a_namespace_that_takes_no_template_delays_no_other(
    api: FakeApi, start: Callable[..., Running], tmp_path: Any, status: int
) -> None:
    engine, now, failures = start(claims=True).engine, [0.0], []
    server = ApiServer.connect(api.kubeconfig(tmp_path), timeout_seconds=3)
    lanes = inline(lambda: failures.append(now[0]), lambda: now[0])
    tried = refusing(api, "dead", status)
    pods = [names_template(f"p{number}", f"vcuda-30c-{number + 1}m") for number in range(3)]
    for pod in pods:
        pod["metadata"]["namespace"] = "dead"
        engine.see_pod(pod)
    engine.see_pod(names_template("q"))
    templates.keep(server, engine, lanes)
    assert api.find("resourceclaimtemplates", f"default/{NAME}")
    for _ in range(5):  # its pause is not over
        templates.keep(server, engine, lanes)
    assert len(tried) == 3 == len({*tried}) == len(failures)
    for _ in range(3600):
        now[0] += 1.0
        templates.keep(server, engine, lanes)
    # Each of its names has a pause of its own, which grows; and three in a row that are refused are one for all.
    assert 3 * 10 <= len(tried) == len(failures) <= 3 * (3600 / (15 if status == 500 else 150) + 10)
    for pod in pods:
        engine.lose_pod(pod["metadata"]["uid"])
    templates.keep(server, engine, lanes)
    assert not lanes._things._waits


def test_a_template_that_got_no_answer_is_not_the_next_one_tried(
    api: FakeApi, start: Callable[..., Running], tmp_path: Any
) -> None:
    engine = start(claims=True).engine
    server, lanes = ApiServer.connect(api.kubeconfig(tmp_path), timeout_seconds=3), inline()
    refusing(api, "slow", 0)
    pod = names_template("p")
    pod["metadata"]["namespace"] = "slow"
    engine.see_pod(pod)
    engine.see_pod(names_template("q"))
    templates.keep(server, engine, lanes)
    assert api.find("resourceclaimtemplates", f"default/{NAME}")
