"""Takes memory until CUDA refuses, says with which error, and holds what it has got while it tries again."""

from __future__ import annotations

import argparse
import sys
import time

import gpu

_TOO_MUCH = 1 << 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--piece-mib", type=int, default=64, help="size of one allocation")
    arguments = parser.parse_args()
    card = gpu.Gpu()
    print(card.describe())
    pace, held, refusals = gpu.Pace(), 0, 0
    while True:
        try:
            card.allocate(arguments.piece_mib * gpu.MIB)
            held += arguments.piece_mib * gpu.MIB
        except gpu.CudaError as error:
            refusals += 1
            if refusals == 1:
                print(f"refused after {held // gpu.MIB} MiB: {error.name}")
            time.sleep(0.1)
        if held > _TOO_MUCH:
            sys.exit("no limit was met")
        if pace.due():
            print(f"holds {held // gpu.MIB} MiB after {refusals} refusals")


if __name__ == "__main__":
    main()
