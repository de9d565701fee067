"""`python -m tests.support.image ARCHIVE [--name NAME]`: write the product's image as an OCI archive, without a container engine."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import vcuda
from tests.support import image_files, image_oci

NAME = f"docker.io/library/vcuda-gpu-manager:{vcuda.__version__}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.image", description=__doc__)
    parser.add_argument("archive", type=Path, help="file to write, for `ctr -n k8s.io images import` or skopeo")
    parser.add_argument("--name", default=NAME, help="registry/repository:tag (default %(default)s)")
    options = parser.parse_args()
    if ":" not in options.name.rpartition("/")[2]:
        parser.error(f"--name {options.name} has no tag")
    if not (image_files.ROOT / "vcuda/lib/shim/libcuda.so.1").is_file():
        parser.error("the shims are not built; run `python -m vcuda._build` first")
    try:
        with tempfile.TemporaryDirectory(prefix="vcuda-image-") as text:
            folder = Path(text)
            layers = []
            for name, fill in (("runtime", image_files.runtime), ("product", image_files.product)):
                (folder / name).mkdir()
                fill(folder / name)
                layers.append(image_oci.Layer.of(folder / name, folder / f"{name}.tar"))
            image_oci.write(options.archive, options.name, layers, ["gpu-manager"])
    except OSError as error:
        print(f"the image can't be written to {options.archive}: {error}", file=sys.stderr)
        return 1
    print(f"{options.archive}: {options.name}, {options.archive.stat().st_size >> 20} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
