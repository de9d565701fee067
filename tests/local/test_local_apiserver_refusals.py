"""What the stand-in API server refuses: the answer names the field or the thing, and why; nothing is changed by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from localcluster import api as apis
from localcluster.apiserver.patch import MERGE, STRATEGIC

PODS = "/api/v1/namespaces/default/pods"
Pod = Callable[..., dict[str, Any]]


@pytest.fixture
def pod(api: apis.Api, make_pod: Pod) -> dict[str, Any]:
    return api.call("POST", PODS, make_pod("a", core=30, memory=4))


def refused(api: apis.Api, method: str, path: str, body: Any = None, kind: str = "application/json") -> tuple[int, str]:
    with pytest.raises(apis.ApiFailure) as error:
        api.call(method, path, body, kind)
    return error.value.code, str(error.value)


def container(**fields: Any) -> dict[str, Any]:
    return {"name": "main", "image": "i", **fields}


@pytest.mark.parametrize(
    ("spec", "code", "message"),
    [
        ({"containers": "main"}, 400, "spec.containers is not a list"),
        ({"containers": ["main"]}, 400, "spec.containers[0] is not an object"),
        ({"containers": [container(), container()]}, 422, "spec.containers[1].name: Duplicate value: 'main'"),
        ({"containers": [container(command="sleep 1")]}, 400, "spec.containers[0].command must be a list"),
        ({"containers": [container(args=["sleep", 1])]}, 400, "quote numbers"),
        ({"containers": [container(env=[{"value": "1"}])]}, 422, "containers[0].env[0].name: Required value"),
        ({"containers": [container(env=[{"name": "A", "value": 1}])]}, 400, "env[0].value must be a string"),
        (
            {"containers": [container(volumeMounts=[{"name": "data", "mountPath": "/data"}])]},
            422,
            "volumeMounts[0].name: Not found: 'data'",
        ),
        (
            {"volumes": [{"name": "data"}], "containers": [container(volumeMounts=[{"name": "data"}])]},
            422,
            "volumeMounts[0].mountPath: Required value",
        ),
        (
            {"containers": [container(resources={"requests": {"tencent.com/vcuda-core": 5}})]},
            422,
            "limit must be set for non overcommitable tencent.com/vcuda-core",
        ),
        (
            {"containers": [container()], "terminationGracePeriodSeconds": -1},
            422,
            "terminationGracePeriodSeconds: Invalid value: -1",
        ),
        (
            {"containers": [container()], "terminationGracePeriodSeconds": True},
            422,
            "must be a non-negative integer",
        ),
    ],
)
def test_a_pod_that_cannot_run_is_refused_and_the_field_named(
    api: apis.Api, spec: dict[str, Any], code: int, message: str
) -> None:
    found = refused(api, "POST", PODS, {"metadata": {"name": "a"}, "spec": spec})
    assert found[0] == code
    assert message in found[1]
    assert api.call("GET", "/api/v1/pods")["items"] == []


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ([1], 400, "the body is not an object with metadata"),
        ({"metadata": {}}, 422, "metadata.name: Required value: name or generateName is required"),
        ({"metadata": {"name": "a"}}, 422, "spec: Required value"),
        ({"metadata": {"name": "x" * 254}, "spec": {}}, 422, "a lowercase RFC 1123 subdomain is needed"),
        (
            {"metadata": {"name": "a", "namespace": "kube-system"}, "spec": {}},
            400,
            "the namespace of the object does not match the namespace of the request",
        ),
        ({"metadata": {"name": "a", "labels": ["x"]}}, 400, "metadata.labels must map strings to strings"),
        (
            {"kind": "Job", "metadata": {"name": "a"}, "spec": {}},
            400,
            "the object is a v1 Job, the request's path is for Pod",
        ),
    ],
)
def test_an_object_that_cannot_be_stored_is_refused_with_what_is_missing(
    api: apis.Api, body: Any, code: int, message: str
) -> None:
    found = refused(api, "POST", PODS, body)
    assert found[0] == code and message in found[1]


@pytest.mark.parametrize(
    ("method", "path", "body", "code", "message"),
    [
        ("POST", "/api/v1/pods", {"metadata": {"name": "b"}}, 400, "a namespace is needed in the path"),
        ("PUT", f"{PODS}/a", [1], 400, "the body is not an object with metadata"),
        ("PUT", f"{PODS}/a", {"metadata": {"name": "b"}}, 400, "does not match the name on the URL"),
        (
            "PUT",
            f"{PODS}/a",
            {"metadata": {"uid": "other"}},
            409,
            "the UID in the object is not the stored one",
        ),
        ("PUT", f"{PODS}/b", {"metadata": {}}, 404, '"b" not found'),
        ("DELETE", f"{PODS}/b", None, 404, '"b" not found'),
        ("DELETE", f"{PODS}/a?gracePeriodSeconds=soon", None, 400, "gracePeriodSeconds is 'soon'"),
        ("DELETE", f"{PODS}/a", {"gracePeriodSeconds": -1}, 400, "it must be a non-negative integer"),
        ("DELETE", f"{PODS}/a/status", None, 405, "DELETE is not allowed"),
        ("POST", f"{PODS}/a", {}, 405, "POST is not allowed"),
        ("POST", f"{PODS}/a/binding", [1], 400, "a Binding needs metadata and target.name"),
        ("POST", f"{PODS}/a/binding", {"metadata": {}, "target": {}}, 400, "needs metadata and target.name"),
        ("GET", "/api/v1/bindings", None, 404, "could not find the requested resource (/api/v1/bindings)"),
        ("GET", "/somewhere", None, 404, "could not find the requested resource (/somewhere)"),
        ("GET", "/api/v1", None, 0, ""),
        ("GET", "/api/v1/pods/a", None, 404, "could not find"),
        ("GET", "/api/v1/namespaces/default/nodes", None, 404, "could not find"),
        ("GET", f"{PODS}/a/status/more", None, 404, "could not find"),
        (
            "GET",
            "/api/v1/pods?labelSelector=a%3D%3D%3Db",
            None,
            400,
            "unable to parse label selector 'a===b'",
        ),
        ("GET", "/api/v1/pods?fieldSelector=status.phase", None, 400, "unable to parse field selector"),
        ("GET", "/api/v1/pods?watch=1&resourceVersion=new", None, 400, "must be numbers"),
        ("GET", "/api/v1/pods?watch=1&timeoutSeconds=long", None, 400, "must be numbers"),
    ],
)
def test_a_request_that_cannot_be_served_says_why(
    api: apis.Api, pod: dict[str, Any], method: str, path: str, body: Any, code: int, message: str
) -> None:
    if code == 0:
        assert api.call(method, path, body)["kind"] == "APIResourceList"
        return
    found = refused(api, method, path, body)
    assert found[0] == code and message in found[1], found
    assert api.call("GET", f"{PODS}/a")["metadata"]["resourceVersion"] == pod["metadata"]["resourceVersion"]


@pytest.mark.parametrize(
    ("kind", "patch", "code", "message"),
    [
        ("application/json-patch+json", [], 415, "'application/json-patch+json' is not supported; send"),
        (MERGE, [1], 400, "the patch is not a JSON object"),
        (MERGE, {"kind": "Node"}, 400, "the object is a v1 Node"),
        (MERGE, {"metadata": None}, 400, "the body is not an object with metadata"),
        (MERGE, {"metadata": "x"}, 400, "the body is not an object with metadata"),
        (MERGE, {"spec": None}, 422, "spec: Required value"),
        (STRATEGIC, {"spec": {"containers": [{"image": "j"}]}}, 400, "lacks its merge key 'name'"),
    ],
)
def test_a_patch_that_cannot_be_applied_is_refused_and_changes_nothing(
    api: apis.Api, pod: dict[str, Any], kind: str, patch: Any, code: int, message: str
) -> None:
    found = refused(api, "PATCH", f"{PODS}/a", patch, kind)
    assert found[0] == code and message in found[1], found
    assert api.call("GET", f"{PODS}/a") == pod


def test_a_strategic_patch_takes_one_condition_away_and_ignores_the_order_it_is_told(api: apis.Api) -> None:
    api.call("POST", "/api/v1/nodes", {"metadata": {"name": "n1"}})
    for change in ({"status": "True"}, {"$patch": "delete"}):
        conditions = [{"type": "Ready", **change}, {"type": "Other", "status": "True"}]
        status = {"conditions": conditions, "$setElementOrder/conditions": [{"type": "Other"}]}
        found = api.call("PATCH", "/api/v1/nodes/n1/status", {"status": status}, STRATEGIC)
    assert found["status"] == {"conditions": [{"type": "Other", "status": "True"}]}


def test_a_pod_that_is_going_is_not_bound(api: apis.Api, pod: dict[str, Any]) -> None:
    binding = {"metadata": {}, "target": {"name": "n1"}}
    api.call("POST", f"{PODS}/a/binding", binding)
    api.call("DELETE", f"{PODS}/a", {"gracePeriodSeconds": 9})
    code, message = refused(api, "POST", f"{PODS}/a/binding", binding)
    assert code == 409 and "pod a is being deleted, cannot be assigned to a host" in message
    # Deleting it again with a longer grace period than it has changes nothing, a shorter one counts.
    for grace, left in ((20, 9), (3, 3)):
        api.call("DELETE", f"{PODS}/a", {"gracePeriodSeconds": grace})
        assert api.call("GET", f"{PODS}/a")["metadata"]["deletionGracePeriodSeconds"] == left


def test_an_eviction_deletes_as_its_options_say(api: apis.Api, pod: dict[str, Any]) -> None:
    wrong = {"deleteOptions": {"preconditions": {"uid": "other"}}}
    code, message = refused(api, "POST", f"{PODS}/a/eviction", wrong)
    assert code == 409 and "the precondition uid does not hold" in message
    api.call("POST", f"{PODS}/a/eviction", {})
    assert refused(api, "GET", f"{PODS}/a")[0] == 404


def test_evictions_are_of_policy_v1_and_kept_to_by_budgets(api: apis.Api, pod: dict[str, Any]) -> None:
    """As the real server since 1.25: the beta version is gone."""
    code, message = refused(api, "POST", f"{PODS}/a/eviction", {"apiVersion": "policy/v1beta1", "kind": "Eviction"})
    assert (code, message) == (400, 'no kind "Eviction" is registered for version "policy/v1beta1"')
    budgets = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
    api.patch(f"{PODS}/a", {"metadata": {"labels": {"app": "a"}}})
    for name, selector in (("others", {"app": "b"}), ("mine", {"app": "a"})):
        api.call("POST", budgets, {"metadata": {"name": name}, "spec": {"selector": {"matchLabels": selector}}})
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction"}
    code, message = refused(api, "POST", f"{PODS}/a/eviction", eviction)
    assert code == 429 and "disruption budget" in message
    api.patch(f"{budgets}/mine/status", {"status": {"disruptionsAllowed": 1}})
    api.call("POST", f"{PODS}/a/eviction", eviction)
    assert refused(api, "GET", f"{PODS}/a")[0] == 404


@pytest.mark.parametrize(
    ("spec", "query", "code", "message"),
    [
        ({}, "", 400, "pod b is not on a node yet: nothing of it runs"),
        ({"nodeName": "n9"}, "?container=side", 400, "side is not valid for pod b; choose one of main"),
        ({"nodeName": "n9"}, "", 404, '"n9" not found'),
        ({"nodeName": "n1"}, "", 503, "the kubelet of node n1 has no endpoint"),
        ({"nodeName": "n2"}, "", 502, "kubelet does not answer"),
        (
            {"nodeName": "n1", "containers": [container(), container(name="two")]},
            "",
            400,
            "a container name must be specified for pod b, one of main, two",
        ),
    ],
)
def test_a_log_that_cannot_be_read_says_which_part_is_missing(
    api: apis.Api, make_pod: Pod, spec: dict[str, Any], query: str, code: int, message: str
) -> None:
    for name in ("n1", "n2"):
        api.call("POST", "/api/v1/nodes", {"metadata": {"name": name}})
    # Port 1 of loopback: nothing listens there.
    api.patch("/api/v1/nodes/n2/status", {"status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 1}}}})
    made = make_pod("b")
    made["spec"] |= spec
    api.call("POST", PODS, made)
    found = refused(api, "GET", f"{PODS}/b/log{query}")
    assert found[0] == code and message in found[1], found


def test_a_body_beyond_the_real_servers_limit_is_413(api: apis.Api, make_pod: Pod) -> None:
    pod = make_pod("big")
    pod["metadata"]["annotations"] = {"x": "y" * (3 * 1024 * 1024)}
    code, message = refused(api, "POST", PODS, pod)
    assert code == 413 and "the body exceeds" in message


def test_a_dependent_object_takes_the_namespaces_word(api: apis.Api) -> None:
    """A namespace that was made is one that pods can be made in."""
    assert refused(api, "POST", "/api/v1/namespaces/team/configmaps", {"metadata": {"name": "c"}})[0] == 404
    made = api.call("POST", "/api/v1/namespaces", {"metadata": {"name": "team", "namespace": "x"}})
    assert made["status"] == {"phase": "Active"} and "namespace" not in made["metadata"]
    path = "/api/v1/namespaces/team/configmaps"
    api.call("POST", path, {"metadata": {"name": "c"}})
    assert [item["metadata"]["name"] for item in api.call("GET", path)["items"]] == ["c"]
    api.call("DELETE", f"{path}/c")
    assert api.call("GET", path)["items"] == []
