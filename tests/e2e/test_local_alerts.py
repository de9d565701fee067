"""Each alert of the chart that a playground can break fires in a real Prometheus when its part is broken, and goes when it is mended."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from localcluster import breaks
from localcluster.cluster import free_port
from tests.e2e.test_local_breaks import Playground
from tests.packaging.test_packaging_alerts import rules
from tests.packaging.test_packaging_prometheus import job, monitors

pytest.importorskip("helm_python", reason="Helm's engine (helm-python-sdk) has no wheel for this machine")
SECONDS = 120.0
FIRED_BY = {found.alert: name for name, found in breaks.BREAKS.items() if found.alert}
# Not broken by the list: what they watch takes another cluster, a real card, or minutes of work. promtool tests them all.
ELSEWHERE = {
    "VcudaAllocationsRefused", "VcudaThreadFailures", "VcudaMemoryUnaccounted", "VcudaBypass",
    "VcudaDrift", "VcudaDevicesLost", "VcudaOverbooked", "VcudaBookingDiffers", "VcudaQuotasInvalid", "VcudaStandingBy",
}  # fmt: skip


def hurried(rule: dict[str, Any]) -> dict[str, Any]:
    """The chart's rule with seconds for minutes, and a stale watch after 10 s: nothing else of it is changed."""
    expression = re.sub(r"\[15m\]|offset 15m", lambda found: found[0].replace("15m", "20s"), rule["expr"])
    expression = expression.replace("> 180", "> 10").replace("[1h]", "[5m]")
    return {**rule, "expr": expression, **({"for": "2s"} if "for" in rule else {})}


@pytest.fixture(scope="module")
def playground() -> Iterator[Playground]:
    made = Playground()
    yield made
    made.close()


@pytest.fixture(scope="module")
def firing(playground: Playground, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Asks Prometheus which alerts fire; it scrapes as the chart's ServiceMonitors ask."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus (Debian's package) is not installed here")
    folder, cluster = tmp_path_factory.mktemp("prometheus"), playground.cluster
    addresses = {"gpu-manager": cluster.manager_url, "gpu-scheduler-extender": cluster.extender_url}
    jobs = [job(monitors()[name], url.removeprefix("http://")) for name, url in addresses.items()]
    for one in jobs:  # without TLS here
        one["scheme"] = "http"
    (folder / "rules.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "vcuda", "rules": [hurried(r) for r in rules()]}]})
    )
    (folder / "prometheus.yml").write_text(yaml.safe_dump({
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"], "scrape_configs": jobs,
    }))  # fmt: skip
    at = f"127.0.0.1:{free_port()}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
             f"--web.listen-address={at}"], stdout=subprocess.DEVNULL, stderr=log,
        )  # fmt: skip

    def known() -> bool:
        """Whether both have been scraped: what was never there can't be missed."""
        words = "count(vcuda_manager_info) %2B count(vcuda_extender_nodes)"
        url = f"http://{at}/api/v1/query?query={words.replace(' ', '%20')}"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
            return bool(json.load(answer)["data"]["result"])
        return False

    def ask() -> dict[str, dict[str, Any]]:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{at}/api/v1/alerts", timeout=10) as answer:
            found = json.load(answer)["data"]["alerts"]
            return {one["labels"]["alertname"]: one for one in found if one["state"] == "firing"}
        return {}

    try:
        wait(known, "the first scrape")
        yield ask
    finally:
        process.terminate()
        process.wait()


def wait(condition: Any, what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


def test_each_alert_is_fired_by_a_break_or_named_as_one_that_none_fires() -> None:
    assert FIRED_BY.keys() | ELSEWHERE == {rule["alert"] for rule in rules()}
    assert not FIRED_BY.keys() & ELSEWHERE


@pytest.mark.timeout(400)
@pytest.mark.parametrize("alert", FIRED_BY)
def test_an_alert_fires_when_its_part_is_broken_and_goes_when_it_is_mended(
    playground: Playground, firing: Any, alert: str
) -> None:
    name = FIRED_BY[alert]
    found = breaks.BREAKS[name]
    if name == "disk" and playground.cluster.disk_bytes is None:
        pytest.skip("mounting a small disk for the node needs root")
    wait(lambda: alert not in firing(), f"{alert} is silent before")
    assert playground.run(f"break {name}").returncode == 0
    try:
        wait(lambda: alert in firing(), f"{alert} fires: {firing()}")
        told = firing()[alert]["annotations"]
        assert "$labels" not in told["summary"]
    finally:
        if found.mend is not None:
            playground.run(f"mend {name}")
    wait(lambda: alert not in firing(), f"{alert} goes: {firing()}")
