"""Logins: kubeconfig files of every kind, and the service account; what is wrong is one clear message."""

from __future__ import annotations

import base64
import json
import ssl
import sys
from pathlib import Path
from typing import Any

import pytest

from vcuda.kube import config
from vcuda.kube.errors import ApiUnreachable, NoConfiguration

SERVER = {"server": "https://10.0.0.1:6443"}


def kubeconfig(
    tmp_path: Path, user: dict[str, Any] | None = None, cluster: dict[str, Any] | None = None, **more: Any
) -> Path:
    document = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": SERVER | (cluster or {})}],
        "users": [{"name": "u", "user": user or {}}],
    }
    path = tmp_path / "config"
    path.write_text(json.dumps(document | more))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"current-context": "other"}, "is incomplete: no 'other'"),
        ({"contexts": 3}, "is incomplete"),
        ({"user": {"auth-provider": {}}}, "uses 'auth-provider'; use a certificate"),
        ({"user": {"exec": {"args": []}}}, "is incomplete: no 'command'"),
        ({"cluster": {"server": "ftp://x"}}, "is no http:// or https:// URL"),
        ({"cluster": {"certificate-authority": "none"}}, "cannot use the CA file .*none"),
        ({"cluster": {"certificate-authority-data": "%"}}, "certificate-authority-data is not base64"),
        ({"user": {"client-certificate": "none", "client-key": "none"}}, "cannot use the client"),
        (
            {"user": {"client-certificate-data": base64.b64encode(b"x").decode(), "client-key-data": "eA=="}},
            "cannot use the client",
        ),
    ],
)
def test_an_unusable_kubeconfig_is_one_clear_message(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NoConfiguration, match=message) as caught:
        config.load(kubeconfig(tmp_path, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{{{", "is not YAML"), ("", "incomplete"), ("[1]", "incomplete"), ("a: [" * 200_000, "nested too deep"),
    ],
)  # fmt: skip
def test_a_file_that_is_none(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config").write_text(content)
    with pytest.raises(NoConfiguration, match=message):
        config.load(tmp_path / "config")
    with pytest.raises(NoConfiguration, match=r"cannot read the kubeconfig .*gone"):
        config.load(tmp_path / "gone")


def test_tokens_are_read_from_files_beside_the_kubeconfig_and_kept_while_these_are_away(
    tmp_path: Path,
) -> None:
    (tmp_path / "token").write_text(" secret\n")
    login = config.load(kubeconfig(tmp_path, user={"tokenFile": "token"}))
    assert login.token() == "secret" and login.url == "https://10.0.0.1:6443"
    (tmp_path / "token").unlink()
    assert login.token() == "secret"
    assert config.load(kubeconfig(tmp_path, user={"token": "fixed"})).token() == "fixed"


def test_a_program_gives_the_token_once_until_it_expires(tmp_path: Path) -> None:
    script = (
        "import json, os, pathlib; p = pathlib.Path(os.environ['COUNT']); p.write_text(p.read_text() + 'x');"
        "json.loads(os.environ['KUBERNETES_EXEC_INFO'])['kind'] == 'ExecCredential' or exit(1);"
        "print(json.dumps({'status': {'token': p.read_text(), 'expirationTimestamp': os.environ['END']}}))"
    )
    count = tmp_path / "count"
    for end, first, second in (("2999-01-01T00:00:00Z", "x", "x"), ("2001-01-01T00:00:00Z", "x", "xx")):
        count.write_text("")
        env = [{"name": "COUNT", "value": str(count)}, {"name": "END", "value": end}]
        plugin = {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": sys.executable,
            "args": ["-c", script],
        }
        login = config.load(kubeconfig(tmp_path, user={"exec": plugin | {"env": env}}))
        assert (login.token(), login.token()) == (first, second)
    broken = config.load(kubeconfig(tmp_path, user={"exec": {"command": "/bin/false"}}))
    with pytest.raises(ApiUnreachable, match="the program /bin/false gave no token"):
        broken.token()


def test_the_servers_certificate_is_verified_unless_the_file_says_no(tmp_path: Path) -> None:
    strict = config.load(kubeconfig(tmp_path)).tls()
    assert strict is not None and strict.verify_mode is ssl.CERT_REQUIRED and strict.check_hostname
    lax = config.load(kubeconfig(tmp_path, cluster={"insecure-skip-tls-verify": True})).tls()
    assert lax is not None and lax.verify_mode is ssl.CERT_NONE
    assert config.load(kubeconfig(tmp_path, cluster={"server": "http://x"})).tls() is None


def test_outside_a_pod_there_is_no_service_account() -> None:
    assert config.in_cluster({}) is None
    with pytest.raises(NoConfiguration, match="no --kubeconfig was given and there is no service account"):
        config.load(None, {})


def test_of_several_files_the_first_that_has_an_entry_counts_and_a_context_can_be_named(tmp_path: Path) -> None:
    """As kubectl merges $KUBECONFIG; paths in an entry are relative to the file that it stands in."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one/token").write_text("of one")
    first = {
        "current-context": "work",
        "contexts": [{"name": "work", "context": {"cluster": "k", "user": "u", "namespace": "team-a"}}],
        "users": [{"name": "u", "user": {"tokenFile": "token"}}],
    }
    second = {
        "current-context": "other",
        "contexts": [
            {"name": "work", "context": {"cluster": "gone"}},
            {"name": "other", "context": {"cluster": "k"}},
        ],
        "clusters": [{"name": "k", "cluster": SERVER}],
        "users": [{"name": "u", "user": {"token": "of two"}}],
    }
    paths = [tmp_path / "one/config", tmp_path / "two"]
    for path, document in zip(paths, (first, second), strict=True):
        path.write_text(json.dumps(document))
    found = config.files({"KUBECONFIG": f"{paths[0]}:{tmp_path / 'none'}::{paths[1]}"})
    assert found == paths
    current, other = config.context(found), config.context(found, "other")
    assert (current.namespace, current.login.token()) == ("team-a", "of one")
    assert (other.namespace, other.login.token()) == ("default", "")
    with pytest.raises(NoConfiguration, match="is incomplete: no 'nobody'"):
        config.context(found, "nobody")
    with pytest.raises(NoConfiguration, match="no current-context"):
        config.context([_without(tmp_path)])


def _without(tmp_path: Path) -> Path:
    (tmp_path / "bare").write_text("{}")
    return tmp_path / "bare"
