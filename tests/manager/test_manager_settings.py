"""Settings and where they come from, and documents and generated modules that must keep up with them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from deploy import names_page
from manager.config.reader import OLD_FLAGS, parse
from manager.config.settings import Settings
from manager.errors import StartError
from manager.proto import generate
from vcuda.settings import flag_of

DOCS = Path(__file__).parents[2] / "docs"


def settings(*arguments: str, **environment: str) -> Settings:
    found = parse(arguments, environment)
    assert found is not None
    return found.settings


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("query-port: 1\nquery-addr: from-file\ncontainer-env: [A=1, B=2]\nhealth-ignore-xids: [1, 2]\n")
    found = settings("--query-port=3", f"--config={file}", GPU_MANAGER_QUERY_PORT="2", GPU_MANAGER_SAMPLE_PERIOD="5")
    assert found.query_port == 3
    assert found.sample_period == 5.0
    assert found.query_addr == "from-file"
    assert found.container_env == (("A", "1"), ("B", "2"))
    assert found.health_ignore_xids == {1, 2}
    assert found.resource_domain == "tencent.com"
    assert settings(NODE_NAME="n").node_name == "n"
    assert settings("--hostname-override=m", NODE_NAME="n").node_name == "m"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v: 1\na: [", "is not YAML: line 2: "),
        ("a: " + "[" * 3000, "nested too deep"),
        ("resource-domain: a/b", "resource-domain: 'a/b' is not valid (write a domain"),
        ("hostname-override: a/../b", "is not valid (write a name of a Kubernetes object"),
        ("query-port: true", "query-port: 'True' is not valid (a port is 0 to 65535)"),
        ("- a", "must hold `name: value` lines"),
        ("no-such: 1", "unknown settings: no-such"),
        ("query-port: -1", "query-port: '-1' is not valid"),
    ],
)
def test_a_bad_settings_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(StartError, match=re.escape(message)) as error:
        settings(f"--config={file}")
    assert str(file) in str(error.value)


def test_every_setting_and_metric_is_documented() -> None:
    manual = (DOCS / "manager.md").read_text()
    for field in dataclasses.fields(Settings):
        assert f"`--{flag_of(field.name)}`" in manual, field.name
    for name in OLD_FLAGS:
        assert f"`--{name}`" in manual, name
    text = (DOCS / "metrics.md").read_text()
    exported = {name for name, _, _ in names_page.metrics()}
    assert {name for name in exported if f"`{name}`" not in text} == set()
    assert set(re.findall(r"`((?:vcuda|container_gpu|container_request)_\w+)`", text)) - exported == set()


def test_generated_protocol_modules_are_up_to_date() -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is a development dependency")
    assert generate.stale() == []
