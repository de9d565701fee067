"""Makes docs/names.md, the page of all names that users, operators and dashboards meet, from the code."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from manager.config import settings
from manager.errors import Reason as NodeReason
from manager.observe import metrics as node_metrics
from manager.observe import report
from scheduler_ext import settings as extender_settings
from scheduler_ext.admission import app as webhook
from scheduler_ext.admission import settings as webhook_settings
from scheduler_ext.engine import metrics as extender_metrics
from scheduler_ext.protocol.reasons import ExtenderReason
from scheduler_ext.state import notices
from vcuda import logs
from vcuda.settings import add_options
from vcuda.spec import names
from vcuda.spec.errors import Reason

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "names.md"
COMMAND = "python -m deploy.names_page"
# How the daemon's code names the event that it sends.
_EVENT = re.compile(r"""(?:event|tell|_say)\([^()]*?["']([A-Z][a-z]+[A-Z][A-Za-z]+)["']""")
_VARIABLE = re.compile(
    r'"((?:VCUDA|NVIDIA|CUDA|LD)_[A-Z_]+|GPU_MANAGER_|GPU_SCHEDULER_EXTENDER_|GPU_ADMISSION_WEBHOOK_|NODE_NAME)"'
)

# What the code says only by using them: the command fails for one that is missing here or is no more.
LABELS = {
    names.NODE_SELECTOR_LABEL: f'Label on nodes: "{names.NODE_SELECTOR_VALUE}" brings the daemon',
    names.POD_GROUP_LABEL: "Label on pods: the pod group of kube-scheduler's coscheduling plugin",
    names.OLD_POD_GROUP_NAME_LABEL: "Label on pods: the same in the plugin's first version",
    names.OLD_POD_GROUP_SIZE_LABEL: "Label on pods: its size in the plugin's first version",
}
VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "`vcuda run` sets it to the cards of the share; the simulated driver reads it",
    settings.ENV_PREFIX: "each of the daemon's settings: `--query-port` is `GPU_MANAGER_QUERY_PORT`",
    extender_settings.ENV_PREFIX: "each of the extender's: `--log-level` is `GPU_SCHEDULER_EXTENDER_LOG_LEVEL`",
    webhook_settings.ENV_PREFIX: "each of the webhook's: `--log-level` is `GPU_ADMISSION_WEBHOOK_LOG_LEVEL`",
    "LD_LIBRARY_PATH": "a container's and a run's: our libraries come before the driver's",
    "LD_PRELOAD": "`vcuda run --injection preload`: our library for programs that pass the library path by",
    "NODE_NAME": "the daemon's node (downward API), where `--hostname-override` is not given",
    "NVIDIA_VISIBLE_DEVICES": "set in containers so that NVIDIA's runtime brings nothing of its own",
    "VCUDA_LEDGER": "in a run's processes: the folder that it is booked in, for `vcuda top`, `ls` and `show`",
    "VCUDA_LOG": "0: our library says nothing on standard error in a process, not even why it refused memory",
    "VCUDA_RUN": "in a run's processes: the name of its booking",
    "VCUDA_SIM_DEV": "the simulated driver: where its device nodes are",
    "VCUDA_SIM_DIR": "the simulated driver: its machine's state",
    "VCUDA_SIM_PIDS": "the simulated driver: whose process IDs NVML shows",
    "VCUDA_SIM_POOLS": "the simulated driver: how its memory pools grow",
}


PROGRAMS = {
    "gpu-manager": settings.Settings,
    "gpu-scheduler-extender serve": extender_settings.Settings,
    "gpu-scheduler-extender webhook": webhook_settings.Settings,
}


def _sample(kind: type, **given: Any) -> Any:
    """An object of a report with any value in every field: only the metrics' names are wanted."""
    plain = {"str": "x", "int": 1, "float": 1.0, "bool": True, "tuple": ()}
    values = {field.name: plain.get(re.split(r"\W", str(field.type))[0], 1) for field in dataclasses.fields(kind)}
    return kind(**{**values, **given})


def _registries() -> Iterator[tuple[str, CollectorRegistry]]:
    container = _sample(report.ContainerReport, cards=(_sample(report.ShareReport),))
    seen = _sample(report.NodeReport, cards=(_sample(report.CardReport),), containers=(container,))
    node = node_metrics.Metrics()
    node.watch(lambda: seen)
    node.count(lambda: _sample(node_metrics.Counts, failures={"x": 1}, xids={("x", 1, False): 1}))
    yield "gpu-manager", node.registry
    extender = extender_metrics.Metrics()
    extender.watch_figures(lambda: {"nodes": 0, "cards": 0, "free_cores": 0, "overbooked_cards": 0})
    yield "extender", extender.registry
    yield "webhook", webhook.Metrics().registry


def metrics() -> list[tuple[str, str, str]]:
    """Name as it is exported, who exports it, its help text."""
    rows = []
    for owner, registry in _registries():
        for family in registry.collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            rows.append((name, owner, family.documentation))
    return sorted(rows)


def events() -> list[tuple[str, str]]:
    """Reason and sender of the events on pods and nodes that are no refusals."""
    sources = (ROOT / "manager").rglob("*.py")
    found = {(name, "gpu-manager") for path in sources for name in _EVENT.findall(path.read_text())}
    return sorted(found | {(name, "extender") for name in notices.REASONS})


def reasons() -> list[tuple[str, str]]:
    """Every refusal's code, and who gives it."""
    owners = ((Reason, "both"), (NodeReason, "gpu-manager"), (ExtenderReason, "extender"))
    return sorted((str(code), owner) for kind, owner in owners for code in kind)


def variables() -> list[tuple[str, str]]:
    """Raises ValueError if the code and `VARIABLES` differ."""
    files = [
        path for folder in ("vcuda", "manager", "scheduler_ext") for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".c", ".h")
    ]  # fmt: skip
    found = {name for path in files for name in _VARIABLE.findall(path.read_text())}
    if found != VARIABLES.keys():
        raise ValueError(f"environment: {', '.join(sorted(found ^ VARIABLES.keys()))} in VARIABLES or in the code only")
    return [(f"{name}…" if name.endswith("_") else name, VARIABLES[name]) for name in sorted(found)]


def keys() -> list[tuple[str, str]]:
    """Resources, annotations, labels and the like with what they mean, in their order.

    Raises ValueError for one that does not say.
    """
    here = names.Names()
    rows = []
    for name, member in vars(names.Names).items():
        text = " ".join((inspect.getdoc(member) or "").split())
        if isinstance(member, cached_property):
            rows.append((str(getattr(here, name)), text))
        elif name == "predicate_gpu_index":
            rows.append((here.predicate_gpu_index(0).removesuffix("0") + "N", text))
    constants = {value for name, value in vars(names).items() if name.endswith("_LABEL")}
    if constants != LABELS.keys():
        raise ValueError(f"labels: {', '.join(constants ^ LABELS.keys())} in LABELS or in vcuda.spec.names only")
    for key, text in rows:
        if not text.startswith(("Resource", "Annotation", "Label", "Driver", "Version")):
            raise ValueError(f"{key}: begin its docstring with Resource, Annotation, Label, Driver or Version")
    return [*rows, *LABELS.items()]


def flags(kind: type[Any]) -> list[tuple[str, str, str]]:
    """A program's settings as flags: name, default, meaning."""
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser, kind)
    rows = []
    for action in parser._actions:
        text, _, default = str(action.help).replace("%%", "%").rpartition(" (default: ")
        shown = default.removesuffix(")")
        rows.append((action.option_strings[0], "" if shown in ("none", "") else f"`{shown}`", text.replace("|", "\\|")))
    return rows


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    columns = list(head)
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return [*lines, *(f"| `{first}` | {' | '.join(rest)} |" for first, *rest in rows), ""]


def page() -> str:
    """The whole page."""
    words = [(key, *text.partition(": ")[::2]) for key, text in keys()]
    lines = [
        f"<!-- Made by `{COMMAND}`; do not edit. -->",
        "# Names",
        "",
        f"Everything that has a name outside of our code. `{names.DEFAULT_DOMAIN}` is the default of "
        "`--resource-domain`.",
        "",
        "## Resources, annotations, labels",
        "",
        *_table(("name", "kind", "what"), words),
        "## Environment variables",
        "",
        *_table(("variable", "what"), variables()),
        "## Flags",
        "",
        "Flag > environment > file > default, in all three programs. More words: [manager.md](manager.md), "
        "[extender.md](extender.md), [admission.md](admission.md).",
        "",
        *(
            line
            for name, kind in PROGRAMS.items()
            for line in ("### " + name, *_table(("flag", "default", "what"), flags(kind)))
        ),
        "## Metrics",
        "",
        "Labels and units: [metrics.md](metrics.md), [extender.md](extender.md).",
        "",
        *_table(("metric", "of", "what"), metrics()),
        "## Fields of log lines",
        "",
        "Both daemons write them, after the message as `name=value` (`--log-format=text`) or beside it in an object "
        "(`json`). What a line is not of it leaves out.",
        "",
        *_table(("field", "what"), logs.FIELDS.items()),
        "## Events",
        "",
        "What each means: [errors.md](errors.md). A refusal is an event too, with its reason.",
        "",
        *_table(("event", "by"), events()),
        "## Reasons",
        "",
        *_table(("reason", "by"), reasons()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def write(path: Path, text: Callable[[], str], command: str, *, check: bool) -> int:
    """Write a page, or with `check` compare it with the committed one; 1 if they differ or it can't be made."""
    try:
        made = text()
    except ValueError as error:
        print(f"{path.name}: {error}", file=sys.stderr)
        return 1
    if path.exists() and path.read_text() == made:
        return 0
    if check:
        print(f"{path} is out of date; run {command}", file=sys.stderr)
        return 1
    path.write_text(made)
    return 0


def main() -> int:
    """Write the page, or compare it with the committed one; 1 if they differ."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    return write(PAGE, page, COMMAND, check=parser.parse_args().check)


if __name__ == "__main__":
    sys.exit(main())
