"""Makes the plain manifests in deploy/kubernetes from the Helm chart, by Helm's engine; --check only compares."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

CHART = Path(__file__).parent / "helm" / "vcuda-gpu-manager"
FOLDER = Path(__file__).parent / "kubernetes"
COMMAND = "python -m deploy.manifests"
RELEASE = "vcuda"
# One of its own: the right to patch pods, which the extender has in its namespace, should not reach others' there.
NAMESPACE = "vcuda-system"

# Which templates make which file: what a node gets, what the cluster gets once, what kube-scheduler's host gets.
FILES = {
    "gpu-manager.yaml": ("manager-rbac.yaml", "manager.yaml"),
    "gpu-scheduler-extender.yaml": ("extender-rbac.yaml", "extender.yaml"),
    "kube-scheduler-configuration.yaml": ("scheduler-config.yaml",),
}
# Helm manages nothing here; where the chart would ask the cluster, what today's clusters have.
VALUES: dict[str, Any] = {
    "extender": {"podDisruptionBudget": {"apiVersion": "policy/v1"}},
    "manager": {"kubelet": {"access": "pods"}},
}
_HELM_ONLY = ("app.kubernetes.io/managed-by: Helm",)


def render(values: dict[str, Any] | None = None, namespace: str = NAMESPACE) -> dict[str, str]:
    """Rendered text by template file name, empty ones left out. Raises ImportError without Helm's engine, HelmError."""
    import helm_python

    chart = helm_python.Chart.load(CHART)
    chart.validate_schema(values or {})
    rendered = chart.render(values or {}, name=RELEASE, namespace=namespace)
    return {Path(path).name: text for path, text in rendered.items() if text.strip()}


def plain(values: dict[str, Any], namespace: str = NAMESPACE) -> dict[str, str]:
    """The files of deploy/kubernetes for these values: name to text."""
    rendered = render(values, namespace)
    made = {}
    for name, templates in FILES.items():
        parts = [rendered[template].strip() for template in templates]
        lines = [line for line in "\n---\n".join(parts).splitlines() if not line.strip().endswith(_HELM_ONLY)]
        made[name] = f"# Generated from the chart in deploy/helm by `{COMMAND}`; do not edit.\n" + "\n".join(
            [*lines, ""]
        )
    return made


def main() -> int:
    """Write the manifests, or compare them with the committed ones; 1 if they differ."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    check = parser.parse_args().check
    stale = []
    FOLDER.mkdir(exist_ok=True)
    for name, text in plain(VALUES).items():
        path = FOLDER / name
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not check:
                path.write_text(text)
    if check and stale:
        print(f"out of date: {', '.join(stale)}; run {COMMAND}", file=sys.stderr)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
