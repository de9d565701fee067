"""The Grafana dashboard and the alerts ask for metrics that daemon and extender export, with labels that these have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import manifests
from scheduler_ext.engine.metrics import Metrics as ExtenderMetrics

DASHBOARD = manifests.CHART / "dashboards/vcuda.json"
METRICS_PAGE = Path(__file__).resolve().parents[2] / "docs/metrics.md"
_NAME = re.compile(r"\b(?:vcuda|container)_[a-z_]+\b")
_SERIES = re.compile(r"_(?:bucket|sum|count)$")
# Labels that Prometheus adds to whatever it scrapes, or makes of a histogram.
_ADDED = {"instance", "job", "le"}


def exported() -> set[str]:
    """Names of metrics.md, which a test of the daemon compares with its export, and of the extender's registry."""
    metrics = ExtenderMetrics()
    metrics.watch_figures(lambda: {"nodes": 1, "cards": 1, "free_cores": 1, "overbooked_cards": 0, "assumed": 1})
    text = metrics.render().decode()
    return set(_NAME.findall(METRICS_PAGE.read_text())) | set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))


def panels() -> list[dict[str, Any]]:
    return [item for item in json.loads(DASHBOARD.read_text())["panels"] if item["type"] != "row"]


def alerts() -> list[dict[str, Any]]:
    rendered = manifests.render({"metrics": {"prometheusRule": {"enabled": True}}})
    (group,) = yaml.safe_load(rendered["prometheusrule.yaml"])["spec"]["groups"]
    return list(group["rules"])


def expressions() -> Iterator[str]:
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]
    try:
        yield from (rule["expr"] for rule in alerts())
    except ImportError:
        pytest.skip("Helm's engine (helm-python-sdk) has no wheel for this machine")


def test_every_metric_exists() -> None:
    known = exported()
    used = {name for expression in expressions() for name in _NAME.findall(expression)}
    assert len(used) >= 20
    assert not {name for name in used if _SERIES.sub("", name) not in known}


def test_labels_are_those_that_the_daemon_and_the_extender_give() -> None:
    page = METRICS_PAGE.read_text()
    known = {
        "namespace",
        "pod",
        "container",
        "node",
        "uuid",
        "xid",
        "ignored",
        "thread",
        "minor",
        "model",
        "resource",
        "reason",
    }
    assert all(f"`{label}`" in page for label in known)
    known |= {"state", "verb", "result"} | _ADDED
    legends = {
        name
        for panel in panels()
        for target in panel["targets"]
        for name in re.findall(r"{{(\w+)}}", target["legendFormat"])
    }
    selected = {
        name
        for expression in expressions()
        for inside in re.findall(r"{([^}]*)}", expression)
        for name in re.findall(r"(\w+)\s*[!=]", inside)
    }
    grouped = {
        name.strip()
        for expression in expressions()
        for inside in re.findall(r"\bby \(([^)]*)\)", expression)
        for name in inside.split(",")
    }
    assert legends | selected | grouped <= known


def test_panels_do_not_overlap_and_name_their_unit() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def test_the_chart_ships_it_for_grafana_s_sidecar() -> None:
    pytest.importorskip("helm_python", reason="Helm's engine (helm-python-sdk) has no wheel for this machine")
    item = yaml.safe_load(manifests.render({"metrics": {"dashboard": {"enabled": True}}})["dashboard.yaml"])
    assert item["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(item["data"]["vcuda.json"]) == json.loads(DASHBOARD.read_text())
