"""Makes docs/errors.md from deploy/errors.yaml: what each code that users meet means, and the way out."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

from deploy import names_page
from scheduler_ext.protocol.reasons import ROW_CODES, UNRESOLVABLE

PAGE = names_page.ROOT / "docs" / "errors.md"
TEXTS = Path(__file__).with_name("errors.yaml")
COMMAND = "python -m deploy.errors_page"
_UNRESOLVABLE = {str(ROW_CODES[code]) for code in UNRESOLVABLE}


def senders() -> dict[str, list[str]]:
    """Each code of the programs with who says it, and as what."""
    found: dict[str, list[str]] = {}
    for code, owner in names_page.reasons():
        found.setdefault(code, []).append("refusal, by " + {"both": "extender and gpu-manager"}.get(owner, owner))
    for code, owner in names_page.events():
        found.setdefault(code, []).append(f"event, by {owner}")
    return found


def page() -> str:
    """The whole page. Raises ValueError if the programs have other codes than the texts."""
    known, texts = senders(), yaml.safe_load(TEXTS.read_text())
    if known.keys() != texts.keys():
        raise ValueError(
            f"codes: {', '.join(sorted(known.keys() ^ texts.keys()))} in {TEXTS.name} or in the programs only"
        )
    lines = [
        f"<!-- Made by `{COMMAND}`; do not edit. -->",
        "# Codes of refusals and events",
        "",
        "Stable: none is ever renamed. They stand in events, in kube-scheduler's FailedScheduling, in what the",
        "webhook, the extender and gpu-manager refuse, in what `vcuda` says of a request, in our library's line on",
        "standard error, in metrics (`reason`) and in log lines ([`reason`](names.md#fields-of-log-lines)).",
        "By symptom: [troubleshooting.md](troubleshooting.md).",
        "",
    ]
    for code in sorted(texts):
        said = "; ".join(known[code]) + ("; evicting pods can't cure it" if code in _UNRESOLVABLE else "")
        lines += [
            f"## {code}",
            f"*{said[0].upper()}{said[1:]}.*",
            "",
            texts[code]["means"],
            "",
            f"**Way out.** {texts[code]['do']}",
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Write the page, or compare it with the committed one; 1 if they differ."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    return names_page.write(PAGE, page, COMMAND, check=parser.parse_args().check)


if __name__ == "__main__":
    sys.exit(main())
