"""Makes the chart's settings.json and README.md from the programs' settings and values.yaml; --check only compares."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Any

import yaml

from deploy.manifests import CHART
from manager.config import reader
from manager.config.settings import Settings as ManagerSettings
from scheduler_ext.admission.settings import Settings as WebhookSettings
from scheduler_ext.settings import Settings as ExtenderSettings
from vcuda.settings import flag_of

COMMAND = "python -m deploy.chart"
_MARK = "# -- "
_HEAD = """# The chart vcuda-gpu-manager

Shares of NVIDIA GPUs for pods: `gpu-manager` on each GPU node, `gpu-scheduler-extender` beside kube-scheduler.
How to install it: [docs/operations.md](../../../docs/operations.md). `helm test RELEASE` places a pod with the
smallest share, which looks at its limit, and deletes it.

Made from the comments in values.yaml by `{command}`; do not edit. What isn't in the table is refused,
and so are settings and flags that the programs do not know.

| value | default | meaning |
|---|---|---|
"""


def settings() -> str:
    """The names of the programs' settings, by which the templates refuse others."""

    def names(kind: type[Any]) -> list[str]:
        return sorted(flag_of(field.name) for field in dataclasses.fields(kind))

    known = {
        "manager.config": names(ManagerSettings),
        "manager.extraArgs": sorted({*names(ManagerSettings), *reader.OLD_FLAGS}),
        "extender.extraArgs": names(ExtenderSettings),
        "webhook.extraArgs": names(WebhookSettings),
    }
    return json.dumps(known, indent=1) + "\n"


def readme() -> str:
    """A line for each value, in the order of values.yaml."""
    text = (CHART / "values.yaml").read_text()
    rows = _rows(yaml.compose(text), text.splitlines(), ())
    return _HEAD.format(command=COMMAND) + "".join(f"| `{name}` | `{given}` | {told} |\n" for name, given, told in rows)


def _rows(node: yaml.Node | None, lines: list[str], above: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    assert isinstance(node, yaml.MappingNode)
    for key, value in node.value:
        path = (*above, key.value)
        told = _comment(lines, key.start_mark.line)
        if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style and not told:
            yield from _rows(value, lines, path)
            continue
        given = json.dumps(yaml.safe_load(yaml.serialize(value)))
        yield ".".join(path), given, told.replace("|", "\\|")


def _comment(lines: list[str], row: int) -> str:
    """The comment above a value, if it is one for readers: it begins with `# -- `."""
    found: list[str] = []
    for line in reversed(lines[:row]):
        stripped = line.strip()
        if not stripped.startswith("#"):
            return ""
        if stripped.startswith(_MARK):
            return " ".join([stripped.removeprefix(_MARK), *found])
        found.insert(0, stripped.removeprefix("# "))
    return ""


def main() -> int:
    """Write both files, or compare them with the committed ones; 1 if they differ."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    check = parser.parse_args().check
    stale = []
    for name, text in (("settings.json", settings()), ("README.md", readme())):
        path = CHART / name
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not check:
                path.write_text(text)
    if check and stale:
        print(f"out of date: {', '.join(stale)}; run {COMMAND}", file=sys.stderr)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
