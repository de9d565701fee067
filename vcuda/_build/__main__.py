"""`python -m vcuda._build [LIBRARY…]`: rebuild stale native parts of a checkout in place (also the cffi module).

`--into FOLDER`: the libraries alone, there: for another machine, with CC and NM of a cross compiler.
"""

from __future__ import annotations

import sys
from pathlib import Path

from vcuda._build import gcc, native


def main(names: list[str]) -> int:
    package = Path(__file__).resolve().parents[1]
    elsewhere = Path(names[1]) if names[:1] == ["--into"] and len(names) > 1 else None
    names = names if elsewhere is None else names[2:]
    try:
        wanted = [name for name in names if name != "native"] if names else None
        built = native.build(elsewhere or package / "lib", wanted)
        if elsewhere is None and (not names or "native" in names):
            from vcuda._build import ffi  # reads sources that only a checkout has

            built += ffi.build_in_place(package)
    except (gcc.BuildError, KeyError) as error:
        known = ", ".join([library.name for library in native.LIBRARIES] + ["native"])
        print(f"{error}\n(libraries: {known})", file=sys.stderr)
        return 1
    print("built: " + (", ".join(built) if built else "nothing, all is up to date"))
    return 0


sys.exit(main(sys.argv[1:]))
