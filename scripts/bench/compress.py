"""Bytes, milliseconds and errors of the compressor, beside the reference's packet and the memory's speed.

scripts/bench_compress --params 40e6                 # Student-t(4), the settings of MEASUREMENTS.md
scripts/bench_compress --params 40e6 --record 300    # and differences recorded from 300 rounds of a run
scripts/bench_compress --params 40e6 --grid          # every K from 0.01 to 0.25 at 1, 2 and 4 bits
scripts/bench_compress --params 6.05e9 --device cuda
"""

from __future__ import annotations

import json
import time

from cocktail_cli.commands.tools.bench_codec import GRID, RANDOM_RATIO, SETTINGS, bench, table
from scripts.swarms.lab import parser


def recorded(topk_ratio: float, bits: int, rounds: int) -> object:
    """Train a small model for so many rounds; x_i - x' of a peer (P,), which its next packet is taken
    from."""
    from recipes.training.optimizers import learning_rate
    from scripts.study.train import Setting, Size, Swarm, documentation, new_model, steps

    size = Size(hidden=128, layers=4, steps=rounds)
    setting = Setting(sample=RANDOM_RATIO, keep=topk_ratio, bits=bits)
    training = setting.training(rate=1e-3, seed=1, steps=rounds)
    swarm = Swarm(size, setting, new_model(size).vector.clone(), training)
    difference = None
    for step in steps(size, swarm, documentation(size.length)[0], learning_rate(training, rounds)):
        if step == rounds - 1:
            difference = swarm.peers[0].flat.vector - swarm.shared
    return difference


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--params", type=float, default=40e6, help="length of the vector")
    asked.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    asked.add_argument("--record", type=int, default=0, metavar="ROUNDS", help="and on differences of a run")
    asked.add_argument("--grid", action="store_true", help="K in 0.01 .. 0.25, 1, 2 and 4 bits")
    asked.add_argument("--times", type=int, default=7, help="repetitions; the best counts")
    asked.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = asked.parse_args()
    difference = recorded(*SETTINGS[0], args.record) if args.record else None
    rows = bench(int(args.params), args.device, difference, GRID if args.grid else SETTINGS, args.times)
    print(json.dumps({"v": 1, "date": time.strftime("%Y-%m-%d"), "rows": rows}) if args.json else table(rows))


if __name__ == "__main__":
    main()
