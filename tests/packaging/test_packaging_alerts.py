"""Each alert of the chart fires when its part is broken and not before (promtool), names a node, and links to a paragraph that exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import manifests

pytest.importorskip("helm_python", reason="Helm's engine (helm-python-sdk) has no wheel for this machine")
PAGE = Path(__file__).resolve().parents[2] / "docs/troubleshooting.md"
POD = 'namespace="team",pod="p",container="c",node="n",uuid="GPU-0"'
# Alert: the series that break its part 20 minutes after the start, and until when it must be silent, firing from then on.
BROKEN: dict[str, tuple[dict[str, str], str, str]] = {
    "VcudaDaemonDown": ({'vcuda_manager_info{node="n"}': "1x20 stale"}, "20m", "27m"),
    "VcudaNotRegistered": ({'vcuda_manager_registered{node="n"}': "1x20 0x20"}, "24m", "27m"),
    "VcudaStandingBy": ({'vcuda_manager_standby_seconds{node="n"}': "0x20 30+60x20"}, "30m", "32m"),
    "VcudaCardUnhealthy": ({'vcuda_card_healthy{node="n",uuid="GPU-0",minor="0"}': "1x20 0x20"}, "24m", "27m"),
    # It heals within a minute, and the series was not there before.
    "VcudaXid": (
        {'vcuda_card_xid_errors_total{node="n",uuid="GPU-0",xid="79",ignored="false"}': "_x20 1x20"},
        "19m",
        "22m",
    ),
    "VcudaAllocationsRefused": (
        {'vcuda_manager_allocations_total{node="n",reason="PodUnknown"}': "0x20 0+1x20"},
        "20m",
        "30m",
    ),
    "VcudaDiskFull": (
        {'vcuda_manager_allocations_total{node="n",reason="StateUnwritable"}': "_x20 1x20"},
        "19m",
        "22m",
    ),
    "VcudaThreadFailures": (
        {'vcuda_manager_thread_failures_total{node="n",thread="cards"}': "0x20 1x20"},
        "20m",
        "22m",
    ),
    "VcudaApiUnreachable": ({'vcuda_manager_api_failing{node="n"}': "0x20 1x20"}, "24m", "27m"),
    "VcudaMemoryUnaccounted": ({f"vcuda_container_unaccounted_bytes{{{POD}}}": "0x20 10000000000x20"}, "29m", "32m"),
    "VcudaBypass": ({f"vcuda_container_bypassing_processes{{{POD}}}": "0x20 1x20"}, "20m", "23m"),
    "VcudaDrift": ({f"vcuda_container_gpu_time_drift{{{POD}}}": "0x20 -50x20"}, "21m", "24m"),
    "VcudaDevicesLost": ({f"vcuda_container_lost_devices{{{POD}}}": "0x20 2x20"}, "21m", "24m"),
    "VcudaBindErrors": ({'vcuda_extender_binds_total{result="BindFailed"}': "0x20 0+1x20"}, "20m", "30m"),
    "VcudaWrongPlacement": ({"vcuda_extender_wrong_placements_total": "0x20 1x20"}, "20m", "22m"),
    "VcudaOverbooked": ({"vcuda_extender_overbooked_cards": "0x20 1x20"}, "20m", "23m"),
    "VcudaBookingDiffers": ({"vcuda_extender_booking_differences": "0x20 1x20"}, "24m", "27m"),
    "VcudaQuotasInvalid": ({"vcuda_extender_quotas_invalid": "0x20 1x20"}, "20m", "23m"),
    "VcudaStaleWatch": (
        {'vcuda_extender_watch_unheard_seconds{node="n",resource="pods"}': "0x20 200x20"},
        "20m",
        "22m",
    ),
    "VcudaNoLeader": ({"vcuda_extender_nodes": "3x20 0x20"}, "24m", "27m"),
}


def rules() -> list[dict[str, Any]]:
    values = {"metrics": {"prometheusRule": {"enabled": True, "runbookURL": "https://docs.example/t"}}}
    (group,) = yaml.safe_load(manifests.render(values)["prometheusrule.yaml"])["spec"]["groups"]
    return list(group["rules"])


def test_every_alert_links_to_its_own_paragraph() -> None:
    headings = re.findall(r"^### (Vcuda\w+)$\n(.+)", PAGE.read_text(), re.MULTILINE)
    assert [name for name, _ in headings] == [rule["alert"] for rule in rules()]
    for rule in rules():
        assert rule["annotations"]["runbook_url"] == f"https://docs.example/t#{rule['alert'].lower()}"


def test_alerts_about_nodes_and_pods_name_them() -> None:
    for rule in rules():
        if "vcuda_manager_" in rule["expr"] or "vcuda_card_" in rule["expr"]:
            assert "$labels.node" in rule["annotations"]["summary"], rule["alert"]
        if "vcuda_container_" in rule["expr"]:
            assert "$labels.namespace }}/{{ $labels.pod" in rule["annotations"]["summary"], rule["alert"]
        assert "$labels.instance" not in rule["annotations"]["summary"]


def test_each_alert_fires_when_its_part_is_broken_and_not_before(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (Debian's package prometheus) is not installed here")
    assert {rule["alert"] for rule in rules()} == BROKEN.keys()
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "vcuda", "rules": rules()}]}))
    tests = []
    for name, (series, silent, fires) in BROKEN.items():
        tests.append(
            {
                "interval": "1m",
                "input_series": [{"series": key, "values": values} for key, values in series.items()],
                "promql_expr_test": [
                    {"expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)', "eval_time": at,
                     "exp_samples": [{"labels": "{}", "value": count}]}
                    for at, count in ((silent, 0), (fires, 1))
                ],
            }
        )  # fmt: skip
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yaml").write_text(json.dumps(document))
    for command in (["check", "rules", "rules.yaml"], ["test", "rules", "tests.yaml"]):
        done = subprocess.run(
            [promtool, *command], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
