"""From a pod's container to what is run: what is taken over, and what this deployment can't do is named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from localcluster.kubelet import containers
from localcluster.kubelet.containers import ConfigFailure, Defaults
from localcluster.kubelet.devices import RunOptions
from localcluster.runner.config import ContainerConfig, Mount

DEFAULTS = Defaults("/work", {"PATH": "/usr/bin", "HOME": "/tmp"}, ("/visible",))


def configure(tmp_path: Path, options: RunOptions | None = None, volumes: Any = None, **fields: Any) -> ContainerConfig:
    container = {"name": "main", "image": "nvidia/cuda", "command": ["true"], **fields}
    metadata = {"name": "a" * 70, "namespace": "team", "uid": "u1", "labels": {"app": "x"}}
    pod = {"metadata": metadata, "spec": {"nodeName": "n1", "volumes": volumes, "containers": [container]}}
    directory = tmp_path / "u1" / "main" / "0"
    return containers.configure(pod, container, options or RunOptions(), DEFAULTS, directory)


def from_field(path: str) -> list[dict[str, Any]]:
    return [{"name": "V", "valueFrom": {"fieldRef": {"fieldPath": path}}}]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.namespace", "team"),
        ("metadata.uid", "u1"),
        ("spec.nodeName", "n1"),
        ("status.podIP", "127.0.0.1"),
        ("metadata.labels['app']", "x"),
        ("metadata.labels['other']", ""),
        ("metadata.annotations['other']", ""),
    ],
)
def test_a_variable_takes_the_pods_own_field(tmp_path: Path, path: str, value: str) -> None:
    assert configure(tmp_path, env=from_field(path)).environment["V"] == value


def test_words_and_variables_are_expanded_with_what_came_before(tmp_path: Path) -> None:
    env = [{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)$(C)$$(A)"}, {"name": "C"}]
    config = configure(tmp_path, env=env, command=["echo"], args=["$(B)", "$A", "$(HOSTNAME)"])
    assert config.environment["B"] == "1$(C)$(A)" and config.environment["C"] == ""
    assert config.command == ("echo", "1$(C)$(A)", "$A", "a" * 70)
    assert config.hostname == "a" * 63  # what the kernel takes


def test_python_is_the_deployments_and_a_container_starts_where_it_says(tmp_path: Path) -> None:
    config = configure(tmp_path, command=["python3", "-V"], workingDir="/there")
    assert config.command == (sys.executable, "-V") and config.working_directory == "/there"
    assert configure(tmp_path).working_directory == "/work"


def test_volumes_come_after_what_the_plugin_mounts(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    options = RunOptions(mounts={"/etc/vcuda": (str(tmp_path / "data"), True)})
    volumes = [
        {"name": "host", "hostPath": {"path": str(tmp_path / "data")}},
        {"name": "empty", "emptyDir": {}},
    ]
    mounts = [
        {"name": "host", "mountPath": "/data", "readOnly": True},
        {"name": "empty", "mountPath": "/scratch"},
    ]
    config = configure(tmp_path, options, volumes, volumeMounts=mounts)
    scratch = tmp_path / "u1" / "volumes" / "empty"
    assert scratch.is_dir()
    assert config.mounts == (
        Mount(str(tmp_path / "data"), "/etc/vcuda", True),
        Mount(str(tmp_path / "data"), "/data", True),
        Mount(str(scratch), "/scratch", False),
    )


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"command": []}, "image 'nvidia/cuda' is only a label here: give the container a command"),
        ({"env": from_field("spec.hostname")}, "fieldRef 'spec.hostname' is not supported here"),
        (
            {"env": [{"name": "V", "valueFrom": {"secretKeyRef": {"name": "s"}}}]},
            "variable V: only value and fieldRef are supported here",
        ),
        (
            {"volumes": [{"name": "d", "hostPath": {"path": "/no/such"}}]},
            "volume d: host path /no/such does not exist",
        ),
        ({"volumes": [{"name": "d", "nfs": {}}]}, "volume d: only hostPath and emptyDir are supported here"),
        (
            {"options": RunOptions(mounts={"/m": ("/no/mount", False)}, devices={"/dev/x": "/no/device"})},
            "these host paths do not exist: /no/device, /no/mount",
        ),
    ],
)
def test_what_cannot_be_had_here_is_named(tmp_path: Path, fields: dict[str, Any], told: str) -> None:
    if "volumes" in fields:
        fields["volumeMounts"] = [{"name": "d", "mountPath": "/d"}]
    with pytest.raises(ConfigFailure) as error:
        configure(tmp_path, **fields)
    assert str(error.value) == told


@pytest.mark.parametrize("path", [None, "/extra"])
def test_an_image_brings_the_deployments_interpreter_and_its_module_path(
    monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if path is not None:
        monkeypatch.setenv("PYTHONPATH", path)
    found = containers.image_defaults(Path("/work"))
    assert found.environment["PATH"].startswith(str(Path(sys.executable).parent))
    assert found.environment.get("PYTHONPATH") == path and "/work" in found.visible
