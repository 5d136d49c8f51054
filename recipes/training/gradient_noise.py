"""A peer's steps are too short, as its optimizer divides by the noise of its own few samples: by how much.

Adam divides by the root of v, the mean of g^2. The gradient of b of a round's B samples has the signal of the
round's mean gradient, and B / b times the variance:

    v of the mean gradient  =  M + N        M: square of the expected gradient; N: variance of the mean
    v of a peer             =  M + q N      q: B / b, averaged over steps as v is

So the mean of the peers' steps has the right direction, and is too short by the root of (M + q N) / (M + N):
the root of q where noise is all there is, 1 where samples agree. `factor` is that root. A peer takes the
recipe's rate times it, and the swarm makes the steps of one machine, whoever takes part with how many
samples. `norms` is the same of a gradient's norm, which `max_grad_norm` bounds.

M is the product of two gradients of different samples: of the halves of a lease, now and then; of leases of
one sample, those of this step and the one before. Noise cancels in both, and to the latter what alternates
between steps is noise too. N follows from |g|^2. Two numbers are kept for each of 64 places of the vector,
taken on 64 values each, so the cost is that of 4,096 parameters, whatever the size of the model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import sqrt

import torch
from torch import Tensor

from recipes.weight_files import Layout

PLACES = 64  # at equal distances in the vector; each stands for the parameter that it lies in
VALUES = 64  # of that parameter, drawn once
NOISE_VALUES = 2 * PLACES + PLACES * VALUES + 4  # of `GradientNoise.state`
HALF = 0.1  # of a lease's terms, at least: what counts as a half
AT_FIRST, EVERY = 16, 16  # steps in which the halves of a lease are compared
PATIENCE = 64  # steps without such halves, after which gradients of two steps are compared
MOST = 4.0  # times its usual energy: as what a gradient counts at most


def compared_in(step: int) -> bool:
    """Are the halves of a lease compared in this step of a peer? In all at first, then now and then."""
    return step < AT_FIRST or step % EVERY == 0


@dataclass(frozen=True)
class NoiseSums:
    """Sums over places of what is known of a gradient's noise; those of a replica's machines add up."""

    places: int = 0  # that have been measured
    shorter: float = 0.0  # (M + N) / (M + q N)
    signal: float = 0.0  # M
    noise: float = 0.0  # N
    least: float = 1.0  # 1 / q

    def __add__(self, other: NoiseSums) -> NoiseSums:
        return NoiseSums(
            self.places + other.places,
            self.shorter + other.shorter,
            self.signal + other.signal,
            self.noise + other.noise,
            min(self.least, other.least),
        )

    @property
    def factor(self) -> float:
        """Return how much longer the steps of this peer have to be."""
        square = self.shorter / self.places if self.places else 1.0
        return 1 / sqrt(min(max(square, self.least), 1.0))

    def norms(self, share: float) -> float:
        """Divide the norm of the gradient of a share of a step's samples by that of them all."""
        signal, noise = max(self.signal, 0.0), max(self.noise, 0.0)
        return sqrt((signal + noise / share) / (signal + noise)) if signal + noise > 0 else 1.0

    def told(self) -> dict[str, float]:
        """Return the sums by name."""
        return asdict(self)


class GradientNoise:
    """Measures M and N of a vector of gradients.

    Args:
        positions: of the values that are looked at, (places, VALUES) in the vector.
        window: decay of the second moment, `adam_beta2`.
        device: of the samples.
    """

    def __init__(self, positions: Tensor, window: float, device: torch.device | str | None = None) -> None:
        self.positions = positions.to(device)
        self.window = window
        self._moments = torch.zeros(2, len(positions), device=device)  # M and N, times what both share
        # the gradient under way, and that of the last step
        self._gradient, self._before = torch.zeros(2, *positions.shape, device=device)
        self._excess = 0.0  # q - 1, before it is divided by the weight of all steps
        self._steps = self._measured = self._compared = 0  # the last one; that was measured; that had halves
        self._sums: NoiseSums | None = None  # of all that was measured; None: not summed yet
        self.begin(1.0)

    def begin(self, share: float) -> None:
        """Begin a gradient of this share b / B of the samples of a step."""
        self.share, self._done = share, 0.0
        self._part: Tensor | None = None  # the gradient of the lease's first half
        self._taken = False

    def partly(self, done: float, gradient: Tensor) -> None:
        """Take the sample of a gradient as it is after this share of its terms: (places, VALUES) float32."""
        if HALF <= done <= 1 - HALF:
            self._part, self._done = gradient, done

    def take(self, gradient: Tensor) -> None:
        """Take the sample of the whole gradient: (places, VALUES) float32."""
        self._gradient.copy_(gradient)
        self._taken = True

    def scaled(self, factor: Tensor | float) -> None:
        """Note that the gradient was multiplied by this since it was taken."""
        for sample in (self._part, self._gradient):
            if sample is not None:
                sample.mul_(factor)

    @property
    def sums(self) -> NoiseSums:
        """Sum up what the steps until now have shown."""
        if self._sums is None:
            self._sums = self._summed() if self._measured else NoiseSums()
        return self._sums

    def observe(self) -> None:
        """Measure the gradient that was taken, as the optimizer steps with it."""
        self._steps += 1
        excess = self._excess + (1 - self.window) * (1 / self.share - 1 - self._excess)
        self._excess = float(torch.tensor(excess, dtype=torch.float32))  # as it is kept
        self._sums = None
        if not self._taken:
            return
        gradient = self._gradient
        self.scaled(self._usual(gradient))
        if (part := self._part) is not None:  # <a, c>, each of which is a share of the terms: a + c
            product = products(part, gradient) - products(part, part)
            self._measure(gradient, product / (self._done * (1 - self._done)))
            self._compared = self._steps
        elif self._steps > 1 and (not self._compared or self._steps - self._compared > PATIENCE):
            self._measure(gradient, products(gradient, self._before))
        self._before.copy_(gradient)
        self._part, self._taken = None, False

    def _usual(self, gradient: Tensor) -> Tensor | float:
        """Return the factor that makes a gradient of unusual energy one of some times the usual: no single
        batch decides."""
        if not self._measured:
            return 1.0
        weight = 1 - self.window**self._measured
        usual = (self._moments[0] + self._moments[1] / self.share).sum().clamp(min=0) / weight
        scale: Tensor = MOST * usual / products(gradient, gradient).sum().clamp(min=1e-38)
        return scale.clamp(max=1.0).sqrt()

    def _measure(self, gradient: Tensor, signal: Tensor) -> None:
        """Measure by the products of two gradients with noise of their own, (places,)."""
        noise = self.share * (products(gradient, gradient) - signal)
        self._moments.lerp_(torch.stack([signal, noise]), 1 - self.window ** (self._steps - self._measured))
        self._measured = self._steps

    def _summed(self) -> NoiseSums:
        excess = self._excess / (1 - self.window**self._steps)  # q - 1
        signal, noise = self._moments  # (places,) each; a single place's signal may come out negative
        mean, own = signal + noise, signal + (1 + excess) * noise
        shorter = torch.where(own > 0, mean / own, 1.0).clamp(-1, 1)
        ratio, squared, variance = torch.stack([shorter.sum(), signal.sum(), noise.sum()]).tolist()
        return NoiseSums(len(shorter), ratio, squared, variance, 1 / (1 + excess))

    # ---- what is kept --------------------------------------------------------------------------------------

    def state(self) -> Tensor:
        """Return all that was measured, as one float32 vector, for `load`."""
        counts = [self._excess, float(self._steps), float(self._measured), float(self._compared)]
        return torch.cat([self._moments.view(-1), self._before.view(-1), self._moments.new_tensor(counts)])

    def load(self, state: Tensor) -> None:
        """Restore what `state` gave."""
        sizes = [self._moments.numel(), self._before.numel(), 4]
        moments, before, counts = torch.split(state.to(self._before.device), sizes)
        self._moments.copy_(moments.view_as(self._moments))
        self._before.copy_(before.view_as(self._before))
        self._excess, *steps = counts.tolist()
        self._steps, self._measured, self._compared = map(int, steps)
        self._sums = None


def products(one: Tensor, other: Tensor) -> Tensor:
    """Compute the inner products of rows, (n,) of (n, m), without a temporary of their size."""
    return torch.bmm(one[:, None], other[:, :, None]).view(-1)


def positions_of(layout: Layout) -> Tensor:
    """Choose the positions to look at, (PLACES, VALUES) in the vector: they follow from the layout."""
    generator, offsets = torch.Generator().manual_seed(0), layout.offsets
    rows = []
    for number in parameters_of_places(layout):
        start, count = offsets[number], offsets[number + 1] - offsets[number]
        rows.append(start + torch.randint(count, (VALUES,), generator=generator))
    return torch.stack(rows)


def parameters_of_places(layout: Layout) -> list[int]:
    """Number the parameter that each place lies in."""
    middles = ((2 * place + 1) * layout.size // (2 * PLACES) for place in range(PLACES))
    return [bisect_right(layout.offsets, middle) - 1 for middle in middles]


def positions_within(whole: Layout, own: Layout) -> Tensor:
    """Choose the same positions in the vector of some of the parameters: (places in these, VALUES)."""
    at: Mapping[str, int] = dict(zip(own.names, own.offsets, strict=False))
    rows = []
    for number, row in zip(parameters_of_places(whole), positions_of(whole), strict=True):
        if (name := whole.names[number]) in at:
            rows.append(row - whole.offsets[number] + at[name])
    return torch.stack(rows) if rows else torch.zeros(0, VALUES, dtype=torch.int64)
