"""The `vcuda` command: one parser, one place where errors become exit codes and lines on stderr."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import vcuda
from vcuda.cli import bars, completion_command, doctor_command, run_command, show_command, sim_command, top_command
from vcuda.cli.words import Parser
from vcuda.printable import printable_lines
from vcuda.runs.errors import CommandError, RunError
from vcuda.sim import SimError
from vcuda.spec.errors import SpecError

BAD_USAGE = 2
REFUSED = 125  # as `docker run`: the share was refused or can't be set up; the command did not start


def parser() -> argparse.ArgumentParser:
    """All subcommands."""
    top: argparse.ArgumentParser = Parser(prog="vcuda", description="Shares of NVIDIA GPUs.")
    top.add_argument("--version", action="version", version=f"vcuda {vcuda.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    run_command.add_parser(commands)
    show_command.add_parsers(commands)
    top_command.add_parser(commands)
    doctor_command.add_parser(commands)
    sim_command.add_parser(commands)
    completion_command.add_parser(commands, parser)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status. Users see messages, never tracebacks."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    bars.keep_to_locale(sys.stdout)
    try:
        if words[:1] in (["run"], ["ls"], ["show"], ["top"], ["doctor"]):
            words = run_command.prepare(words)
        options = parser().parse_args(words)
        status: int = options.run(options)
        return status
    except SpecError as error:
        return _fail(str(error), BAD_USAGE)
    except CommandError as error:
        return _fail(str(error), error.status)
    except (RunError, SimError) as error:
        return _fail(str(error), REFUSED)
    except BrokenPipeError:
        sys.stderr.close()  # nobody reads our table any more: as `ls | head`
        return 141
    except KeyboardInterrupt:
        return 130


def _fail(message: str, status: int) -> int:
    print(f"vcuda: {printable_lines(message)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
