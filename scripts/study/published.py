"""Train with compressed methods of others as published, on the model and tokens of the quality study.

    scripts/start scripts.study.published --method econtrol --control .1 --rates 4e-3 8e-3 --seeds 1
    scripts/start scripts.study.published --method scafcom --members 4 --apart 1 --control .2 --rates 4e-3

All peers are one tensor (N, P), their gradients are taken at x', and one optimizer for all steps along what
the method makes of them. Packets are made in plain torch. Their bits are counted, those of the way up alone:
the sum comes down as it is, except in `onebit`. C is the top K of a round's sample, contractive as the papers
want it. A training run is a row of `published.jsonl`.

dense      u <- m u + mean of g: momentum SGD, or Adam, without compression
feedback   v_i <- e_i + g_i;  send C(v_i);  e_i <- v_i - C(v_i) (Seide et al., 2014)
dgc        u_i <- m u_i + g_i;  v_i <- v_i + u_i;  send the top K of v_i;  both become 0 there. While it warms
           up K is a quarter, a 16th, a 64th, a 256th (Lin et al., 2018, sections 3.2 and 3.3)
onebit     m_i <- b1 m + (1 - b1) g_i;  send C(m_i + e_i);  m <- C of their mean, with an e of its own;
           x' <- x' - m / sqrt(v). While it warms up it is Adam; then v stays (1-bit Adam, Tang et al., 2021)
econtrol   send C(control e_i + g_i - h_i);  h_i <- h_i + that;  e_i <- e_i + g_i - h_i;  x' moves along the
           mean of h_i (EControl, Gao et al., 2024)
scafcom    u_i <- u_i + control (g_i - u_i);  send C(u_i - c_i);  c_i <- c_i + that;  x' moves along c and the
           mean of the members' packets;  c <- mean of c_i (SCAFCOM, Huang et al., 2024; one local step)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from recipes.training.optimizers import learning_rate
from scripts.report import rows
from scripts.study.levers import Adam, Ring, bits_of, largest, quantized
from scripts.study.model import Models
from scripts.study.train import Setting, Size, Text, base, documentation, halves_of, new_model
from scripts.swarms.lab import parser


@dataclass(frozen=True)
class Way:
    """One method and its numbers."""

    method: str = "econtrol"
    optim: str = "adam"  # adam or sgd: what steps along the estimate
    peers: int = 8
    members: int = 0  # peers of a round, drawn anew each time; 0: all
    apart: int = 0  # 1: each peer draws its samples from a part of the text of its own
    rows: int = 8  # samples of a step
    share: float = 1.0  # p
    keep: float = 0.0053  # K
    bits: int = 16
    momentum: float = 0.9  # of dense and dgc with sgd, and beta1 of Adam
    control: float = 0.1  # eta of EControl, beta of SCAFCOM
    warm: int = 0  # first steps, of dgc and onebit


class Compressor:
    """C for a round's packets (S, P), which share one sample."""

    def __init__(self, way: Way, size: int, seed: int) -> None:
        self.way, self.ring, self.size = way, Ring(size, way.share, seed), size
        self.bits = 0.0  # a parameter, of all rounds

    def __call__(self, v: Tensor, keep: float = 0.0) -> Tensor:
        """Compress each row of v (S, P); keep: in the place of the usual K."""
        keep, at = keep or self.way.keep, self.ring.draw()
        part = v[:, at]
        if keep < 1:
            kept = largest(part, keep, self.way.bits, torch.ones_like(part))
        else:
            kept = quantized(part, self.way.bits)
        self.bits += bits_of(len(at) / self.size, keep, self.way.bits)
        return torch.zeros_like(v).index_copy_(1, at, kept)


class Method(Protocol):
    def estimate(self, gradients: Tensor, members: Tensor) -> Tensor:
        """Do a round with the gradients (S, P) of these peers (S,); returns what x' is to go against (P,)."""


class Dense:
    def __init__(self, way: Way, size: int, compressor: Compressor) -> None:
        self.momentum = way.momentum if way.optim == "sgd" else 0.0
        self.u, self.compressor = torch.zeros(size), compressor

    def estimate(self, gradients: Tensor, members: Tensor) -> Tensor:
        self.compressor.bits += 32
        self.u.mul_(self.momentum).add_(gradients.mean(0))
        return self.u.clone()


class Feedback:
    def __init__(self, way: Way, size: int, compressor: Compressor) -> None:
        self.e, self.compressor = torch.zeros(way.peers, size), compressor

    def estimate(self, gradients: Tensor, members: Tensor) -> Tensor:
        wanted = self.e[members] + gradients
        sent = self.compressor(wanted)
        self.e[members] = wanted - sent
        return sent.mean(0)


class Dgc:
    def __init__(self, way: Way, size: int, compressor: Compressor) -> None:
        self.way, self.compressor, self.steps = way, compressor, 0
        self.u, self.v = torch.zeros(way.peers, size), torch.zeros(way.peers, size)

    @property
    def keep(self) -> float:
        """K of this step: by quarters while it warms up, never less than the usual K."""
        quarters = 1 + 4 * self.steps // max(self.way.warm, 1)
        return max(self.way.keep, 0.25**quarters if self.steps < self.way.warm else 0.0)

    def estimate(self, gradients: Tensor, members: Tensor) -> Tensor:
        u = self.way.momentum * self.u[members] + gradients
        v = self.v[members] + u
        sent = self.compressor(v, self.keep)
        unsent = sent == 0
        self.u[members], self.v[members] = u * unsent, v * unsent
        self.steps += 1
        return sent.mean(0)


class OnebitAdam:
    """Adam is in it, so that the optimizer that steps along it is to be SGD.

    Where v is 0 no gradient came while it warmed up. There m is masked, as DeepSpeed does: 1 bit is never 0.
    """

    def __init__(self, way: Way, size: int, compressor: Compressor, beta2: float = 0.999) -> None:
        self.way, self.compressor, self.beta2, self.steps = way, compressor, beta2, 0
        self.m, self.v = torch.zeros(size), torch.zeros(size)
        self.e, self.error = (
            torch.zeros(way.peers, size),
            torch.zeros(size),
        )  # at the peers, where sums are made

    def estimate(self, gradients: Tensor, members: Tensor) -> Tensor:
        beta1 = self.way.momentum
        self.steps += 1
        if self.steps <= self.way.warm:
            self.compressor.bits += 32
            mean = gradients.mean(0)
            self.m.lerp_(mean, 1 - beta1)
            self.v.mul_(self.beta2).addcmul_(mean, mean, value=1 - self.beta2)
        else:
            wanted = torch.lerp(self.m.expand_as(gradients), gradients, 1 - beta1) + self.e[members]
            sent = self.compressor(wanted)
            self.e[members] = wanted - sent
            total = sent.mean(0) + self.error
            self.m = quantized(total[None], self.way.bits)[0]
            self.error = total - self.m
            self.m = self.m * (self.v > 0)
        learnt = 1 - self.beta2 ** min(self.steps, self.way.warm)
        return self.m / (1 - beta1**self.steps) / ((self.v / learnt).sqrt() + 1e-8)


class EControl:
    def __init__(self, way: Way, size: int, compressor: Compressor) -> None:
        self.eta, self.compressor = way.control, compressor
        self.e, self.h = torch.zeros(way.peers, size), torch.zeros(way.peers, size)

    def estimate(self, gradients: Tensor, members: Tensor) -> Tensor:
        self.h[members] += self.compressor(self.eta * self.e[members] + gradients - self.h[members])
        self.e[members] += gradients - self.h[members]
        return self.h[members].mean(0)


class Scafcom:
    def __init__(self, way: Way, size: int, compressor: Compressor) -> None:
        self.beta, self.peers, self.compressor = way.control, way.peers, compressor
        self.u, self.c = torch.zeros(way.peers, size), torch.zeros(way.peers, size)
        self.common = torch.zeros(size)  # c, which everybody has

    def estimate(self, gradients: Tensor, members: Tensor) -> Tensor:
        self.u[members] = torch.lerp(self.u[members], gradients, self.beta)
        sent = self.compressor(self.u[members] - self.c[members])
        self.c[members] += sent
        found = self.common + sent.mean(0)
        self.common += sent.sum(0) / self.peers
        return found


METHODS: dict[str, Callable[[Way, int, Compressor], Method]] = {
    "dense": Dense,
    "feedback": Feedback,
    "dgc": Dgc,
    "onebit": OnebitAdam,
    "econtrol": EControl,
    "scafcom": Scafcom,
}


def texts_of(way: Way, text: Text) -> list[Text]:
    """Give each peer the text that it draws from: all of it, or a part of its own."""
    if not way.apart:
        return [text] * way.peers
    part = len(text.raw) // way.peers
    return [text.slice(i * part, (i + 1) * part) for i in range(way.peers)]


def train(size: Size, way: Way, rate: float, seed: int, folder: Path) -> rows.Row:
    """Train one cell; returns its losses, and how many times fewer bits than FP16 went up."""
    text, held = documentation(size.length)
    flat, x = new_model(size), base(size, folder)
    models, texts = Models(flat.model.config, flat.layout, size.length), texts_of(way, text)
    compressor = Compressor(way, len(x), seed)
    method, adam = METHODS[way.method](way, len(x), compressor), Adam(x.shape, way.momentum)
    rate_at = learning_rate(Setting().training(rate, seed, size.steps), size.steps)
    count = way.members or way.peers
    for step in range(size.steps):
        draws = torch.Generator().manual_seed(seed * 7919 + step)
        members = torch.randperm(way.peers, generator=draws)[:count].sort().values
        if way.apart:
            parts = [texts[i].rows(way.rows // count, seed * 1009 + i, step) for i in members.tolist()]
        else:
            parts = list(text.rows(way.rows, seed, step).unflatten(0, (-1, count)).unbind(1))
        found = models.gradients([x] * count, parts)[0]
        found *= (count**0.5 / (found.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1)  # DGC, section 3.2
        against = method.estimate(found, members)
        x = x + (adam.step(against, rate_at(step)) if way.optim == "adam" else -rate_at(step) * against)
    loss, halves = halves_of(size, flat, x, held.all())
    return {"loss": loss, "halves": halves, "ratio": 16 * size.steps / compressor.bits}


def main() -> None:
    asked = parser(__doc__)
    choices = {"method": list(METHODS), "optim": ["adam", "sgd"]}
    for field in fields(Way):
        known = choices.get(field.name)
        asked.add_argument(f"--{field.name}", type=type(field.default), default=field.default, choices=known)
    asked.add_argument("--rates", type=float, nargs="+", default=[4e-3])
    asked.add_argument("--seeds", type=int, nargs="+", default=[1])
    asked.add_argument("--steps", type=int, default=Size.steps)
    asked.add_argument(
        "--folder", type=Path, default=Path("outputs/quality"), help="of the pre-trained model"
    )
    asked.add_argument("--out", type=Path, default=rows.FOLDER / "published.jsonl")
    args = asked.parse_args()
    way = Way(**{field.name: getattr(args, field.name) for field in fields(Way)})
    size = Size(steps=args.steps)
    torch.set_num_threads(1)
    for seed, rate in product(args.seeds, args.rates):
        key = {"size": size.name, **asdict(way), "rate": rate, "seed": seed}
        if not rows.there(args.out, key):
            found = key | train(size, way, rate, seed, args.folder) | {"date": time.strftime("%Y-%m-%d")}
            rows.keep(args.out, found, tuple(key))
            print(f"rate {rate:g}, seed {seed}: {found['loss']:.4f}, {found['ratio']:.0f}x", flush=True)


if __name__ == "__main__":
    main()
