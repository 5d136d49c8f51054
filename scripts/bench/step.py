"""A training step of a recipe on this machine, with no network in between.

scripts/bench_step smoke
scripts/bench_step my.yaml learning_rate=1e-4 --steps 10 --peers 8 --device cuda
scripts/bench_step --model ./my-model --data rows.jsonl

The model is fetched as for a launch; of the data only the first rows are read. With --json one object:
{"v": 1, "recipe", "device", "parameters", "micro_batch", "samples", "tokens", "step_s", "compute_s",
"optimizer_s", "codec_s", "join_s", "phases": {"sample", "gather", ...}, "plain_s", "tokens_per_s",
"packet_bytes", "slowest_s", "memory_bytes"}

codec_s is the whole exchange, beside the compute where staleness is 1; phases.py names its phases. plain_s is
a step of an ordinary loop: the same model, micro-batches, clipping and optimizer, and no exchange.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from cocktail_cli.machine import check_trust, isolate_model_code, pick_device
from cocktail_cli.recipe_request import RecipeRequest, room_for
from cocktail_cli.ui import megabytes
from cocktail_cli.volunteer import micro_batch_of
from recipes.config import Recipe
from scripts.bench import phases
from scripts.swarms.lab import parser
from scripts.swarms.loopback_link import LoopbackLink

WARM = 1  # warm-up rounds: the first compiles, and has nothing to exchange


@dataclass(frozen=True)
class Measured:
    """One step: its seconds, those of its exchange, and the spans of its phases."""

    step_s: float
    codec_s: float  # encoding and decoding; in parallel with compute where staleness is 1
    packet: int  # bytes
    spans: list[phases.Span]


def measured(recipe: Recipe, device: str, micro_batch: int | None, steps: int, peers: int) -> dict[str, Any]:
    """Build a peer as `join` would, train on the first rows of the data, and measure.

    Raises:
        the errors of recipes, for a recipe, model or data set that cannot be used.
    """
    from recipes.data import pack_samples
    from recipes.models import check_fit, load_tokenizer, load_trained, prepare_base
    from recipes.training import build_peer, micro_batch_for

    # nothing is in flight on a loop, and an exchange that waits for its turn would be measured as work
    stale = {"staleness": min(recipe.compression.staleness, 1)}
    recipe = recipe.model_copy(update={"compression": recipe.compression.model_copy(update=stale)})
    with tempfile.TemporaryDirectory(prefix="cocktail-", ignore_cleanup_errors=True) as place:
        base = prepare_base(recipe, Path(place) / "base").folder
        tokenizer = load_tokenizer(recipe.model, base)
        check_fit(recipe, base)
        every = recipe.compression.local_steps
        lease = first(recipe, tokenizer, math.ceil(recipe.training.global_batch_size / peers) * every)
        model, batch = load_trained(recipe, base, device), micro_batch_of(recipe, micro_batch) or 1
        peer = build_peer(model, recipe, batch, device=device)
        del model
        if micro_batch_of(recipe, micro_batch) is None:
            peer.micro_batch = micro_batch_for(peer.trainer, recipe)
        link = LoopbackLink(pack_samples(lease), len(lease), WARM + math.ceil(steps / every), every)
        rounds = list(rounds_of(link, peer))
        plain = plain_step(peer, lease[: len(lease) // every], steps)
    return row(recipe, device, peer, lease, rounds) | {"plain_s": plain}


def first(recipe: Recipe, tokenizer: Any, count: int) -> Sequence[Any]:
    """Return the first `count` samples, repeating the data where there are fewer."""
    from recipes.data import preview_data

    samples = [sample for part in preview_data(recipe, tokenizer, count) for sample in part.packed.samples]
    return list(islice(cycle(samples), count))


def rounds_of(link: LoopbackLink, peer: Any) -> Iterator[Measured]:
    """Run round after round and yield their times; warm-up rounds are left out."""
    from recipes.training import StepDone, finetune

    every, before = link.local_steps, time.monotonic()
    with phases.measured(peer) as measuring:
        for event in finetune(link, peer, 0):
            if not isinstance(event, StepDone):
                continue
            now, spans = time.monotonic(), measuring.taken()
            if event.round >= WARM:
                codec = event.exchange_finished - event.exchange_started
                yield Measured((now - before) / every, codec / every, event.sent_bytes, spans)
            before = now


def plain_step(peer: Any, samples: Sequence[Any], steps: int) -> float:
    """Measure a step of a loop of the same trainer that exchanges nothing."""
    from recipes.data import batches
    from recipes.objectives import objective_of

    trainer, limit = peer.trainer, peer.recipe.training.max_grad_norm
    parts, terms = list(batches(samples, peer.micro_batch)), objective_of(peer.recipe).terms(samples)
    ends = []
    for _ in range(WARM + steps + 1):
        trainer.zero()
        for start in range(0, len(parts), trainer.at_once):
            trainer.backward(parts[start : start + trainer.at_once], terms)
        trainer.clip(limit)  # reads the norm: no step ends before its compute has
        trainer.step(peer.rate)
        ends.append(time.monotonic())
    return median(b - a for a, b in pairwise(ends[WARM:]))


def row(
    recipe: Recipe, device: str, peer: Any, lease: Sequence[Any], rounds: Sequence[Measured]
) -> dict[str, Any]:
    """Summarize the rounds by medians."""
    step, every = median(one.step_s for one in rounds), recipe.compression.local_steps
    spent = [phases.seconds(one.spans) for one in rounds]
    of = {name: median(one[name] for one in spent) / every for name in spent[0]}
    tokens = sum(sample.count for sample in lease) // every
    return {
        "recipe": recipe.name,
        "device": device,
        "parameters": peer.trainer.layout.size,
        "micro_batch": peer.micro_batch,
        "samples": len(lease) // every,
        "tokens": tokens,
        "step_s": step,
        "compute_s": of[phases.COMPUTE],
        "optimizer_s": of[phases.OPTIMIZER],
        "codec_s": median(one.codec_s for one in rounds),
        "join_s": of["join"],
        "phases": {name: of[name] for name in phases.EXCHANGE},
        "tokens_per_s": tokens / step,
        "packet_bytes": rounds[-1].packet,
        "slowest_s": max(one.step_s for one in rounds),
        "memory_bytes": most_memory(device),
    }


def most_memory(device: str) -> int | None:
    """Return the peak bytes allocated on the GPU, or of this process; None where not known."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else 1024 * used


def table(row: dict[str, Any]) -> Iterator[str]:
    per = f"{row['samples']:,} sequences, {row['tokens']:,} trained tokens, micro-batch {row['micro_batch']}"
    yield f"{'step':<9} {row['step_s']:.3f} s (the slowest {row['slowest_s']:.3f} s), {per}"
    yield f"{'compute':<9} {row['compute_s']:.3f} s"
    yield f"{'optimizer':<9} {row['optimizer_s']:.3f} s"
    yield f"{'codec':<9} {row['codec_s']:.3f} s, a packet of {megabytes(row['packet_bytes'])}"
    longest = sorted(row["phases"].items(), key=lambda one: -one[1])
    yield f"{'':<9} {', '.join(f'{name} {seconds:.3f}' for name, seconds in longest)}"
    yield f"{'join':<9} {row['join_s']:.3f} s, {row['join_s'] / row['step_s']:.1%} of the step"
    more = row["step_s"] / row["plain_s"] - 1
    yield f"{'plain':<9} {row['plain_s']:.3f} s without exchange; the step is {more:.1%} longer"
    yield f"{'speed':<9} {row['tokens_per_s']:,.0f} tokens/s on {row['device']}"
    if row["memory_bytes"]:
        yield f"{'memory':<9} {megabytes(row['memory_bytes'])} at most"


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("recipe", nargs="?", help="a shipped recipe, a YAML file, its address, or a model")
    asked.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="recipe fields")
    asked.add_argument("--data", help="jsonl, json, csv, parquet, txt, folder or hub id")
    asked.add_argument("--model", help="train this: a folder or a hub id")
    asked.add_argument("--steps", type=int, default=5, help="steps to measure, after one to warm up")
    asked.add_argument("--peers", type=int, help="peers that share a batch (default: swarm.min_peers)")
    asked.add_argument("--device", default="auto", help="auto, cpu, mps, xpu, cuda or cuda:N")
    asked.add_argument("--micro-batch-size", type=int, help="sequences in memory at once")
    asked.add_argument("--trust-remote-code", action="store_true", help="run Python code of the model here")
    asked.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = asked.parse_intermixed_args()
    isolate_model_code(args.trust_remote_code)
    request = RecipeRequest.of(args.recipe, args.overrides, args.data, args.model)
    check_trust(request.load(), args.trust_remote_code)
    request, said = request.choose(room_for([args.device]) if request.is_own else None)
    recipe = request.load()
    many = args.peers or recipe.swarm.min_peers
    found = measured(recipe, pick_device(args.device), args.micro_batch_size, args.steps, many)
    print(json.dumps({"v": 1} | found) if args.json else "\n".join([*said, *table(found)]))


if __name__ == "__main__":
    main()
