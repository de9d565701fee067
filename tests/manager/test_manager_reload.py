"""Settings that change while the daemon runs: by SIGHUP and by the file itself."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from manager.config.reader import parse
from manager.config.reload import Reloader
from manager.config.settings import Settings
from manager.daemon import Daemon
from tests.manager.manager_pods import container, eventually, pod
from tests.manager.manager_support import FakeArbiter, Node
from vcuda.settings import flag_of
from vcuda.sim import Machine

MANUAL = Path(__file__).parents[2] / "docs/manager.md"


def rewrite(path: Path, text: str) -> None:
    """As a ConfigMap changes: another file in its place."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def test_what_can_change_does_and_what_is_wrong_does_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("audit-tolerance: 1\nquery-port: 1\n")

    def read() -> Settings:
        parsed = parse([f"--config={file}", "--v=2"], {})
        assert parsed is not None
        return parsed.settings

    reloader = Reloader(read(), read)
    assert reloader.poll() is None
    rewrite(file, "audit-tolerance: 2\nquery-port: 2\ncontainer-env: [TOKEN=hunter2]\nv: 4\n")
    changed = reloader.poll()
    assert changed is not None
    assert (changed.audit_tolerance, changed.query_port, changed.v) == (2, 1, 2)
    assert "--query-port has changed; that takes effect at the next start" in caplog.text
    assert "hunter2" not in caplog.text
    rewrite(file, "audit-tolerance: -1\n")
    assert reloader.poll() is None
    assert "the settings stay as they were" in caplog.text and "give a whole number from 0" in caplog.text
    assert reloader.poll() is None
    file.unlink()
    assert reloader.poll() is None
    assert f"cannot read the settings file {file}" in caplog.text


def test_reading_again_is_asked_for(tmp_path: Path) -> None:
    current = Settings()
    reloader = Reloader(current, lambda: dataclasses.replace(current, audit_policy="evict"))
    assert reloader.poll() is None
    reloader.ask()
    changed = reloader.poll()
    assert changed is not None and changed.audit_policy == "evict"
    assert reloader.poll() is None


def test_the_manual_says_which_settings_are_live() -> None:
    paragraph = next(text for text in MANUAL.read_text().split("\n\n") if "On SIGHUP" in text)
    named = {f.name for f in dataclasses.fields(Settings) if f"`--{flag_of(f.name)}`" in paragraph}
    assert named - {"config"} == {f.name for f in dataclasses.fields(Settings) if f.metadata["live"]}


def test_a_running_daemon_follows(make_node: Callable[..., Node], machine: Machine) -> None:
    node = make_node(machine.root, with_api=True)
    node.kubelet.start()
    file = node.directory / "config.yaml"
    file.write_text("node-labels: one=1,two=2\n")
    arguments = node.arguments(f"--config={file}")

    def read() -> Settings:
        parsed = parse(arguments, {})
        assert parsed is not None
        return parsed.settings

    node.daemon = Daemon(read(), {}, FakeArbiter, shims=node.shims, reread=read)
    node.daemon.start()
    node.kubelet.wait_devices(200)
    assert node.api is not None
    labels = lambda: node.api.node().get("labels", {})  # noqa: E731
    eventually(lambda: labels().get("two") == "2", "labels of the start")
    rewrite(file, "node-labels: one=1\ncontainer-env: [MODE=new]\n")
    eventually(lambda: "two" in labels() and labels()["two"] is None, "the dropped label")
    item = pod("a", container("c", 10, 1))
    node.api.put("pods", item)
    node.kubelet.admit(item)
    assert node.kubelet.answer(item, "c").envs["MODE"] == "new"


def test_sighup_reads_again_and_ends_nothing(process: Callable[..., object], node: Node) -> None:
    file = node.directory / "config.yaml"
    file.write_text("{}\n")
    running = process(f"--config={file}", "--health-check-interval=3600")
    log = node.directory / "manager.log"
    running.send_signal(signal.SIGHUP)
    eventually(lambda: "nothing to change" in log.read_text(), "the first look")
    file.write_text("audit-tolerance: 7\n")
    os.kill(running.pid, signal.SIGHUP)
    eventually(lambda: "changed settings: audit-tolerance: 7" in log.read_text(), "the change")
    running.send_signal(signal.SIGTERM)
    assert running.wait(20) == 0
