"""The command line of the local deployment: demo, up, apply, get, logs, delete.

Errors are one message, never a traceback.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from localcluster import api as apis
from localcluster.apiserver.server import ServerFailure
from localcluster.apiserver.table import pod_state
from localcluster.cluster import Cluster, ClusterFailure, ClusterOptions
from localcluster.daemon import DaemonFailure
from localcluster.demo import checks, run, scenario
from localcluster.runner.config import Isolation
from localcluster.runner.runtime import RuntimeFailure
from vcuda import sim
from vcuda.spec import units
from vcuda.spec.errors import SpecError

_FAILURES = (
    apis.ApiFailure, ClusterFailure, DaemonFailure, RuntimeFailure, ServerFailure, scenario.ScenarioFailure,
    sim.SimError, SpecError, OSError,
)  # fmt: skip
_PODS = "/api/v1/namespaces/default/pods"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m localcluster", description="The whole product on one machine: no Kubernetes, no card.",
    )  # fmt: skip
    parser.add_argument("-v", "--verbose", action="store_true", help="log what the stand-ins do")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="run the examples, show a live table, judge whether every limit held")
    demo.add_argument("--seconds", type=float, default=12.0, help="length of the measured period (default 12)")
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the figures and findings there")
    demo.add_argument("manifest", type=Path, nargs="*", help="pods to apply instead of examples/*.yaml")
    up = commands.add_parser(
        "up", help="start and keep running until Ctrl-C; kubectl works with the printed kubeconfig"
    )
    up.add_argument("--port", type=int, default=0, help="port of the API server (default: a free one)")
    for command in (demo, up):
        _cluster_arguments(command)
    for name, text in (
        ("apply", "create the pods of YAML files"), ("get", "list the pods"), ("logs", "print a pod's log"),
        ("delete", "delete pods"),
    ):  # fmt: skip
        command = commands.add_parser(name, help=text)
        command.add_argument(
            "--kubeconfig",
            type=Path,
            default=os.environ.get("KUBECONFIG"),
            help="as `up` prints it (default: $KUBECONFIG)",
        )
        if name == "apply":
            command.add_argument("file", type=Path, nargs="+")
        elif name == "logs":
            command.add_argument("pod")
            command.add_argument("-c", "--container", default="")
        elif name == "delete":
            command.add_argument("pod", nargs="+")
    return parser


def _cluster_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cards", type=int, default=2, help="simulated cards (default 2)")
    parser.add_argument("--card-memory", default="8GiB", help="memory of each (default 8GiB)")
    parser.add_argument(
        "--isolation", type=Isolation, choices=list(Isolation), help="default: the best that works here"
    )
    parser.add_argument("--pid-namespace", action="store_true", help="give each container its own process IDs")
    parser.add_argument("--working-directory", type=Path, help="where containers' commands start (default: examples/)")
    parser.add_argument("--nvidia-smi", type=Path, help="a genuine nvidia-smi for the simulated machine")


def _options(arguments: argparse.Namespace) -> ClusterOptions:
    defaults = ClusterOptions()
    if not 1 <= arguments.cards <= sim.cards.MAX_CARDS:
        raise ClusterFailure(f"--cards is {arguments.cards}; it must be 1 to {sim.cards.MAX_CARDS}")
    directory = (arguments.working_directory or defaults.working_directory).resolve()
    if not directory.is_dir():
        raise ClusterFailure(f"--working-directory {directory} is no folder")
    return ClusterOptions(
        cards=arguments.cards, card_bytes=units.parse_bytes(arguments.card_memory, "--card-memory"),
        isolation=arguments.isolation, pid_namespace=arguments.pid_namespace, working_directory=directory,
        port=getattr(arguments, "port", 0), nvidia_smi=arguments.nvidia_smi,
    )  # fmt: skip


def _demo(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.seconds <= 3600:
        raise ClusterFailure(f"--seconds is {arguments.seconds:g}; it must be 1 to 3600")
    options = run.DemoOptions(arguments.seconds, arguments.json, tuple(arguments.manifest))
    return run.main(options, _options(arguments))


def _up(arguments: argparse.Namespace) -> int:
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with Cluster(_options(arguments), print) as cluster:
        print(f"ready. In another shell:\n  export KUBECONFIG={cluster.kubeconfig}")
        print("  kubectl get nodes        # or: python -m localcluster apply examples/20-vcuda.yaml")
        print(
            f"manager: {cluster.manager_url}/metrics, logs: {cluster.directory}/*.log. Ctrl-C ends everything.",
            flush=True,
        )
        while not ended.wait(1.0):
            cluster.check()
    return 0


def _client(arguments: argparse.Namespace) -> apis.Api:
    if not arguments.kubeconfig:
        raise ClusterFailure(
            "no kubeconfig: export KUBECONFIG as `python -m localcluster up` prints it, or pass --kubeconfig"
        )
    return apis.Api(Path(arguments.kubeconfig))


def _apply(arguments: argparse.Namespace) -> int:
    api = _client(arguments)
    for pod in scenario.load_manifests(arguments.file):
        api.call("POST", _PODS, pod)
        print(f"pod/{pod['metadata']['name']} created")
    return 0


def _get(arguments: argparse.Namespace) -> int:
    for pod in _client(arguments).call("GET", _PODS)["items"]:
        message = checks.refusal_of(pod) or pod["status"].get("message", "")
        name, node = pod["metadata"]["name"], pod["spec"].get("nodeName", "")
        print(f"{name:<24} {pod_state(pod):<28} {node:<12} {message}".rstrip())
    return 0


def _logs(arguments: argparse.Namespace) -> int:
    query = f"?container={arguments.container}" if arguments.container else ""
    print(_client(arguments).text("GET", f"{_PODS}/{arguments.pod}/log{query}"), end="")
    return 0


def _delete(arguments: argparse.Namespace) -> int:
    api = _client(arguments)
    for name in arguments.pod:
        api.call("DELETE", f"{_PODS}/{name}")
        print(f"pod/{name} deleted")
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 for a limit that did not hold or a failure, 130 after Ctrl-C."""
    arguments = _parser().parse_args(words)
    logging.basicConfig(
        level=logging.INFO if arguments.verbose else logging.ERROR, format="%(asctime)s %(name)s: %(message)s"
    )
    commands = {"demo": _demo, "up": _up, "apply": _apply, "get": _get, "logs": _logs, "delete": _delete}
    signal.signal(signal.SIGTERM, _interrupted)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, _interrupted)
    try:
        return commands[arguments.command](arguments)
    except KeyboardInterrupt:
        print("interrupted; everything is stopped and removed", file=sys.stderr)
        return 130
    except _FAILURES as error:
        print(f"localcluster: {error}", file=sys.stderr)
        return 1


def _interrupted(*_: object) -> None:
    """SIGTERM ends the demonstration like Ctrl-C, with everything cleaned up."""
    raise KeyboardInterrupt
