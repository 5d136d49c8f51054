"""The work that cocktail and its rivals do in the same measurement: model, data, duration of a step.

The model is a Llama of one layer, fine-tuned whole with AdamW. A step's gradient is a real one, and takes
COMPUTE_S seconds a parameter, most of them slept: that stands for the GPUs. So two cores carry four peers.

    GPT-J-6B on 8 A100, 4 machines: 6.05e9 parameters, 24 GB of FP16 both ways and 10.76 s a step and machine
    here: P parameters, COMPUTE_S P seconds, and lines MBIT times as fast as the ones they stand for

so compute : FP16 bytes : line is as there, whatever P is. Round trips are as much shorter as the longest
step is, about.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scripts import ROOT

GPTJ, GPTJ_S, GPTJ_TOKENS = 6.05e9, 10.76, 262_144  # parameters; seconds and tokens of a step
COMPUTE_S = 2.0e-7  # a parameter
MBIT = (GPTJ_S / GPTJ) / COMPUTE_S  # of a line's rate
RTT = 5.0  # ms, for the 20 of a home line
PEERS = 4  # as many as two cores carry at COMPUTE_S
BATCH, LENGTH, VOCABULARY = 8, 16, 2048  # sequences of a peer's step, and their tokens
# A step of 65 k tokens a machine is several backward passes; DDP exchanges during the last one. It is taken
# to have all gradients when that one begins, which is the best that it could have.
LAST_BACKWARD = 1 / 8 * 2 / 3  # of a step's compute
KEPT = 30  # models that a comparison may go back
WIDTHS = (1024, 256, 128, 64)  # of the model: the largest whose exchange is waited for is measured


def parameters(width: int) -> int:
    """Count P: attention and three matrices of the MLP, one embedding for both ends, three norms."""
    return 4 * width**2 + 3 * width * 2 * width + VOCABULARY * width + 3 * width


def compute_s(width: int) -> float:
    return COMPUTE_S * parameters(width)


def make_model(width: int) -> nn.Module:
    """Make the model, the same at every peer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": width, "intermediate_size": 2 * width}
    sizes |= {"num_attention_heads": max(1, width // 64), "max_position_embeddings": 128}
    config = LlamaConfig(num_hidden_layers=1, tie_word_embeddings=True, **sizes)
    return LlamaForCausalLM(config)


def save_model(width: int, folder: Path) -> None:
    """Save it for `cocktail launch`, with the builtin tokenizer."""
    from transformers import AutoTokenizer

    make_model(width).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "recipes" / "builtin" / "tiny-gpt-neox").save_pretrained(folder)


class Work:
    """One peer's model and steps."""

    def __init__(self, width: int, rank: int, seconds: float | None = None) -> None:
        self.width, self.seconds = width, compute_s(width) if seconds is None else seconds
        self.model = make_model(width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._random = torch.Generator().manual_seed(1 + rank)

    def gradient(self, model: nn.Module, until: float) -> None:
        """Compute `.grad` of this peer's next sequences. The forward pass is over at `until`."""
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=self._random)
        loss = model(input_ids=tokens, labels=tokens).loss
        sleep_until(until)
        loss.backward()

    @property
    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: str | None, rank: int, number: int) -> None:
        """Save the model after a step, for a comparison; only the newest ones stay."""
        if folder is None:
            return
        vector = torch.nn.utils.parameters_to_vector(self.model.parameters()).detach()
        torch.save(vector, Path(folder, f"{rank}-{number}.part"))
        Path(folder, f"{rank}-{number}.part").rename(Path(folder, f"{rank}-{number}.pt"))
        Path(folder, f"{rank}-{number - KEPT}.pt").unlink(missing_ok=True)


def sleep_until(moment: float) -> None:
    while (left := moment - time.monotonic()) > 0:
        time.sleep(left)


def orders() -> Iterator[dict[str, Any]]:
    """Read the phases of a measurement from stdin, a line each."""
    return map(json.loads, sys.stdin)


def bytes_sent() -> int:
    """Count what this network namespace has sent, on all but its loopback."""
    rows = [line.split(":") for line in Path("/proc/self/net/dev").read_text().splitlines() if ":" in line]
    return sum(int(counts.split()[8]) for name, counts in rows if name.strip() != "lo")
