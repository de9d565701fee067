"""The command line: `serve` (the default), `webhook`, `explain`, `simulate` and `defrag`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from prometheus_client import disable_created_metrics

import scheduler_ext
from scheduler_ext import settings
from scheduler_ext.admission import settings as admission_settings
from scheduler_ext.commands import defrag, explain, serve, simulate, webhook
from scheduler_ext.commands.fetch import CannotFetch
from scheduler_ext.http.certificate import BadCertificate
from scheduler_ext.lab.plots import NoPlot
from scheduler_ext.lab.replay import RecordingError
from scheduler_ext.lab.trace import TraceError
from scheduler_ext.sync.api import ApiServer
from vcuda import logs
from vcuda.kube.errors import NoConfiguration
from vcuda.printable import printable_lines
from vcuda.settings import InvalidSettings, add_options

_COMMANDS = ("serve", "webhook", "explain", "simulate", "defrag")


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        "gpu-scheduler-extender", description="Places pods with a share of a GPU, for kube-scheduler."
    )
    parser.add_argument("--version", action="version", version=scheduler_ext.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    serving = commands.add_parser("serve", help="answer kube-scheduler (the default)")
    add_options(serving, settings.Settings)
    reviewing = commands.add_parser("webhook", help="answer the API server's admission reviews of pods")
    add_options(reviewing, admission_settings.Settings)
    explain.add_options(
        commands.add_parser("explain", help="say why a pod waits, or where it is, and what would let it in")
    )
    defrag.add_options(commands.add_parser("defrag", help="plan which moves would free whole cards; nothing is moved"))
    simulating = commands.add_parser("simulate", help="replay a trace or a recording under the placement policies")
    simulate.add_options(simulating)
    return parser, {"serve": serving, "webhook": reviewing, "simulate": simulating}


def _serve(options: argparse.Namespace) -> None:
    """The two commands that run until a signal. Raises InvalidSettings and what they raise."""
    # When a counter was made nobody asks, and it doubles the series.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    if options.command == "webhook":
        reviewing = admission_settings.read(vars(options), os.environ)
        _log_as(reviewing)
        webhook.run(reviewing)
        return
    chosen = settings.read(vars(options), os.environ)
    _log_as(chosen)
    serve.run(chosen, ApiServer.connect(chosen.kubeconfig, chosen.api_timeout_seconds))


def _log_as(chosen: settings.Settings | admission_settings.Settings) -> None:
    logs.configure(chosen.log_format, logging.getLevelNamesMapping()[chosen.log_level.upper()])


def serves(words: Sequence[str]) -> bool:
    """Whether these words run a server."""
    return not words or words[0] in ("serve", "webhook") or words[0] not in (*_COMMANDS, "-h", "--help", "--version")


def run(words: list[str]) -> int:
    """Run the command. Returns its exit status: 0, 1 for a failure at run time, 2 for settings that can't work."""
    parser, parsers = _parser()
    if serves(words) and words[:1] not in (["serve"], ["webhook"]):
        words.insert(0, "serve")
    options = parser.parse_args(words)
    status = 0
    try:
        if options.command == "simulate":
            status = simulate.run(options, parsers["simulate"])
        elif options.command == "defrag":
            status = defrag.run(options)
        elif options.command == "explain":
            status = explain.run(options)
        else:
            _serve(options)
        sys.stdout.flush()
    except InvalidSettings as error:
        parsers[options.command].exit(2, f"gpu-scheduler-extender: {printable_lines(str(error))}\n")
    except (NoConfiguration, BadCertificate, serve.CannotServe, TraceError, RecordingError, NoPlot) as error:
        print(f"gpu-scheduler-extender: {printable_lines(str(error))}", file=sys.stderr)
        return 2
    except (CannotFetch, serve.LostLease) as error:
        print(f"gpu-scheduler-extender: {printable_lines(str(error))}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        if options.command in ("serve", "webhook"):
            raise
        sys.stderr.close()  # nobody reads our table any more: as `explain … | head`
        return 141
    except KeyboardInterrupt:
        return 130
    return status
