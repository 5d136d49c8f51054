"""CocktailSGD's Algorithm 1 in one process over `compress` alone: four workers, a byte-level NeoX, Python's
own documentation as text. For measurements of the compressor.
"""

from __future__ import annotations

from dataclasses import dataclass
from pydoc_data import topics

import torch
from torch.nn.utils import parameters_to_vector
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from compress import Cocktail, decode

WORKERS, BATCH, LENGTH, RATE = 4, 2, 128, 1e-3
BETA1, BETA2 = 0.9, 0.95


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    loss: float  # held-out loss of x', nats per byte
    bits_per_param: float  # mean over packets, up and down alike
    difference: torch.Tensor  # (P,) x_0 - x' before the last exchange: what the next packet is taken from


class Text:
    """Batches of bytes; every tenth stretch of 4,096 is held out."""

    def __init__(self) -> None:
        raw = torch.tensor(list("\n".join(topics.topics.values()).encode()), dtype=torch.uint8)
        stretches = raw[: len(raw) // 4096 * 4096].view(-1, 4096)
        held = torch.arange(len(stretches)) % 10 == 9
        self.train, self.held = stretches[~held].reshape(-1), stretches[held].reshape(-1)

    def batch(self, rows: int, generator: torch.Generator) -> torch.Tensor:
        """(rows, LENGTH + 1) bytes from anywhere."""
        starts = torch.randint(len(self.train) - LENGTH - 1, (rows, 1), generator=generator)
        return self.train[starts + torch.arange(LENGTH + 1)].long()

    def evaluation(self) -> torch.Tensor:
        """(rows, LENGTH) bytes, all that was held out."""
        return self.held[: len(self.held) // LENGTH * LENGTH].view(-1, LENGTH).long()


class Model:
    """A NeoX of 0.86 M parameters that lives in one flat vector."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = GPTNeoXForCausalLM(
            GPTNeoXConfig(
                vocab_size=256, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
                intermediate_size=512, max_position_embeddings=LENGTH,
            )
        )  # fmt: skip
        self.flat = parameters_to_vector(self.net.parameters()).detach().clone()
        self.gradient = torch.zeros_like(self.flat)
        start = 0
        for p in self.net.parameters():
            p.data = self.flat[start : start + p.numel()].view_as(p)
            p.grad = self.gradient[start : start + p.numel()].view_as(p)
            start += p.numel()

    def gradient_at(self, x: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        """(P,), overwritten by the next call."""
        self.flat.copy_(x)
        self.gradient.zero_()
        self.net(input_ids=batch[:, :-1], labels=batch[:, :-1]).loss.backward()
        return self.gradient

    @torch.no_grad()
    def loss_at(self, x: torch.Tensor, rows: torch.Tensor) -> float:
        """Mean over all rows."""
        self.flat.copy_(x)
        return sum(
            float(self.net(input_ids=part, labels=part).loss) * len(part) for part in rows.split(64)
        ) / len(rows)


class Worker:
    """x_i and its Adam."""

    def __init__(self, x: torch.Tensor, seed: int) -> None:
        self.x = x.clone()
        self.m, self.v, self.t = torch.zeros_like(x), torch.zeros_like(x), 0
        self.random = torch.Generator().manual_seed(seed)

    def step(self, gradient: torch.Tensor) -> torch.Tensor:
        """What Adam would subtract."""
        self.t += 1
        self.m.lerp_(gradient, 1 - BETA1)
        self.v.lerp_(gradient.square(), 1 - BETA2)
        scale = RATE / (1 - BETA1**self.t)
        return scale * self.m / ((self.v / (1 - BETA2**self.t)).sqrt() + 1e-8)


def train(mix: Cocktail, steps: int, seed: int = 1) -> Outcome:
    """Algorithm 1 with one step of staleness, the owner's error feedback included."""
    text, model = Text(), Model(seed)
    common = model.flat.clone()  # x'
    error = torch.zeros_like(common)  # e
    workers = [Worker(common, 1000 * seed + i) for i in range(WORKERS)]
    bits: list[float] = []
    for t in range(steps):
        s = mix.draw(len(common), seed, t)
        steps_taken = [w.step(model.gradient_at(w.x, text.batch(BATCH, w.random))) for w in workers]
        difference = workers[0].x - common
        packets = [mix.encode(s.difference(w.x, common)) for w in workers]
        sent = [decode(packet, s.m) for packet in packets]
        D = s.take(error) + sum(u.dense() for u in sent) / WORKERS
        packets.append(mix.encode(D))
        back = decode(packets[-1], s.m)
        s.put_(error, D - back.dense())
        s.add_(common, back)
        for w, own, update in zip(workers, sent, steps_taken, strict=True):
            s.add_(s.add_(w.x, back), own, alpha=-1)
            w.x -= update
        bits += [len(packet) * 8 / s.m * mix.sample for packet in packets]
    return Outcome(model.loss_at(common, text.evaluation()), sum(bits) / len(bits), difference)
