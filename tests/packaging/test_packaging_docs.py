"""Operators find every code that they may meet: each reason and event has its section in docs/errors.md, each value its words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import errors_page, manifests, names_page

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = ROOT / "docs/operations.md"


def test_every_code_has_its_section_and_every_section_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert errors_page.PAGE.read_text() == errors_page.page(), f"run {errors_page.COMMAND}"
    sections = re.findall(r"^## (.*)$", errors_page.PAGE.read_text(), re.MULTILINE)
    assert {"CardUnhealthy", "MemoryUnaccounted", "DevicesLost", "InsufficientCores", "PodUnknown"} <= {*sections}
    assert sections == sorted({*sections}) and len(sections) > 60
    for other in ({"MadeUp": ["refusal, by extender"]}, {"PodUnknown": None}):
        known = {code: said for code, said in (errors_page.senders() | other).items() if said}
        with monkeypatch.context() as patch:
            patch.setattr(errors_page, "senders", lambda known=known: known)
            with pytest.raises(ValueError, match=f"codes: {next(iter(other))} in errors.yaml or in the programs only"):
                errors_page.page()


@pytest.mark.parametrize(
    ("program", "page"),
    [
        ("gpu-manager", "manager.md"),
        ("gpu-scheduler-extender serve", "extender.md"),
    ],
)
def test_every_flag_is_in_its_program_s_page(program: str, page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    names = {flag for flag, *_ in names_page.flags(names_page.PROGRAMS[program])}
    assert len(names) > 10
    assert not [flag for flag in sorted(names) if not re.search(rf"`{flag}[ =`]", text)]


def test_links_between_sections_lead_somewhere() -> None:
    page = errors_page.PAGE.read_text()
    anchors = {heading.lower() for heading in re.findall(r"^## (.*)$", page, re.MULTILINE)}
    assert {*re.findall(r"\]\(#([a-z-]+)\)", page)} <= anchors


def test_every_right_is_listed_with_its_reason() -> None:
    """The table of rights is the chart's, with every option on."""
    pytest.importorskip("helm_python", reason="Helm's engine (helm-python-sdk) has no wheel for this machine")
    options = {
        "manager": {"audit": {"policy": "evict"}, "failedAdmissionGrace": 60},
        "extender": {"quotas": {"entries": [{"namespace": "a", "cores": 1}]}},
    }
    page = OPERATIONS.read_text()
    table = page[page.index("### Rights") : page.index("`nodes/proxy` lets its holder")]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    for access in ("proxy", "pods"):
        chosen = {**options, "manager": {**options["manager"], "kubelet": {"access": access}}}
        rendered = manifests.render(chosen)
        for name in ("manager-rbac.yaml", "extender-rbac.yaml"):
            for item in yaml.safe_load_all(rendered[name]):
                for rule in item.get("rules", ()):
                    for resource in rule.get("resources", ()):
                        words = {"configmaps": "ConfigMap"}.get(resource, resource)
                        for verb in rule["verbs"]:
                            told = any(f"`{verb}`" in line and words in line for line in lines)
                            assert told, f"{verb} {resource} is not in the table"


CLAIMS_AND_CDI = {
    "manager": {"deviceListStrategy": "cdi-cri"},
    "claims": {"enabled": True, "protocols": "device-plugin,dra"},
}


@pytest.mark.parametrize("options", [{}, CLAIMS_AND_CDI], ids=["as it comes", "every option"])
def test_what_the_daemonset_may_do_on_its_node_is_listed_with_its_reason(options: dict[str, Any]) -> None:
    """Every volume of the host's, every privilege: a row each in the table, and no row too many."""
    pytest.importorskip("helm_python", reason="Helm's engine (helm-python-sdk) has no wheel for this machine")
    (daemon,) = [item for item in objects(options) if item["kind"] == "DaemonSet"]
    pod = daemon["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    has = {volume["name"] for volume in pod["volumes"]}
    has |= {name for name in ("hostPID", "hostNetwork", "hostIPC", "securityContext") if pod.get(name)}
    has |= container["securityContext"].keys() - {"readOnlyRootFilesystem"}
    assert container["securityContext"]["readOnlyRootFilesystem"]
    page = OPERATIONS.read_text()
    table = page[page.index("### What the DaemonSet may do") : page.index("Its root file system is read-only")]
    rows = {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}
    wanted = {name for name, line in rows.items() if options or "only with" not in line.split("|")[1]}
    assert has == wanted
    read_only = {mount["name"] for mount in container["volumeMounts"] if mount.get("readOnly")}
    assert read_only == {name for name in wanted if "read-only" in rows[name].split("|")[1]}


def test_all_but_the_daemon_run_as_the_restricted_standard_wants() -> None:
    """Pod Security's `restricted`, and a read-only root file system beside; docs/operations.md says so."""
    pytest.importorskip("helm_python", reason="Helm's engine (helm-python-sdk) has no wheel for this machine")
    kinds = {"Deployment", "Job", "CronJob", "StatefulSet", "Pod"}
    options = {
        "scheduler": {"mode": "own", "own": {"image": {"repository": "kube-scheduler", "tag": "v1"}}},
        "webhook": {"enabled": True},
    }
    found = [item for item in objects(options) if item["kind"] in kinds]
    assert {item["metadata"]["name"] for item in found} >= {
        "gpu-scheduler-extender",
        "vcuda-scheduler",
        "gpu-admission-webhook",
    }
    for item in found:
        pod = item["spec"] if item["kind"] == "Pod" else item["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostPID", "hostNetwork", "hostIPC"} & pod.keys()
        assert not [volume for volume in pod.get("volumes", ()) if "hostPath" in volume]
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, container["name"]


def objects(options: dict[str, Any]) -> list[dict[str, Any]]:
    """What the chart makes for these values."""
    rendered = manifests.render(options).items()
    return [item for name, text in rendered if name.endswith(".yaml") for item in yaml.safe_load_all(text) if item]


def test_the_page_of_names_is_what_the_code_makes() -> None:
    assert names_page.PAGE.read_text() == names_page.page(), f"run {names_page.COMMAND}"


@pytest.mark.parametrize("table", ["LABELS", "VARIABLES"])
def test_a_name_that_nobody_explains_is_named(monkeypatch: pytest.MonkeyPatch, table: str) -> None:
    known = dict(getattr(names_page, table))
    gone, _ = known.popitem()
    monkeypatch.setattr(names_page, table, known)
    with pytest.raises(ValueError, match=re.escape(gone)):
        names_page.page()


def test_links_lead_somewhere() -> None:
    pages = [path for path in (ROOT / "docs").glob("*.md") if path.name != "benchmarks.md"]
    for page in (*pages, ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", page.read_text()):
            file = (page.parent / target).resolve() if target else page
            assert file.exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
                known = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
                assert anchor in known, f"{page.name}: {target}#{anchor}"


def test_every_test_that_a_page_names_is_there() -> None:
    pages = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    named = {name for page in pages for name in re.findall(r"`(test_\w+(?:\.py)?)`", page)}
    files = list((ROOT / "tests").rglob("test_*.py"))
    found = {path.name for path in files}
    found |= {name for path in files for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)}
    assert len(named) > 20 and named <= found


def test_every_rule_of_gpu_time_that_is_named_by_its_number_is_there() -> None:
    """Rules with a number are headings, those with a letter begin a list's item; code and pages name both."""
    pages = {
        name: (ROOT / "docs" / name).read_text() for name in ("compute.md", "compute-rules.md", "compute-limits.md")
    }
    known = {*re.findall(r"^### (\d+)\. ", pages["compute.md"], re.MULTILINE)}
    known |= {*re.findall(r"^- \*\*(\d+[a-z])\. ", pages["compute-rules.md"], re.MULTILINE)}
    sources = [path for top in ("vcuda", "benchmarks", "tests/native") for path in (ROOT / top).rglob("*")]
    texts = [*pages.values(), *(path.read_text() for path in sources if path.suffix in {".c", ".h", ".py"})]
    named = {name for text in texts for name in re.findall(r"\brules? (\d+[a-z]?)\b", text)}
    named |= {name for text in pages.values() for name in re.findall(r"\b(\d+[a-q])\b", text)}
    assert len(named) > 60 and named <= known
