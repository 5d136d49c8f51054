#!/usr/bin/env python3
"""Measures compress: bytes, milliseconds and errors, beside the reference's packet and the memory's speed.

scripts/bench_compress --params 40e6                 # Student-t(4), the three settings of the README
scripts/bench_compress --params 40e6 --record 300    # and differences recorded from 300 rounds of a real run
scripts/bench_compress --params 40e6 --grid          # every K from 0.01 to 0.25 at 1, 2 and 4 bits
scripts/bench_compress --params 6.05e9 --device cuda
"""

from __future__ import annotations

import argparse
import json
import os
import time


def main() -> None:
    """Reads the command line, prints a table or one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=float, default=40e6, help="length of the vector")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument(
        "--record",
        type=int,
        default=0,
        metavar="ROUNDS",
        help="train a small model, measure on its differences",
    )
    parser.add_argument("--grid", action="store_true", help="K in 0.01 .. 0.25, 1, 2 and 4 bits")
    parser.add_argument("--times", type=int, default=7, help="repetitions; the best counts")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from compress.codec_bench import GRID, SETTINGS, bench, table

    recorded = None
    if args.record:
        from bench_compress_swarm import train

        recorded = train(SETTINGS[0], args.record).difference
    rows = bench(int(args.params), args.device, recorded, GRID if args.grid else SETTINGS, args.times)
    print(json.dumps({"v": 1, "date": time.strftime("%Y-%m-%d"), "rows": rows}) if args.json else table(rows))


if __name__ == "__main__":
    main()
