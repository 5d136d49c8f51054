"""Loads a replica: the head reads the model's weights from its disk, and gives every machine its stage's.

Values go around the ring window by window, those of a frozen base in its own dtype. A machine that has the
same base on its disk reads from there what is not of a snapshot.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from recipes.config import Recipe
from recipes.errors import StageFailed

from .ring_head import RingHead
from .stage_machine import CONFIG
from .weights_reader import open_weights


def load_replica(
    ring: RingHead, recipe: Recipe, base: Path, snapshot: Path | None = None, name: str = "", round: int = 0
) -> bool:
    """Give every machine its stage of the model in `base`, at x' of `round`: of a snapshot, or x_0.

    Machines that have their part from this head, at that round or a later one, keep it; also
    those that have it from a head before, which is lost: updates that it had in flight count as taken.
    Returns whether the head kept its own: `mend` is to follow then.

    Errors: ModelError: the model cannot be cut so; StageLost, StageFailed.
    """
    held = [answer.values for answer in ring.held()]
    if not ring.key:
        ring.key = next((one["key"] for one in held if one["key"]), "")
        ring.steps = max(one["step"] for one in held)
    kept = [bool(ring.key) and one["key"] == ring.key and one["round"] >= round for one in held]
    if not any(kept):
        ring.key = secrets.token_hex(8)
    layers = {str(stage): (one.start, one.stop) for stage, one in enumerate(ring.layers) if not kept[stage]}
    config = (base / CONFIG).read_text(encoding="utf-8")
    source = {"base": base.name, "from_snapshot": snapshot is not None}
    answers = ring.ask("load", recipe=recipe.to_json(), config=config, layers=layers, source=source)
    with open_weights(recipe, base, snapshot) as reader:
        for stage, answer in enumerate(answers):
            for wanted in answer.values["parameters"]:
                if not reader.has(wanted):
                    raise StageFailed(f"wants {str(wanted)[:60]}, which the model does not have", stage)
                name, _, dtype = wanted
                for start, values in reader.windows(name, dtype):
                    data = [values if at == stage else b"" for at in range(ring.stages)]
                    ring.ask("fill", data, stage=stage, name=name, start=start)
    ring.ask("begin", name=name, round=round, step=ring.steps, key=ring.key)
    if any(kept) and not kept[0]:
        ring.ask("settle", taken=None)
    return kept[0]
