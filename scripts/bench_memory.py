"""The planner's memory beside a real peer's: one process a row, and what the system says it held at most.

    scripts/bench_memory                             # five architectures on the CPU
    scripts/bench_memory --only llama,gptj --rounds 3
    scripts/bench_memory --device cuda --only gptj-6b    # random weights

A peer is built and trains for some rounds against a hub that gives its own packets back. What is measured is,
on the CPU, the high-water mark of resident memory above what the process held before, with its libraries
loaded and its loops compiled; on a GPU the most that PyTorch had allocated.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# What glibc frees in blocks of this size goes back to the system: else its heap keeps holes, here 9 % of all.
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}
WORDS = 16000
COMMON = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SIZE = {"hidden_size": 320, "num_hidden_layers": 4, "num_attention_heads": 5, "intermediate_size": 1280}
GPTJ = {"n_embd": 320, "n_layer": 4, "n_head": 5, "rotary_dim": 32, "n_positions": 512}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-neox": ("GPTNeoXConfig", {**COMMON, **SIZE}),
    "gptj": ("GPTJConfig", {**COMMON, **GPTJ}),
    "llama": ("LlamaConfig", {**COMMON, **SIZE, "num_key_value_heads": 5}),
    "opt": ("OPTConfig", {**COMMON, **SIZE, "ffn_dim": 1280, "word_embed_proj_dim": 320}),
    "qwen3": ("Qwen3Config", {**COMMON, **SIZE, "num_key_value_heads": 1, "head_dim": 64}),
    "gptj-6b": ("GPTJConfig", {}),
    "tiny": (
        "LlamaConfig",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1},
    ),
}
SMALL = ("gpt-neox", "gptj", "llama", "opt", "qwen3")


def recipe_for(folder: Path, length: int, overrides: list[str]) -> Any:
    from recipes.recipe import load_recipe

    return load_recipe(
        "smoke", [f"data.max_length={length}", "data.packing=false", *overrides], model=str(folder)
    )


def write_model(name: str, folder: Path, device: str) -> None:
    """A model folder with random weights."""
    import torch
    import transformers

    from recipes.base import quiet

    kind, fields = MODELS[name]
    with torch.device(device), quiet():
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**fields))
        model.save_pretrained(folder)


def train(folder: Path, micro_batch: int, length: int, rounds: int, device: str, overrides: list[str]) -> int:
    """Build a peer, let it train; the trained parameters it has."""
    import numpy as np

    from cocktail_cli.mirror import Mirror
    from recipes.data import Sample, pack
    from recipes.finetune import build_peer, finetune
    from recipes.trained import load_trained

    lengths = [length] + [length // 2] * (micro_batch - 1)  # unequal, so that a mask is made
    tokens = [np.arange(n, dtype=np.int32) for n in lengths]
    lease = pack([Sample(t, t > 0) for t in tokens])
    recipe = recipe_for(folder, length, overrides)
    model = load_trained(recipe, folder, device)
    peer = build_peer(model, recipe, micro_batch)
    del model
    for _ in finetune(Mirror(lease, micro_batch, rounds), peer, 0):
        pass
    return peer.local.layout.size


def kib(what: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what + ":"):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"this system does not tell {what}")


def one(given: argparse.Namespace, name: str, answer: Connection) -> None:
    """In a process of its own: the measured bytes and the plan's."""
    import torch

    from recipes.cocktail_sgd import mix_of, rehearse
    from recipes.memory import Machine, memory_of

    with tempfile.TemporaryDirectory() as place:
        folder, tiny = Path(place) / "model", Path(place) / "tiny"
        write_model("tiny", tiny, "cpu")
        train(tiny, 1, 8, 2, given.device, [])
        rehearse(mix_of(recipe_for(tiny, 8, []).compression), 1 << 30)
        write_model(name, folder, given.device)
        gc.collect()
        if given.device == "cpu":
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            before = kib("VmRSS")
        else:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        train(folder, given.micro_batch, given.length, given.rounds, given.device, given.override)
        most = kib("VmHWM") if given.device == "cpu" else torch.cuda.max_memory_allocated()
        recipe = recipe_for(folder, given.length, given.override)
        planned = memory_of(recipe, folder, given.micro_batch, Machine(1 << 40, given.device != "cpu"))
        parts = {part.name: part.bytes for part in planned.parts}
        answer.send({"measured": most - before, "planned": planned.bytes, "parts": parts})


def measured(given: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """A row of each model, whose process has the libraries from this one where it can."""
    fork = given.device == "cpu"
    if fork:
        from transformers import AutoModelForCausalLM, get_scheduler  # noqa: F401

        import recipes.finetune
        import recipes.memory  # noqa: F401

        with suppress(ImportError):  # no numba here
            import compress.compiled  # noqa: F401
    context: Any = multiprocessing.get_context("fork" if fork else "spawn")
    for name in given.only.split(","):
        here, there = context.Pipe()
        process = context.Process(target=one, args=(given, name, there))
        process.start()
        there.close()
        try:
            yield name, here.recv()
        except EOFError:
            raise SystemExit(f"{name} ended without an answer") from None
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SMALL), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="tokens of the longest sample")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="of the recipe")
    given = parser.parse_args()
    if not GIVES_BACK.keys() <= os.environ.keys():  # read when a process starts
        os.execve(sys.executable, [sys.executable, __file__, *sys.argv[1:]], GIVES_BACK | dict(os.environ))
    rows = list(measured(given))
    names = list(dict.fromkeys(part for _, row in rows for part in row["parts"]))
    print(f"| MB | {' | '.join(names)} | planned | measured | planned / measured |")
    print("|---" * (len(names) + 4) + "|")
    for name, row in rows:
        cells = [f"{row['parts'].get(part, 0) / 1e6:.1f}" for part in names]
        cells += [f"{row['planned'] / 1e6:.1f}", f"{row['measured'] / 1e6:.1f}"]
        print(f"| {name} | {' | '.join(cells)} | {row['planned'] / row['measured']:.3f} |")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
