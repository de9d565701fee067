"""What the daemon tells the API server arrives, in whatever order daemon, kubelet and node object come."""

# ruff: noqa: ARG002  (the parameters are those of the real client)
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import cast

import pytest

from manager.kube.api import Kube
from manager.kube.writer import ApiWriter
from tests.manager.manager_pods import eventually
from tests.manager.manager_support import Node
from vcuda.kube.errors import ApiError
from vcuda.kube.events import Correlator, Said
from vcuda.sim import Machine


class Api:
    """An API server with or without our node."""

    def __init__(self) -> None:
        self.has_node = False
        self.refused = 0
        self.node: list[Mapping[str, str]] = []
        self.events: list[str] = []
        self.labels: Mapping[str, str | None] = {}

    def patch_node(self, annotations: Mapping[str, str], labels: Mapping[str, str | None], _: float) -> None:
        if not self.has_node:
            self.refused += 1
            raise ApiError(404, 'nodes "node-1" not found')
        self.node.append(annotations)
        self.labels = labels

    def event(self, said: Said, correlator: Correlator, timeout: float) -> None:
        self.events.append(said.reason)


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def api_writer(api: Api) -> Iterator[ApiWriter]:
    made = ApiWriter(cast(Kube, api))
    made.start()
    yield made
    made.stop()


def test_what_is_said_of_a_node_waits_until_kubelet_has_made_it(api: Api, api_writer: ApiWriter) -> None:
    api_writer.describe_node({"cards": "1"}, {})
    eventually(lambda: api.refused, "the first try")
    api_writer.event({"name": "node-1"}, "Warning", "Xid", "it does not wait for the node")
    eventually(lambda: api.events == ["Xid"], "the event")
    api.has_node = True
    assert api_writer.wait_empty(5)
    assert api.node == [{"cards": "1"}]
    assert api.refused < 5, "it does not spin"


def test_a_node_that_is_not_there_is_tried_ever_more_rarely_until_something_new_is_said(api: Api) -> None:
    now = 0.0
    api_writer = ApiWriter(cast(Kube, api), lambda: now)

    def tried_at(seconds: int) -> list[float]:
        """When it was tried within the next seconds."""
        nonlocal now
        until, found = now + seconds, []
        while now < until:
            for _ in range(5):
                if (entry := api_writer._next()) is not None:
                    found.append(now)
                    assert api_writer._send(cast(Kube, api), *entry)
            now += 1
        return found

    api_writer.describe_node({"cards": "1"}, {})
    assert tried_at(130) == [0, 1, 3, 7, 15, 31, 61, 91, 121]
    api_writer.describe_node({"cards": "2"}, {})
    assert tried_at(5) == [130, 131, 133]
    api.has_node = True
    assert tried_at(60) == [137]
    assert api.node == [{"cards": "2"}]


def test_what_nobody_waits_for_is_written_when_kubelet_is_quiet_or_after_five_minutes(api: Api) -> None:
    """In a burst each write of ours takes processors from the pods that start."""
    now, called = 0.0, 0.0
    api_writer = ApiWriter(cast(Kube, api), lambda: now, lambda: now - called)

    def due() -> list[str]:
        found = []
        while (entry := api_writer._next()) is not None:
            found.append(entry[0].split(" ")[0])
            del api_writer._pending[entry[0]]
        return found

    about = {"kind": "Pod", "name": "a", "uid": "u"}
    api_writer.annotate_pod("default", "a", "u", {"assigned": "true"}, in_calm=True)
    api_writer.event(about, "Normal", "ShareAssigned", "30 cores")
    api_writer.event(about, "Warning", "Xid", "79")
    api_writer.annotate_pod("default", "b", "v", {"placement": "{}"})
    assert due() == ["pod", "event"]
    assert api_writer.annotates("u") and not api_writer.annotates("v")
    now = 0.9
    assert due() == []
    now = 1.0
    assert due() == ["pod", "event"]
    api_writer.annotate_pod("default", "a", "u", {"assigned": "true"}, in_calm=True)
    for _ in range(299):
        now = called = now + 1.0
        api_writer.annotate_pod("default", "a", "u", {"assigned": "true"}, in_calm=True)  # does not begin anew
        assert due() == []
    now = called = now + 1.0
    assert due() == ["pod"]
    # The tail of a burst: all pods are admitted, and kubelet calls seldom while most containers are yet to start.
    for number in range(100):
        api_writer.annotate_pod("default", "a", f"u{number}", {"assigned": "true"}, in_calm=True)
    for _ in range(5):
        assert due() == []
        now += 0.9
    now += 0.6
    assert due() == ["pod"] * 100


def test_what_is_said_of_a_node_while_it_is_looked_for_in_vain_does_not_wait(api: Api) -> None:
    api_writer = ApiWriter(cast(Kube, api), lambda: 0.0)
    api_writer.describe_node({"cards": "1"}, {})
    entry = api_writer._next()
    assert entry is not None
    api_writer.describe_node({"cards": "2"}, {})
    assert api_writer._send(cast(Kube, api), *entry)
    assert api_writer._next() is not None


def test_a_label_that_is_not_given_any_more_is_taken_away_whenever_it_arrives(api: Api, api_writer: ApiWriter) -> None:
    api_writer.describe_node({}, {"model": "a", "rack": "7"})
    eventually(lambda: api.refused, "the first try")
    api_writer.describe_node({}, {"model": "a"})
    api_writer.describe_node({}, {"model": "b"})  # replaces the one that took the label away
    api.has_node = True
    assert api_writer.wait_empty(5)
    assert api.labels == {"model": "b", "rack": None}


def test_a_node_that_was_made_again_is_described_again(make_node: Callable[..., Node], machine: Machine) -> None:
    node = make_node(machine.root, with_api=True)
    node.kubelet.start()
    node.start(wait=200)

    def said() -> list[object]:
        assert node.api is not None
        return [body for path, body in node.api.patches if "/nodes/" in path]

    eventually(said, "the first description")
    before = len(said())
    node.kubelet.restart()
    eventually(lambda: len(said()) > before, "the second description")
    assert said()[-1] == said()[before - 1]
