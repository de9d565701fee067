"""The command line of the local deployment: start a playground, look at it, break it.

Errors are one message, never a traceback.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import signal
import sys
import threading
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import websocket

from localcluster import api as apis
from localcluster import breaks
from localcluster.apiserver.server import ServerFailure
from localcluster.apiserver.table import pod_state
from localcluster.cluster import Cluster, ClusterFailure, ClusterOptions
from localcluster.daemon import DaemonFailure
from localcluster.demo import checks, run, scenario
from localcluster.runner.config import Isolation
from localcluster.runner.runtime import RuntimeFailure
from localcluster.supervision import NAMESPACE
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
    up.add_argument(
        "--disk", default="64MiB", help="size of the node's own file system, to be filled (default 64MiB; needs root)"
    )
    up.add_argument("--port", type=int, default=0, help="port of the API server (default: a free one)")
    for command in (demo, up):
        _cluster_arguments(command)
    for name, text in (
        ("apply", "create the pods of YAML files"), ("get", "list the pods"), ("logs", "print a pod's log"),
        ("delete", "delete pods"),
        ("nodes", "list the nodes and what they offer"), ("events", "list the events"),
        ("metrics", "print a daemon's metrics"), ("exec", "run a command in a pod, as kubectl exec does"),
        ("break", "break something, and say what one should see; without a name, list what can be broken"),
        ("mend", "take a break back"),
    ):  # fmt: skip
        command = commands.add_parser(name, help=text)
        command.add_argument(
            "--kubeconfig",
            type=Path,
            default=os.environ.get("KUBECONFIG"),
            help="as `up` prints it (default: $KUBECONFIG)",
        )
        if name in ("get", "logs", "delete", "exec"):
            command.add_argument("-n", "--namespace", default="default")
        if name == "apply":
            command.add_argument("file", type=Path, nargs="+")
        elif name == "logs":
            command.add_argument("pod")
            command.add_argument("-c", "--container", default="")
            command.add_argument("-p", "--previous", action="store_true", help="of the run before")
        elif name == "exec":
            command.add_argument("-c", "--container", default="")
            command.add_argument("pod")
            command.add_argument("words", nargs="+", metavar="-- COMMAND ARGUMENT")
        elif name == "delete":
            command.add_argument("pod", nargs="+")
        elif name == "metrics":
            command.add_argument("program", choices=("manager", "extender"))
            command.add_argument("prefix", nargs="?", default="", help="of the series' names")
        elif name == "break":
            command.add_argument("name", nargs="?")
        elif name == "mend":
            command.add_argument("name")
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
        disk_bytes=units.parse_bytes(arguments.disk, "--disk") if hasattr(arguments, "disk") else None,
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
    with Cluster(_options(arguments), functools.partial(print, flush=True)) as cluster:
        cluster.supervise()
        cluster.server.control = breaks.Desk(cluster).answer
        print(f"ready. In another shell:\n  export KUBECONFIG={cluster.kubeconfig}")
        print("  kubectl get nodes        # or: python -m localcluster apply examples/20-vcuda.yaml")
        print(
            f"manager: {cluster.manager_url}/metrics, extender: {cluster.extender_url}, "
            f"logs: {cluster.directory}/*.log.\n"
            "`python -m localcluster break` lists what can be broken. Ctrl-C ends everything.",
            flush=True,
        )
        while not ended.wait(0.2):
            cluster.supervise()
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
    for pod in _client(arguments).call("GET", _pods(arguments))["items"]:
        message = checks.refusal_of(pod) or pod["status"].get("message", "")
        name, node = pod["metadata"]["name"], pod["spec"].get("nodeName", "")
        restarts = sum(one.get("restartCount", 0) for one in pod["status"].get("containerStatuses", []))
        told = f"restarts: {restarts} {message}" if restarts else message
        print(f"{name:<24} {pod_state(pod):<28} {node:<12} {told}".rstrip())
    return 0


def _pods(arguments: argparse.Namespace) -> str:
    return f"/api/v1/namespaces/{arguments.namespace}/pods"


def _logs(arguments: argparse.Namespace) -> int:
    asked = {"container": arguments.container, "previous": "true" if arguments.previous else ""}
    query = urllib.parse.urlencode({name: value for name, value in asked.items() if value})
    print(_client(arguments).text("GET", f"{_pods(arguments)}/{arguments.pod}/log?{query}"), end="")
    return 0


def _nodes(arguments: argparse.Namespace) -> int:
    for node in _client(arguments).call("GET", "/api/v1/nodes")["items"]:
        capacity, offered = (node["status"].get(field, {}) for field in ("capacity", "allocatable"))
        ours = [name for name in capacity if "/" in name]
        told = ", ".join(f"{name.partition('/')[2]} {offered.get(name, '0')} of {capacity[name]}" for name in ours)
        print(f"{node['metadata']['name']:<12} {told or 'no cards'}")
    return 0


def _events(arguments: argparse.Namespace) -> int:
    found = _client(arguments).call("GET", "/api/v1/events")["items"]
    for event in sorted(found, key=lambda event: str(event.get("lastTimestamp") or "")):
        about = f"{event['involvedObject']['kind'].lower()}/{event['involvedObject']['name']}"
        print(f"{event.get('type', ''):<8} {event['reason']:<18} {about} {event['message']}")
    return 0


def _metrics(arguments: argparse.Namespace) -> int:
    api, wanted = _client(arguments), breaks.MANAGER if arguments.program == "manager" else breaks.EXTENDER
    namespace = f"/api/v1/namespaces/{NAMESPACE}/pods"
    for pod in api.call("GET", namespace)["items"]:
        (container,) = pod["spec"]["containers"]
        if container["name"] == wanted:
            where = f"{pod['metadata']['name']}:{container['ports'][0]['containerPort']}"
            for line in api.text("GET", f"{namespace}/{where}/proxy/metrics").splitlines():
                if line.startswith(arguments.prefix or ("vcuda_", "container_")):
                    print(line)
            return 0
    raise ClusterFailure(f"{wanted} does not run")


def _break(arguments: argparse.Namespace) -> int:
    api = _client(arguments)
    if arguments.name is None:
        broken = api.call("GET", breaks.PATH)["broken"]
        for name, one in breaks.BREAKS.items():
            print(f"{'broken' if name in broken else '':<6} {name:<14} {one.what}")
        print("`break NAME` breaks it and says what to see, `mend NAME` takes it back.")
        return 0
    api.call("POST", f"{breaks.PATH}/{arguments.name}")
    found = breaks.BREAKS[arguments.name]
    print(f"{found.what}.")
    for sign in found.signs:
        print(f"  look:  python -m localcluster {sign.command}\n  until: {sign.shows}")
    if found.alert:
        print(f"  alert: {found.alert} (docs/troubleshooting.md#{found.alert.lower()})")
    print(f"  back:  python -m localcluster mend {arguments.name}" if found.mend else "  back:  by itself")
    return 0


def _mend(arguments: argparse.Namespace) -> int:
    _client(arguments).call("DELETE", f"{breaks.PATH}/{arguments.name}")
    print(f"{arguments.name} is mended")
    return 0


def _exec(arguments: argparse.Namespace) -> int:
    query = urllib.parse.urlencode(
        [("stdout", "true"), ("stderr", "true"), *(("command", word) for word in arguments.words),
         *([("container", arguments.container)] if arguments.container else [])]
    )  # fmt: skip
    connection = _client(arguments).websocket(f"{_pods(arguments)}/{arguments.pod}/exec?{query}")
    streams = {1: sys.stdout.buffer, 2: sys.stderr.buffer}
    status: dict[str, Any] = {}
    while True:
        opcode, data = connection.recv_data()
        if opcode == websocket.ABNF.OPCODE_CLOSE:
            break
        if data[:1] == b"\x03":
            status = json.loads(data[1:])
        elif data[1:] and data[0] in streams:
            streams[data[0]].write(data[1:])
            streams[data[0]].flush()
    if status.get("status") == "Success":
        return 0
    causes = (status.get("details") or {}).get("causes") or [{}]
    if status.get("reason") != "NonZeroExitCode":
        raise ClusterFailure(status.get("message", "the connection broke off"))
    return int(causes[0].get("message", "1"))


def _delete(arguments: argparse.Namespace) -> int:
    api = _client(arguments)
    for name in arguments.pod:
        api.call("DELETE", f"{_pods(arguments)}/{name}")
        print(f"pod/{name} deleted")
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 for a limit that did not hold or a failure, 130 after Ctrl-C."""
    arguments = _parser().parse_args(words)
    logging.basicConfig(
        level=logging.INFO if arguments.verbose else logging.ERROR, format="%(asctime)s %(name)s: %(message)s"
    )
    commands = {
        "demo": _demo, "up": _up, "apply": _apply, "get": _get, "logs": _logs, "delete": _delete,
        "events": _events, "nodes": _nodes, "exec": _exec,
        "metrics": _metrics, "break": _break, "mend": _mend,
    }  # fmt: skip
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
