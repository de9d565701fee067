"""Unmodified monitoring programs inside a share, beside a neighbour on the same card."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import clients, genuine
from tests.support.clients import Client, Scene


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with clients.scene(tmp_path_factory.mktemp("clients")) as view:
        yield view


@pytest.mark.parametrize("client", clients.CLIENTS, ids=lambda client: client.name)
def test_the_client_shows_the_limit_as_total_the_own_use_and_no_neighbour(scene: Scene, client: Client) -> None:
    try:
        assert client.check(scene)
    except genuine.Unavailable as reason:
        pytest.skip(str(reason))
