"""Files whose path an operator gives, or that a daemon wrote: what lies there may be anything."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from manager.allocations.state_file import StateError, StateFile
from manager.cards.context_cost import ContextCosts
from manager.cards.seen import SeenCards
from manager.errors import StartError
from manager.kubelet.records import Checkpoint, RecordsError
from manager.limits.standing import Standing
from manager.process import instance_lock
from scheduler_ext.lab import replay, trace
from scheduler_ext.lab.replay import RecordingError
from scheduler_ext.lab.trace import TraceError
from scheduler_ext.settings import Settings
from vcuda import plain_file, settings
from vcuda.driver.root import HostRoot
from vcuda.kube import config
from vcuda.kube.errors import NoConfiguration
from vcuda.spec.names import Names

LONG = plain_file.MOST_BYTES + 1


def pipe(path: Path) -> None:
    os.mkfifo(path)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, LONG)


MADE = pytest.mark.parametrize(
    ("make", "said"), [(pipe, "no regular file"), (zeros, "no regular file"), (huge, "more than 64 MiB")]
)


@MADE
@pytest.mark.timeout(20)
def test_what_is_no_file_of_sane_size_is_refused_with_its_name(
    tmp_path: Path, make: Callable[[Path], None], said: str
) -> None:
    """A pipe hung the start without a word, /dev/zero and a file of 8 GiB were read."""
    path = tmp_path / "there"
    make(path)
    with pytest.raises(OSError, match=f"{said}.*{path}"):
        plain_file.read(path)
    with pytest.raises(settings.InvalidSettings, match=f"cannot read the settings file {path}.*{said}"):
        settings.read(Settings, {"config": str(path)}, {}, "VCUDA_")
    with pytest.raises(NoConfiguration, match=f"cannot read the kubeconfig {path}.*{said}"):
        config.from_file(path)
    for where in ("ca", "certificate", "key"):
        files = {"ca": None, "certificate": __file__, "key": __file__} | {where: str(path)}
        login = config.Login("https://x", **{name: file and Path(file) for name, file in files.items()})
        with pytest.raises(NoConfiguration, match=f"{path}.*{said}"):
            login.tls()


@MADE
@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["state.json", "state.journal"])
def test_the_daemons_state_is_not_read_from_it(
    tmp_path: Path, make: Callable[[Path], None], said: str, name: str
) -> None:
    make(tmp_path / name)
    if name == "state.journal":
        (tmp_path / "state.json").write_text("{}")
    with pytest.raises(StateError, match=f"cannot read the state file {tmp_path / name}: .*{said}.*; make it"):
        StateFile(tmp_path).load()


def deep(path: Path) -> None:
    path.write_text("[" * 300_000)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [pipe, zeros, huge, deep])
def test_what_a_daemon_before_has_noted_counts_as_nothing_then(
    tmp_path: Path, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A file nested 300,000 deep ended the daemon at each start."""
    for name in ("cards.json", "driver-limits.json", "context-bytes.json"):
        make(tmp_path / name)
    assert SeenCards(tmp_path).cards == {}
    assert Standing(tmp_path).pods == set()
    assert ContextCosts(tmp_path, HostRoot(tmp_path)).bytes("GPU-x") == 0
    assert sum("can't be read" in line for line in caplog.messages) == 2


def test_a_pipe_in_the_place_of_the_lock_is_told_of(tmp_path: Path) -> None:
    pipe(tmp_path / instance_lock.NODE)
    with pytest.raises(StartError, match=r"seekable|not seek"):
        instance_lock.attempt(tmp_path, "x")


@pytest.mark.parametrize("make", [pipe, zeros, Path.mkdir])
@pytest.mark.timeout(20)
def test_a_trace_or_a_recording_that_is_no_file_is_refused_with_its_name(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    """`simulate` waited for a pipe without a word."""
    path = tmp_path / "there"
    make(path)
    with pytest.raises(TraceError, match=f"cannot read {path}.*no regular file"):
        trace.read_nodes(path)
    with pytest.raises(RecordingError, match=f"cannot read {path}.*no regular file"):
        replay.read(path)
    path.rename(tmp_path / "kubelet_internal_checkpoint")
    with pytest.raises(RecordsError, match=r"cannot read kubelet's checkpoint .*no regular"):
        Checkpoint(tmp_path, Names()).list()
