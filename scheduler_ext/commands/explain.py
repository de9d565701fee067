"""`gpu-scheduler-extender explain POD`: asks a serving extender and prints its answer for people, or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.parse

from scheduler_ext.commands import fetch
from vcuda.kubectl import explanation
from vcuda.printable import printable


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pod", metavar="POD", help="name or UID of the pod")
    parser.add_argument("-n", "--namespace", default="default", help="its namespace (default %(default)s)")
    fetch.add_options(parser)
    parser.add_argument("--json", action="store_true", help="print the answer as it came")


def run(options: argparse.Namespace) -> int:
    """Print what the extender says. Raises CannotFetch."""
    path = "/".join(urllib.parse.quote(part, safe="") for part in (options.namespace, options.pod))
    data = fetch.fetch(options, f"/scheduler/explain/{path}", 30.0)
    if options.json:
        json.dump(data, sys.stdout, indent=1)
        print()
    else:
        print("\n".join(map(printable, explanation.lines(data))))
    return 0
