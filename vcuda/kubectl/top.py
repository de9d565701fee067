"""`kubectl vcuda top`: what each share is limited to and what it uses, by the daemons of all nodes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

from vcuda.kube.errors import KubeError
from vcuda.kubectl import output
from vcuda.kubectl.cluster import Cluster
from vcuda.kubectl.errors import PluginError
from vcuda.spec.units import format_bytes

Report = Mapping[str, Any]
Row = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pod", nargs="?", metavar="POD", help="this pod alone")
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="pods of all namespaces")
    parser.add_argument("--node", metavar="NODE", help="shares on this node alone")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="measure GPU time for so long (default: 2)"
    )


def run(cluster: Cluster, options: argparse.Namespace) -> int:
    """1 where a node could not be asked."""
    nodes, failures = _nodes(cluster, options), list[str]()
    first = _reports(cluster, nodes, failures)
    if first and any(report.get("containers") for report in first.values()):
        time.sleep(min(max(options.interval, 0.0), 60.0))
        failed = set(nodes) - set(first)
        second = _reports(cluster, [node for node in nodes if node not in failed], failures)
    else:
        second = first
    rows = [row for node, report in second.items() for row in _rows(node, first.get(node), report)]
    rows = [row for row in rows if _wanted(row, cluster, options)]
    for failure in failures:
        output.say(failure)
    if options.json:
        output.as_json(rows)
    elif rows:
        _show(rows, options.all_namespaces)
    elif not failures:
        where = "in any namespace" if options.all_namespaces else f"in namespace {cluster.namespace} (-A: in all)"
        what = f"pod {options.pod}" if options.pod else "pod"
        output.say(f"no {what} with a share runs {where}")
    return int(bool(failures))


def _nodes(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    if options.node:
        return {options.node: cluster.daemon(options.node)}
    if options.pod:
        node = (cluster.pod(options.pod).get("spec") or {}).get("nodeName")
        if not node:
            raise PluginError(f"pod {options.pod} is on no node yet; `kubectl vcuda explain {options.pod}` says why")
        return {node: cluster.daemon(node)}
    found = cluster.daemons()
    if not found:
        raise PluginError(
            f"no gpu-manager runs in namespace {cluster.system}; name its namespace by --system-namespace"
        )
    return found


def _reports(cluster: Cluster, nodes: Any, failures: list[str]) -> dict[str, Report]:
    found = {}
    daemons = nodes if isinstance(nodes, dict) else None
    for node in nodes:
        pod = daemons[node] if daemons is not None else cluster.daemon(node)
        try:
            found[node] = cluster.page(pod, "metrics", "/usage", _report)
        except (PluginError, KubeError) as error:
            failures.append(str(error))
    return found


def _report(data: Any) -> Report:
    """A daemon's page, from which rows can be made."""
    _rows("", data, data)
    report: Report = data
    return report


def _rows(node: str, before: Report | None, now: Report) -> list[Row]:
    known = {
        (at["pod_uid"], at["container"], share["uuid"]): share
        for at in (before or {}).get("containers", ())
        for share in at["cards"]
    }
    seconds = float(now.get("at_s", 0.0)) - float((before or {}).get("at_s", 0.0))
    return [
        {
            "namespace": str(at["namespace"]), "pod": str(at["pod_name"]),
            "container": str(at["container"]), "node": node,
            "card": str(share["uuid"]), "minor": int(share["minor"]),
            "cores": int(share["cores"]), "core_limit": int(share["core_limit"]),
            "used_cores": _used(known.get((at["pod_uid"], at["container"], share["uuid"])), share, seconds),
            "memory_used_bytes": int(share["memory_used_bytes"]),
            "memory_limit_bytes": int(share["memory_limit_bytes"]),
            "processes": int(at["processes"]),
        }
        for at in now.get("containers", ())
        for share in at["cards"]
    ]  # fmt: skip


def _used(before: Mapping[str, Any] | None, now: Mapping[str, Any], seconds: float) -> float | None:
    """Hundredths of the card's time; None if it can't be told."""
    if now.get("card_percent") is not None:
        return float(now["card_percent"])
    earlier, later = (before or {}).get("gpu_time_ns"), now.get("gpu_time_ns")
    if earlier is None or later is None or seconds <= 0:
        return None
    return round(max(0.0, float(later) - float(earlier)) / seconds / 1e7, 1)


def _wanted(row: Row, cluster: Cluster, options: argparse.Namespace) -> bool:
    return (options.all_namespaces or row["namespace"] == cluster.namespace) and options.pod in (None, row["pod"])


def _show(rows: list[Row], with_namespace: bool) -> None:
    columns = ["pod", "container", "node", "card", "cores", "used", "memory"]
    output.table(
        (["namespace"] if with_namespace else []) + columns,
        [
            ([row["namespace"]] if with_namespace else [])
            + [
                row["pod"],
                row["container"],
                row["node"],
                row["minor"],
                row["cores"] if row["core_limit"] <= row["cores"] else f"{row['cores']}-{row['core_limit']}",
                "?" if row["used_cores"] is None else f"{row['used_cores']:.0f}",
                f"{format_bytes(row['memory_used_bytes'])}/{format_bytes(row['memory_limit_bytes'])}",
            ]
            for row in sorted(rows, key=lambda row: (row["namespace"], row["pod"], row["container"], row["minor"]))
        ],
    )
