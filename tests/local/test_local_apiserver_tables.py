"""What `kubectl get` prints of the stand-in API server: columns, the most telling state, ages."""

from __future__ import annotations

import datetime
import json
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from localcluster import api as apis
from localcluster.apiserver import resources, table
from localcluster.apiserver.server import Server

PODS = "/api/v1/namespaces/default/pods"
ACCEPT = "application/json;as=Table;v=v1;g=meta.k8s.io"


def waiting(reason: str) -> dict[str, Any]:
    return {"state": {"waiting": {"reason": reason}}}


@pytest.mark.parametrize(
    ("metadata", "status", "state"),
    [
        ({}, {}, "Unknown"),
        ({}, {"phase": "Pending"}, "Pending"),
        ({}, {"phase": "Succeeded"}, "Completed"),
        ({}, {"phase": "Failed", "reason": "UnexpectedAdmissionError"}, "UnexpectedAdmissionError"),
        ({}, {"phase": "Pending", "containerStatuses": [waiting("ContainerCreating")]}, "Pending"),
        ({}, {"phase": "Running", "containerStatuses": [waiting("CrashLoopBackOff")]}, "CrashLoopBackOff"),
        (
            {},
            {
                "phase": "Pending",
                "initContainerStatuses": [waiting("CreateContainerConfigError")],
                "containerStatuses": [waiting("PodInitializing")],
            },
            "CreateContainerConfigError",
        ),
        (
            {},
            {
                "phase": "Running",
                "containerStatuses": [{"state": {"running": {}}}, waiting("ImagePullBackOff")],
            },
            "ImagePullBackOff",
        ),
        ({"deletionTimestamp": "now"}, {"phase": "Running", "reason": "Evicted"}, "Terminating"),
    ],
)
def test_a_pods_state_is_the_most_telling_of_what_is_known(
    metadata: dict[str, Any], status: dict[str, Any], state: str
) -> None:
    assert table.pod_state({"metadata": metadata, "status": status}) == state


@pytest.mark.parametrize(("seconds", "age"), [(-5, "0s"), (119, "119s"), (120, "2m"), (7300, "2h"), (2 * 86400, "2d")])
def test_an_age_is_in_the_unit_of_which_there_are_two(seconds: int, age: str) -> None:
    # Half a second is what this test may take.
    created = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=seconds + 0.5)
    item = {"metadata": {"name": "c", "creationTimestamp": created.isoformat()}}
    made = table.render([item], "7", resources.CONFIG_MAPS)
    assert made["metadata"] == {"resourceVersion": "7"}
    assert [row["cells"] for row in made["rows"]] == [["c", age]]


def lines(server: Server, path: str) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {server.token}", "Accept": ACCEPT}
    with urllib.request.urlopen(urllib.request.Request(server.url + path, headers=headers), timeout=20) as answer:
        return [json.loads(line) for line in answer]


def cells(answer: dict[str, Any]) -> list[list[Any]]:
    assert answer["kind"] == "Table"
    return [row["cells"][:-1] for row in answer["rows"]]  # without the age


def test_a_list_an_object_and_a_watch_are_tables_for_who_asks_for_them(
    server: Server, api: apis.Api, make_pod: Callable[..., dict[str, Any]]
) -> None:
    pod = api.call("POST", PODS, make_pod("a"))
    row = ["a", "0/1", "Pending", 0]
    assert cells(lines(server, PODS)[0]) == [row]
    assert cells(lines(server, f"{PODS}/a")[0]) == [row]
    # Without a version a watch begins with what is there, and only where it looks.
    (event,) = lines(server, f"{PODS}?watch=true&timeoutSeconds=0.5")
    assert event["type"] == "ADDED" and cells(event["object"]) == [row]
    assert lines(server, "/api/v1/namespaces/kube-system/pods?watch=true&timeoutSeconds=0.2") == []
    api.event(pod, "Warning", "Broken", "why", "test")
    (name, *event_cells) = cells(lines(server, "/api/v1/namespaces/default/events")[0])[0]
    assert name.startswith("a.") and event_cells == ["Warning", "Broken", "pod/a", "why"]


def test_a_watch_that_fell_behind_ends_with_the_error_as_it_is(
    server: Server, api: apis.Api, make_pod: Callable[..., dict[str, Any]]
) -> None:
    api.call("POST", PODS, make_pod("a"))
    for number in range(20):  # the fixture's server remembers 16 changes
        api.patch(f"{PODS}/a", {"metadata": {"labels": {"n": str(number)}}})
    (event,) = lines(server, f"{PODS}?watch=true&resourceVersion=1")
    assert event["type"] == "ERROR" and event["object"]["code"] == 410
    assert "too old resource version: 1; list again" in event["object"]["message"]
    with pytest.raises(apis.ApiFailure, match="list again") as failure:
        list(api.watch(PODS, "1"))
    assert failure.value.code == 410


def test_health_is_told_to_everybody_and_a_write_that_changes_nothing_is_no_version(
    server: Server, api: apis.Api, make_pod: Callable[..., dict[str, Any]]
) -> None:
    with urllib.request.urlopen(f"{server.url}/readyz", timeout=20) as answer:
        assert answer.read() == b"ok"
    pod = api.call("POST", PODS, make_pod("a"))
    assert api.call("PUT", f"{PODS}/a", pod)["metadata"] == pod["metadata"]
    assert api.patch(f"{PODS}/a", {})["metadata"] == pod["metadata"]
