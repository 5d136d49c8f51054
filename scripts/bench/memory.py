"""The planner's memory beside a real peer's, part by part, in a process for each model.

    scripts/bench_memory                             # five architectures on the CPU
    scripts/bench_memory --only llama,gptj --override lora.lora_r=8
    scripts/bench_memory --device cuda --only gptj-6b    # random weights

A peer is built and trains for some rounds against a hub that gives its own packets back. The whole is, on the
CPU, the high-water mark of resident memory above what the process held before, with its libraries loaded and
its loops compiled; on a GPU the most that PyTorch had allocated. Its parts are measured one by one, in
each of the last three rounds:

    activations   what is held more when the logits are about to be made
    logits        the high-water mark of that forward and backward pass, above the activations
    exchange      that of encoding, alone: the compute waits for it; or of taking in
    all others    at the end: by how much less is held when the system is given back the pages of its tensors
    rest          what is still held then, was not before, and belongs to no part
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import mmap
import multiprocessing
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from scripts.swarms import lab
from scripts.swarms.processes import status_bytes
from scripts.swarms.random_models import save_random

# What glibc frees in blocks of this size goes back to the system: else its heap keeps holes, here 9 % of all.
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}
COMMON = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
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
MEASURED = 3  # rounds, by part
SMALL = ("gpt-neox", "gptj", "llama", "opt", "qwen3")


def recipe_for(folder: Path, length: int, overrides: list[str]) -> Any:
    from recipes.config.loader import load_recipe

    return load_recipe(
        "smoke", [f"data.max_length={length}", "data.packing=false", *overrides], model=str(folder)
    )


def write_model(name: str, folder: Path, device: str, words: int) -> None:
    """A model folder with random weights."""
    config, fields = MODELS[name]
    save_random(folder, config, device, **fields | ({"vocab_size": words} if name in SMALL else {}))


class Host:
    """Host memory: what the system says this process holds, pages of libraries not counted."""

    def __init__(self) -> None:
        self.libraries = 0
        self.libraries = self.files()

    def held(self) -> int:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return self.now()

    def now(self) -> int:
        return status_bytes("VmRSS") - self.files()

    def files(self) -> int:
        return status_bytes("RssFile") - self.libraries

    def begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def most(self) -> int:
        """The most since `begin`."""
        return status_bytes("VmHWM") - self.files()

    def give_back(self, storages: Iterable[Any]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        for storage in storages:
            first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            size = (storage.data_ptr() + storage.nbytes() - first) // mmap.PAGESIZE * mmap.PAGESIZE
            pages = ctypes.c_void_p(first), ctypes.c_size_t(size)
            if size > 0 and libc.madvise(*pages, mmap.MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), "madvise")


class Cuda:
    """Device memory: what PyTorch has allocated."""

    def __init__(self) -> None:
        import torch

        self.cuda = torch.cuda

    def held(self) -> int:
        gc.collect()
        return self.now()

    def now(self) -> int:
        return self.cuda.memory_allocated()

    def begin(self) -> None:
        self.cuda.reset_peak_memory_stats()

    def most(self) -> int:
        return self.cuda.max_memory_allocated()

    def give_back(self, storages: Iterable[Any]) -> None:
        for storage in storages:
            storage.resize_(0)


@dataclass
class Watch:
    """Measures the parts of a peer in each of its last rounds, and the whole in those before.

    Of what is found the middle counts: now and then the allocator takes 4 to 10 MB more, and they stay.
    """

    peer: Any
    memory: Host | Cuda
    before: int  # what was held without the peer
    whole: int = 0
    found: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    empty: int = 0  # held between two rounds

    def begin(self) -> None:
        """Begin to measure the parts, for all rounds to come."""
        self.whole = self.memory.most() - self.before
        local, worker = self.peer.trainer, self.peer.worker
        zero, backward = local.zero, local.backward
        worker.start = self.most_of("encoding", worker.start)
        worker.follow = self.most_of("taking in", worker.follow)
        local.zero = lambda share=1.0: (self.peer.encoded.wait(), zero(share))
        local.backward = lambda *given: self.passing(backward, *given)

    def most_of(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*given: Any, **named: Any) -> Any:
            self.memory.begin()
            result = function(*given, **named)
            self.found[what].append(self.memory.most() - self.empty)
            return result

        return watched

    def passing(self, backward: Callable[..., float], *given: Any) -> float:
        """A micro-batch, twice: in its first pass the encoder's thread lets go of what it had."""
        backward(*given)
        before = self.memory.held()
        kept: list[int] = []
        head = self.peer.trainer.model.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda *_: kept.append(self.memory.now() - before))
        self.memory.begin()
        loss = backward(*given)
        hook.remove()
        self.found["activations"].append(kept[0])
        self.found["logits"].append(self.memory.most() - before - kept[0])
        return loss

    def parts(self) -> dict[str, int]:
        found = {name: sorted(of)[len(of) // 2] for name, of in self.found.items()}
        taken = found.pop("taking in") - found["activations"] - found["logits"]
        found |= {"whole": self.whole, "exchange": max(found.pop("encoding"), taken)}
        for name, tensors in tensors_of(self.peer).items():
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
            held = self.memory.held()
            self.memory.give_back(storages.values())
            found[name] = held - self.memory.held()
        return found | {"rest": self.memory.held() - self.before}


def tensors_of(peer: Any) -> dict[str, list[Any]]:
    """List what a peer holds on its device all the time, under the planner's names."""
    import torch

    local, flat, model = peer.trainer, peer.trainer.flat, peer.trainer.model
    frozen = [p for p in model.parameters() if not p.requires_grad]
    found = {
        "base": [*frozen, *model.buffers()],
        "weights": [flat.residual if hasattr(flat, "residual") else flat.vector],
        "copy": [flat.copy],
        "common": [peer.worker.global_model.vector],
        "gradient": [flat.grad],
        "optimizer": [value for state in local.optimizer.state.values() for value in state.values()],
    }
    return {
        name: [t for t in all_ if isinstance(t, torch.Tensor) and t.device == local.device]
        for name, all_ in found.items()
    }


def leases(given: argparse.Namespace, words: int) -> list[bytes]:
    """Make samples of unequal lengths for each round, so that a mask is made, and of other tokens each round:
    with the same ones all steps of Adam are equally long."""
    import numpy as np

    from recipes.data.corpus import Sample
    from recipes.data.samples import pack_samples

    drawn = np.random.default_rng(0)
    lengths = [given.length] + [given.length // 2] * (given.micro_batch - 1)
    tokens = [[drawn.integers(0, words, n, np.int32) for n in lengths] for _ in range(given.rounds)]
    return [pack_samples([Sample(t, np.arange(len(t)) > 0) for t in of]) for of in tokens]


def train(folder: Path, given: argparse.Namespace, memory: Host | Cuda) -> dict[str, int]:
    """Build a peer and let it train; the parts that it had."""
    from recipes.models.trainable import load_trained
    from recipes.training.loop import build_peer, finetune
    from scripts.swarms.loopback_link import LoopbackLink

    recipe = recipe_for(folder, given.length, given.override)
    before = memory.held()
    memory.begin()
    model = load_trained(recipe, folder, given.device)
    peer = build_peer(model, recipe, given.micro_batch, device=given.device)
    del model
    watch = Watch(peer, memory, before)
    link, waiting = LoopbackLink(b"", given.micro_batch, given.rounds), leases(given, peer.vocabulary)
    opened = link.next_round

    def next_round() -> Any:
        round = opened()
        if round is not None:
            link.lease = waiting[round.round]
        if round is not None and round.round == given.rounds - MEASURED:
            watch.begin()
        watch.empty = memory.held()
        return round

    link.next_round = next_round
    for _ in finetune(link, peer, 0):
        pass
    return watch.parts()


def warm(given: argparse.Namespace, place: Path) -> None:
    """Load, import and compile what is needed when it is first used."""
    from recipes.algorithm.compressor import compressor_of, warm_up_codec

    small = argparse.Namespace(**vars(given) | {"micro_batch": 1, "length": 8, "rounds": 5})
    write_model("tiny", place / "tiny", "cpu", 0)
    gc.freeze()  # what is imported is not searched each time
    train(place / "tiny", small, Host() if given.device == "cpu" else Cuda())
    warm_up_codec(compressor_of(recipe_for(place / "tiny", 8, []).compression), 1 << 30)


def one(given: argparse.Namespace, name: str, answer: Connection) -> None:
    """Send the plan's bytes and the measured ones, by part, from a process of its own."""
    from recipes.planning.memory_plan import Machine, plan_memory

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        if given.device != "cpu":  # else it was forked from one that is warm
            warm(given, Path(place))
        write_model(name, folder, given.device, given.words)
        found = train(folder, given, Host() if given.device == "cpu" else Cuda())
        recipe = recipe_for(folder, given.length, given.override)
        planned = plan_memory(recipe, folder, given.micro_batch, Machine(1 << 40, given.device != "cpu"))
        parts = {part.name: part.bytes for part in planned.parts if not part.host}
        answer.send({"planned": parts | {"whole": planned.bytes}, "measured": found})


def measured(given: argparse.Namespace) -> Iterator[tuple[str, dict[str, dict[str, int]]]]:
    """Measure each model in a process that has the libraries from this one where it can."""
    fork = given.device == "cpu"
    if fork:
        import torch

        torch.set_num_threads(1)  # a process with more cannot fork
        with tempfile.TemporaryDirectory() as place:
            warm(given, Path(place))
        gc.collect()
        gc.freeze()
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


def table(rows: dict[str, dict[str, dict[str, int]]]) -> Iterator[str]:
    """Three lines a model; of a part that is less than 0.05 MB none is told."""
    order = ("base", "weights", "copy", "common", "gradient", "optimizer", "activations", "logits")
    order += ("exchange", "rest", "whole")
    worth = [n for n in order if any(max(of.get(n, 0) for of in row.values()) > 5e4 for row in rows.values())]
    yield f"| MB | {' | '.join(worth)} |"
    yield "|---" * (len(worth) + 1) + "|"
    for name, row in rows.items():
        for kind, of in row.items():
            yield f"| {name}, {kind} | {' | '.join(f'{of.get(part, 0) / 1e6:.1f}' for part in worth)} |"
        planned, found = row["planned"], row["measured"]
        ratios = [f"{planned[n] / found[n]:.3f}" if n in planned and found.get(n) else "" for n in worth]
        yield f"| {name}, planned / measured | {' | '.join(ratios)} |"


def main() -> None:
    parser = lab.parser(__doc__)
    parser.add_argument("--only", default=",".join(SMALL), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="tokens of the longest sample")
    parser.add_argument("--words", type=int, default=16000, help="in the vocabulary of the small ones")
    parser.add_argument("--rounds", type=int, default=5, help="the last 3 are measured by part")
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="of the recipe")
    given = parser.parse_args()
    if not GIVES_BACK.keys() <= os.environ.keys():  # read when a process starts
        again = [sys.executable, "-m", "scripts.bench.memory", *sys.argv[1:]]
        os.execve(sys.executable, again, GIVES_BACK | dict(os.environ))
    for line in table(dict(measured(given))):
        print(line)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
