"""The bytes of a round: the tables of compress/MEASUREMENTS.md, from packets that the code really makes.

    scripts/start scripts.bench.costs [--sample 40e6]
    scripts/start scripts.bench.costs --presets       the table of the presets: what a step costs

A vector of heavy-tailed numbers (Student's t with 4 degrees of freedom, as the updates of a run) is encoded
as a peer would do it. Bits per parameter do not depend on the model's size, so they are scaled to the models.
"""

from __future__ import annotations

from compress import Cocktail, heavy_tailed_packet
from recipes.algorithm import compressor_of
from recipes.config.presets import PRESETS
from recipes.config.schema import Compression
from scripts.bench.compress import RANDOM_RATIO, SETTINGS
from scripts.swarms.lab import parser

MODELS = {"GPT-Neo 1.3 B": 1.32e9, "GPT-J 6 B": 6.05e9, "GPT-NeoX 20 B": 20.6e9}
LINK = 100e6  # bit/s, one way
GPTJ, ADAPTERS = MODELS["GPT-J 6 B"], 33.0e6  # of which lora_r=16 trains so many


def bits(mix: Cocktail, parameters: int) -> float:
    """Encode a packet of so many parameters: its bits a parameter, header included."""
    return 8 * len(heavy_tailed_packet(mix, parameters, seed=0, round=mix.uncompressed_rounds)) / parameters


def rounds(parameters: int) -> None:
    """Print what a round costs each way, at the settings of compress/MEASUREMENTS.md."""
    print(f"| each way, each round | bit/parameter | below FP16 | {' | '.join(MODELS)} |")
    print("|---" * (3 + len(MODELS)) + "|")
    for mix in (compressor_of(Compression()), *(Cocktail(RANDOM_RATIO, *setting) for setting in SETTINGS)):
        each = bits(mix, parameters)
        cells = [f"{each * p / 8e6:,.0f} MB, {each * p / LINK:,.1f} s" for p in MODELS.values()]
        name = f"p={mix.random_ratio:g} K={mix.topk_ratio:g} {mix.quant_bits} bit"
        print(f"| {name} | {each:.4f} | {16 / each:.0f}x | {' | '.join(cells)} |")
    cells = [f"{2 * p / 1e6:,.0f} MB, {16 * p / LINK:,.0f} s" for p in MODELS.values()]
    print(f"| FP16, all of it | 16 | 1x | {' | '.join(cells)} |")


def presets(parameters: int) -> None:
    """Print what a step of GPT-J costs with each preset."""
    print("| preset | packet | every | a step | below FP16 | a step at 100 Mbit/s, each way |")
    print("|---" * 6 + "|")
    for name in PRESETS:
        asked = Compression(preset=name)  # type: ignore[arg-type]
        packet = bits(compressor_of(asked), parameters) * (ADAPTERS if name == "lora-cocktail" else GPTJ) / 8
        every = asked.local_steps
        step = packet / every
        steps = f"{every} steps" if every > 1 else "step"
        cells = [f"{packet / 1e6:,.0f} MB", steps, f"{step / 1e6:,.1f} MB", f"{2 * GPTJ / step:,.0f}x"]
        print(f"| {name} | {' | '.join(cells)} | {8 * step / LINK:,.1f} s |")


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--sample", type=float, default=40e6, help="parameters of the vector that is encoded")
    asked.add_argument("--presets", action="store_true")
    given = asked.parse_args()
    (presets if given.presets else rounds)(int(given.sample))


if __name__ == "__main__":
    main()
