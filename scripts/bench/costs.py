"""What a round costs on the wire: the table of the README, from packets that the code really makes.

    python scripts/costs.py [--sample 40e6]
    python scripts/costs.py --presets       the table of recipes/README.md: what a preset costs, a step

A vector of heavy-tailed numbers (Student's t with 4 degrees of freedom: so the updates of a run look) is
encoded as a peer would do it, and bits per parameter are scaled to the models of the table: they do not
depend on its size.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from compress import Cocktail
from compress.codec_bench import SETTINGS, student
from recipes.algorithm.cocktail_sgd import compressor_of
from recipes.config.presets import PRESETS
from recipes.config.schema import Compression

MODELS = {"GPT-Neo 1.3 B": 1.32e9, "GPT-J 6 B": 6.05e9, "GPT-NeoX 20 B": 20.6e9}
LINK = 100e6  # bit/s, one way
GPTJ, ADAPTERS = MODELS["GPT-J 6 B"], 33.0e6  # of which lora_r=16 trains so many


@dataclass(frozen=True)
class Cost:
    """One packet of a mix."""

    bits: float  # per parameter of the model and direction, header included

    def bytes(self, parameters: float) -> float:
        return self.bits * parameters / 8

    @property
    def ratio(self) -> float:
        return 16 / self.bits


def measure(mix: Cocktail, parameters: int) -> Cost:
    pair = student(parameters)
    drawn = mix.draw(parameters, seed=0, round=mix.full)
    return Cost(8 * len(mix.encode(drawn.difference(pair.x, pair.common)).packet) / parameters)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", type=float, default=40e6, help="parameters of the vector that is encoded")
    parser.add_argument("--presets", action="store_true")
    given = parser.parse_args()
    parameters = int(given.sample)
    if given.presets:
        presets(parameters)
        return
    mixes = (compressor_of(Compression()), *SETTINGS)
    rows = {f"p={mix.sample:g} K={mix.keep:g} {mix.bits} bit": measure(mix, parameters) for mix in mixes}
    print(f"| each way, each round | bit/parameter | below FP16 | {' | '.join(MODELS)} |")
    print("|---|---|---|" + "---|" * len(MODELS))
    for name, cost in rows.items():
        cells = [f"{cost.bytes(p) / 1e6:,.0f} MB, {8 * cost.bytes(p) / LINK:,.1f} s" for p in MODELS.values()]
        print(f"| {name} | {cost.bits:.4f} | {cost.ratio:.0f}x | {' | '.join(cells)} |")
    cells = [f"{2 * p / 1e6:,.0f} MB, {16 * p / LINK:,.0f} s" for p in MODELS.values()]
    print(f"| FP16, all of it | 16 | 1x | {' | '.join(cells)} |")


def presets(parameters: int) -> None:
    print("| preset | packet | every | a step | below FP16 | a step at 100 Mbit/s, each way |")
    print("|---|---|---|---|---|---|")
    for name in PRESETS:
        asked = Compression(preset=name)  # type: ignore[arg-type]
        packet = measure(compressor_of(asked), parameters).bytes(
            ADAPTERS if name == "lora-cocktail" else GPTJ
        )
        step, every = packet / asked.local_steps, asked.local_steps
        steps = f"{every} steps" if every > 1 else "step"
        cells = [f"{packet / 1e6:,.0f} MB", steps, f"{step / 1e6:,.1f} MB", f"{2 * GPTJ / step:,.0f}x"]
        print(f"| {name} | {' | '.join(cells)} | {8 * step / LINK:,.1f} s |")


if __name__ == "__main__":
    main()
