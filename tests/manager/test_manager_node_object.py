"""What a node's object says of pods that have ended by their status and go on: a word that is never old, as long as there is one."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

from manager.allocations.accounting import AllocationView
from manager.cards.inventory import Inventory, Snapshot
from manager.config.settings import Settings
from manager.kube.writer import ApiWriter
from manager.observe.node_object import NodeObject
from tests.manager.manager_pods import NAMES, allocation
from vcuda.kube.objects import MIRROR_ANNOTATION
from vcuda.spec import bookings
from vcuda.spec.bookings import Report
from vcuda.spec.placement import CardShare

SHARE = CardShare("GPU-0", 30, 4)
ENDED = {"phase": "Succeeded", "containerStatuses": [{"state": {"terminated": {"exitCode": 0}}}]}


class Played:
    """A node, its clock, its kernel, and what its object was told."""

    def __init__(self, *uids: str, static: bool = False) -> None:
        self.now = 1_000_000_020.0
        self.running: set[str] = set()
        self.told: list[Report] = []
        self.pods: list[dict[str, Any]] = []
        self.allocations = tuple(allocation(SHARE, pod_uid=uid, pod_name=uid, static=static) for uid in uids)
        self.object = NodeObject(
            settings=Settings,
            names=NAMES,
            inventory=cast("Inventory", SimpleNamespace(snapshot=Snapshot("nvml", "1", ()))),
            view=cast("AllocationView", self),
            api_writer=cast("ApiWriter", self),
            pods=lambda: self.pods,
            resizes=dict,
            running=lambda: self.running,
            clock=lambda: self.now,
        )

    def describe_node(self, annotations: Mapping[str, str], _: object) -> None:
        self.told.append(bookings.decode(annotations[NAMES.bookings]))

    def show(self, name: str, uid: str, status: dict[str, Any], **annotations: str) -> None:
        metadata = {"namespace": "default", "name": name, "uid": uid, "annotations": annotations}
        self.pods = [one for one in self.pods if one["metadata"]["uid"] != uid]
        self.pods.append({"metadata": metadata, "status": status})

    def pass_by(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.object.look()


def test_while_an_ended_pod_has_processes_its_nodes_report_says_so_anew_every_half_minute() -> None:
    node = Played("p", "q")
    node.show("p", "p", {"phase": "Running"})
    node.show("q", "q", {"phase": "Running"})
    node.running = {"p", "q"}
    node.object.describe()
    node.pass_by(300)
    assert len(node.told) == 1, "nothing has changed"
    node.show("p", "p", ENDED)
    node.pass_by(300)
    assert 10 <= len(node.told) - 1 <= 11
    assert all(set(report.alive) == {"p"} and set(report.pods) == {"p", "q"} for report in node.told[1:])
    assert len({report.alive["p"] for report in node.told[1:]}) == len(node.told) - 1
    node.running = {"q"}
    node.pass_by(300)
    assert not node.told[-1].alive and len(node.told) <= 13


def test_an_ended_pod_without_processes_or_without_a_share_is_no_news() -> None:
    node = Played("p")
    node.show("p", "p", ENDED)
    node.show("stranger", "s", ENDED)
    node.running = {"s"}
    node.object.describe()
    node.pass_by(100)
    assert len(node.told) == 1 and not node.told[0].alive


def test_a_static_pod_whose_mirrors_status_says_that_it_has_ended_is_told_by_its_mirror() -> None:
    node = Played("p", static=True)
    node.show("p", "m", ENDED, **{MIRROR_ANNOTATION: "p"})
    node.running = {"p"}
    node.object.describe()
    assert set(node.told[0].alive) == set(node.told[0].pods) == {"m"}
