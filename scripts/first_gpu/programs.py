"""Programs of `scripts/gpu` that no command of cocktail is for. Each prints a JSON object.

python -m scripts.first_gpu.programs parity 100000000 --device cuda
python -m scripts.first_gpu.programs models FOLDER opt-1.3b gptj-6b --device cuda
python -m scripts.first_gpu.programs leaving FOLDER/opt-1.3b --device cuda
python -m scripts.first_gpu.programs trl FOLDER/llama-8b 512 liger --device cuda
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from scripts.first_gpu.stages import LORA_BATCH, LORA_MICRO_BATCH
from scripts.swarms.random_models import save_random

PACKETS = 50
FULL = 0.9  # share of the device's memory that is taken before a peer leaves
HANDOFF = 50_000_000  # bytes
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # random weights: no download
    "opt-1.3b": (
        "OPTConfig",
        {"hidden_size": 2048, "num_hidden_layers": 24, "ffn_dim": 8192, "num_attention_heads": 32,
         "word_embed_proj_dim": 2048},
    ),
    "gptj-6b": ("GPTJConfig", {}),
    "llama-8b": (
        "LlamaConfig",
        {"vocab_size": 128_256, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "intermediate_size": 14_336, "max_position_embeddings": 8192},
    ),
    "tiny": (
        "LlamaConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
         "max_position_embeddings": 512, "vocab_size": 320},
    ),
}  # fmt: skip
ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def parity(words: list[str], device: str) -> dict[str, Any]:
    """Fold the same packets into x' on the host and on the device: their fingerprints are equal."""
    from compress import Cocktail, fingerprint
    from recipes.algorithm import GlobalModel, Worker

    size = int(words[0])
    generator = torch.Generator().manual_seed(0)
    x0 = torch.randn(size, generator=generator) * 0.02
    compressor = Cocktail(random_ratio=0.1, topk_ratio=0.2, quant_bits=4)
    sender = Worker(x0.clone(), GlobalModel(x0.clone(), compressor, 1))
    models = [GlobalModel(x0.to(where, copy=True), compressor, 1) for where in ("cpu", device)]
    for _packet in range(PACKETS):
        sender.x.add_(torch.randn(size, generator=generator), alpha=1e-4)
        packet = sender.start().packet
        for model in (sender.global_model, *models):
            model.apply(packet)
    sums = {model.fingerprint for model in models} | {fingerprint(models[1].vector)}
    return {"packets": PACKETS, "parameters": size, "equal": len(sums) == 1}


def models(words: list[str], device: str) -> dict[str, Any]:
    """Write folders of models with random weights, in bfloat16, and the builtin tokenizer."""
    folder, total = Path(words[0]), 0
    for name in words[1:]:
        config, fields = MODELS[name]
        total += save_random(folder / name, config, device, "bfloat16", **ENDS, **fields)
    return {"models": words[1:], "gigabytes": round(total / 1e9, 2)}


def leaving(words: list[str], device: str) -> dict[str, Any]:
    """Hand over, keep and restore a peer whose device is nearly full: bytes a parameter above those held."""
    from recipes.config import load_recipe
    from recipes.data import pack_samples, preview_data
    from recipes.models import load_tokenizer, load_trained
    from recipes.training import build_peer, finetune, peer_checkpoint
    from scripts.swarms.loopback_link import LoopbackLink

    recipe = load_recipe("smoke", ["max_length=64", "optim=adamw_torch"], model=words[0])
    tokenizer = load_tokenizer(recipe.model, Path(words[0]))
    samples = [s for part in preview_data(recipe, tokenizer, 4) for s in part.packed.samples][:4]

    def new() -> Any:
        return build_peer(load_trained(recipe, Path(words[0]), device), recipe, 1)

    peer = new()
    for _event in finetune(LoopbackLink(pack_samples(samples), 4, 2), peer, 0):
        pass
    parameters, before = peer.worker.x.numel(), peer.worker.residual_norm()
    filler = fill(device)
    found: dict[str, Any] = {"parameters": parameters, "filled": 0 if filler is None else filler.numel()}
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "checkpoint"
        found["handoff"] = taken(device, parameters, partial(peer.worker.handoff, HANDOFF))
        found["keep"] = taken(device, parameters, partial(peer_checkpoint.keep, peer, path, {}))
        global_model = peer.worker.global_model.fingerprint
        peer = filler = None
        other = new()
        found["restore"] = taken(device, parameters, partial(peer_checkpoint.restore, other, path))
    same = other.worker.global_model.fingerprint == global_model
    return found | {"equal": same and other.worker.residual_norm() == before}


def trl(words: list[str], device: str) -> dict[str, Any]:
    """Train adapters like the stage of cocktail beside it, by TRL's SFTTrainer, plain or with liger."""
    import pydoc_data.topics

    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    length, ends, on_gpu = int(words[1]), list[float](), device != "cpu"

    class Clock(TrainerCallback):
        def on_step_end(self, *_given: object, **_more: object) -> None:
            if on_gpu:
                torch.cuda.synchronize(device)
            ends.append(time.monotonic())

    config = SFTConfig(
        output_dir=tempfile.gettempdir(),  # where nothing is saved
        max_length=length,
        packing=True,
        packing_strategy="wrapped",
        per_device_train_batch_size=LORA_MICRO_BATCH,
        gradient_accumulation_steps=LORA_BATCH // LORA_MICRO_BATCH,
        max_steps=5,
        gradient_checkpointing=True,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        use_liger_kernel="liger" in words,
        model_init_kwargs={"dtype": "bfloat16"},
        report_to="none",
        save_strategy="no",
    )
    rows = Dataset.from_dict({"text": [*pydoc_data.topics.topics.values()]})
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    SFTTrainer(words[0], args=config, train_dataset=rows, peft_config=adapters, callbacks=[Clock()]).train()
    step = median(after - before for before, after in pairwise(ends[1:]))
    most = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    return {"tokens_per_s": LORA_BATCH * length / step, "step_s": step, "memory_bytes": most}


def fill(device: str) -> torch.Tensor | None:
    """Take memory of the device until it is nearly full; None on the host."""
    if device == "cpu":
        return None
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return torch.empty(max(0, int(free - (1 - FULL) * total)), dtype=torch.uint8, device=device)


def taken(device: str, parameters: int, work: Any) -> str:
    """Do some work: the bytes a parameter that it took above what was held, and its seconds."""
    if device != "cpu":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    held, started = 0 if device == "cpu" else torch.cuda.memory_allocated(device), time.monotonic()
    work()
    most = 0 if device == "cpu" else torch.cuda.max_memory_allocated(device)
    return f"{(most - held) / parameters:.3f} B, {time.monotonic() - started:.1f} s"


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    programs = {"parity": parity, "models": models, "leaving": leaving, "trl": trl}
    asked.add_argument("program", choices=programs)
    asked.add_argument("words", nargs="+")
    asked.add_argument("--device", default="cuda")
    args = asked.parse_args()
    print(json.dumps(programs[args.program](args.words, args.device)))


if __name__ == "__main__":
    main()
