"""Limits that the driver itself holds: on the pod's control group before anything of it starts, kept, resized, taken away, and told of."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from localcluster.kubelet.devices import AdmissionFailure
from manager import doctor
from manager.allocations.record import ClaimUse
from manager.allocations.state_file import StateError
from manager.cards.driver import CardProcess
from manager.cgroups import pods
from manager.config import reader
from manager.doctor import Verdict
from manager.errors import Refusal
from manager.kube.api import Pod
from manager.limits.driver_limits import DriverLimits
from manager.regions.regions import Regions
from tests.manager.manager_pods import container, eventually, pod
from tests.manager.manager_support import Node
from tests.support import groups, sim_cuda, simulated
from tests.support.groups import Group
from vcuda.region import CardUsage, Usage
from vcuda.sim import Machine, SimCard
from vcuda.spec.placement import CardShare

MIB = 2**20
GIB = 2**30
BOTH = pytest.mark.parametrize("machine", ["dmem", "misc"], indirect=True)
# What a client that knows nothing of us gets, in MiB: the driver's own library, no limits in its environment.
PAST_THE_SHIM = """
context()
got, held = 0, []
while got < 4096 and int((last := cu.cuMemAlloc(16 << 20))[0]) == 0:
    got += 16; held.append(last[1])
answer([got, int(last[0])])
"""
ALL = [4096, 0]


@pytest.fixture
def machine(request: pytest.FixtureRequest, short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Two cards of 8 GiB, 32 blocks each, behind a driver that can limit memory itself."""
    cards, counts = [SimCard(memory_bytes=8 * GIB)] * 2, getattr(request, "param", "dmem")
    if counts == "older":
        made = Machine.create(short_directory / "machine", cards)
    elif counts == "mig":
        made = Machine.create(short_directory / "machine", [SimCard(mig=["1g"])], newer=True)
    else:
        made = Machine.create(short_directory / "machine", cards, newer=True, memory_limits=counts)
    monkeypatch.setenv("VCUDA_SIM_DIR", made.environment()["VCUDA_SIM_DIR"])
    return made


@pytest.fixture
def group() -> Iterator[Group]:
    with groups.made("vgm-limits") as made:
        yield made


class Place:
    """A node whose kubelet gives each pod a control group below `group`, as with the systemd driver."""

    def __init__(self, node: Node, machine: Machine, group: Group) -> None:
        self.node, self.machine, self.group = node, machine, group
        self.node.kubelet.start()

    def start(self, *more: str, cores: int = 200) -> None:
        self.node.start(f"--cgroup-root={self.group.path}", *more, wait=cores)

    def of(self, item: Pod) -> Group:
        name = f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{item['metadata']['uid'].replace('-', '_')}.slice"
        path = self.group.path / name
        return Group(path) if path.exists() else self.group.child(name)

    def begin(self, item: Pod) -> Group:
        """Admit a pod, make its group, and ask to start its containers, in kubelet's order. Returns its only container's group, in which nobody is yet."""
        self.node.kubelet.admit(item, start=False)
        made = self.of(item)
        self.node.kubelet.start_containers(item)
        return made.child("cri-containerd-1.scope")

    def limits(self, path: Path) -> list[int | None]:
        """What the driver says of a group, by card."""
        driver = self.node.daemon.inventory if self.node.daemon else None
        assert driver is not None
        found = [driver.memory_limit(card.uuid, path) for card in self.machine.cards]
        return [one.hard_bytes if one is not None else None for one in found]

    def card(self, item: Pod) -> int:
        """The place of the only card that a pod is on."""
        (uuid,) = self.node.kubelet.cards(item, item["spec"]["containers"][0]["name"])
        return [card.uuid for card in self.machine.cards].index(uuid)

    def shares(self) -> dict[str, dict[str, Any]]:
        return {item["container"]: item["cards"][0] for item in json.loads(self.node.get("/usage")[1])["containers"]}


@pytest.fixture
def place(make_node: Callable[..., Node], machine: Machine, group: Group) -> Place:
    return Place(make_node(machine.root), machine, group)


@pytest.fixture
def ended() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that end with the test."""
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for process in found:
        process.kill()
        process.communicate()


def looks(place: Place) -> None:
    """Return when the daemon has looked at everything twice."""
    daemon = place.node.daemon
    assert daemon is not None
    for _ in range(2):
        before = daemon.cgroups.watch
        daemon._housekeeping.look_again()
        eventually(lambda before=before: daemon.cgroups.watch is not before, "a look")


@BOTH
def test_who_goes_past_the_shim_meets_the_driver_before_the_first_byte_too_many(place: Place) -> None:
    place.start("--driver-limits=off")
    item = pod("p", container("c", 10, 4))
    assert sim_cuda.run(place.machine, PAST_THE_SHIM, wrapper=place.begin(item).enter) == ALL  # the escape
    place.node.stop()
    place.start()
    other = pod("q", container("c", 10, 4))
    assert sim_cuda.run(place.machine, PAST_THE_SHIM, wrapper=place.begin(other).enter) == [960, 2]
    eventually(lambda: place.limits(place.of(item).path)[:1] != [None], "the limit of the pod that ran already")
    assert place.shares()["c"]["held_by"] == "both"
    assert sim_cuda.run(place.machine, PAST_THE_SHIM, wrapper=place.of(item).child("again").enter) == [960, 2]


def test_each_card_has_its_own_limit_and_a_whole_card_none(place: Place) -> None:
    place.start()
    one, whole = pod("one", container("c", 10, 4)), pod("whole", container("w", 100))
    place.begin(one), place.begin(whole)
    on = place.node.kubelet.cards(one, "c")
    wanted = [GIB if card.uuid in on else None for card in place.machine.cards]
    assert place.limits(place.of(one).path) == wanted
    assert place.limits(place.of(whole).path) == [None, None]
    usage = place.shares()
    assert (usage["c"]["held_by"], usage["c"]["driver_limit_bytes"]) == ("both", GIB)
    assert (usage["w"]["held_by"], usage["w"]["driver_limit_bytes"]) == ("shim", None)
    metrics, graph = place.node.get("/metrics")[1], place.node.get("/graph")[1]
    assert 'vcuda_container_memory_held_by{container="c",mechanism="both",' in metrics
    assert (
        f'vcuda_container_driver_limit_bytes{{container="c",namespace="default",node="node-1",pod="one",uuid="{on[0]}"}} 1.0'
        in metrics
    )
    assert "default/one/c: 10 cores, 0 B of 1 GiB (both)" in graph
    assert json.loads(place.node.get("/usage")[1])["driver_limits"] == ""


def test_a_pod_has_what_it_has_booked_the_peak_of_init_containers_and_the_rest(place: Place) -> None:
    place.start()
    small = pod("p", container("a", 10, 4), container("b", 10, 2), init=[container("i", 10, 5)])
    large = pod("q", container("c", 10, 1), init=[container("j", 10, 12)])
    for item, blocks in ((small, 6), (large, 12)):
        place.begin(item)
        assert blocks * 256 * MIB in place.limits(place.of(item).path)
    place.node.stop()
    place.start()  # a new daemon keeps what stands
    eventually(lambda: place.shares().get("b", {}).get("driver_limit_bytes") == 6 * 256 * MIB, "what stands is known")
    assert 6 * 256 * MIB in place.limits(place.of(small).path)


def test_what_somebody_else_changed_is_set_again_and_what_is_gone_is_cleared(place: Place) -> None:
    place.start()
    item = pod("p", container("c", 10, 4))
    place.begin(item)
    made = place.of(item)
    daemon = place.node.daemon
    assert daemon is not None
    (uuid,) = place.node.kubelet.cards(item, "c")
    daemon.inventory.limit_memory(uuid, made.path, None)
    eventually(lambda: GIB in place.limits(made.path), "the limit again")
    item["status"] = {"phase": "Succeeded"}
    eventually(lambda: not place.shares(), "the pod's end")
    eventually(lambda: place.limits(made.path) == [None, None], "the limit's end")


def test_a_claims_limit_stays_when_its_pods_containers_start_and_are_resized(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.start()
    item = pod("p", container("c", 10, 4))
    place.begin(item)
    daemon = place.node.daemon
    assert daemon is not None
    (mine,) = daemon.allocator.allocations
    other = 1 - place.card(item)
    claimed = replace(
        mine,
        pod_uid="claim",
        pod_name="claim",
        container="request",
        shares=(CardShare(place.machine.cards[other].uuid, 10, 3),),
        held={},
        claim=ClaimUse(((mine.pod_name, mine.pod_uid),)),
    )
    daemon.allocator.book.index[claimed.key] = claimed
    eventually(lambda: 3 * 256 * MIB in place.limits(place.of(item).path), "the claim's limit")
    monkeypatch.setattr(DriverLimits, "look", lambda *_: None)
    place.node.kubelet.start_containers(item)
    assert place.limits(place.of(item).path)[other] == 3 * 256 * MIB
    assert resized(place, item, 8) is None
    assert place.limits(place.of(item).path)[other] == 3 * 256 * MIB


def test_an_audit_that_fails_keeps_no_limit_from_being_looked_at(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("an audit of something else")

    place.start()
    item = pod("p", container("c", 10, 4))
    place.begin(item)
    daemon = place.node.daemon
    assert daemon is not None
    monkeypatch.setattr(daemon.auditor, "audit", broken)
    daemon.inventory.limit_memory(place.node.kubelet.cards(item, "c")[0], place.of(item).path, None)
    eventually(lambda: GIB in place.limits(place.of(item).path), "the limit again")


@BOTH
def test_who_outlives_a_pod_that_is_gone_stays_limited(place: Place, ended: list[subprocess.Popen[bytes]]) -> None:
    place.start()
    item = pod("p", container("c", 10, 4))
    leaf = place.begin(item)
    ended.append(subprocess.Popen([*leaf.enter, "sleep", "600"]))
    eventually((leaf.path / "cgroup.procs").read_text, "a process in the group")
    item["status"] = {"phase": "Failed"}
    eventually(lambda: not place.shares(), "the pod's end")
    looks(place)
    place.node.stop()
    place.start()
    looks(place)
    assert sim_cuda.run(place.machine, PAST_THE_SHIM, wrapper=leaf.enter) == [960, 2]
    ended[0].kill()
    ended[0].wait()
    eventually(lambda: place.limits(place.of(item).path) == [None, None], "the limit's end")


@BOTH
def test_a_pod_that_vanishes_between_two_looks_harms_nobody(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.start()
    gone, stays = pod("gone", container("c", 10, 4)), pod("stays", container("d", 10, 4))
    place.begin(gone), place.begin(stays)
    place.of(gone).remove()
    eventually(lambda: place.shares()["c"]["held_by"] == "shim" or None, "a look")
    assert place.shares()["d"]["held_by"] == "both"
    assert "as it should, the shim does" not in caplog.text
    again = place.of(gone)
    eventually(lambda: GIB in place.limits(again.path), "the limit of the group that was made anew")


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        ("older", "the driver has no limits of its own (615 has)"),
        ("none", "the driver counts no memory of control groups here"),
        ("mig", "the driver limits no MIG instances"),
    ],
    indirect=["machine"],
)
def test_a_driver_that_cannot_is_told_once_and_fails_no_pod_unless_it_must(
    place: Place, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    cores = 100 if place.machine.cards[0].mig_mode else 200
    place.start(cores=cores)
    for number in range(2):
        place.begin(pod(f"p{number}", container("c", 10, 4)))
    assert place.shares()["c"]["held_by"] == "shim"
    eventually(lambda: why in json.loads(place.node.get("/usage")[1])["driver_limits"], "the reason")
    assert caplog.text.count(f"as it should, the shim does: {why}") == 1
    place.node.stop()
    root = f"--cgroup-root={place.group.path}"
    assert (looked_at(place, root)[0], why in looked_at(place, root)[1]) == (Verdict.WARN, True)
    assert looked_at(place, root, "--require-driver-limits=true")[0] is Verdict.FAIL
    place.start("--require-driver-limits=true", cores=cores)
    with pytest.raises(AdmissionFailure, match="the driver can't hold the pod's memory") as refused:
        place.begin(pod("q", container("c", 10, 4)))
    assert why in str(refused.value)


@BOTH
def test_the_doctor_sets_a_limit_and_takes_it_away(place: Place) -> None:
    assert looked_at(place, f"--cgroup-root={place.group.path}") == (
        Verdict.OK,
        "one was set and taken away; the driver counts (no dmem)",
    )
    assert not [path for path in place.group.path.iterdir() if path.is_dir()]


def looked_at(place: Place, *more: str) -> tuple[Verdict, str]:
    """What `gpu-manager doctor` says."""
    parsed = reader.parse(place.node.arguments(*more), {})
    assert parsed is not None
    (check,) = [one for one in doctor.examine(parsed.settings, {}) if one.what == "driver's limits"]
    return check.verdict, check.details


def test_a_daemon_without_the_right_says_so_once_and_fails_no_pod_unless_it_must(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)

    monkeypatch.setattr(pynvml, "nvmlDeviceSetMemoryLimits_v1", refused)
    place.start()
    for number in range(2):
        place.begin(pod(f"p{number}", container("c", 10, 4)))
    looks(place)
    assert place.shares()["c"]["held_by"] == "shim"
    assert "NVML lets only root set them" in json.loads(place.node.get("/usage")[1])["driver_limits"]
    assert caplog.text.count("the shim does: NVML lets only root set them") == 1
    place.node.stop()
    place.start("--require-driver-limits=true")
    with pytest.raises(AdmissionFailure, match="NVML lets only root set them"):
        place.begin(pod("q", container("c", 10, 4)))


def test_control_groups_of_version_1_are_told_and_refused_where_limits_are_required(
    place: Place, tmp_path: Path
) -> None:
    (tmp_path / "devices").mkdir()
    place.node.start(f"--cgroup-root={tmp_path}", "--require-driver-limits=true", wait=200)
    with pytest.raises(AdmissionFailure, match="no control groups of version 2"):
        place.node.kubelet.admit(pod("p", container("c", 10, 4)))


def test_a_start_is_refused_while_its_pod_has_no_group_and_tried_again(place: Place) -> None:
    place.start("--require-driver-limits=true")
    item = pod("p", container("c", 10, 4))
    place.node.kubelet.admit(item, start=False)
    with pytest.raises(AdmissionFailure, match="kubelet has made no control group for the pod"):
        place.node.kubelet.start_containers(item)
    made = place.of(item)
    place.node.kubelet.start_containers(item)
    assert GIB in place.limits(made.path)


def test_without_the_requirement_such_a_pod_starts_with_the_shim_alone(place: Place) -> None:
    place.start()
    place.node.kubelet.admit(pod("p", container("c", 10, 4)))
    assert place.shares()["c"]["held_by"] == "shim"
    assert "kubelet has made no control group" in json.loads(place.node.get("/usage")[1])["driver_limits"]


@BOTH
def test_a_limit_that_counts_nobody_is_none_and_told_once(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ended: list[subprocess.Popen[bytes]],
) -> None:
    place.start()
    item = pod("p", container("c", 10, 4))
    ended.append(subprocess.Popen([*place.begin(item).enter, "sleep", "600"]))
    daemon = place.node.daemon
    assert daemon is not None
    eventually(lambda: place.shares()["c"]["held_by"] == "both", "the limit")
    listed = [CardProcess(ended[0].pid, 512 * MIB)]
    monkeypatch.setattr(daemon.auditor, "_processes", lambda _: listed)
    eventually(lambda: place.shares()["c"]["driver_limit_bytes"] is None, "the doubt")
    looks(place)
    assert caplog.text.count("the shim does: the driver counts less of a pod than it lists") == 1
    assert "the driver counts less of a pod than it lists" in json.loads(place.node.get("/usage")[1])["driver_limits"]


def test_what_a_tenant_writes_into_its_ledger_changes_nothing_that_is_said_of_the_driver(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = tuple(
        CardUsage(uuid=card.uuid, memory_used_bytes=1 << 40, ledger_bytes=1 << 40) for card in place.machine.cards
    )
    monkeypatch.setattr(Regions, "usage", lambda *_: Usage(cards=cards, processes=()))
    place.start("--require-driver-limits=true")
    item = pod("p", container("c", 10, 4))
    place.begin(item)
    for _ in range(2):
        looks(place)
        assert place.shares()["c"]["driver_limit_bytes"] == GIB
        assert json.loads(place.node.get("/usage")[1])["driver_limits"] == ""


def resized(place: Place, item: Pod, blocks: int) -> tuple[str, int] | None:
    """As the resizer does it."""
    daemon = place.node.daemon
    assert daemon is not None
    (before,) = [one for one in daemon.allocator.allocations if one.pod_uid == item["metadata"]["uid"]]
    (share,) = before.shares
    return daemon.allocator.resize([(before, replace(before, shares=(replace(share, memory_blocks=blocks),)))])


@BOTH
def test_a_resize_changes_the_driver_s_limit_and_waits_for_what_it_counts(place: Place) -> None:
    place.start()
    item = pod("p", container("c", 10, 4))
    leaf, made = place.begin(item), place.of(item)
    assert resized(place, item, 8) is None
    assert 8 * 256 * MIB in place.limits(made.path)
    # Past the shim: the ledger knows nothing of it, the driver does.
    with simulated.tenant(place.machine, card=place.card(item), memory_bytes=GIB, wrapper=leaf.enter):
        assert resized(place, item, 4) == ("c", 64 * MIB)
        assert 8 * 256 * MIB in place.limits(made.path)
        assert resized(place, item, 5) is None
    assert 5 * 256 * MIB in place.limits(made.path)


@BOTH
def test_a_daemon_that_has_not_looked_yet_resizes_what_one_before_it_has_set(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.start()
    item = pod("p", container("c", 10, 4))
    place.begin(item)
    place.node.stop()
    monkeypatch.setattr(DriverLimits, "look", lambda *_: None)
    place.start()
    assert resized(place, item, 8) is None
    assert 8 * 256 * MIB in place.limits(place.of(item).path)


def test_a_daemon_that_is_not_to_set_limits_takes_away_those_of_one_before_it(place: Place) -> None:
    place.start()
    item = pod("p", container("c", 10, 4))
    place.begin(item)
    place.node.stop()
    place.start("--driver-limits=off")
    eventually(lambda: place.limits(place.of(item).path) == [None, None], "no limit")
    assert place.shares()["c"]["held_by"] == "shim"


def test_a_resize_that_cannot_be_written_leaves_the_driver_s_limit(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.start()
    item = pod("p", container("c", 10, 4))
    place.begin(item)
    daemon = place.node.daemon
    assert daemon is not None

    def full(*_: object) -> None:
        raise StateError("the disk is full")

    monkeypatch.setattr(daemon.allocator.book.state, "append", full)
    with pytest.raises(Refusal, match="the disk is full"):
        resized(place, item, 8)
    assert GIB in place.limits(place.of(item).path)


def joined(region: str, leaf: Group) -> subprocess.Popen[bytes]:
    """A process of a container: in its group, with the container's region where containers have it."""
    script = 'echo $$ > "$0/cgroup.procs" && mount -t tmpfs none /etc && mkdir /etc/vcuda && mount --bind "$1" /etc/vcuda && echo in && exec sleep 60'
    process = subprocess.Popen(["unshare", "--mount", "sh", "-c", script, leaf.path, region], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"in\n"
    return process


@BOTH
def test_containers_that_share_a_card_have_their_own_limits_where_the_kernel_counts(
    place: Place, ended: list[subprocess.Popen[bytes]]
) -> None:
    place.start()
    item = pod("p", container("a", 10, 4), container("b", 10, 2))
    one = place.begin(item)
    two = Group(one.path.parent).child("cri-containerd-2.scope")
    for name, leaf in (("a", one), ("b", two)):
        ended.append(joined(str(place.node.region(item, name)), leaf))
    if "memory_limits=dmem" in (place.machine.state / "machine.conf").read_text():
        eventually(lambda: 2 * 256 * MIB in place.limits(two.path) and GIB in place.limits(one.path), "own limits")
        assert {name: share["driver_limit_bytes"] for name, share in place.shares().items()} == {
            "a": GIB,
            "b": GIB // 2,
        }
        assert sim_cuda.run(place.machine, PAST_THE_SHIM, wrapper=two.enter) == [448, 2]
    else:
        looks(place)
        assert 6 * 256 * MIB in place.limits(two.path)  # the pod's: limits of the driver's own accounting do not nest
        assert {share["driver_limit_bytes"] for share in place.shares().values()} == {6 * 256 * MIB}


def test_a_group_that_a_tenant_names_like_another_pod_s_is_not_taken_for_it(tmp_path: Path) -> None:
    mine, other = "0a" * 16, "0b" * 16
    for path in (f"kubepods/burstable/pod{mine}/c/pod{other}", f"kubepods.slice/kubepods-pod{mine}.slice/x/pod{other}"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "kubepods" / f"pod{other}").symlink_to(tmp_path / f"kubepods/burstable/pod{mine}")
    assert pods.of_pod(pods.trees(tmp_path), other) == []
    assert len(pods.of_pod(pods.trees(tmp_path), mine)) == 2
