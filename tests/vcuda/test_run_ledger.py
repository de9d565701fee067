"""The ledger: no overbooking by simultaneous runs, bookings end with their holders, other users' files do no harm."""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from vcuda.region import CardLimit
from vcuda.runs import booking, card_choice, files, layout, ledger, locks, run
from vcuda.runs.booking import Booking, Share
from vcuda.runs.errors import RunError
from vcuda.runs.ledger import Ledger
from vcuda.spec.inventory import Card

GIB = 2**30
CARD = Card("GPU-1", 0, "T4", 8 * GIB)
LIMITS = (CardLimit("GPU-1", 0, GIB, 30, 30),)
FORK = multiprocessing.get_context("fork")
OTHER_USER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path in (tmp_path, *tmp_path.parents[:3]):
        path.chmod(path.stat().st_mode | 0o011)  # the second user must get there
    return tmp_path / "ledger"


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def book(folder: Path, warnings: list[str]) -> Iterator[Ledger]:
    opened = Ledger.open(folder, warnings.append)
    yield opened
    opened.close()


def wanted(cores: int = 30) -> Booking:
    return Booking("", 0, os.getpid(), time.time(), "python train.py", "", (Share("GPU-1", 0, cores, cores, GIB),))


def add(book: Ledger, cores: int = 30) -> tuple[Booking, int]:
    with book.locked():
        return book.add(wanted(cores), LIMITS)


def as_other_user(action: Callable[[], None]) -> None:
    """Run in a forked process of another user; its failure fails the test."""

    def child() -> None:
        os.setgroups([])
        os.setgid(OTHER_USER)
        os.setuid(OTHER_USER)
        action()

    process = FORK.Process(target=child)
    process.start()
    process.join(30)
    assert process.exitcode == 0


def test_a_booking_lives_exactly_as_long_as_its_descriptor(book: Ledger) -> None:
    entry, held = add(book)
    assert [found.name for found in book.bookings()] == [entry.name]
    assert (book.folder / entry.name / "vcuda" / "limits").exists()
    os.close(held)
    assert book.bookings() == []
    with book.locked():
        book.purge()
    assert not (book.folder / entry.name).exists()


def test_any_process_that_inherited_the_descriptor_keeps_the_booking(book: Ledger) -> None:
    _, held = add(book)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    os.close(held)
    assert len(book.bookings()) == 1
    os.close(writing)
    os.waitpid(child, 0)
    assert book.bookings() == []


def test_a_slot_in_the_region_keeps_the_booking_of_a_process_that_closed_everything_else(
    book: Ledger,
) -> None:
    entry, held = add(book)
    os.close(held)
    usage = os.open(book.region_folder(entry.name) / "usage", os.O_RDWR)
    slot = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 393216 + 5, 1, 0)
    fcntl.fcntl(usage, fcntl.F_OFD_SETLK, slot)
    assert len(book.bookings()) == 1
    with book.locked():
        book.purge()
    assert (book.folder / entry.name).exists()
    os.close(usage)
    assert book.bookings() == []


def _book_one(
    folder: Path, barrier: multiprocessing.synchronize.Barrier, done: multiprocessing.synchronize.Event
) -> None:
    mine = Ledger.open(folder, lambda _message: None)
    barrier.wait(30)
    try:
        run.book(mine, card_choice.RunRequest(30, 30, GIB), ["true"], [CARD], run.Machine(folder))
    except RunError as error:
        os._exit(3 if "30 cores" in str(error) else 4)
    done.wait(30)
    os._exit(0)


def test_simultaneous_runs_never_overbook(folder: Path) -> None:
    barrier, done = FORK.Barrier(9), FORK.Event()
    racers = [FORK.Process(target=_book_one, args=(folder, barrier, done)) for _ in range(8)]
    for racer in racers:
        racer.start()
    barrier.wait(30)
    for _ in range(1000):
        if sum(racer.exitcode == 3 for racer in racers) == 5:
            break
        time.sleep(0.02)
    done.set()
    for racer in racers:
        racer.join(30)
    assert sorted(racer.exitcode for racer in racers) == [0, 0, 0, 3, 3, 3, 3, 3]


def test_if_the_lock_was_split_what_is_written_decides(book: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program books between our look and our writing: possible once somebody removed the lock's file."""
    stale_looks = [book.bookings()]
    add(book, 80)
    real = Ledger.bookings
    monkeypatch.setattr(Ledger, "bookings", lambda self: stale_looks.pop() if stale_looks else real(self))
    with pytest.raises(RunError, match="at this moment"):
        run.book(book, card_choice.RunRequest(30, 30, GIB), ["true"], [CARD], run.Machine(book.folder))
    assert len(real(book)) == 1


def test_a_lock_whose_file_was_replaced_meanwhile_does_not_count(book: Ledger) -> None:
    with book.locked():
        pass
    stale = os.open(book.folder / "lock", os.O_RDWR)
    (book.folder / "lock").unlink()
    assert not ledger._is_same(stale, book.folder / "lock")
    with book.locked():
        assert not ledger._is_same(stale, book.folder / "lock")
        other = os.open(book.folder / "lock", os.O_RDWR)
        assert not locks.try_exclusive(other)
        os.close(other)
    os.close(stale)


def test_who_waited_for_a_lock_that_was_replaced_waits_for_its_successor(folder: Path, book: Ledger) -> None:
    path = folder / "lock"
    old = files.open_or_create(str(path), 0o666)
    assert locks.try_exclusive(old)
    started, entered = FORK.Event(), FORK.Event()

    def waiter() -> None:
        os.close(old)
        started.set()
        mine = Ledger.open(folder, print)
        with mine.locked():
            entered.set()

    process = FORK.Process(target=waiter)
    process.start()
    assert started.wait(30)
    while not _has_open(process.pid, path):
        time.sleep(0.01)
    path.unlink()
    new = files.open_or_create(str(path), 0o666)
    assert locks.try_exclusive(new)
    os.close(old)
    assert not entered.wait(0.3), "the old file's lock is worth nothing"
    os.close(new)
    assert entered.wait(30)
    process.join(30)


def _has_open(pid: int | None, path: Path) -> bool:
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(descriptor.readlink())
    return path in found


def test_a_lock_that_is_never_given_back_is_named(book: Ledger) -> None:
    with book.locked():
        other = Ledger.open(book.folder, lambda _message: None)
        with pytest.raises(RunError, match=f"locked by process {os.getpid()} "), other.locked(0.05):
            pass
        other.close()


def _entry(folder: Path, name: str, raw: bytes | None) -> Path:
    path = folder / name
    path.mkdir()
    if raw is not None:
        (path / "booking").write_bytes(raw)
    return path


def test_damaged_entries_are_named_once_and_ignored(book: Ledger, warnings: list[str]) -> None:
    _, held = add(book)
    good = booking.encode(wanted())
    _entry(book.folder, "run-garbage", b"\xff\x00 no json")
    _entry(book.folder, "run-huge", good + b" " * 100_000)
    _entry(book.folder, "run-deep", b"[" * 50_000)
    _entry(book.folder, "run-newer", json.dumps(json.loads(good) | {"version": 9}).encode())
    os.mkfifo(_entry(book.folder, "run-pipe", None) / "booking")
    (_entry(book.folder, "run-link", None) / "booking").symlink_to("/etc/passwd")
    _entry(book.folder, "run-empty", None)
    (book.folder / "run-elsewhere").symlink_to("/")
    (book.folder / "run-file").write_text("not a folder")
    for _ in range(2):
        assert len(book.bookings()) == 1
    for name in ("garbage", "huge", "deep", "newer", "pipe", "link", "elsewhere", "file"):
        assert sum(f"run-{name}:" in warning for warning in warnings) == 1, (name, warnings)
    assert len(warnings) == 8
    with book.locked():
        book.purge()
    assert len(book.bookings()) == 1
    assert Path("/etc/passwd").exists()
    os.close(held)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/etc/passwd"), Path.mkdir])
def test_a_lock_that_is_no_plain_file_is_refused(folder: Path, book: Ledger, make: Callable[[Path], None]) -> None:
    make(folder / "lock")
    with pytest.raises(RunError, match="lock can't be opened"), book.locked():
        pass


def test_a_folder_that_anyone_may_rearrange_is_refused(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(RunError, match=r"chmod \+t"):
        Ledger.open(folder, print)


def test_a_link_is_not_followed_to_a_ledger(folder: Path, tmp_path: Path) -> None:
    folder.symlink_to(tmp_path)
    with pytest.raises(RunError, match="can't be used"):
        Ledger.open(folder, print)


def test_a_missing_parent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="give another --ledger"):
        Ledger.open(tmp_path / "no" / "ledger", print)


def test_the_umask_does_not_lock_others_out(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        opened = Ledger.open(folder, print)
        entry, held = add(opened)
    finally:
        os.umask(before)
    modes = {
        path.relative_to(folder / entry.name).as_posix(): stat.S_IMODE(path.stat().st_mode)
        for path in (folder / entry.name).rglob("*")
    }
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert stat.S_IMODE((folder / entry.name).stat().st_mode) == 0o755
    assert stat.S_IMODE((folder / "lock").stat().st_mode) == 0o666
    assert modes == {"booking": 0o644, "vcuda": 0o711, "vcuda/limits": 0o444, "vcuda/usage": 0o600}
    os.close(held)
    opened.close()


@needs_root
def test_users_see_each_others_bookings_but_can_touch_only_their_own(folder: Path, book: Ledger) -> None:
    entry, held = add(book, 80)

    def stranger() -> None:
        theirs = Ledger.open(folder, print)
        assert [found.user_id for found in theirs.bookings()] == [0]
        with pytest.raises(RunError, match="of root since"):
            run.book(theirs, card_choice.RunRequest(30, 30, GIB), ["true"], [CARD], run.Machine(folder))
        with theirs.locked():
            theirs.purge()
        with pytest.raises(OSError):
            (folder / entry.name).rename(folder / "gone")
        mine, held_by_me = run.book(theirs, card_choice.RunRequest(20, 20, GIB), ["true"], [CARD], run.Machine(folder))
        assert mine.user_id == OTHER_USER
        os.close(held_by_me)

    as_other_user(stranger)
    assert [found.name for found in book.bookings()] == [entry.name]
    os.close(held)


@needs_root
def test_another_users_slot_counts_without_a_right_to_read_it(folder: Path, book: Ledger) -> None:
    entry, held = add(book)
    os.close(held)
    usage = os.open(book.region_folder(entry.name) / "usage", os.O_RDWR)
    fcntl.fcntl(usage, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 393216, 1, 0))

    def stranger() -> None:
        theirs = Ledger.open(folder, print)
        assert len(theirs.bookings()) == 1
        with pytest.raises(OSError):
            os.open(theirs.region_folder(entry.name) / "usage", os.O_RDONLY)

    as_other_user(stranger)
    os.close(usage)


@needs_root
def test_cleaning_up_never_touches_what_another_users_booking_names(folder: Path, book: Ledger, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    path = _entry(folder, "run-trap", booking.encode(replace(wanted(), folder=str(victim))))
    for part in (path, path / "booking"):
        os.chown(part, OTHER_USER, -1)
    with book.locked():
        book.purge()
    assert victim.exists() and path.exists()


@needs_root
def test_a_folder_with_another_users_booking_inside_is_ignored(folder: Path, book: Ledger, warnings: list[str]) -> None:
    path = _entry(folder, "run-mixed", booking.encode(wanted()))
    os.chown(path / "booking", OTHER_USER, -1)
    assert book.bookings() == []
    assert "another user" in warnings[0]


@needs_root
def test_a_private_folder_of_another_user_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    os.chown(folder, 1, -1)
    with pytest.raises(RunError, match="belongs to user 1"):
        Ledger.open(folder, print)


@needs_root
def test_a_squatted_arbiter_lock_is_named(folder: Path, book: Ledger) -> None:
    squatted = folder / f"arbiter-{OTHER_USER}"
    squatted.touch(mode=0o600)

    def stranger() -> None:
        said: list[str] = []
        theirs = Ledger.open(folder, said.append)
        assert theirs.arbiter_lock() is None
        assert theirs.arbiter_lock() is None
        assert len(said) == 1 and str(squatted) in said[0]

    as_other_user(stranger)


def test_one_arbiter_at_a_time(folder: Path, book: Ledger) -> None:
    first = book.arbiter_lock()
    other = Ledger.open(folder, print)
    assert first is not None and other.arbiter_lock() is None
    os.close(first)
    second = other.arbiter_lock()
    assert second is not None
    os.close(second)
    other.close()


def test_what_a_crash_left_half_written_is_removed(book: Ledger) -> None:
    (book.folder / ".new-run-1" / "vcuda").mkdir(parents=True)
    assert book.bookings() == []
    with book.locked():
        book.purge()
    assert not (book.folder / ".new-run-1").exists()


def test_a_refused_region_leaves_nothing_behind(book: Ledger) -> None:
    with book.locked(), pytest.raises(RunError, match="nothing can be booked"):
        book.add(wanted(), (CardLimit("GPU-1", 0, GIB, 0, 0),))
    assert [path.name for path in book.folder.iterdir()] == ["lock"]


def test_libraries_go_elsewhere_where_the_ledger_allows_no_programs(
    book: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    monkeypatch.setattr(layout, "allows_programs", lambda path: path == allowed)
    machine = run.Machine(book.folder, elsewhere=(tmp_path / "noexec", allowed))
    entry, held = run.book(book, card_choice.RunRequest(30, 30, GIB), ["true"], [CARD], machine)
    assert Path(entry.folder).parent == allowed
    os.close(held)
    with book.locked():
        book.purge()
    assert list(allowed.iterdir()) == []
    with pytest.raises(RunError, match="TMPDIR"):
        run.book(book, card_choice.RunRequest(30, 30, GIB), ["true"], [CARD], run.Machine(book.folder))
