"""Shares in real pods: real kube-scheduler, extender, kubelet, runc and container; a CUDA client hits its limit."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_system import BLOCKS, CARDS, CORES, System, share_pod
from kubelab import eventually

BLOCK = 256 * 1024 * 1024


def figures(line: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line)}


def test_a_pod_gets_its_share_and_hits_its_limit(system: System, client_image: str, pods: Any) -> None:
    """The client fills its share until CUDA_ERROR_OUT_OF_MEMORY (2) and sees one card with the limit as its size."""
    name = pods(share_pod("hog", client_image, 30, 10))
    line = system.wait_log(name, "taken=") if system.wait_phase(name, "Running") else ""
    seen = figures(line)
    assert seen["result"] == 2, line
    assert seen["devices"] == 1
    assert seen["total"] == 10 * BLOCK
    assert 8 * BLOCK <= seen["taken"] <= 10 * BLOCK  # the context's own memory counts, too
    held = [sum(process.memory_bytes.values()) for process in system.machine.report().processes]
    assert held, "the client is alive and holds memory"
    assert max(held) <= 10 * BLOCK  # by the card's own count


def test_both_resources_are_on_the_node(system: System, evidence: Any) -> None:
    """What `kubectl describe node` shows, the label of the model, and the inventory that the extender reads."""
    described = system.lab.kubectl("describe", "node", system.lab.environment["NODE_NAME"])
    for resource, amount in (("tencent.com/vcuda-core", CORES), ("tencent.com/vcuda-memory", BLOCKS)):
        lines = re.findall(rf"^  {re.escape(resource)}:? +(\S+)", described, re.MULTILINE)
        assert lines[:2] == [str(amount)] * 2, described  # capacity and allocatable
        evidence(f"kubectl describe node: {resource} {lines[0]} of capacity, {lines[1]} allocatable")
    metadata = system.node()["metadata"]
    assert metadata["labels"]["gaia.tencent.com/gpu-model"]
    assert metadata["labels"]["nvidia-device-enable"] == "enable"
    assert metadata["annotations"]["tencent.com/vcuda-inventory"].count("GPU-") >= CARDS


@pytest.mark.parametrize(
    ("command", "user"),
    [(["/bin/bare", "/bin/hog"], None), (["/bin/setuid-hog"], 1000)],
    ids=["environment cleared, as by a login shell", "setuid: the loader ignores LD_LIBRARY_PATH"],
)
def test_the_limit_holds_without_the_environment(
    system: System, client_image: str, pods: Any, command: list[str], user: int | None
) -> None:
    name = pods(share_pod("bare", client_image, 20, 4, command=command, user=user))
    system.wait_phase(name, "Running")
    seen = figures(system.wait_log(name, "="))
    assert seen["result"] == 2
    assert seen["total"] == 4 * BLOCK


@pytest.mark.parametrize("value", [None, "", "/nowhere"])
def test_the_shim_is_found_whatever_the_pod_says_of_its_library_path(
    system: System, client_image: str, pods: Any, value: str | None
) -> None:
    """A pod's own LD_LIBRARY_PATH replaces the plugin's; the limit holds all the same."""
    env = {} if value is None else {"LD_LIBRARY_PATH": value}
    name = pods(share_pod("path", client_image, 20, 4, env=env))
    system.wait_phase(name, "Running")
    seen = figures(system.wait_log(name, "taken="))
    assert seen["result"] == 2
    assert seen["total"] == 4 * BLOCK


def test_a_share_needs_no_rights_of_its_pod(system: System, client_image: str, pods: Any) -> None:
    """The restricted Pod Security Standard and a read-only root: any user, no capability, the runtime's seccomp filter."""
    wanted = share_pod("restricted", client_image, 20, 4)
    wanted["spec"]["securityContext"] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    wanted["spec"]["containers"][0]["securityContext"] = {
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    name = pods(wanted)
    system.wait_phase(name, "Running")
    seen = figures(system.wait_log(name, "taken="))
    assert seen["result"] == 2 and seen["total"] == 4 * BLOCK


def read(path: Path) -> str:
    """Empty of a process that has ended meanwhile."""
    try:
        return path.read_text()
    except OSError:
        return ""


@pytest.fixture
def nodes_of_the_host(system: System) -> Iterator[None]:
    """With users of its own a pod gets its device nodes as mounts of those in /dev of the host, where a driver has made them."""
    made = []
    try:
        for node in (system.machine.root / "dev").glob("nvidia*"):
            target, status = Path("/dev") / node.name, node.stat()
            if stat.S_ISCHR(status.st_mode) and not target.exists():
                os.mknod(target, status.st_mode, status.st_rdev)
                made.append(target)
                target.chmod(0o666)
        yield
    finally:
        for target in made:
            target.unlink()


@pytest.mark.parametrize("hardened", [False, True], ids=["root", "restricted, read-only, fsGroup"])
def test_a_pod_with_users_of_its_own_is_held_to_its_share(
    system: System, client_image: str, pods: Any, evidence: Any, nodes_of_the_host: None, hardened: bool
) -> None:
    """`hostUsers: false`: the pod's users are others on the node, and its mounts, devices and account work all the same."""
    handlers = system.node()["status"].get("runtimeHandlers", [])
    if not any(item.get("features", {}).get("userNamespaces") for item in handlers):
        pytest.skip(
            "the runtime offers no user namespaces: that takes containerd 2 with runc 1.2 or newer (RUNC_OLD=0)"
        )
    wanted = share_pod("own-users", client_image, 20, 4)
    wanted["spec"]["hostUsers"] = False
    if hardened:
        wanted["spec"]["securityContext"] = {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "fsGroup": 2000,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        wanted["spec"]["containers"][0]["securityContext"] = {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
    name = pods(wanted)
    system.wait_phase(name, "Running")
    seen = figures(system.wait_log(name, "taken="))
    assert (seen["result"], seen["total"]) == (2, 4 * BLOCK)
    uid = system.pod(name)["metadata"]["uid"]
    (process,) = (
        path.parent for path in Path("/proc").glob("[0-9]*/cgroup")
        if f"pod{uid}/" in read(path) and "hog" in read(path.parent / "comm")
    )  # fmt: skip
    inside, outside, count = map(int, read(process / "uid_map").split())
    assert inside == 0 and outside > 0 and count < 1 << 32
    evidence(f"user 0 of {name} is {outside} on the node; the pod has {seen['total']} bytes of a card and no more")

    def counted() -> bool:
        (card,) = system.bookings()[name]["cards"]
        return bool(card["memory_used_bytes"] >= seen["taken"] and not card["unaccounted_bytes"])

    eventually("the manager counts what the pod holds", counted, 30)


def test_the_decision_travels_in_annotations(system: System, client_image: str, pods: Any) -> None:
    """The extender's annotations are on the pod in the same write as the binding; the manager confirms."""
    name = pods(share_pod("annotated", client_image, 30, 4))
    system.wait_phase(name, "Running")

    def assigned() -> bool:
        return system.pod(name)["metadata"]["annotations"].get("tencent.com/gpu-assigned") == "true"

    eventually("gpu-assigned is true", assigned, 15)
    annotations = system.pod(name)["metadata"]["annotations"]
    assert int(annotations["tencent.com/predicate-gpu-idx-0"]) in range(CARDS)
    assert annotations["tencent.com/predicate-node"] == system.lab.environment["NODE_NAME"]
    (share,) = json.loads(annotations["tencent.com/vcuda-placement"])["containers"]["main"]
    assert share[1:] == [30, 4]


def test_equal_cores_and_different_memory_at_once(system: System, client_image: str, pods: Any) -> None:
    """Ten pods with equal cores, admitted in any order: each sees exactly its own memory limit."""
    names = {blocks: pods(share_pod(f"burst-{blocks}", client_image, 10, blocks)) for blocks in range(1, 11)}
    for blocks, name in names.items():
        system.wait_phase(name, "Running", seconds=120)
        assert figures(system.wait_log(name, "total="))["total"] == blocks * BLOCK, name


def test_an_impossible_request_is_refused_with_a_readable_event(
    system: System, client_image: str, pods: Any, evidence: Any
) -> None:
    name = pods(share_pod("too-much", client_image, 150, 4))
    told = ""

    def refused() -> bool:
        nonlocal told
        told = system.lab.kubectl("describe", "pod", name)
        return "150 tencent.com/vcuda-core" in told

    try:
        eventually("an event tells the reason", refused, 30)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{told}") from None
    assert system.pod(name)["status"]["phase"] == "Pending"
    evidence("kubectl describe pod: " + next(line.strip() for line in told.splitlines() if "150 tencent" in line))


def test_a_running_share_is_resized(system: System, client_image: str, pods: Any, evidence: Any) -> None:
    """Up, over a restart of kubelet, down below what it uses, and too far: the client's own view, events, books."""
    name = pods(share_pod("resized", client_image, 30, 4, command=["/bin/hog", "again"]))
    system.wait_phase(name, "Running")
    system.wait_log(name, "round=")

    def ask(text: str) -> None:
        system.lab.kubectl("annotate", "--overwrite", "pod", name, f"tencent.com/vcuda-resize={text}")

    def sees(blocks: int) -> bool:
        seen = figures(system.lab.kubectl("logs", "--tail=1", name))
        return seen["total"] == blocks * BLOCK and seen["taken"] <= blocks * BLOCK

    def booked() -> list[int]:
        (share,) = json.loads(system.pod(name)["metadata"]["annotations"]["tencent.com/vcuda-placement"])["containers"][
            "main"
        ]
        return list(share[1:])

    ask("core=50,memory=12,core-limit=80")
    eventually("the client sees 12 blocks", lambda: sees(12), 60)
    eventually("the placement says so", lambda: booked() == [50, 12], 30)
    system.lab.call("restart-kubelet")
    system.wait_offered()
    # kubelet answers "not found" until it knows the pod again.
    again = eventually("its log", lambda: system.lab.kubectl("logs", "--tail=1", name, check=False), 60)
    assert figures(again)["total"] == 12 * BLOCK
    ask("memory=2")
    eventually("the client sees 2 blocks", lambda: sees(2), 60)
    eventually("the placement says so", lambda: booked() == [50, 2], 30)
    ask("core=60,memory=100000")
    eventually("the refusal", lambda: "InsufficientMemory" in system.lab.kubectl("describe", "pod", name), 30)
    assert sees(2) and system.pod(name)["status"]["containerStatuses"][0]["restartCount"] == 0
    described = system.lab.kubectl("describe", "pod", name)
    for line in described.splitlines():
        if "Resize" in line:
            evidence("kubectl describe pod: " + " ".join(line.split()))


def test_limits_outlive_restarts_of_the_daemon_and_of_kubelet(system: System, client_image: str, pods: Any) -> None:
    """kill -9 of the daemon and a kubelet restart: the running pod keeps its share, new pods get theirs."""
    before = pods(share_pod("before", client_image, 40, 4))
    system.wait_phase(before, "Running")
    system.wait_log(before, "taken=")
    system.kill("manager")
    system.start_manager()
    system.lab.call("restart-kubelet")
    system.wait_offered()
    after = pods(share_pod("after", client_image, 100, 1))
    system.wait_phase(after, "Running")
    assert figures(system.wait_log(after, "taken="))["devices"] == 1
    assert system.pod(before)["status"]["phase"] == "Running"
    uuids = {
        json.loads(system.pod(name)["metadata"]["annotations"]["tencent.com/vcuda-placement"])["containers"]["main"][0][
            0
        ]
        for name in (before, after)
    }
    assert len(uuids) == 2  # the whole card is not the one that the first pod shares


@pytest.mark.parametrize("cpu", [None, "1"], ids=["shared CPUs", "exclusive CPU"])
def test_our_devices_survive_the_cpu_manager_and_others_do_not(
    system: System, client_image: str, pods: Any, evidence: Any, cpu: str | None
) -> None:
    """Incident I1: the old runc rewrites the device cgroup; what Allocate returned stays, an out-of-band device goes."""
    name = pods(share_pod("reconciled", client_image, 10, 1, cpu=cpu))
    status = system.wait_phase(name, "Running")
    uid = status["metadata"]["uid"]
    container = status["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
    folder = eventually(
        "the container's device cgroup exists",
        lambda: next(Path("/sys/fs/cgroup/devices").rglob(f"*{uid}*/{container}"), None),
        20,
    )
    listed = folder / "devices.list"
    ours = {f"c {major}:{minor} rw" for major, minor in devices_of(system, status)}
    assert ours <= set(listed.read_text().splitlines())
    if system.lab.minor >= 34:
        # A newer kubelet updates a container only when its CPU set has changed: on shared CPUs once after its start.
        time.sleep(8)
        assert ours <= set(listed.read_text().splitlines())
        return
    (folder / "devices.allow").write_text("c 240:77 rw")
    assert "c 240:77 rw" in listed.read_text()
    eventually("the reconcile wiped the out-of-band device", lambda: "c 240:77 rw" not in listed.read_text(), 30)
    time.sleep(0.5)
    lines = listed.read_text().splitlines()
    assert ours <= set(lines)
    evidence(f"devices.list after the reconcile wiped c 240:77: {'; '.join(line for line in lines if line in ours)}")


def devices_of(system: System, status: dict[str, Any]) -> set[tuple[int, int]]:
    """Numbers of the nodes that this pod must have: the control nodes and its own card's."""
    minor = status["metadata"]["annotations"]["tencent.com/predicate-gpu-idx-0"]
    nodes = system.machine.nodes()
    names = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", f"nvidia{minor}"]
    return {nodes[name] for name in names}


def test_a_volume_over_the_region_gives_nobody_the_whole_card(
    system: System, client_image: str, pods: Any, evidence: Any
) -> None:
    """Mounted over /etc/vcuda it hid the limits: the shim passed everything on, and 3 GiB of the driver went to a 1 GiB share."""
    wanted = share_pod("over", client_image, 10, 4)
    wanted["spec"]["volumes"] = [{"name": "v", "emptyDir": {}}]
    wanted["spec"]["containers"][0]["volumeMounts"] = [{"name": "v", "mountPath": "/etc/vcuda"}]
    name = pods(wanted)
    status = system.wait_phase(name, "Failed", "Running")["status"]
    held = [sum(process.memory_bytes.values()) for process in system.machine.report().processes]
    evidence(f"{status['phase']}: {status.get('message', '')}; held on the card: {held}")
    assert status["phase"] == "Failed" and "MountInTheWay" in status["message"]
    system.wait_phase(pods(share_pod("after", client_image, 10, 4)), "Running")
