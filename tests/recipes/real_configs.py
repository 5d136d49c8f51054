"""Shapes in the config.json of each shipped recipe's model.

Written down from the models' papers and cards; COUNTS is what their cards say of their size, so that a wrong
number here does not go unseen.
"""

import json
from pathlib import Path
from typing import Any

REAL: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))

COUNTS = {
    "EleutherAI/gpt-j-6b": 6_050_882_784,
    "EleutherAI/gpt-neox-20b": 20_554_567_680,
    "EleutherAI/pythia-70m": 70_426_624,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "facebook/opt-1.3b": 1_315_758_080,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
}
