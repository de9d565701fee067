"""The stand-in API server as the unmodified `kubernetes` client sees it."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import threading
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes
import pytest
from kubernetes.client import ApiException

from localcluster import api as apis
from localcluster import certificates
from localcluster.apiserver.server import Server, ServerFailure
from tests.support.sockets import nodelay_of_accepted

Pod = Callable[..., dict[str, Any]]


@pytest.fixture
def core(server: Server) -> kubernetes.client.CoreV1Api:
    client = kubernetes.config.new_client_from_config(str(server.kubeconfig))
    return kubernetes.client.CoreV1Api(client)


def status_of(error: pytest.ExceptionInfo[ApiException]) -> tuple[int, str, str]:
    body = json.loads(error.value.body)
    assert body["kind"] == "Status"
    return error.value.status, body["reason"], body["message"]


def binding(name: str, node: str = "n1", **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name, **metadata},
        "target": {"name": node},
    }


def bind(core: kubernetes.client.CoreV1Api, name: str, node: str = "n1", **metadata: Any) -> None:
    core.create_namespaced_pod_binding(name, "default", binding(name, node, **metadata), _preload_content=False)


def test_a_created_pod_gets_identity_defaults_and_requests_from_limits(core: Any, make_pod: Pod) -> None:
    pod = core.create_namespaced_pod("default", make_pod("a", core=30, memory=10))
    assert pod.metadata.uid and pod.metadata.resource_version and pod.metadata.creation_timestamp
    assert pod.status.phase == "Pending" and pod.spec.restart_policy == "Always"
    wanted = {"tencent.com/vcuda-core": "30", "tencent.com/vcuda-memory": "10"}
    assert pod.spec.containers[0].resources.requests == wanted
    assert [item.metadata.name for item in core.list_pod_for_all_namespaces().items] == ["a"]


def test_names_are_unique_and_generated_ones_differ(core: Any, make_pod: Pod) -> None:
    core.create_namespaced_pod("default", make_pod("a"))
    with pytest.raises(ApiException) as error:
        core.create_namespaced_pod("default", make_pod("a"))
    assert status_of(error)[:2] == (409, "AlreadyExists")
    generated = make_pod("x")
    generated["metadata"] = {"generateName": "job-"}
    names = {core.create_namespaced_pod("default", generated).metadata.name for _ in range(3)}
    assert len(names) == 3 and all(name.startswith("job-") for name in names)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda pod: pod["spec"].update(containers=[]), "spec.containers"),
        (lambda pod: pod["spec"]["containers"][0].update(name="Not_A_Label"), "spec.containers[0].name"),
        (lambda pod: pod["spec"]["containers"][0].pop("image"), "spec.containers[0].image"),
        (lambda pod: pod["metadata"].update(name="Upper"), "metadata.name"),
        (lambda pod: pod["spec"].update(restartPolicy="Sometimes"), "spec.restartPolicy"),
        (
            lambda pod: limits(pod).update({"tencent.com/vcuda-core": "-1"}),
            "spec.containers[0].resources.limits",
        ),
        (
            lambda pod: limits(pod).update({"tencent.com/vcuda-core": "0.5"}),
            "spec.containers[0].resources.limits",
        ),
        (
            lambda pod: limits(pod).update({"tencent.com/vcuda-core": "many"}),
            "spec.containers[0].resources.limits",
        ),
        (lambda pod: limits(pod).update({"gpu": "1"}), "spec.containers[0].resources.limits"),
        (
            lambda pod: pod["spec"]["containers"][0]["resources"].update(requests={"tencent.com/vcuda-core": "20"}),
            "spec.containers[0].resources.requests",
        ),
    ],
)
def test_an_invalid_pod_is_refused_with_422_and_the_field(
    api: apis.Api, make_pod: Pod, change: Any, field: str
) -> None:
    pod = make_pod("a", core=30, memory=4)
    change(pod)
    with pytest.raises(apis.ApiFailure) as error:
        api.call("POST", "/api/v1/namespaces/default/pods", pod)
    assert (error.value.code, error.value.reason) == (422, "Invalid") and field in str(error.value)
    assert api.call("GET", "/api/v1/pods")["items"] == []


def limits(pod: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = pod["spec"]["containers"][0]["resources"]["limits"]
    return found


def test_annotations_must_be_strings(api: apis.Api, make_pod: Pod) -> None:
    pod = make_pod("a")
    pod["metadata"]["annotations"] = {"tencent.com/vcuda-core-limit": 50}
    with pytest.raises(apis.ApiFailure, match="quote numbers") as error:
        api.call("POST", "/api/v1/namespaces/default/pods", pod)
    assert error.value.code == 400


def test_binding_copies_annotations_in_the_same_write_and_only_once(core: Any, api: apis.Api, make_pod: Pod) -> None:
    pod = core.create_namespaced_pod("default", make_pod("a"))
    version = pod.metadata.resource_version
    bind(core, "a", annotations={"tencent.com/vcuda-placement": "{}"}, uid=pod.metadata.uid)
    events = []
    for event in api.watch("/api/v1/pods", version, seconds=1):
        events.append(event["object"])
    assert len(events) == 1
    assert events[0]["spec"]["nodeName"] == "n1"
    assert events[0]["metadata"]["annotations"] == {"tencent.com/vcuda-placement": "{}"}
    with pytest.raises(ApiException) as error:
        bind(core, "a", "n2")
    assert status_of(error)[:2] == (409, "Conflict") and "already assigned" in status_of(error)[2]
    assert core.read_namespaced_pod("a", "default").spec.node_name == "n1"


def test_binding_another_incarnation_is_a_conflict(core: Any, make_pod: Pod) -> None:
    core.create_namespaced_pod("default", make_pod("a"))
    with pytest.raises(ApiException) as error:
        bind(core, "a", uid="00000000-0000-0000-0000-000000000000")
    assert status_of(error)[0] == 409


def test_a_stale_resource_version_is_a_conflict_for_put_and_patch(core: Any, make_pod: Pod) -> None:
    pod = core.create_namespaced_pod("default", make_pod("a"))
    core.patch_namespaced_pod("a", "default", {"metadata": {"labels": {"x": "1"}}})
    pod.metadata.labels = {"x": "2"}
    with pytest.raises(ApiException) as error:
        core.replace_namespaced_pod("a", "default", pod)
    assert status_of(error)[:2] == (409, "Conflict")
    stale = {"metadata": {"resourceVersion": pod.metadata.resource_version, "labels": {"x": "3"}}}
    with pytest.raises(ApiException) as error:
        core.patch_namespaced_pod("a", "default", stale)
    assert status_of(error)[0] == 409
    assert core.read_namespaced_pod("a", "default").metadata.labels == {"x": "1"}


def test_status_and_spec_are_written_apart(core: Any, make_pod: Pod) -> None:
    core.create_namespaced_pod("default", make_pod("a"))
    core.patch_namespaced_pod("a", "default", {"status": {"phase": "Failed"}, "metadata": {"labels": {"x": "1"}}})
    assert core.read_namespaced_pod("a", "default").status.phase == "Pending"
    core.patch_namespaced_pod_status("a", "default", {"status": {"phase": "Running"}, "spec": {"nodeName": "sneaky"}})
    pod = core.read_namespaced_pod("a", "default")
    assert (pod.status.phase, pod.spec.node_name, pod.metadata.labels) == ("Running", None, {"x": "1"})


def test_a_pods_limits_cannot_be_changed(core: Any, make_pod: Pod) -> None:
    core.create_namespaced_pod("default", make_pod("a", core=30, memory=4))
    container = {"name": "main", "resources": {"limits": {"tencent.com/vcuda-core": "90"}}}
    with pytest.raises(ApiException) as error:
        core.patch_namespaced_pod("a", "default", {"spec": {"containers": [container]}})
    assert status_of(error)[:2] == (422, "Invalid")


def test_conditions_of_a_node_merge_by_type(core: Any) -> None:
    core.create_node({"metadata": {"name": "n1"}})
    for name in ("Ready", "GpuReady"):
        core.patch_node_status("n1", {"status": {"conditions": [{"type": name, "status": "True"}]}})
    core.patch_node("n1", {"metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}}})
    node = core.read_node("n1")
    assert [condition.type for condition in node.status.conditions] == ["Ready", "GpuReady"]
    core.patch_node("n1", {"metadata": {"labels": {"a": None}}})
    assert not core.read_node("n1").metadata.labels


def test_a_pod_without_node_goes_at_once_and_a_bound_one_waits_for_kubelet(core: Any, make_pod: Pod) -> None:
    core.create_namespaced_pod("default", make_pod("a"))
    core.delete_namespaced_pod("a", "default")
    pod = core.create_namespaced_pod("default", make_pod("a"))
    bind(core, "a")
    core.delete_namespaced_pod("a", "default", grace_period_seconds=7)
    going = core.read_namespaced_pod("a", "default").metadata
    assert going.deletion_timestamp and going.deletion_grace_period_seconds == 7
    wrong = kubernetes.client.V1DeleteOptions(grace_period_seconds=0, preconditions={"uid": "another"})
    with pytest.raises(ApiException) as error:
        core.delete_namespaced_pod("a", "default", body=wrong)
    assert status_of(error)[0] == 409
    right = kubernetes.client.V1DeleteOptions(grace_period_seconds=0, preconditions={"uid": pod.metadata.uid})
    core.delete_namespaced_pod("a", "default", body=right)
    with pytest.raises(ApiException) as error:
        core.read_namespaced_pod("a", "default")
    assert status_of(error)[:2] == (404, "NotFound")


def test_a_watch_follows_a_list_and_a_selector_makes_objects_appear_and_vanish(core: Any, make_pod: Pod) -> None:
    version = core.list_pod_for_all_namespaces().metadata.resource_version
    core.create_namespaced_pod("default", make_pod("a"))
    bind(core, "a")
    core.patch_namespaced_pod("a", "default", {"metadata": {"labels": {"x": "1"}}})
    core.delete_namespaced_pod("a", "default", grace_period_seconds=0)
    seen = {}
    for selector in ("", "spec.nodeName=n1"):
        watch = kubernetes.watch.Watch().stream(
            core.list_pod_for_all_namespaces,
            resource_version=version,
            field_selector=selector,
            timeout_seconds=1,
        )
        seen[selector] = [event["type"] for event in watch]
    assert seen[""] == ["ADDED", "MODIFIED", "MODIFIED", "DELETED"]
    assert seen["spec.nodeName=n1"] == ["ADDED", "MODIFIED", "DELETED"]


def test_all_pages_of_a_list_are_of_one_moment(core: Any, make_pod: Pod) -> None:
    """Counted in what is there at each page, one was in none where one before it went, and what changed in a page that
    had been given was in neither list nor watch: the extender held such a card to be free, and booked it twice.
    """
    for name in "acegi":
        core.create_namespaced_pod("default", make_pod(name))
    page = core.list_pod_for_all_namespaces(limit=2)
    version, names = page.metadata.resource_version, [item.metadata.name for item in page.items]
    core.delete_namespaced_pod("a", "default", grace_period_seconds=0)
    core.create_namespaced_pod("default", make_pod("b"))
    bind(core, "c")
    while page.metadata._continue:
        page = core.list_pod_for_all_namespaces(limit=2, _continue=page.metadata._continue)
        assert page.metadata.resource_version == version
        names += [item.metadata.name for item in page.items]
    assert names == list("acegi")
    watch = kubernetes.watch.Watch().stream(
        core.list_pod_for_all_namespaces, resource_version=version, timeout_seconds=1
    )
    assert [(event["type"], event["object"].metadata.name) for event in watch] == [
        ("DELETED", "a"),
        ("ADDED", "b"),
        ("MODIFIED", "c"),
    ]


def test_a_page_that_is_not_there_any_more_is_410_and_one_that_never_was_400(core: Any, make_pod: Pod) -> None:
    for name in "abc":
        core.create_namespaced_pod("default", make_pod(name))
    old = core.list_pod_for_all_namespaces(limit=1).metadata._continue
    for _ in range(100):
        core.list_pod_for_all_namespaces(limit=1)
    for words, wanted in ((old, (410, "Expired")), ("x", (400, "BadRequest"))):
        with pytest.raises(ApiException) as error:
            core.list_pod_for_all_namespaces(limit=1, _continue=words)
        assert status_of(error)[:2] == wanted


def test_a_watch_delivers_what_happens_later(core: Any, make_pod: Pod) -> None:
    timer = threading.Timer(0.3, core.create_namespaced_pod, ("default", make_pod("late")))
    timer.start()
    watch = kubernetes.watch.Watch()
    for event in watch.stream(core.list_namespaced_pod, "default", timeout_seconds=20):
        assert event["object"].metadata.name == "late"
        watch.stop()
    timer.join()


def test_a_watch_from_a_forgotten_version_is_410(core: Any, make_pod: Pod) -> None:
    core.create_namespaced_pod("default", make_pod("a"))
    for number in range(20):  # the fixture's server remembers 16 changes
        core.patch_namespaced_pod("a", "default", {"metadata": {"labels": {"n": str(number)}}})
    with pytest.raises(ApiException) as error:
        list(kubernetes.watch.Watch().stream(core.list_pod_for_all_namespaces, resource_version="1", timeout_seconds=5))
    assert error.value.status == 410


@pytest.mark.parametrize(
    ("selector", "found"),
    [
        ("app=a", ["a"]),
        ("app!=a", ["b", "c"]),
        ("app in (a,b)", ["a", "b"]),
        ("app notin (a),tier", ["b"]),
        ("!app", ["c"]),
    ],
)
def test_label_selectors(core: Any, make_pod: Pod, selector: str, found: list[str]) -> None:
    for name, labels in (("a", {"app": "a"}), ("b", {"app": "b", "tier": "x"}), ("c", {})):
        pod = make_pod(name)
        pod["metadata"]["labels"] = labels
        core.create_namespaced_pod("default", pod)
    items = core.list_namespaced_pod("default", label_selector=selector).items
    assert [item.metadata.name for item in items] == found


def test_unsupported_requests_are_refused_clearly(core: Any, api: apis.Api) -> None:
    for method, path, body, code in (
        ("GET", "/api/v1/pods?fieldSelector=spec.hostname%3Dx", None, 400),
        ("GET", "/api/v1/secrets", None, 404),
        ("POST", "/api/v1/namespaces/default/pods", [1], 400),
        ("POST", "/api/v1/namespaces/nowhere/pods", {"metadata": {"name": "a"}, "spec": {}}, 404),
        ("POST", "/api/v1/namespaces/default/pods?dryRun=All", {}, 400),
        ("PUT", "/api/v1/pods", {}, 405),
        ("GET", "/api/v1/namespaces/default/pods/x/exec", None, 404),
    ):
        with pytest.raises(apis.ApiFailure) as error:
            api.call(method, path, body)
        assert error.value.code == code, (method, path, str(error.value))


def test_leases_and_events(server: Server, core: Any, make_pod: Pod, api: apis.Api) -> None:
    leases = kubernetes.client.CoordinationV1Api(core.api_client)
    lease = leases.create_namespaced_lease("default", {"metadata": {"name": "leader"}, "spec": {"holderIdentity": "a"}})
    lease.spec.holder_identity = "b"
    leases.replace_namespaced_lease("leader", "default", lease)
    with pytest.raises(ApiException):
        leases.replace_namespaced_lease("leader", "default", lease)
    pod = api.call("POST", "/api/v1/namespaces/default/pods", make_pod("a"))
    api.event(pod, "Warning", "Broken", "why", "test")
    events = core.list_namespaced_event("default", field_selector=f"involvedObject.uid={pod['metadata']['uid']}").items
    assert [(event.reason, event.message) for event in events] == [("Broken", "why")]


def test_the_token_is_needed_and_the_kubeconfig_is_private(server: Server, core: Any) -> None:
    assert server.kubeconfig.stat().st_mode & 0o777 == 0o600
    core.api_client.configuration.api_key = {}
    with pytest.raises(ApiException) as error:
        kubernetes.client.CoreV1Api(kubernetes.client.ApiClient(core.api_client.configuration)).list_node()
    assert status_of(error)[:2] == (401, "Unauthorized")


def test_a_port_in_use_is_a_clear_error(server: Server, tmp_path: Path) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(ServerFailure, match=f"port {port} .* can't be used"):
        Server(tmp_path, port=port)


@pytest.mark.skipif(not shutil.which("kubectl") or not shutil.which("openssl"), reason="needs kubectl and openssl")
def test_kubectl_creates_shows_and_deletes(tmp_path: Path, make_pod: Pod) -> None:
    certificate = certificates.make(tmp_path)
    server = Server(tmp_path, certificate=certificate)
    server.start()
    manifest = tmp_path / "pod.json"
    manifest.write_text(json.dumps({"apiVersion": "v1", "kind": "Pod", **make_pod("a", core=30, memory=4)}))

    def kubectl(*words: str) -> str:
        command = [
            "kubectl",
            "--kubeconfig",
            str(server.kubeconfig),
            "--cache-dir",
            str(tmp_path / "cache"),
            *words,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        assert "pod/a created" in kubectl("apply", "-f", str(manifest))
        assert kubectl("get", "pods").split()[5:9] == ["a", "0/1", "Pending", "0"]
        assert "vcuda-core:" in kubectl("describe", "pod", "a")
        assert "deleted" in kubectl("delete", "pod", "a")
        apis.Api(server.kubeconfig).call("POST", "/api/v1/nodes", {"metadata": {"name": "n1"}})
        assert kubectl("get", "nodes").split()[3:5] == ["n1", "NotReady"]
    finally:
        server.stop()


def test_answers_on_a_kept_connection_are_not_held_back(server: Server) -> None:
    """Else each waits for the client's delayed acknowledgement: head and body are two writes."""
    address = urllib.parse.urlsplit(server.url)
    assert address.hostname is not None and address.port is not None
    client = http.client.HTTPConnection(address.hostname, address.port, timeout=20)
    client.request("GET", "/version")
    client.getresponse().read()
    assert nodelay_of_accepted(address.port) == [True]
    client.close()
