"""A real Prometheus scrapes daemon and extender as the chart's ServiceMonitors ask, and every panel of the dashboard has a series of a tenant's namespace."""

from __future__ import annotations

import contextlib
import http.server
import json
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import manifests
from localcluster.cluster import free_port
from scheduler_ext.engine.metrics import Metrics as ExtenderMetrics
from tests.manager.test_manager_metric_labels import example

pytest.importorskip("helm_python", reason="Helm's engine (helm-python-sdk) has no wheel for this machine")
PATIENCE_S = 60.0


def extender_page() -> bytes:
    metrics = ExtenderMetrics()
    metrics.watch_figures(lambda: {"nodes": 1, "cards": 1, "free_cores": 1, "overbooked_cards": 0, "assumed": 1})
    metrics.requests.labels("filter").observe(0.001)
    metrics.verdicts.labels("placed").inc()
    metrics.binds.labels("bound").inc()
    return metrics.render()


@contextlib.contextmanager
def served(page: Callable[[], bytes]) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = page()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def monitors() -> dict[str, dict[str, Any]]:
    """The chart's ServiceMonitors by name."""
    rendered = manifests.render({"metrics": {"serviceMonitor": {"enabled": True}}})["servicemonitor.yaml"]
    return {item["metadata"]["name"]: item for item in yaml.safe_load_all(rendered) if item}


def job(monitor: dict[str, Any], address: str) -> dict[str, Any]:
    """What the operator makes of a ServiceMonitor, with the labels that it gives a pod's target."""
    (endpoint,) = monitor["spec"]["endpoints"]
    name = monitor["metadata"]["name"]
    labels = {
        "namespace": "vcuda-system", "pod": f"{name}-x7k2", "container": name, "endpoint": endpoint["port"],
        "service": f"{name}-metrics", "__meta_kubernetes_pod_node_name": "node-1",
    }  # fmt: skip
    relabel = [
        {"source_labels": item["sourceLabels"], "target_label": item["targetLabel"]}
        for item in endpoint.get("relabelings", [])
    ]
    return {
        "job_name": name,
        "metrics_path": endpoint["path"],
        "honor_labels": endpoint.get("honorLabels", False),
        "relabel_configs": relabel,
        "static_configs": [{"targets": [address], "labels": labels}],
    }


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus (Debian's package) is not installed here")
    shown = example()
    with served(shown.exposition) as manager, served(extender_page) as extender, contextlib.ExitStack() as stack:
        addresses = {"gpu-manager": manager, "gpu-scheduler-extender": extender}
        jobs = [job(monitors()[name], address) for name, address in addresses.items()]
        config = tmp_path / "prometheus.yml"
        config.write_text(yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}))
        at = f"127.0.0.1:{free_port()}"
        process = subprocess.Popen(
            [
                program,
                f"--config.file={config}",
                f"--storage.tsdb.path={tmp_path / 'tsdb'}",
                f"--web.listen-address={at}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=(tmp_path / "log").open("w"),
        )
        stack.callback(process.wait)
        stack.callback(process.terminate)

        def query(text: str) -> list[dict[str, Any]]:
            words = urllib.parse.urlencode({"query": text})
            with urllib.request.urlopen(f"http://{at}/api/v1/query?{words}", timeout=10) as answer:
                return list(json.load(answer)["data"]["result"])

        deadline = time.monotonic() + PATIENCE_S
        enough = "count(count_over_time(up[1m]) >= 3)"
        while True:
            with contextlib.suppress(OSError):
                if query(enough) and query(enough)[0]["value"][1] == "2":
                    break
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-2000:]
            time.sleep(0.3)
        yield query


def test_every_panel_shows_something_of_a_tenant_and_series_join_by_the_usual_labels(
    ask: Callable[[str], list[dict[str, Any]]],
) -> None:
    board = json.loads((manifests.CHART / "dashboards/vcuda.json").read_text())
    empty = []
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            text = target["expr"]
            for name, value in (("$__rate_interval", "1m"), ("$namespace", "default"), ("$node", "node-1")):
                text = text.replace(name, value)
            if not ask(text):
                empty.append((panel["title"], text))
    assert empty == []
    (row,) = ask("vcuda_container_cores")
    wanted = {"namespace": "default", "pod": "p", "container": "c", "node": "node-1", "uuid": "GPU-0"}
    assert wanted.items() <= row["metric"].items()
    assert ask('{__name__=~".+",exported_namespace!=""}') == []
    joined = "vcuda_container_memory_used_bytes * on (uuid, node) group_left (model) vcuda_card_healthy"
    assert [item["metric"]["model"] for item in ask(joined)] == ["T4"]
    assert {item["metric"]["node"] for item in ask("vcuda_extender_nodes or vcuda_manager_registered")} == {"node-1"}
