"""The local deployment's client commands against a running API server, and how the program ends when it is told to."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from localcluster import api as apis
from localcluster import cli
from localcluster.apiserver.server import Server

PODS = "/api/v1/namespaces/default/pods"
Run = Callable[..., tuple[int, str, str]]
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def run(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """The program in this process: its status, its output and its errors."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    kept = {number: signal.getsignal(number) for number in SIGNALS}

    def command(*words: str) -> tuple[int, str, str]:
        status = cli.main(words)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    yield command
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    file = tmp_path / "pods.yaml"
    pod = "kind: Pod\nmetadata: {{name: {}}}\nspec: {{containers: [{{name: main, image: x, command: [sleep]}}]}}\n"
    file.write_text(pod.format("one") + "---\n" + pod.format("two"))
    return file


def test_pods_are_applied_listed_and_deleted(run: Run, api: apis.Api, manifest: Path) -> None:
    assert run("apply", str(manifest)) == (0, "pod/one created\npod/two created\n", "")
    api.call("POST", f"{PODS}/one/binding", {"metadata": {}, "target": {"name": "n1"}})
    why = "0/1 nodes are available: 1 NotEnoughCores"
    refusal = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
    api.patch(f"{PODS}/two/status", {"status": {"conditions": [refusal]}})
    status, out, _ = run("get")
    assert status == 0
    first, second = out.splitlines()
    assert first.split() == ["one", "Pending", "n1"]
    assert re.fullmatch(f"two +Pending +{why}", second)
    assert run("delete", "two") == (0, "pod/two deleted\n", "")
    assert [pod["metadata"]["name"] for pod in api.call("GET", PODS)["items"]] == ["one"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["apply", "{manifest}"], 'pods "one" already exists'),
        (["apply", "{folder}/missing.yaml"], "missing.yaml can't be read"),
        (["logs", "nobody"], 'pods "nobody" not found'),
        (["logs", "one"], "pod one is not on a node yet: nothing of it runs"),
        (["logs", "one", "-c", "side"], "pod one is not on a node yet"),
        (["delete", "two", "nobody"], 'pods "nobody" not found'),
    ],
)
def test_a_command_that_fails_is_one_line_that_names_the_pod_or_file(
    run: Run, manifest: Path, words: list[str], told: str
) -> None:
    run("apply", str(manifest))
    status, _, error = run(*(word.format(manifest=manifest, folder=manifest.parent) for word in words))
    assert status == 1
    assert error.startswith("localcluster: ") and told in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["demo", "--seconds", "0.5"], "--seconds is 0.5; it must be 1 to 3600"),
        (["demo", "--cards", "0"], "--cards is 0; it must be 1 to"),
        (["up", "--cards", "99"], "--cards is 99; it must be 1 to"),
        (
            ["up", "--working-directory", "/no/such/folder"],
            "--working-directory /no/such/folder is no folder",
        ),
        (["up", "--card-memory", "much"], "--card-memory"),
    ],
)
def test_an_option_that_cannot_be_is_named_before_anything_starts(run: Run, words: list[str], told: str) -> None:
    status, out, error = run(*words)
    assert (status, out) == (1, "") and told in error and error.count("\n") == 1


def test_without_a_kubeconfig_the_way_to_one_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG")
    status, _, error = run("get")
    assert status == 1 and "export KUBECONFIG as `python -m localcluster up` prints it" in error


def test_a_server_that_has_gone_is_said_to_not_answer(run: Run, server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
    server.kubeconfig.write_text(server.kubeconfig.read_text().replace(server.url, address))
    status, _, error = run("get")
    assert status == 1 and "the API server does not answer: " in error and "refused" in error


@pytest.mark.parametrize("number", SIGNALS)
def test_a_command_that_is_told_to_end_says_so_and_ends_with_130(
    run: Run, server: Server, number: signal.Signals
) -> None:
    """The server that it asks answers nothing: it is told to end while it waits."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        text = server.kubeconfig.read_text()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        server.kubeconfig.write_text(text.replace(server.url, address))
        accepted: list[Any] = []

        def tell() -> None:
            accepted.append(silent.accept())
            os.kill(os.getpid(), number)

        # As a shell leaves it for a program in the background: only our own handler ends it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        teller = threading.Thread(target=tell)
        teller.start()
        status, _, error = run("get")
        teller.join(timeout=30)
        accepted[0][0].close()
    assert status == 130 and error == "interrupted; everything is stopped and removed\n"
