"""Tokens a second and memory of a run of one peer, beside `trl sft` on the same model, data and batch.

    scripts/start --test scripts.bench.single_peer --steps 60 --times 3

`cocktail launch --peers 1` compresses and exchanges through a real hub on the same machine; `trl sft` is
TRL's SFTTrainer. Model, rows, sequence length, packing, micro-batch, optimizer and precision are equal. They
run in turn, `--times` times. The clock is the reader's: tokens between step `--warm-up` and the last. Memory
is the peak of the process that trains, and of all processes together (private bytes, sampled every 0.2 s).
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from argparse import SUPPRESS, Namespace
from pathlib import Path

import psutil

from scripts.swarms.lab import parser
from scripts.swarms.processes import Process, say
from scripts.swarms.random_models import save_random


class Memory(threading.Thread):
    """The peaks of a process and its children, in bytes."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.root, self.largest, self.all, self.over = psutil.Process(pid), 0, 0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self.over.wait(0.2):
            used = []
            try:
                for process in [self.root, *self.root.children(recursive=True)]:
                    used.append(process.memory_full_info().uss)
            except psutil.Error:
                continue  # one of them ended meanwhile
            self.largest, self.all = max(self.largest, *used), max(self.all, sum(used))


def prepare(folder: Path, args: Namespace) -> None:
    """Save a Llama of `--hidden` and `--layers` with the builtin tokenizer, and rows of Python's own help."""
    import pydoc_data.topics

    sizes = {"vocab_size": 320, "hidden_size": args.hidden, "intermediate_size": 4 * args.hidden}
    sizes |= {"num_hidden_layers": args.layers, "num_attention_heads": args.hidden // 64}
    save_random(folder / "model", "LlamaConfig", max_position_embeddings=args.length, **sizes)
    rows = [json.dumps({"text": text}) for text in pydoc_data.topics.topics.values()]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")


def train_with_trl(folder: Path, args: Namespace) -> None:
    """Train with TRL as `trl sft` does, and say when each step ended."""
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Say(TrainerCallback):
        def on_step_end(self, *_given: object, **_more: object) -> None:
            say("step")

    config = SFTConfig(
        output_dir=str(folder / "trl"),
        max_length=args.length,
        packing=True,
        packing_strategy="wrapped",
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=args.accumulate,
        max_steps=args.steps,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=args.device == "cpu",
        model_init_kwargs={"dtype": "float32"},
        report_to="none",
        save_strategy="no",
        logging_steps=10,
    )
    rows = load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train")
    SFTTrainer(str(folder / "model"), args=config, train_dataset=rows, callbacks=[Say()]).train()


def launch(folder: Path, args: Namespace) -> list[str]:
    """Build the command of the same training as a run of one peer."""
    command = [sys.executable, "-m", "cocktail_cli", "launch", "--json", "--peers", "1", "--port", "0"]
    command += ["--bind", "127.0.0.1", "--device", args.device, "-o", str(folder / f"run-{time.time_ns()}")]
    command += ["--model", str(folder / "model"), "--data", str(folder / "rows.jsonl")]
    recipe = {
        "max_length": args.length,
        "packing": "true",
        "packing_strategy": "wrapped",
        "global_batch_size": args.micro_batch * args.accumulate,
        "per_device_train_batch_size": args.micro_batch,
        "max_steps": args.steps,
        "activation_checkpointing": "false",
        "dtype": "float32",
        "val_set_size": 0,
        "save_steps": args.steps,
    }
    return [*command, *(f"{key}={value}" for key, value in recipe.items())]


def measure(name: str, command: list[str], folder: Path, args: Namespace) -> dict[str, float]:
    """Run a command to its end: tokens a second after the warm-up, and the peaks of memory."""
    process = Process(command, logs=folder / f"{name}-{time.time_ns()}", stdin="", HF_HUB_OFFLINE="1")
    memory = Memory(process.pid)
    process.end(timeout=3600)
    memory.over.set()
    steps = [line["came"] for line in process.heard("step")]
    if process.process.returncode != 0 or len(steps) < args.steps:
        raise SystemExit(
            f"{name} ended with {process.process.returncode} after {len(steps)} steps: see {folder}"
        )
    tokens = args.micro_batch * args.accumulate * args.length * (args.steps - args.warm_up)
    seconds = steps[args.steps - 1] - steps[args.warm_up - 1]
    return {"tokens_s": tokens / seconds, "largest": memory.largest / 1e6, "all": memory.all / 1e6}


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--hidden", type=int, default=256)
    asked.add_argument("--layers", type=int, default=4)
    asked.add_argument("--length", type=int, default=256, help="tokens a sequence")
    asked.add_argument("--micro-batch", type=int, default=4, help="sequences a pass")
    asked.add_argument("--accumulate", type=int, default=2, help="passes a step")
    asked.add_argument("--steps", type=int, default=60)
    asked.add_argument("--warm-up", type=int, default=10, help="steps that are not counted")
    asked.add_argument("--times", type=int, default=3)
    asked.add_argument("--device", default="cpu")
    asked.add_argument("--trl", metavar="FOLDER", help=SUPPRESS)
    args = asked.parse_args()
    if args.trl:
        train_with_trl(Path(args.trl), args)
        return
    folder = Path(tempfile.mkdtemp(prefix="single-peer-"))
    prepare(folder, args)
    trl = [sys.executable, "-m", "scripts.bench.single_peer", *sys.argv[1:], "--trl", str(folder)]
    rows: dict[str, list[dict[str, float]]] = {"TRL": [], "cocktail": []}
    for _time in range(args.times):
        rows["TRL"].append(measure("trl", trl, folder, args))
        rows["cocktail"].append(measure("cocktail", launch(folder, args), folder, args))
    print("| | tokens/s | MB, largest process | MB, all processes |\n|---|---|---|---|")
    for name, found in rows.items():
        print(f"| {name} | " + " | ".join(cell(found, key) for key in ("tokens_s", "largest", "all")) + " |")
    pairs = zip(rows["cocktail"], rows["TRL"], strict=True)
    ratios = [ours["tokens_s"] / theirs["tokens_s"] for ours, theirs in pairs]
    print(
        f"tokens/s, cocktail / TRL: {statistics.median(ratios):.3f} {[round(ratio, 3) for ratio in ratios]}"
    )


def cell(found: list[dict[str, float]], key: str) -> str:
    return f"{statistics.median(row[key] for row in found):,.0f}"


if __name__ == "__main__":
    main()
