"""What every test of this folder says first and asks for: the card, and a client beside a share of it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gpu import gpu_clients, gpu_place
from tests.gpu.gpu_clients import Share
from tests.gpu.gpu_place import Place


def pytest_report_header() -> list[str]:
    return gpu_place.describe()


@pytest.fixture(scope="session")
def card() -> Place:
    """A real card; the test is skipped with the reason where there is none."""
    place, why_not = gpu_place.real()
    if place is None:
        pytest.skip(f"needs a real card: {why_not}")
    return place


@pytest.fixture(scope="session")
def outside() -> Iterator[Path]:
    """A folder that other users may enter; pytest closes its own to them whenever it starts."""
    folder = Path(tempfile.mkdtemp(prefix="vcuda-gpu-tests-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def any_card(outside: Path) -> Place:
    """A real card, else a simulated one: for clients of the driver API."""
    place, _ = gpu_place.real()
    return place or gpu_place.simulated(outside / "card")


@pytest.fixture(params=["this user", "an ordinary user"])
def user(request: pytest.FixtureRequest) -> int | None:
    """None for the user who runs the tests, else the number of an ordinary one."""
    if request.param == "this user":
        return None
    if why_not := gpu_clients.why_not_as(gpu_clients.ORDINARY_USER):
        pytest.skip(why_not)
    return gpu_clients.ORDINARY_USER


@pytest.fixture
def home(outside: Path) -> Path:
    """A folder that any user may write to."""
    folder = Path(tempfile.mkdtemp(prefix="home-", dir=outside))
    folder.chmod(0o777)
    return folder


@pytest.fixture
def share_of(home: Path) -> Callable[..., Share]:
    """Makes shares of one ledger: `share_of(place, memory_mib=…, cores=…, user=…)`."""

    def make(place: Place, **settings: int | None) -> Share:
        return Share(place, home, **settings)  # type: ignore[arg-type]

    return make


@pytest.fixture
def python_with() -> Callable[..., str]:
    """The Python that has a module and that the user may execute; the test is skipped with the reason where none has it."""

    def find(module: str, user: int | None = None) -> str:
        python, why_not = gpu_clients.python_with(module, user)
        if not python:
            pytest.skip(why_not)
        return python

    return find
