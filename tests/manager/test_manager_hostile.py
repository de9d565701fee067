"""A tenant that does its worst to its own `usage` file while the real daemon and a neighbour run: it harms only itself."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localcluster.cluster import free_port
from manager.regions.storage import TMPFS_BYTES
from tests.manager.manager_pods import container, eventually, pod
from tests.manager.manager_support import Node
from vcuda import region
from vcuda.sim import Machine

# One process of the tenant: does what it is told to the file, says so, and holds on to it until told to end.
TENANT = """
import ctypes, fcntl, mmap, os, signal, struct, sys, time
path, deed = sys.argv[1:]
signal.signal(signal.SIGIO, signal.SIG_IGN)
held = []

def lock(kind, start, length):
    fcntl.fcntl(held[0], 37, struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0))  # F_OFD_SETLK

if deed == "truncate": os.truncate(path, 0)
elif deed == "cut": os.truncate(path, 5000)
elif deed == "grow":
    os.truncate(path, 1 << 40)
    with open(path, "r+b", buffering=0) as file:
        file.seek(0, 2)
        try:
            for _ in range(4096): file.write(bytes(1 << 16))
        except OSError: pass
    with open(path, "r+b", buffering=0) as file:
        try:
            while True: file.seek(1 << 20, 1); file.write(bytes(4096))
        except OSError: pass
elif deed == "overwrite":
    with open(path, "r+b") as file: file.write(b"\\xff" * os.path.getsize(path))
elif deed == "claim everything":
    with open(path, "r+b") as file: file.seek(128); file.write(b"\\xff" * (4096 - 128 + 128 * 2176))
elif deed == "unlink": os.unlink(path)
elif deed == "fifo": os.unlink(path); os.mkfifo(path)
elif deed == "link": os.unlink(path); os.symlink("/dev/zero", path)
elif deed == "folder": os.unlink(path); os.mkdir(path)
else:
    held.append(os.open(path, os.O_RDWR))
    if deed == "flock":
        fcntl.flock(held[0], fcntl.LOCK_EX)
        held.append(os.open(os.path.join(os.path.dirname(path), "limits"), os.O_RDONLY))
        fcntl.flock(held[1], fcntl.LOCK_EX)
    elif deed == "lock all bytes": lock(fcntl.F_WRLCK, 0, 0)
    elif deed == "many locks":
        for number in range(3000): lock(fcntl.F_WRLCK, 1000 + 2 * number, 1)
    elif deed == "lease":
        for name, kind in (("usage", fcntl.F_WRLCK), ("limits", fcntl.F_RDLCK)):
            descriptor = os.open(os.path.join(os.path.dirname(path), name), os.O_RDONLY)
            held.append(descriptor)
            try: fcntl.fcntl(descriptor, fcntl.F_SETLEASE, kind)
            except OSError: pass
    elif deed in ("mlock", "scribble"):
        memory = mmap.mmap(held[0], 0)
        held.append(memory)
        if deed == "mlock":
            view = ctypes.c_char.from_buffer(memory)
            ctypes.CDLL(None).mlock(ctypes.byref(view), ctypes.c_size_t(len(memory)))
        else:
            print("ready", flush=True)
            while True:
                memory[64:300000] = os.urandom(299936)
                memory[200:300] = b"\\xff" * 100
                time.sleep(0.001)
print("ready", flush=True)
sys.stdin.read()
"""
DEEDS = (
    "truncate", "cut", "grow", "overwrite", "claim everything", "unlink", "fifo", "link", "folder", "flock",
    "lock all bytes", "many locks", "lease", "mlock", "scribble",
)  # fmt: skip
GOOD = "good"


class Page:
    """The daemon's pages; each must come within the time-out."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self._base + path, timeout=20) as answer:
            assert answer.status == 200
            return str(answer.read().decode())

    def containers(self) -> dict[str, Any]:
        return {found["pod_name"]: found for found in json.loads(self.get("/usage"))["containers"]}


def numbers(value: Any) -> list[float]:
    """Every number in a JSON value."""
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers(item)]
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def good_usage(page: Page) -> list[list[Any]]:
    """What the neighbour is shown to have and to use."""
    names = ("cores", "memory_limit_bytes", "memory_used_bytes", "memory_peak_bytes", "launches", "refusals")
    return [[card[name] for name in names] for card in page.containers()[GOOD]["cards"]]


def taken_bytes(directory: Path) -> int:
    return sum(entry.lstat().st_blocks * 512 for entry in directory.iterdir())


@pytest.fixture
def node(machine: Machine, make_node: Callable[..., Node]) -> Node:
    """With an API server: only it makes it certain at once that a pod is gone. Kubelet's word alone counts after a minute."""
    made = make_node(machine.root, with_api=True)
    made.kubelet.start()
    return made


def admit(node: Node, item: dict[str, Any]) -> None:
    assert node.api is not None
    node.api.put("pods", item)
    node.kubelet.admit(item)


def remove(node: Node, item: dict[str, Any]) -> None:
    assert node.api is not None
    node.api.delete(item)
    node.kubelet.remove(item)


def test_whatever_a_tenant_does_to_its_usage_file_harms_only_itself(
    process: Callable[..., subprocess.Popen[str]], node: Node
) -> None:
    port = free_port()
    running = process(f"--query-port={port}")
    page = Page(port)
    neighbour = pod(GOOD, container("c", 20, 2))
    admit(node, neighbour)
    before = good_usage(page)
    folders = []
    for number, deed in enumerate(DEEDS):
        bad = pod(f"bad-{number}", container("c", 1, 1))
        admit(node, bad)
        folder = node.region(bad, "c")
        folders.append(folder)
        with subprocess.Popen(
            [sys.executable, "-c", TENANT, str(folder / "usage"), deed],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as tenant:
            try:
                assert tenant.stdout and tenant.stdout.readline() == "ready\n", deed
                time.sleep(0.06)  # a sample period: no page from before the deed, or from before the pod
                # Not dead, not hanging, not believed.
                found = page.containers()
                assert all(0 <= figure < 2**63 for figure in numbers(found)), deed
                for card in found[f"bad-{number}"]["cards"]:
                    assert all(figure <= 1 << 50 for name, figure in card.items() if name.endswith("memory_used_bytes"))
                assert good_usage(page) == before, deed
                assert f'pod_name="{GOOD}"' in page.get("/metrics")
                page.get("/graph")
                # Others come, their limits change, go; what the daemon writes to the tenant's limits arrives.
                other = pod(f"other-{number}", container("c", 1, 1))
                admit(node, other)
                assert region.read_limits(node.region(other, "c"))[0].cores == 1
                remove(node, other)
                if os.path.ismount(folder):
                    assert taken_bytes(folder) <= TMPFS_BYTES, deed
            finally:
                tenant.kill()
        remove(node, bad)
    eventually(lambda: not any(map(os.path.lexists, folders)), "removal of the tenants' regions")
    assert running.poll() is None
    assert good_usage(page) == before
    assert region.read_usage(node.region(neighbour, "c")).processes == ()
    log = (node.directory / "manager.log").read_text()
    assert "Traceback" not in log


@pytest.mark.parametrize("deed", ["flock", "lease"])
def test_a_tenant_can_not_keep_the_daemon_from_changing_its_limits(
    process: Callable[..., subprocess.Popen[str]], node: Node, deed: str
) -> None:
    process()
    bad = pod("bad", container("c", 1, 1))
    admit(node, bad)
    folder = node.region(bad, "c")
    card = region.read_limits(folder)[0]
    assert not card.shared
    with subprocess.Popen(
        [sys.executable, "-c", TENANT, str(folder / "usage"), deed],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as tenant:
        try:
            assert tenant.stdout and tenant.stdout.readline() == "ready\n"
            for number in range(2):  # with two cards the second one at the latest comes to the same
                admit(node, pod(f"neighbour-{number}", container("c", 60, 1)))
            admit(node, pod("neighbour", container("c", 30, 1)))
            eventually(lambda: region.read_limits(folder)[0].shared, "news of the neighbours on its card")
        finally:
            tenant.kill()


def test_half_open_requests_with_few_descriptors_cost_neither_probes_nor_admissions(
    process: Callable[..., subprocess.Popen[str]], node: Node
) -> None:
    """Runtimes give 1024 descriptors at first; whoever reaches the port can open as many connections."""
    port = free_port()
    running = process(f"--query-port={port}")
    resource.prlimit(running.pid, resource.RLIMIT_NOFILE, (256, 256))
    half_open = []
    try:
        for _ in range(400):
            half_open.append(socket.create_connection(("127.0.0.1", port), timeout=10))
            half_open[-1].sendall(b"GET /healthz HTTP/1.1\r\nX: ")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10) as answer:
            assert answer.status == 200
        node.kubelet.admit(pod("a", container("c", 10, 2)))
    finally:
        for each in half_open:
            each.close()
