"""A ClientHello in however many records; and whose handshake is next."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path
from typing import NamedTuple

import pytest

from scheduler_ext.http import door, places
from scheduler_ext.http import hello as hellos
from scheduler_ext.http.certificate import ServerCertificate
from tests.scheduler_ext.test_extender_certificate import serving, shown
from tests.scheduler_ext.test_extender_handshakes import are_over, half, hello
from tests.scheduler_ext.test_extender_server import answer, post
from tests.scheduler_ext.test_extender_writing import certificate


def cut(whole: bytes, size: int) -> bytes:
    """The same message in records of that size."""
    message = whole[5:]
    parts = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(whole[:3] + len(part).to_bytes(2, "big") + part for part in parts)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 100, 10_000])
def test_what_lacks_of_a_client_hello_is_told_whatever_its_records(size: int) -> None:
    whole = b"\x16\x03\x01" + (44).to_bytes(2, "big") + b"\x01" + (40).to_bytes(3, "big") + bytes(40)
    sent = cut(whole, size)
    at, waits = 0, 0
    while wanted := hellos.lacks(sent[:at]):
        assert at < wanted <= len(sent)  # each wait is for more, and for no more than comes
        at, waits = wanted, waits + 1
    assert at == len(sent) and waits <= 3 + 44 // size
    assert all(hellos.lacks(sent[:end]) > end for end in range(len(sent)))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"\x17\x03\x03\x00\x10" + bytes(16),
        b"\x16\x03\x01\x00\x00" + bytes(16),
        b"\x16\x03\x01\x40\x01\x01" + bytes(16),
        b"\x16\x03\x01\x00\x04\x02\x00\x00\x00",
        b"\x16\x03\x01\x40\x00\x01\x01\xff\x00" + bytes(16),  # 128 KiB, as OpenSSL takes them
        b"".join(b"\x16\x03\x01\x00\x01" + bytes([byte]) for byte in (1, 0, 1, *range(64))),  # a byte at a time
        b"\x16\x03\x01\x00\x05\x01\x00\x01\x00\x00\x15\x03\x01\x00\x02\x00\x00",  # an alert within
    ],
)
def test_what_is_no_client_hello_that_we_take_is_told_at_once(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"this is no|a ClientHello"):
        hellos.lacks(data)


def test_a_client_hello_in_several_records_is_answered(tmp_path: Path) -> None:
    whole = hello()

    async def work(address: tuple[str, int]) -> None:
        for size in (1 + len(whole) // 60, 100, len(whole) - 6):
            sent = cut(whole, size)
            for pieces in (1, 3):
                reader, writer = await half(address, data=b"")
                step = 1 + len(sent) // pieces
                for at in range(0, len(sent), step):
                    writer.write(sent[at : at + step])
                    await asyncio.sleep(0.02)
                assert (await asyncio.wait_for(reader.readexactly(1), 10)) == b"\x16"
                writer.close()
        ones = [await half(address, data=cut(whole, 1)), await half(address, data=cut(whole, 100)[:-1])]
        await asyncio.sleep(0.3)
        assert await are_over(ones) == [True, False]
        ones[1][1].close()

    serving(ServerCertificate(*map(str, certificate(tmp_path, "server"))), work)


def test_honest_handshakes_that_take_long_end_none_of_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten addresses with 30 each at a round trip of 300 ms lost 308 to 495 of 1,200: one that had more made room."""
    monkeypatch.setattr(places, "AT_ONCE", 12)
    trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusted.check_hostname, trusted.verify_mode = False, ssl.CERT_NONE

    async def slow(address: tuple[str, int], own: str) -> bool:
        reader, writer = await asyncio.open_connection(*address, local_addr=(own, 0))
        into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = trusted.wrap_bio(into, out)
        done = False
        with contextlib.suppress(OSError):
            while not done:
                try:
                    client.do_handshake()
                    done = True
                except ssl.SSLWantReadError:
                    writer.write(out.read())
                    into.write(await reader.read(2**16))
            await asyncio.sleep(0.5)  # its last bytes are on their way
            client.write(post("/x", b"y"))
            writer.write(out.read())
            into.write(await reader.read(2**16))
            writer.close()
            return b"200 OK" in client.read(2**16)
        return False

    async def work(address: tuple[str, int]) -> None:
        owns = [f"127.0.0.{1 + number // 18}" for number in range(36)]
        assert all(await asyncio.gather(*(slow(address, own) for own in owns)))

    serving(ServerCertificate(*map(str, certificate(tmp_path, "server"))), work)


def test_who_lets_handshakes_lie_gives_way_to_who_does_not(tmp_path: Path) -> None:
    """Of many addresses with one handshake each, which they begin again when it is ended, all were equal: 4 s of 5."""

    async def work(address: tuple[str, int]) -> None:
        async def lie(own: str) -> None:
            while True:
                reader, writer = await half(address, own)
                with contextlib.suppress(ConnectionError):
                    while await reader.read(2**16):
                        pass
                ended[0] += 1
                writer.close()

        ended = [0]

        assert await shown(address)
        many = [f"127.0.{number // 200 + 1}.{number % 200 + 1}" for number in range(2 * places.AT_ONCE)]
        tasks = [asyncio.create_task(lie(own)) for own in many]
        await asyncio.sleep(1.5)  # each was begun and ended at least once, or waits
        before = []
        for _ in range(5):
            began = ended[0]
            assert await asyncio.wait_for(shown(address), 10)
            before.append(ended[0] - began)
            await asyncio.sleep(0.1)
        assert sorted(before)[2] < places.AT_ONCE // 4  # of those who were there before all had their turn first
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    serving(ServerCertificate(*map(str, certificate(tmp_path, "server"))), work)


def test_who_asks_something_is_known_for_good_and_who_only_shakes_hands_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """900 addresses that closed at once, 1,200 a second, were all as good as who asked: of 720 connections 236 were lost."""
    noted: list[tuple[str, bool]] = []
    monkeypatch.setattr(places.Repute, "note", lambda _, peer, good: noted.append((peer, good)))

    async def work(address: tuple[str, int]) -> None:
        assert await shown(address)
        await asyncio.sleep(0.1)
        assert noted == []
        trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusted.check_hostname, trusted.verify_mode = False, ssl.CERT_NONE
        reader, writer = await asyncio.open_connection(*address, ssl=trusted)
        for _ in range(2):
            writer.write(post("/x", b"y"))
            assert (await answer(reader))[0] == 200
        assert noted == [("127.0.0.1", True)]
        writer.close()
        _, lying = await half(address)
        await asyncio.sleep(0.1)
        lying.close()
        await asyncio.sleep(0.5)
        assert noted == [("127.0.0.1", True), ("127.0.0.1", False)]

    serving(ServerCertificate(*map(str, certificate(tmp_path, "server"))), work)


def test_where_certificates_are_asked_for_a_request_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asked for the version, and let the next handshake lie, came before kube-scheduler's first connection."""
    noted: list[tuple[str, bool]] = []
    monkeypatch.setattr(places.Repute, "note", lambda _, peer, good: noted.append((peer, good)))
    chain, key = certificate(tmp_path, "server")

    async def work(address: tuple[str, int]) -> None:
        for known in (False, True):
            trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            trusted.check_hostname, trusted.verify_mode = False, ssl.CERT_NONE
            if known:
                trusted.load_cert_chain(chain, key)
            reader, writer = await asyncio.open_connection(*address, ssl=trusted)
            writer.write(post("/x", b"y"))
            assert (await answer(reader))[0] == 200
            assert noted == [("127.0.0.1", True)] * known
            writer.close()

    serving(ServerCertificate(str(chain), str(key), str(chain)), work)


def test_who_waits_when_its_address_becomes_known_goes_before_those_that_are_not(tmp_path: Path) -> None:
    """They kept the rank that they came with: 7 to 15 s, and then they were lost, while later ones were let in."""
    served = ServerCertificate(*map(str, certificate(tmp_path, "server")))
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.socket()) for _ in range(4)]
        one = door.TlsDoor(lambda: pytest.fail("nobody is let in"), made[0], served)
        waiting = [door.Newcomer(plain, peer) for plain, peer in zip(made[1:], "aba", strict=True)]
        for newcomer in waiting:
            one._waiting[newcomer] = None
            one._line.add(newcomer)
        one._prove("b")
        assert one._line.next() is waiting[1] and one._line.size(bad=True) == 2


def test_a_handshake_is_left_alone_for_longer_where_such_ones_come_to_their_ends() -> None:
    patience = places.Patience()
    few, some, many = 10, 100, 192
    assert [patience.seconds(places.GOOD, count) for count in (0, few, some, many, 900)] == pytest.approx(
        [1.5, 1.5, 0.576, 0.3, 0.3]
    )
    assert patience.seconds(places.BAD, few) == pytest.approx(0.3)
    for _ in range(100):
        patience.note(places.GOOD, 0.5, ended=False)
        patience.note(places.GOOD, 0.01, ended=True)  # they say nothing of those that take long
        patience.note(places.BAD, 0.5, ended=True)
    assert [patience.seconds(rank, few) for rank in range(3)] == pytest.approx([0.3, 1.5, 0.3], abs=0.01)
    for _ in range(100):
        patience.note(places.GOOD, 0.4, ended=True)
    assert patience.seconds(places.GOOD, few) == pytest.approx(1.5, abs=0.01)


def test_who_is_known_for_good_may_give_up_handshakes_of_its_own() -> None:
    """An address that cancelled 20 for each that it kept was as bad as those that let them lie: 4 to 11 of 30 lost."""
    repute = places.Repute()
    repute.note("a", good=True)
    for _ in range(20):
        repute.give_up("a"), repute.give_up("b")
    assert [repute.rank(peer) for peer in "ab"] == [places.GOOD, places.BAD]


class One(NamedTuple):
    peer: str
    rank: int
    number: int = 0


def test_ranks_take_turns_and_the_best_three_of_four() -> None:
    line = places.Ranked[One]()
    for number in range(8):
        for rank in (places.BAD, places.UNKNOWN, places.GOOD):
            line.add(One(f"{rank}", rank, number))
    ranks = [line.next().rank for _ in range(12)]
    assert ranks == [0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 1, 2]
    assert line.size(bad=True) == 12 and line.size(bad=False) == 6
    assert [line.addresses(rank) for rank in range(3)] == [0, 1, 2]


def test_whose_place_may_be_taken() -> None:
    held, line = places.Ranked[One](), places.Ranked[One]()
    bad, good = One("a", places.BAD), One("b", places.GOOD)
    held.add(bad), held.add(good)
    line.add(One("c", places.BAD))
    assert not line.comes_before(bad, held)  # they would only take turns
    held.add(One("a", places.BAD, 1))
    assert line.comes_before(bad, held) and not line.comes_before(good, held)  # it has two more
    line.add(One("b", places.UNKNOWN))
    assert line.comes_before(bad, held) and not line.comes_before(good, held)  # that is its own
    unknown = One("e", places.UNKNOWN)
    held.add(unknown)
    line.add(One("e", places.GOOD))  # an address that is known for good by now ends none of its own
    assert not line.comes_before(unknown, held)
    line.add(One("d", places.UNKNOWN))
    assert line.comes_before(unknown, held) and not line.comes_before(good, held)
    line.add(One("f", places.GOOD))
    assert line.comes_before(good, held)
    line.discard(One("f", places.GOOD))
    for number in range(places.UNDISTURBED):
        held.add(One("b", places.GOOD, number + 1))
    assert line.comes_before(good, held)
    assert list(held.oldest_of_most()) == [bad, unknown, good]


def test_of_addresses_the_last_handshakes_count_and_not_all_are_remembered() -> None:
    repute = places.Repute()
    repute.note("a", good=True)
    repute.note("b", good=False)
    assert [repute.rank(peer) for peer in "abc"] == [places.GOOD, places.BAD, places.UNKNOWN]
    repute.note("a", good=False)
    assert repute.rank("a") == places.UNKNOWN
    repute.note("a", good=False)
    for number in range(places._MOST_KNOWN - 1):
        repute.note(str(number), good=False)
    assert [repute.rank(peer) for peer in "ab"] == [places.BAD, places.UNKNOWN]
