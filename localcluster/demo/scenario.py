"""What the demonstration applies and expects: each example pod, its request, and the label that says what happens."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vcuda.spec import request, units
from vcuda.spec.errors import InvalidRequest

JsonObject = dict[str, Any]
EXPECT_LABEL = "vcuda-demo/expect"


class Expect(enum.StrEnum):
    """The values of the label; without it a pod is expected to run."""

    RUNS = "runs"
    REFUSED = "refused"
    OUT_OF_MEMORY = "out-of-memory"


class ScenarioFailure(Exception):
    """A manifest can't be used; the message names the file."""


@dataclass(frozen=True)
class DemoPod:
    """One pod of the scenario. `memory_bytes` is None for whole cards (the card's own); cores are in 1/100 card."""

    manifest: JsonObject
    expect: Expect
    cores: int
    core_limit: int
    memory_bytes: int | None

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def whole(self) -> bool:
        return self.memory_bytes is None


def load_manifests(paths: list[Path]) -> list[JsonObject]:
    """All pods of YAML files and of the folders' files. Raises ScenarioFailure for what is no pod."""
    files = [file for path in paths for file in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])]
    if not files:
        raise ScenarioFailure(f"no *.yaml below {', '.join(map(str, paths))}")
    pods = []
    for file in files:
        try:
            documents = [document for document in yaml.safe_load_all(file.read_text(encoding="utf-8")) if document]
        except (OSError, yaml.YAMLError) as error:
            raise ScenarioFailure(f"{file} can't be read: {error}") from error
        for document in documents:
            if not isinstance(document, dict) or document.get("kind") != "Pod" or "metadata" not in document:
                kind = document.get("kind") if isinstance(document, dict) else type(document).__name__
                raise ScenarioFailure(f"{file}: a local deployment takes pods, this is {kind}")
            pods.append(document)
    return pods


def describe(manifest: JsonObject) -> DemoPod:
    """The pod with its request; what no card can give counts as 0 of it.

    Raises ScenarioFailure for an unknown label.
    """
    metadata = manifest["metadata"]
    label = (metadata.get("labels") or {}).get(EXPECT_LABEL, Expect.RUNS)
    if label not in list(Expect):
        raise ScenarioFailure(
            f"pod {metadata['name']}: label {EXPECT_LABEL} is {label!r}, not one of {', '.join(Expect)}"
        )
    try:
        shares = request.parse_pod(manifest).containers
    except InvalidRequest:
        return DemoPod(manifest, Expect(label), 0, 0, 0)
    whole = any(share.whole for share in shares)
    memory = None if whole else sum(share.memory_blocks for share in shares) * units.BLOCK_BYTES
    cores = sum(share.cores for share in shares)
    core_limit = cores if whole else sum(share.core_limit for share in shares)
    return DemoPod(manifest, Expect(label), cores, core_limit, memory)
