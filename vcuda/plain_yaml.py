"""YAML that people write: of two values for one name it would take the last, and nobody would know."""

from __future__ import annotations

from typing import Any

import yaml


class Repeated(ValueError):
    """A map gives `name` again in `line`, counted from 1."""

    def __init__(self, name: str, line: int) -> None:
        super().__init__(f"line {line} gives {name} again")
        self.name, self.line = name, line


class Loader(yaml.SafeLoader):
    """Raises Repeated."""

    def spelling(self, name: str) -> str:
        """Names are the same if this is."""
        return name

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key.value, str):
                name = self.spelling(key.value)
                if name in seen:
                    raise Repeated(name, key.start_mark.line + 1)
                seen.add(name)
        return super().construct_mapping(node, deep)
