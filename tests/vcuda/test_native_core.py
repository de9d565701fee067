"""The C core's own tests, as they are built for tenants; `make sanitize` runs all of them under every sanitizer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.native import run
from vcuda._build import gcc


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gcc.Objects]:
    """What programs have in common is compiled once."""
    with gcc.Objects(tmp_path_factory.mktemp("native")) as compiled:
        yield compiled


@pytest.mark.timeout(320)  # a little more than the runner gives a program
@pytest.mark.parametrize("name", run.PROGRAMS)
def test_claims_of_the_native_program_hold(name: str, objects: gcc.Objects) -> None:
    problem = run.run(name, "none", objects)
    assert problem == "", problem
