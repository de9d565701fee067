"""`gpu-scheduler-extender explain POD`: asks a serving extender and prints its answer for people, or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.parse
from typing import Any

from scheduler_ext.commands import fetch


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pod", metavar="POD", help="name or UID of the pod")
    parser.add_argument("-n", "--namespace", default="default", help="its namespace (default %(default)s)")
    fetch.add_options(parser)
    parser.add_argument("--json", action="store_true", help="print the answer as it came")


def _lines(data: dict[str, Any]) -> list[str]:
    pod = data["pod"]
    lines = [f"pod {pod['namespace']}/{pod['name']} ({pod['uid']}): {data['summary']}"]
    lines += [
        f"  card {uuid}: {use['cores']} cores, {use['memory_blocks']} blocks"
        for uuid, use in data.get("cards", {}).items()
    ]
    lines += [f"  {way['text']}" for way in data.get("would_fit", ())]
    for one in data["decisions"]:
        asked = ", ".join(
            f"{c['container']} {c['cores']} cores {c['memory_blocks']} blocks" for c in one.get("asked", ())
        )
        result = f"node {one['node']}" if one["node"] else one.get("message", "no node")
        why = ", ".join(f"{reason} {count}" for reason, count in one.get("reasons", {}).items())
        lines.append(
            f"  {one['at']} {result} of {one['candidates']}"
            + (f" [{asked}; {one['policy']}]" if asked else "")
            + (f": {why}" if why else "")
        )
    return lines


def run(options: argparse.Namespace) -> int:
    """Print what the extender says. Raises CannotFetch."""
    path = "/".join(urllib.parse.quote(part, safe="") for part in (options.namespace, options.pod))
    data = fetch.fetch(options, f"/scheduler/explain/{path}", 30.0)
    if options.json:
        json.dump(data, sys.stdout, indent=1)
        print()
    else:
        print("\n".join(_lines(data)))
    return 0
