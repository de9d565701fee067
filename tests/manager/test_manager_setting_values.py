"""Each setting that is wrong ends the start with one line: where it stands, what stands there, and what to write instead."""

from __future__ import annotations

import json
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from manager import daemon, main
from manager.config.reader import parse
from manager.config.settings import ENV_PREFIX, Settings
from manager.errors import StartError
from manager.observe import http
from vcuda import logs

WRONG = [
    ("health-check-interval", "0", "give seconds between 0.05 and 86400"),
    ("health-check-interval", "100000", "give seconds between 0.05 and 86400"),
    ("health-check-interval", "soon", "give seconds between 0.05 and 86400"),
    ("health-check-interval", "nan", "give seconds between 0.05 and 86400"),
    ("failed-admission-grace", "0.01", "give seconds between 0.05 and 86400"),
    ("query-port", "65536", "a port is 0 to 65535"),
    ("query-port", "-1", "a port is 0 to 65535"),
    ("smallest-memory", "0", "give a whole number from 1"),
    ("audit-tolerance", "-1", "give a whole number from 0"),
    ("drift-tolerance", "101", "give a whole number from 1 to 100"),
    ("driver-root", "relative/path", "give an absolute path"),
    ("usage-storage", "disk", "choose one of auto, tmpfs, directory"),
    ("device-list-strategy", "envvar", "choose device-specs, cdi-cri or cdi-annotations"),
    ("device-list-strategy", "cdi", "choose of device-specs, cdi-cri, cdi-annotations"),
    ("container-env", "NAME", "write NAME=VALUE"),
    ("container-env", "=value", "write NAME=VALUE"),
    ("container-mount", "/only-one", "write HOST:CONTAINER or HOST:CONTAINER:ro"),
    ("container-mount", "/a:/b:rx", "write HOST:CONTAINER or HOST:CONTAINER:ro"),
    ("container-mount", "a:/b", "both paths must be absolute"),
    ("container-mount", "/a:b", "both paths must be absolute"),
    ("health-ignore-xids", "13,x", "write numbers with commas between"),
    ("node-labels", "rack", "write NAME=VALUE"),
    ("node-labels", "a=b=c", "has no '='"),
    ("v", "loud", "give a whole number from 0 to 99"),
    ("query-addr", "not a host", "write an IP address, or a name of this machine"),
    ("query-addr", "a" * 64, "write an IP address, or a name of this machine"),
]


@pytest.mark.parametrize(("flag", "value", "instead"), WRONG)
@pytest.mark.parametrize("where", ["flag", "environment", "file"])
def test_a_wrong_value_is_named_with_its_place_and_what_to_write(
    tmp_path: Path, where: str, flag: str, value: str, instead: str
) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text(json.dumps({flag: value}))
    variable = ENV_PREFIX + flag.replace("-", "_").upper()
    arguments, environment, place = {
        "flag": ([f"--{flag}={value}"], {}, f"--{flag}"),
        "environment": ([], {variable: value}, variable),
        "file": ([f"--config={config}"], {}, f"{config}: {flag}"),
    }[where]
    with pytest.raises(StartError) as error:
        parse(arguments, environment)
    assert str(error.value).startswith(f"{place}: {value!r} is not valid (")
    assert instead in str(error.value)


UNREADABLE = [
    ("query-port: [1, 2]", "query-port: '1 2' is not valid (a list; write one value)"),
    ("query-port: {a: 1}", "query-port: \"{'a': 1}\" is not valid (it is nested; write plain values)"),
    (
        "container-env: {A: B}",
        "container-env: \"{'A': 'B'}\" is not valid (it is nested; write plain values)",
    ),
    (
        "health-ignore-xids: [[13]]",
        "health-ignore-xids: '[13]' is not valid (it is nested; write plain values)",
    ),
]


@pytest.mark.parametrize(("text", "said"), UNREADABLE)
def test_a_list_or_a_table_where_one_value_is_wanted_is_refused(tmp_path: Path, text: str, said: str) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text(text)
    with pytest.raises(StartError) as error:
        parse([f"--config={config}"], {})
    assert str(error.value) == f"{config}: {said}"


@pytest.mark.parametrize("again", ["query-port: 2", "query_port: 2"])
def test_a_setting_that_a_file_sets_twice_is_refused_not_the_last_one_taken(tmp_path: Path, again: str) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text(f"query-port: 1\nv: 0\n{again}\n")
    with pytest.raises(StartError) as error:
        parse([f"--config={config}"], {})
    assert str(error.value) == f"line 3 of {config} sets query-port again; keep one of them"


def test_what_takes_several_values_takes_a_list_of_yaml(tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text("health-ignore-xids: [13, 31]\nnode-labels: [a=b, c=d]\ncontainer-env: [A=1, B=2]\n")
    parsed = parse([f"--config={config}"], {})
    assert parsed is not None
    found = parsed.settings
    assert (found.health_ignore_xids, found.node_labels) == (frozenset({13, 31}), (("a", "b"), ("c", "d")))
    assert found.container_env == (("A", "1"), ("B", "2"))


def test_an_address_that_is_not_this_machines_is_one_line_with_the_reason() -> None:
    with pytest.raises(StartError, match=r"cannot listen on no-such-host\.invalid:0 \(.*(not known|resolution).*\); "):
        http.listen("no-such-host.invalid", 0)


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "query-port:\n"])
def test_a_settings_file_that_says_nothing_leaves_the_defaults(tmp_path: Path, text: str) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text(text)
    parsed = parse([f"--config={config}"], {})
    assert parsed is not None and parsed.settings == Settings(config=config)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The command in this process, which it does not change; what its daemon was started with."""
    started: list[Any] = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    monkeypatch.setattr(daemon, "run", lambda *arguments: started.append(arguments))
    return started


def test_flags_of_older_releases_are_told_at_the_start_each_with_what_to_do(
    command: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu-manager", "--extra-config=/x", "--log-dir=/y", "--query-port=0"])
    with caplog.at_level(logging.INFO):
        assert main.main() == 0
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == [
        "--extra-config is accepted but has no effect: use --container-env and --container-mount",
        "--log-dir is accepted but has no effect: logs go to standard error",
    ]
    assert command[0][0].query_port == 0
    assert command[0][3]() == command[0][0]  # settings read anew, at SIGHUP


def test_a_start_that_fails_is_one_line_and_exit_code_1(
    command: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise StartError("cannot write to /etc/gpu-manager; make it writable")

    monkeypatch.setattr(daemon, "run", fail)
    monkeypatch.setattr(sys, "argv", ["gpu-manager", "--v=0"])
    assert main.main() == 1
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "cannot write to /etc/gpu-manager; make it writable"
    ]


def test_a_line_of_json_holds_the_error_that_it_tells_of(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        logs.configure("json", logging.INFO)
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            logging.getLogger("manager.x").exception("cannot save %s", "state")
        logging.getLogger("manager.x").info("well")
    finally:
        root.handlers[:], root.level = before, level
    failed, well = map(json.loads, capsys.readouterr().err.splitlines())
    assert (failed["level"], failed["logger"], failed["message"]) == (
        "error",
        "manager.x",
        "cannot save state",
    )
    assert failed["exception"].endswith("[Errno 28] No space left on device")
    assert well["message"] == "well" and "exception" not in well
