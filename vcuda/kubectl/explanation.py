"""The extender's explanation of a pod, for people; `gpu-scheduler-extender explain` prints it, too."""

from __future__ import annotations

from typing import Any


def lines(data: dict[str, Any]) -> list[str]:
    """What `GET /explain/NAMESPACE/NAME` answered (docs/extender.md)."""
    pod = data["pod"]
    found = [f"pod {pod['namespace']}/{pod['name']} ({pod['uid']}): {data['summary']}"]
    found += [
        f"  card {uuid}: {use['cores']} cores, {use['memory_blocks']} blocks"
        for uuid, use in data.get("cards", {}).items()
    ]
    found += [f"  {way['text']}" for way in data.get("would_fit", ())]
    for one in data["decisions"]:
        asked = ", ".join(
            f"{c['container']} {c['cores']} cores {c['memory_blocks']} blocks" for c in one.get("asked", ())
        )
        result = f"node {one['node']}" if one["node"] else one.get("message", "no node")
        why = ", ".join(f"{reason} {count}" for reason, count in one.get("reasons", {}).items())
        found.append(
            f"  {one['at']} {result} of {one['candidates']}"
            + (f" [{asked}; {one['policy']}]" if asked else "")
            + (f": {why}" if why else "")
        )
    return found
