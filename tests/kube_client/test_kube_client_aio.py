"""The client of an event loop: answers whole and in time or an error of ours, connections kept, nothing sent twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from tests.kube_client.test_kube_client_endpoint import FORMS, HEAD, Counting, server
from vcuda.kube import aio
from vcuda.kube.aio import AsyncClient
from vcuda.kube.config import Login
from vcuda.kube.endpoint import Endpoint
from vcuda.kube.errors import ApiUnreachable, KubeError


@pytest.fixture
def counting() -> Iterator[Counting]:
    one = Counting()
    yield one
    one.close()


def post(endpoint: Endpoint, times: int = 1, timeout: float = 5.0) -> None:
    async def work() -> None:
        client = AsyncClient(endpoint, timeout=timeout)
        try:
            for _ in range(times):
                await client.post("/x", b"{}")
                await asyncio.sleep(0.1)  # the stand-in closes each connection after its answer
        finally:
            await client.close()

    asyncio.run(work())


@pytest.mark.parametrize("form", FORMS)
def test_answers_of_every_form(form: str) -> None:
    with server([FORMS[form]]) as endpoint:
        post(endpoint, 2)


@pytest.mark.parametrize("form", ["its length", "chunks", "its end"])
def test_an_answer_of_a_byte_at_a_time_ends_at_the_deadline(form: str) -> None:
    text = FORMS[form]
    with server([text[at : at + 1] for at in range(len(text))], pause=0.02) as endpoint:
        began = time.monotonic()
        with pytest.raises(ApiUnreachable, match=r"no answer from http://127.0.0.1:.*Timeout"):
            post(endpoint, timeout=0.3)
        assert time.monotonic() - began < 2


def test_every_cut_of_an_answer_is_an_error_of_ours() -> None:
    text = FORMS["its length"]
    for at in range(len(text)):
        with server([text[:at]]) as endpoint, pytest.raises(KubeError):
            post(endpoint)


def test_what_is_no_answer_and_what_has_no_end_are_errors_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        server([b"SSH-2.0-x\r\n\r\n"]) as endpoint,
        pytest.raises(ApiUnreachable, match="not an HTTP answer"),
    ):
        post(endpoint)
    monkeypatch.setattr(aio, "_MOST_ANSWER", 5)
    with server([FORMS["chunks"]]) as endpoint, pytest.raises(ApiUnreachable, match="too long"):
        post(endpoint)


def test_a_connection_is_kept_and_one_that_the_server_closed_is_not_used(counting: Counting) -> None:
    async def work() -> None:
        client = AsyncClient(counting.endpoint)
        for _ in range(3):
            await client.post("/x", b"{}")
        assert len(counting.connections) == 1
        counting.connections[0].shutdown(2)
        await asyncio.sleep(0.1)
        await client.post("/x", b"{}")
        await client.close()

    asyncio.run(work())
    assert len(counting.connections) == 2 and len(counting.requests) == 4


def test_what_got_no_answer_is_not_sent_again() -> None:
    """Its Binding may have been carried out."""
    with server([]) as endpoint, pytest.raises(ApiUnreachable, match="ended before the answer did"):
        post(endpoint)


def test_an_answer_that_comes_too_late_is_nobody_elses(counting: Counting) -> None:
    """A connection whose request was given up must not answer the next one."""
    late = [HEAD + b"Content-Length: 2\r\n\r\n", b"ok"]
    with server(late, pause=0.5, stay=True) as endpoint:

        async def work() -> None:
            client = AsyncClient(endpoint, timeout=0.2)
            for _ in range(2):
                with pytest.raises(ApiUnreachable):
                    await client.post("/x", b"{}")
            assert client._kept() is None
            await client.close()

        asyncio.run(work())


def test_many_at_once_have_a_connection_each(counting: Counting) -> None:
    async def work() -> None:
        client = AsyncClient(counting.endpoint)
        await asyncio.gather(*(client.post("/x", b"{}") for _ in range(8)))
        await client.close()

    asyncio.run(work())
    assert len(counting.requests) == 8 and len(counting.connections) == 8


@pytest.mark.parametrize("rest", [HEAD.replace(b"200", b"409") + b"Content-Length: 2\r\n\r\nno", b"no HTTP"])
def test_what_follows_an_answer_in_its_packet_is_no_answer_to_the_next(rest: bytes) -> None:
    answer = HEAD + b"Content-Length: 2\r\n\r\nok"
    with server([answer + rest], stay=True) as endpoint:

        async def work() -> None:
            client, told = AsyncClient(endpoint), asyncio.get_running_loop().create_future()
            await client.post("/x", b"{}")
            assert client._kept() is None and not client.begin("/x", b"{}", told.set_result)
            await client.close()

        asyncio.run(work())


def test_each_of_several_requests_on_kept_connections_has_its_own_time() -> None:
    """The first answer on a connection comes at once, the next never."""
    answer = HEAD + b"Content-Length: 2\r\n\r\nok"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(answer)
        await reader.read()
        writer.close()

    async def work() -> None:
        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        client, loop = (
            AsyncClient(Endpoint(Login(f"http://127.0.0.1:{port}"), agent="x"), timeout=0.4),
            asyncio.get_running_loop(),
        )
        await asyncio.gather(*(client.post("/x", b"{}") for _ in range(3)))
        ends: list[float] = []
        began = loop.time()
        for _ in range(3):
            assert client.begin("/x", b"{}", lambda problem: ends.append(loop.time() - began) if problem else None)
            await asyncio.sleep(0.1)
        assert not client.begin("/x", b"{}", lambda _: None)
        await asyncio.sleep(1.0)
        assert len(ends) == 3 and all(0.38 + 0.1 * at <= end < 0.8 + 0.1 * at for at, end in enumerate(ends)), ends
        await client.close()
        listener.close()

    asyncio.run(work())
