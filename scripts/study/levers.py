"""Try levers against the loss of packets, and measure its parts: all peers as one tensor (N, P).

    scripts/start scripts.study.levers --basis 1 --up exact --rates 1.1e-2
    scripts/start scripts.study.levers --basis 1 --way masks --share .08 --down-bits 2 --rates 8e-3 1.1e-2

The model, its tokens and the seeds are those of the quality study. Packets are made here, in plain torch, and
their bits are counted instead of written: for trials of what the algorithm does not have. Of what it has,
`packets` of these settings end .1 % from the study's own cell.

packets    each peer sends the top K of the round's sample in 1 bit, the aggregator the top K of sum and e
masks      all send the same coordinates without positions: some in turn, some where the sums were largest
returned   packets; what the aggregate leaves out goes back into the peers' deltas, not into e
momentum   a peer's delta is its momentum, gradients are taken at x', which moves by the sum's sign (DeMo)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from recipes.training.optimizers import learning_rate
from scripts.study.eigenbasis import FixedEigenbasis
from scripts.study.model import Models
from scripts.study.train import Setting, Size, base, documentation, fixed_basis, halves_of, new_model
from scripts.swarms.lab import parser

BLOCK, BUCKET = 256, 128  # coordinates: of a unit of the sample, with one scale
EXACT = ("packets", "exact")
WAYS = ("packets", "masks", "returned", "momentum")
UNITS = ("parameter", "norm", "chunk")
CHOICES = {"way": WAYS, "up": EXACT, "down": EXACT, "unit": UNITS}


@dataclass(frozen=True)
class Levers:
    """One way to exchange."""

    way: str = "packets"
    peers: int = 8
    rows: int = 8  # samples of a step
    basis: int = 0  # 1: Adam works in the fixed eigenbasis
    beta1: float = 0.0
    share: float = 0.38  # p; or of the coordinates that a mask has in turn
    informed: float = 0.0  # of the coordinates that a mask has by the sums
    keep: float = 0.047  # K
    bits: int = 1
    down_bits: int = 1
    up: str = "packets"
    down: str = "packets"
    lane: int = 0  # eigenvectors along which deltas are sent whole; these bits are not counted
    relative: float = 0.0  # values count by magnitude / (size of their unit)^relative; 0: global top K
    unit: str = "parameter"  # by its RMS; norm: a parameter by its norm; chunk: neighbours by their RMS
    chunk: int = 4096  # neighbours
    middle: int = 0  # 1: the aggregate enters between two halves of a step's samples


class Ring:
    """Visit all coordinates in blocks, a share of them a round, in an order that is drawn anew each time."""

    def __init__(self, size: int, share: float, seed: int) -> None:
        self.size, self.blocks = size, -(-size // BLOCK)
        self.share, self.generator = share, torch.Generator().manual_seed(seed)
        self.waiting = torch.zeros(0, dtype=torch.long)

    def draw(self) -> Tensor:
        """Return the round's coordinates, ascending."""
        count = round(self.share * self.blocks)
        if len(self.waiting) < count:
            self.waiting = torch.cat([self.waiting, torch.randperm(self.blocks, generator=self.generator)])
        drawn, self.waiting = self.waiting[:count].unique(), self.waiting[count:]
        at = (drawn[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
        return at[at < self.size]


def quantized(x: Tensor, bits: int) -> Tensor:
    """Quantize (N, k) by the mean magnitude of each bucket: to it in 1 bit, to two levels in 2 bits."""
    if bits > 2:
        return x
    count = x.shape[1]
    buckets = torch.nn.functional.pad(x.abs(), (0, -count % BUCKET)).unflatten(1, (-1, BUCKET))
    filled = torch.nn.functional.pad(torch.ones(count), (0, -count % BUCKET)).view(-1, BUCKET).sum(1)
    scale = (buckets.sum(2) / filled)[..., None].expand_as(buckets).flatten(1)[:, :count]
    if bits == 2:  # Lloyd-Max of a normal distribution, whose mean magnitude is .798
        scale = scale * torch.where(x.abs() > 1.23 * scale, 1.893, 0.567)
    return x.sign() * scale


def largest(x: Tensor, keep: float, bits: int, weights: Tensor) -> Tensor:
    """Compress (N, m) to the top K of each row by weighted magnitude, zeros elsewhere."""
    at = (x.abs() * weights).topk(max(1, int(keep * x.shape[1])), sorted=False).indices.sort().values
    return torch.zeros_like(x).scatter_(1, at, quantized(x.gather(1, at), bits))


def bits_of(share: float, keep: float, bits: int) -> float:
    """Count bits a parameter of a packet: positions, values, and a scale of 8 bits a bucket."""
    positions = -keep * math.log2(keep) - (1 - keep) * math.log2(1 - keep) if keep < 1 else 0.0
    return share * (positions + keep * (bits + 1 / 16 * (bits < 16)))


class Adam:
    """AdamW without decay, for all peers; the step is returned."""

    def __init__(self, shape: torch.Size, beta1: float, beta2: float = 0.999) -> None:
        self.mean, self.square, self.steps = torch.zeros(shape), torch.zeros(shape), 0
        self.beta1, self.beta2 = beta1, beta2

    def step(self, gradient: Tensor, rate: float) -> Tensor:
        self.steps += 1
        self.mean.lerp_(gradient, 1 - self.beta1)
        self.square.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        spread = (self.square / (1 - self.beta2**self.steps)).sqrt_().add_(1e-8)
        return self.mean / spread * (-rate / (1 - self.beta1**self.steps))


class Swarm:
    """N peers and an aggregator: x' (P,), the deltas (N, P), the aggregator's error feedback (P,)."""

    def __init__(self, levers: Levers, start: Tensor, seed: int, basis: FixedEigenbasis) -> None:
        self.levers, self.x, self.error, self.basis = levers, start.clone(), torch.zeros_like(start), basis
        self.deltas = torch.zeros(levers.peers, len(start))
        self.ring = Ring(len(start), levers.share, seed)
        self.moved = torch.zeros_like(start)  # decaying mean of the aggregate's magnitudes
        self.bits = [0.0, 0.0]  # a parameter, of all rounds: up, down

    def send(self) -> tuple[Tensor, Tensor]:
        """Compress the deltas; returns what is sent (N, P) and the round's coordinates."""
        levers, at = self.levers, self.ring.draw()
        if levers.way == "masks":
            informed = self.moved.index_fill(0, at, -1.0).topk(int(levers.informed * len(self.x))).indices
            at = torch.cat([at, informed]).sort().values
        sent = torch.zeros_like(self.deltas)
        if levers.way == "masks":
            sent[:, at] = quantized(self.deltas[:, at], levers.bits)
        else:
            weights = self.weights(self.deltas)[:, at]
            sent[:, at] = largest(self.deltas[:, at], levers.keep, levers.bits, weights)
        self._count(0, len(at), levers.bits)
        return (self.deltas.clone() if levers.up == "exact" else sent), at

    def weights(self, values: Tensor) -> Tensor:
        """Compute (size of its unit in its row of `values`, (N, P))^-relative of each coordinate (N, P).

        L-GreCo (Markov et al., 2024) divides bytes among layers so that the sum of their errors is least. Of
        squared errors the global top K does that already; of those relative to a layer the unit `norm` does,
        with 1. What lies between is a trade of both.
        """
        if not self.levers.relative:
            return torch.ones_like(values)
        squares = values.square()
        if self.levers.unit == "chunk":
            sizes = torch.cat([c.mean(1, True).expand_as(c) for c in squares.split(self.levers.chunk, 1)], 1)
        else:
            each = [self.basis.layout.views(row) for row in squares]
            whole = self.levers.unit == "norm"
            sizes = torch.stack(
                [
                    torch.cat([(v.sum() if whole else v.mean()).expand(v.numel()) for v in views])
                    for views in each
                ]
            )
        return (sizes + 1e-30) ** (-self.levers.relative / 2)

    def take(self, sent: Tensor, at: Tensor) -> Tensor:
        """Sum what was sent, compress the sum, and take it from the deltas; returns the aggregate (P,)."""
        levers, total = self.levers, sent.sum(0) + self.error
        aggregate = torch.zeros_like(total)
        if levers.way == "masks":
            aggregate[at] = quantized(total[None, at], levers.down_bits)[0]
        else:
            weights = self.weights(total[None])[:, at]
            aggregate[at] = largest(total[None, at], levers.keep, levers.down_bits, weights)[0]
        self._count(1, len(at), levers.down_bits)
        if levers.down == "exact":
            aggregate = total
        if levers.way == "returned":
            passed = aggregate != 0
            sent, self.error = sent * passed, torch.where(passed, total - aggregate, self.error)
        else:
            self.error = total - aggregate
        self.deltas = self.deltas - sent
        self.moved.lerp_(aggregate.abs(), 0.1)
        return aggregate

    def exchange(self) -> Tensor:
        """Do a round; returns what x' moves by (P,)."""
        fast = torch.zeros_like(self.x)
        if self.levers.lane:  # sent whole, and not counted
            parts = torch.stack([self.basis.low_rank(delta, self.levers.lane) for delta in self.deltas])
            self.deltas, fast = self.deltas - parts, parts.sum(0)
        return self.take(*self.send()) + fast

    def _count(self, way: int, coordinates: int, bits: int) -> None:
        keep = 1.0 if self.levers.way == "masks" else self.levers.keep
        self.bits[way] += bits_of(coordinates / len(self.x), keep, bits)


class Peers:
    """The optimizers of N peers, each on its own samples."""

    def __init__(self, levers: Levers, models: Models, basis: FixedEigenbasis, size: int) -> None:
        self.models, self.basis = models, basis if levers.basis else None
        self.adam = Adam(torch.Size((levers.peers, size)), levers.beta1)

    def gradients(self, at: Tensor, parts: list[Tensor], after: Tensor | None = None) -> Tensor:
        """Compute the clipped gradients (N, P) at models (N, P); of every second sample at `after`."""
        if after is not None:
            first, second = ([part[i::2] for part in parts] for i in (0, 1))
            return (self.gradients(at, first) + self.gradients(after, second)) / 2
        found = self.models.gradients(list(at), parts)[0]
        return found * (1 / (found.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1)

    def moves(self, gradients: Tensor, rate: float) -> Tensor:
        """Compute the optimizers' steps (N, P)."""
        if self.basis is None:
            return self.adam.step(gradients, rate)
        turned = torch.stack([self.basis.rotate(one) for one in gradients])
        return torch.stack([self.basis.rotate(one, back=True) for one in self.adam.step(turned, rate)])


def train(levers: Levers, rate: float, seed: int, folder: Path) -> str:
    """Train one cell; returns its losses, and how many times fewer bits than FP16 were sent."""
    size = Size()
    text, held = documentation(size.length)
    start, flat = base(size, folder), new_model(size)
    basis = fixed_basis(size, start, text)
    swarm = Swarm(levers, start, seed, basis)
    peers = Peers(levers, Models(flat.model.config, flat.layout, size.length), basis, len(start))
    rate_at = learning_rate(Setting().training(rate, seed, size.steps), size.steps)
    for step in range(size.steps):
        before = swarm.deltas
        rows = text.rows(levers.rows, seed, step)
        parts = [rows[i :: levers.peers] for i in range(levers.peers)]
        aggregate = swarm.exchange()
        if levers.way == "momentum":
            swarm.deltas = swarm.deltas + peers.gradients(swarm.x.expand_as(before), parts)
            swarm.x = swarm.x - rate_at(step) * aggregate.sign()
            continue
        after = swarm.x + aggregate + swarm.deltas
        gradients = peers.gradients(swarm.x + before, parts, after if levers.middle else None)
        swarm.deltas = swarm.deltas + peers.moves(gradients, rate_at(step) / levers.peers)
        swarm.x = swarm.x + aggregate
    if levers.way not in ("momentum"):
        swarm.x = swarm.x + swarm.exchange()  # one more round brings the last packets home
    loss, halves = halves_of(size, flat, swarm.x, held.all())
    ratio = 32 * size.steps / sum(swarm.bits)
    return f"{loss:.4f} ({halves[0]:.4f}, {halves[1]:.4f}), {ratio:.0f}x"


def main() -> None:
    asked = parser(__doc__)
    for field in fields(Levers):
        name = f"--{field.name.replace('_', '-')}"
        asked.add_argument(
            name, type=type(field.default), default=field.default, choices=CHOICES.get(field.name)
        )
    asked.add_argument("--rates", type=float, nargs="+", default=[1.1e-2])
    asked.add_argument("--seeds", type=int, nargs="+", default=[1])
    asked.add_argument(
        "--folder", type=Path, default=Path("outputs/quality"), help="of the pre-trained model"
    )
    args = asked.parse_args()
    levers = Levers(**{field.name: getattr(args, field.name) for field in fields(Levers)})
    torch.set_num_threads(1)
    for seed, rate in product(args.seeds, args.rates):
        print(f"rate {rate:g}, seed {seed}: {train(levers, rate, seed, args.folder)}", flush=True)


if __name__ == "__main__":
    main()
