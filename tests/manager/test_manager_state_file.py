"""The state file and its journal: what was saved is read again, whatever was cut short, damaged or taken away."""

from __future__ import annotations

import errno
import json
import os
import resource
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from manager.allocations.record import Allocation, Held
from manager.allocations.state_file import StateDamaged, StateError, StateFile
from tests.manager.manager_support import save_state
from vcuda.spec.placement import CardShare
from vcuda.spec.request import Kind


def an_allocation(name: str = "c") -> Allocation:
    return Allocation(
        pod_uid="u",
        namespace="default",
        pod_name="p",
        container=name,
        kind=Kind.INIT,
        cores=30,
        memory_blocks=10,
        core_limit=50,
        priority="high",
        shares=(CardShare("GPU-1", 30, 10),),
        minors={"GPU-1": 3},
        region="/r",
        mirror="/m",
        held={"core": Held.of(["a", "b"])},
        created_ns=7,
    )


def test_the_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    assert file.load() == {}
    first, second = an_allocation(), an_allocation("d")
    save_state(file, [first, second])
    assert file.load() == {first.key: first, second.key: second}
    assert list(file.load()) == [first.key, second.key]


def damaged(text: str) -> list[str]:
    document = json.loads(text)
    changed = {**document, "data": {"allocations": []}}
    newer = {**document, "version": 99}
    return [text[: len(text) // 2], "", "[]", "null", json.dumps(changed), json.dumps(newer)]


@pytest.mark.parametrize("variant", range(6))
def test_a_damaged_file_is_named_and_kept(tmp_path: Path, variant: int) -> None:
    file = StateFile(tmp_path)
    save_state(file, [an_allocation()])
    text = damaged(file.path.read_text())[variant]
    file.path.write_text(text)
    with pytest.raises(StateDamaged, match=str(file.path)) as error:
        file.load()
    assert error.value.kept.read_text() == text
    assert file.load() == {}


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = StateFile(tmp_path)
    save_state(file, [an_allocation()])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        patch.setattr("os.write", full)
        for write in (partial(save_state, file, []), partial(file.fold, threading.Lock(), list)):
            with pytest.raises(StateError, match="No space left on device; make room"):
                write()
            assert len(file.load()) == 1
    save_state(file, [])
    assert file.load() == {}


def test_a_first_write_that_fails_leaves_nothing_beside(tmp_path: Path) -> None:
    """A daemon that can't write its state ends and is begun again, for hours: each start must not leave a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # what a full disk does, to this process
    try:
        with pytest.raises(StateError, match="File too large"):
            save_state(StateFile(tmp_path), [an_allocation()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_changes_are_appended_and_fold_into_a_snapshot(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    items = [an_allocation(f"c{number}") for number in range(300)]
    save_state(file, items[:1])
    snapshot = file.path.read_bytes()
    for number in range(len(items)):
        save_state(file, items[number // 2 : number + 1])
    assert file.path.read_bytes() == snapshot
    assert list(file.load().values()) == items[149:]
    assert file.journal.read_bytes().count(b"\n") == 1 + len(items) - 1  # nothing is written when nothing changed
    save_state(file, items[149:])
    assert not file.long
    file.fold(threading.Lock(), lambda: items[149:])
    assert file.journal.read_bytes().count(b"\n") == 1
    assert list(file.load().values()) == items[149:]
    file.sync()
    file.close()


def test_half_a_line_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk takes a part of the line; the next change must not stand behind it."""
    file = StateFile(tmp_path)
    first, second, third = an_allocation("a"), an_allocation("b"), an_allocation("d")
    save_state(file, [first])
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr("os.write", lambda descriptor, data: write(descriptor, data[:20]))
        with pytest.raises(StateError, match="the disk is full"):
            save_state(file, [first, second])
    save_state(file, [first, third])
    assert list(file.load().values()) == [first, third]


@pytest.mark.parametrize("keep", range(0, 400, 7))
def test_a_journal_that_ends_anywhere_gives_a_state_that_was(tmp_path: Path, keep: int) -> None:
    """As after a kill or a power cut: what is complete counts, the half line was told to nobody."""
    file = StateFile(tmp_path)
    first, second = an_allocation("a"), an_allocation("b")
    save_state(file, [first])
    save_state(file, [first, second])
    save_state(file, [second])
    text = file.journal.read_bytes()
    file.journal.write_bytes(text[: len(text) * keep // 400])
    assert list(StateFile(tmp_path).load().values()) in ([first], [first, second], [second])


def test_a_damaged_line_inside_the_journal_is_no_state(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    save_state(file, [an_allocation("a")])
    save_state(file, [an_allocation("a"), an_allocation("b")])
    save_state(file, [])
    lines = file.journal.read_bytes().splitlines(keepends=True)
    file.journal.write_bytes(lines[0] + lines[1].replace(b'"b"', b'"z"') + lines[2])
    with pytest.raises(StateDamaged, match="line 2 of the journal is damaged"):
        file.load()
    assert not file.path.exists() and not file.journal.exists()


def test_the_journal_of_an_earlier_snapshot_counts_for_nothing(tmp_path: Path) -> None:
    """Killed between the new snapshot and its journal."""
    file = StateFile(tmp_path)
    save_state(file, [an_allocation("a")])
    save_state(file, [an_allocation("a"), an_allocation("b")])
    old = file.journal.read_bytes()
    file.compact([an_allocation("d")])
    file.journal.write_bytes(old)
    assert [item.container for item in file.load().values()] == ["d"]
    file.journal.unlink()
    assert [item.container for item in file.load().values()] == ["d"]


def test_files_taken_away_under_the_daemon_are_made_again(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    save_state(file, [an_allocation("a")])
    file.path.unlink()
    save_state(file, [an_allocation("a"), an_allocation("b")])
    assert [item.container for item in file.load().values()] == ["a", "b"]


class Killed(BaseException):
    """In place of SIGKILL: nothing of ours handles it."""


@pytest.mark.parametrize("step", range(8))
def test_a_kill_at_any_step_of_a_fold_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """What was saved before, and what is saved while the snapshot is on its way to the disk."""
    file = StateFile(tmp_path)
    first, second, third, fourth = (an_allocation(name) for name in "abde")
    file.append([first], [], lambda: [first])
    file.append([second], [], list)
    file.append([third], [first.key], list)
    known, steps = {item.key: item for item in (second, third)}, iter(range(100))

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if next(steps) == step:
                raise Killed
            return function(*arguments)

        return call

    fsync = os.fsync

    def fsync_while_pods_come(descriptor: int) -> None:
        file.append([fourth], [second.key], list)
        known[fourth.key] = fourth
        known.pop(second.key)
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fsync_while_pods_come)
        for name in ("write", "replace", "open", "pread"):
            patch.setattr(f"os.{name}", counted(getattr(os, name)))
        try:
            file.fold(threading.Lock(), lambda: list(known.values()))
        except Killed:
            assert StateFile(tmp_path).read() == known
            return
    assert StateFile(tmp_path).read() == known and step >= 4
    file.append([first], [], list)
    assert StateFile(tmp_path).read() == {**known, first.key: first}


def test_a_fold_that_the_disk_refuses_leaves_what_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = StateFile(tmp_path)
    first, second = an_allocation("a"), an_allocation("b")
    file.append([first], [], lambda: [first])
    file.append([second], [], list)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(StateError, match="No space left"):
            file.fold(threading.Lock(), lambda: [first, second])
    file.append([], [first.key], list)
    assert list(StateFile(tmp_path).read()) == [second.key]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.journal", "state.json"]


def test_changes_can_be_named_instead_of_looked_for(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    first, second = an_allocation("a"), an_allocation("b")
    file.append([first], [], lambda: [first])
    file.append([second], [first.key], lambda: [second])
    assert list(StateFile(tmp_path).read().values()) == [second]
    file.journal.unlink()  # somebody has taken it: everything is written anew
    file.append([first], [], lambda: [second, first])
    assert list(StateFile(tmp_path).read().values()) == [second, first]
    file.close()
