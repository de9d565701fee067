"""The server's certificate and its clients' authorities while their files change."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop

from scheduler_ext.http import certificate as renewal
from scheduler_ext.http import server as servers
from scheduler_ext.http import tls
from scheduler_ext.http.certificate import BadCertificate, ServerCertificate
from tests.scheduler_ext.test_extender_server import Application, answer, post
from tests.scheduler_ext.test_extender_writing import certificate
from vcuda.kube.config import Login
from vcuda.kube.errors import NoConfiguration

EC = ("ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def serving(served: ServerCertificate, work: Callable[[tuple[str, int]], Awaitable[None]]) -> None:
    async def whole() -> None:
        application = Application()
        application.body_bytes = 1 << 20
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        server = servers.Server(cast(Any, application), listener, served)
        task = asyncio.create_task(server.run_until_stopped(catch_signals=False))
        try:
            await work(address)
        finally:
            server.stop()
            await task

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(whole())


async def shown(address: tuple[str, int]) -> bytes:
    """The certificate that a new connection is given."""
    trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusted.check_hostname, trusted.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection(*address, ssl=trusted)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return bytes(found)


async def soon(holds: Callable[[], Awaitable[bool]]) -> bool:
    for _ in range(100):
        if await holds():
            return True
        await asyncio.sleep(0.05)
    return False


def replace(new: tuple[Path, Path], old: tuple[Path, Path]) -> None:
    for source, target in zip(new, old, strict=True):
        shutil.copy(source, target.with_suffix(".new"))
        target.with_suffix(".new").replace(target)


@pytest.mark.parametrize("kinds", [(EC, ()), ((), EC), ((), ())], ids=["EC to RSA", "RSA to EC", "RSA to RSA"])
def test_a_certificate_of_another_kind_of_key_is_the_one_that_new_connections_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: tuple[tuple[str, ...], tuple[str, ...]]
) -> None:
    monkeypatch.setattr(renewal, "_LOOK_SECONDS", 0.05)
    pair, later = certificate(tmp_path, "server", *kinds[0]), certificate(tmp_path, "later", *kinds[1])
    new = ssl.PEM_cert_to_DER_cert(later[0].read_text())

    async def work(address: tuple[str, int]) -> None:
        trusted = ssl.create_default_context(cafile=str(pair[0]))
        reader, writer = await asyncio.open_connection(*address, ssl=trusted, server_hostname="127.0.0.1")
        assert await shown(address) == ssl.PEM_cert_to_DER_cert(pair[0].read_text())
        replace(later, pair)

        async def renewed() -> bool:
            return await shown(address) == new

        assert await soon(renewed)
        writer.write(post("/x", b"y"))  # who was connected before is served on
        assert (await answer(reader))[:2] == (200, b"/x||y")
        writer.close()

    serving(ServerCertificate(*map(str, pair)), work)


def test_without_a_descriptor_connections_wait_until_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = certificate(tmp_path, "server")

    async def work(address: tuple[str, int]) -> None:
        assert await shown(address)
        with monkeypatch.context() as full:

            def none_left(_: socket.socket) -> tuple[socket.socket, Any]:
                raise OSError(errno.EMFILE, "Too many open files")

            full.setattr(socket.socket, "accept", none_left)
            late = asyncio.create_task(shown(address))
            await asyncio.sleep(1)
            assert not late.done()
            assert sum("connections wait" in line for line in caplog.messages) == 1, "once, not at each look"
        assert await asyncio.wait_for(late, 10)

    serving(ServerCertificate(*map(str, pair)), work)


def test_who_only_the_replaced_authority_signed_is_let_in_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "_LOOK_SECONDS", 0.05)
    pair = certificate(tmp_path, "server")
    clients = {name: certificate(tmp_path, name) for name in ("old", "new")}
    authority = tmp_path / "authority.crt"
    shutil.copy(clients["old"][0], authority)

    async def lets_in(address: tuple[str, int], name: str) -> bool:
        trusted = ssl.create_default_context(cafile=str(pair[0]))
        trusted.load_cert_chain(*clients[name])
        try:
            reader, writer = await asyncio.open_connection(*address, ssl=trusted, server_hostname="127.0.0.1")
            writer.write(post("/x", b"y"))
            found = (await answer(reader))[:2] == (200, b"/x||y")
            writer.close()
        except (OSError, asyncio.IncompleteReadError):  # TLS 1.3: refused after the handshake seems done
            return False
        return found

    async def work(address: tuple[str, int]) -> None:
        assert await lets_in(address, "old") and not await lets_in(address, "new")
        shutil.copy(clients["new"][0], authority)
        assert await soon(lambda: lets_in(address, "new"))
        assert not await lets_in(address, "old")

    serving(ServerCertificate(*map(str, pair), str(authority)), work)


def test_files_that_can_not_be_used_are_told_of_once_until_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(renewal, "_LOOK_SECONDS", 0.02)
    pair = certificate(tmp_path, "server")
    authority = tmp_path / "authority.crt"
    shutil.copy(pair[0], authority)

    def told() -> int:
        return sum("cannot be used" in line for line in caplog.messages)

    async def work(address: tuple[str, int]) -> None:
        for times in (1, 2):
            authority.write_text("rubbish" * times)
            await asyncio.sleep(0.5)
            assert told() == times
        assert await shown(address)

    serving(ServerCertificate(*map(str, pair), str(authority)), work)


def test_an_encrypted_key_is_told_of_and_nobody_is_asked_for_its_password(tmp_path: Path) -> None:
    """OpenSSL asked at standard input, within the loop: nobody was served from then on, and SIGTERM did nothing."""
    chain, key = certificate(tmp_path, "server", *EC)
    encrypted = tmp_path / "encrypted.key"
    command = ["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", str(key), "-out", str(encrypted)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(BadCertificate, match=r"encrypted.key cannot be used: the key is encrypted.*store it without"):
        ServerCertificate(str(chain), str(encrypted))
    with pytest.raises(NoConfiguration, match="the key is encrypted"):
        Login("https://x", ca=chain, certificate=chain, key=encrypted).tls()


def test_a_certificate_with_which_no_hands_can_be_shaken_is_told_of(tmp_path: Path) -> None:
    """It was taken, and every handshake ended without a word."""
    chain, key = certificate(tmp_path, "server", "ec", "-pkeyopt", "ec_paramgen_curve:secp256k1")
    with pytest.raises(BadCertificate, match="cannot be used"):
        ServerCertificate(str(chain), str(key))
    chain, key = certificate(tmp_path, "long")
    chain.write_text(chain.read_text() * 400)
    with pytest.raises(BadCertificate, match="cannot be used"):
        ServerCertificate(str(chain), str(key))


def test_a_certificate_whose_time_is_over_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chain, key = certificate(tmp_path, "server")
    ServerCertificate(str(chain), str(key))
    assert caplog.messages == []
    over = tmp_path / "over.crt"
    request = ["openssl", "req", "-new", "-key", str(key), "-subj", "/CN=x"]
    asked = subprocess.run(request, check=True, capture_output=True).stdout
    sign = ["openssl", "x509", "-req", "-signkey", str(key), "-days", "-1", "-out", str(over)]
    subprocess.run(sign, check=True, capture_output=True, input=asked)
    ServerCertificate(str(over), str(key))
    assert [str(over) in line and "certificate has expired" in line for line in caplog.messages] == [True]


def test_a_file_that_stays_away_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(renewal, "_LOOK_SECONDS", 0.02)
    pair = certificate(tmp_path, "server")

    async def work(address: tuple[str, int]) -> None:
        pair[1].unlink()
        pair[1].symlink_to(pair[1].name)
        await asyncio.sleep(1)
        assert sum("cannot be read" in line and str(pair[1]) in line for line in caplog.messages) == 1
        assert await shown(address)

    serving(ServerCertificate(*map(str, pair)), work)


def test_a_pipe_in_the_place_of_a_file_is_told_of_and_not_waited_for(tmp_path: Path) -> None:
    pair = certificate(tmp_path, "server")
    os.mkfifo(tmp_path / "pipe")
    pipe = str(tmp_path / "pipe")
    for files in ((pipe, str(pair[1])), (str(pair[0]), pipe), (*map(str, pair), pipe)):
        with pytest.raises(BadCertificate, match="no regular file"):
            ServerCertificate(*files)


def test_a_file_of_authorities_without_one_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Everybody whom it does not hold itself is sent away, and nothing said why."""
    leaf = certificate(tmp_path, "leaf", "rsa:2048", "-addext", "basicConstraints=critical,CA:FALSE")
    pair = certificate(tmp_path, "server")
    ServerCertificate(*map(str, pair), str(pair[0]))
    assert caplog.messages == []
    ServerCertificate(*map(str, pair), str(leaf[0]))
    assert [f"client CA {leaf[0]} holds no authority" in line for line in caplog.messages] == [True]


def test_a_client_sends_no_more_than_8_kib_of_certificates(tmp_path: Path) -> None:
    """OpenSSL reads 100: 33 to 45 ms of the loop for each who comes, 10 s for 300 at once."""
    pair, known = certificate(tmp_path, "server"), certificate(tmp_path, "known")
    many = tmp_path / "many.crt"

    async def answered(address: tuple[str, int], chain: Path) -> bool:
        trusted = ssl.create_default_context(cafile=str(pair[0]))
        trusted.load_cert_chain(chain, known[1])
        try:
            reader, writer = await asyncio.open_connection(*address, ssl=trusted, server_hostname="127.0.0.1")
            writer.write(post("/x", b"y"))
            await answer(reader)
        except (OSError, asyncio.IncompleteReadError, ValueError, IndexError):
            return False
        writer.close()
        return True

    async def work(address: tuple[str, int]) -> None:
        whole = len(ssl.PEM_cert_to_DER_cert(known[0].read_text()))
        for count, served in ((2**13 // (whole + 5), True), (2**13 // whole + 1, False)):
            many.write_text(known[0].read_text() * count)
            assert await answered(address, many) == served

    serving(ServerCertificate(*map(str, pair), str(known[0])), work)


@pytest.mark.parametrize("told", [True, False], ids=["told by its pointer", "by Python's ssl alone"])
@pytest.mark.parametrize("with_authority", [True, False])
def test_only_cheap_groups_are_used_for_a_key_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_authority: bool, told: bool
) -> None:
    """One ClientHello, recorded once, of `ffdhe8192` stopped the loop for 124 ms; 186 at once for 23 s."""
    pair = certificate(tmp_path, "server")  # TLS 1.2 wants the group of one of EC, too
    if not told:
        monkeypatch.setattr(renewal, "_USUAL_MOST", -1)
    server = ServerCertificate(*map(str, pair), str(pair[0]) if with_authority else None).context

    def used(group: str, version: ssl.TLSVersion) -> bool:
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        trusting.minimum_version = trusting.maximum_version = version
        trusting.set_ecdh_curve(group)
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        client, side = trusting.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
        try:
            for each in (client, side, client, side, client):
                with contextlib.suppress(ssl.SSLWantReadError):
                    each.do_handshake()
        except ssl.SSLError:
            return False
        return client.version() is not None

    groups = ("X25519", "prime256v1", "secp384r1", "secp521r1", "X448", "ffdhe2048", "ffdhe8192")
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        found = {group for group in groups if used(group, version)}
        assert found == ({"X25519", "prime256v1"} if told else {"prime256v1"}), version


@pytest.mark.parametrize("with_authority", [True, False])
def test_of_a_body_without_room_little_is_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_authority: bool
) -> None:
    """300 that announced 1 MiB and sent 0.9 of it had the webhook killed in the chart's 256 MiB, 2 s after they began."""
    taken: dict[int, int] = {}
    usual = tls._Below.buffer_updated

    def counted(self: Any, nbytes: int) -> None:
        taken[id(self)] = taken.get(id(self), 0) + nbytes
        usual(self, nbytes)

    monkeypatch.setattr(tls._Below, "__init__", functools.partialmethod(uncached, tls._Below.__init__))
    monkeypatch.setattr(tls._Below, "buffer_updated", counted)
    pair = certificate(tmp_path, "server")
    size = 1 << 20  # of which four have room, with certificates two

    async def work(address: tuple[str, int]) -> None:
        trusted = ssl.create_default_context(cafile=str(pair[0]))
        if with_authority:
            trusted.load_cert_chain(*pair)
        ones = [await asyncio.open_connection(*address, ssl=trusted, server_hostname="127.0.0.1") for _ in range(8)]
        for _, writer in ones:
            writer.write(post("/x", bytes(size))[: size * 9 // 10])
        await asyncio.sleep(2)
        few = [each for each in taken.values() if each < size // 2]
        assert len(taken) == 8 and len(few) == (6 if with_authority else 4)
        assert max(few) < 192 * 1024  # some was read before it was known to be a body
        for _, writer in ones:
            writer.write(bytes(size // 10 + 200)[: size - size * 9 // 10 + len(post("/x", bytes(size))) - size])
        for reader, writer in ones:
            assert (await asyncio.wait_for(answer(reader), 10))[0] == 200  # all are served in the end
            writer.close()

    served = ServerCertificate(*map(str, pair), str(pair[0]) if with_authority else None)
    serving(served, work)


def uncached(self: Any, usual: Callable[..., None], *given: Any) -> None:
    """Its method is looked up each time, though it hands on the layer's own."""
    usual(self, *given)
    self.__dict__.pop("buffer_updated", None)
