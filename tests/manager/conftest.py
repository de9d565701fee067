"""Nodes with simulated cards for the daemon's tests."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import vcuda
from manager import daemon
from manager.cards import inventory
from manager.cards.context_cost import ContextCosts
from manager.regions.storage import Storage
from tests.manager.manager_claims import ClaimNode, claim_node
from tests.manager.manager_limits import Place
from tests.manager.manager_pods import eventually
from tests.manager.manager_support import Node
from vcuda.sim import Machine, SimCard

GIB = 2**30
ROOT = Path(vcuda.__file__).parents[1]
SHIMS = ROOT / "vcuda/lib/shim"


@pytest.fixture(autouse=True)
def soon_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of daemons are stopped here, each of which would first wait for its cards' next event."""
    monkeypatch.setattr(inventory, "_LONGEST_WAIT_S", 0.02)


@pytest.fixture(autouse=True)
def contexts_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each daemon in this process would make contexts in a process of its own, for each card (test_manager_context_cost.py lets it)."""
    known = functools.partial(ContextCosts, measure=lambda *_: 64 << 20)
    monkeypatch.setattr(daemon, "ContextCosts", known)


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A socket's path may have 107 bytes, which pytest's own directories use up."""
    path = Path(tempfile.mkdtemp(prefix="vgm-"))
    yield path
    for folder, _, _ in os.walk(path):
        if os.path.ismount(folder):
            Storage.remove(Path(folder))
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def make_machine(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    """Machines whose driver this very process can open; each has its own copy of the library, so its own state."""

    def make(*cards: SimCard) -> Machine:
        made = Machine.create(short_directory / "machine", cards)
        monkeypatch.setenv("VCUDA_SIM_DIR", made.environment()["VCUDA_SIM_DIR"])
        return made

    return make


@pytest.fixture
def machine(make_machine: Callable[..., Machine]) -> Machine:
    """Two cards of 8 GiB: 100 cores and 32 blocks each."""
    return make_machine(SimCard(memory_bytes=8 * GIB), SimCard(memory_bytes=8 * GIB))


@pytest.fixture
def make_node(short_directory: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(root: Path, **options: bool) -> Node:
        made.append(Node(short_directory, root, **options))
        return made[-1]

    yield make
    for node in made:
        node.close()


@pytest.fixture
def node(machine: Machine, make_node: Callable[..., Node]) -> Node:
    """A node with two simulated cards and a running kubelet; the daemon is not started yet."""
    made = make_node(machine.root)
    made.kubelet.start()
    return made


@pytest.fixture
def connected(machine: Machine, make_node: Callable[..., Node]) -> Node:
    """The same with an API server."""
    made = make_node(machine.root, with_api=True)
    made.kubelet.start()
    return made


@pytest.fixture
def process(node: Node, machine: Machine) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    if not all((SHIMS / name).exists() for name in ("libcuda.so.1", "libnvidia-ml.so.1")):
        pytest.skip("the shims are not built: python -m vcuda._build")
    started: list[subprocess.Popen[str]] = []

    def start(*more: str, **environment: str) -> subprocess.Popen[str]:
        before = node.kubelet.registrations
        with (node.directory / "manager.log").open("a") as log:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "manager.main", *node.arguments(*more)],
                    cwd=ROOT,
                    env={**os.environ, **machine.environment(), **environment},
                    stderr=log,
                    text=True,
                )
            )
        # The lists may still be those of a daemon that was killed a moment ago.
        eventually(lambda: node.kubelet.registrations >= before + 2, "registration of both resources")
        node.kubelet.wait_devices(200)
        return started[-1]

    yield start
    for item in started:
        item.kill()
        item.wait()


@pytest.fixture
def claims(machine: Machine, make_node: Callable[..., Node]) -> Iterator[ClaimNode]:
    """Two cards of 8 GiB, all of them for claims."""
    with claim_node(make_node(machine.root, with_api=True)) as found:
        yield found


@pytest.fixture
def make_place(tmp_path: Path) -> Callable[..., Place]:
    """Nodes of control groups and a driver's limits, with these settings."""
    return lambda **settings: Place(tmp_path, **settings)


@pytest.fixture
def place(make_place: Callable[..., Place]) -> Place:
    """The same with the settings that a node has by itself."""
    return make_place()
