"""The command `kubectl-vcuda`, for kubectl `vcuda`: one parser, one place where errors become lines on stderr."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import vcuda
from vcuda.extras import needed

with needed("kubectl vcuda", "kubectl"):
    from vcuda.kube import config
    from vcuda.kube.errors import ApiError, KubeError, NoConfiguration
    from vcuda.kubectl import doctor, explain, nodes, resize, top
    from vcuda.kubectl.cluster import Cluster
    from vcuda.kubectl.errors import PluginError
    from vcuda.spec.names import DEFAULT_DOMAIN, Names
from vcuda.printable import printable_lines

SYSTEM_NAMESPACE = "vcuda-system"
COMMANDS = {
    "top": (top, "what each share is limited to and what it uses"),
    "explain": (explain, "why a pod waits, or where it is and what it has"),
    "nodes": (nodes, "the nodes' cards and what is booked on them"),
    "resize": (resize, "give a running pod's share another size"),
    "doctor": (doctor, "what a node has and lacks"),
}
_BAD_USAGE = 2


def parser() -> argparse.ArgumentParser:
    top_level = argparse.ArgumentParser(
        prog="kubectl vcuda", description="Shares of NVIDIA GPUs in a cluster.", allow_abbrev=False
    )
    top_level.add_argument("--version", action="version", version=f"kubectl-vcuda {vcuda.__version__}")
    commands = top_level.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, (module, help_text) in COMMANDS.items():
        command = commands.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)
        module.add_options(command)
        add_common(command)
    return top_level


def add_common(command: argparse.ArgumentParser) -> None:
    """The options that all commands have, by kubectl's names."""
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("-n", "--namespace", metavar="NAME", help="the pods' namespace (default: the context's)")
    command.add_argument("--context", metavar="NAME", help="the context of the kubeconfig to use")
    command.add_argument("--kubeconfig", type=Path, metavar="FILE", help="default: $KUBECONFIG, else ~/.kube/config")
    command.add_argument(
        "--system-namespace",
        metavar="NAME",
        default=SYSTEM_NAMESPACE,
        help="where our programs run (default: %(default)s)",
    )
    command.add_argument(
        "--resource-domain",
        metavar="DOMAIN",
        default=DEFAULT_DOMAIN,
        help="as the chart's value (default: %(default)s)",
    )


def connect(options: argparse.Namespace) -> Cluster:
    """Raises NoConfiguration."""
    paths = [options.kubeconfig] if options.kubeconfig else config.files(os.environ)
    context = config.context(paths, options.context)
    return Cluster.connect(context, options.namespace, options.system_namespace, Names(options.resource_domain))


def main(arguments: Sequence[str] | None = None) -> int:
    """0: done; 1: refused, failed, in part only; 2: wrong usage, no kubeconfig. Users see no tracebacks."""
    options = parser().parse_args(arguments)
    try:
        cluster = connect(options)
        status: int = COMMANDS[options.command][0].run(cluster, options)
        sys.stdout.flush()
        return status
    except NoConfiguration as error:
        return _fail(f"{error}; name a kubeconfig by --kubeconfig or KUBECONFIG", _BAD_USAGE)
    except ApiError as error:
        return _fail(f"{error}{_way_out(error)}", 1)
    except KubeError as error:
        return _fail(f"{error}; does `kubectl get nodes` work?", 1)
    except PluginError as error:
        return _fail(str(error), 1)
    except BrokenPipeError:
        sys.stderr.close()  # nobody reads our table any more
        return 141
    except KeyboardInterrupt:
        return 130


def _way_out(error: ApiError) -> str:
    if error.status == 401:
        return "; log in again: the kubeconfig's token or certificate does not count any more"
    if error.status == 403:
        return "; ask the cluster's administrator for that right (docs/operations.md, kubectl vcuda, lists them)"
    return ""


def _fail(message: str, status: int) -> int:
    print(f"kubectl vcuda: {printable_lines(message)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
