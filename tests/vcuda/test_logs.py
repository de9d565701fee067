"""Log lines: fields for collectors, and nothing that a tenant writes can begin a line or forge a field."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator

import pytest

from vcuda import logs

HOSTILE = 'x\n2026-01-01 00:00:00,000 INFO manager: all well reason="Fine"\r\x1b[2J\u2028\u202e\x00\ud800 pod=kube-system/admin'
log = logging.getLogger("manager.test")


@pytest.fixture(autouse=True)
def root_as_before() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before


def test_text_has_the_fields_after_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("text", logging.INFO)
    log.warning("refused", extra=logs.fields(reason="Busy", uid="u-1", pod="default/p", uuid=""))
    log.debug("not shown")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" WARNING manager.test: refused pod=default/p uid=u-1 reason=Busy")


def test_json_has_them_beside_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json", logging.INFO)
    log.warning("refused", extra=logs.fields({"pod": "default/p", "uuid": "GPU-1"}, uuid="GPU-2", node=None))
    row = json.loads(capsys.readouterr().err)
    del row["time"]
    assert row == {
        "level": "warning", "logger": "manager.test", "message": "refused", "pod": "default/p", "uuid": "GPU-2",
    }  # fmt: skip


@pytest.mark.parametrize("log_format", logs.FORMATS)
def test_what_a_tenant_writes_stays_in_its_line_and_its_field(
    log_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure(log_format, logging.INFO)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.warning("process %s", HOSTILE, extra=logs.fields(container=HOSTILE, reason="Busy"))
        log.exception("process %s", HOSTILE, extra=logs.fields(pod=HOSTILE))
    shown = capsys.readouterr().err
    assert all(char == "\n" or char.isprintable() for char in shown)
    lines = shown.splitlines()
    if log_format == "json":
        first, second = map(json.loads, lines)
        assert first["message"] == f"process {HOSTILE}" and first["container"] == second["pod"] == HOSTILE
        assert first["reason"] == "Busy" and "pod" not in first and "ValueError" in second["exception"]
        return
    heads = [line for line in lines if not line.startswith("    ")]
    assert [line.split()[2:4] for line in heads] == [["WARNING", "manager.test:"], ["ERROR", "manager.test:"]]
    words = shlex.split(heads[0].partition(": ")[2])
    assert [word.partition("=")[0] for word in words if "=" in word] == ["container", "reason"]


def test_a_field_that_no_page_names_is_a_mistake() -> None:
    with pytest.raises(TypeError, match="no field of log lines: colour"):
        logs.fields(colour="red")
