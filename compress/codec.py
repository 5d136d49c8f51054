"""The compressor: sample a share p of the coordinates, select the K largest, quantize them, write a packet.

cocktail = Cocktail(random_ratio=0.1, topk_ratio=0.2, quant_bits=4)
sample = cocktail.draw(len(x), seed, round)         # the same on every peer; no bytes are sent for it
encoded = cocktail.encode(sample.difference(x, global_model))
sample.add_(global_model, encoded.update().decoded())  # what a receiver's `decode` gives
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Literal, get_args

import numpy as np
import torch

from compress import topk
from compress.backends import compiled, usable
from compress.coding import byte_kind, encode_positions
from compress.errors import NonFiniteError
from compress.packet import PackedUpdate, Update, decode_packed, longest, write
from compress.pinned_copy import read_each
from compress.quantization import BITS, BUDGET, Plans, plan, plans, quantize, seen
from compress.sampling import (
    MOST_SHARDS,
    Sample,
    Schedule,
    Shard,
    cut,
    most_sampled,
    rises,
    schedule,
)

Kind = Literal["block", "element", "fragment"]


@dataclass(frozen=True)
class Encoded:
    """A packet, and the length of the vector that it is of."""

    packet: bytes
    m: int

    def update(self) -> PackedUpdate | Update:
        """Return what `decode` gives of the packet, as small as it can be kept."""
        return decode_packed(self.packet, self.m)


@dataclass(frozen=True)
class Delta:
    """A vector to be compressed, which is made when it is wanted, seldom more than once."""

    make: Callable[[], torch.Tensor]  # (m,) float32
    names: Callable[[int], str] | None = None  # position -> parameter, for the error message


@dataclass(frozen=True)
class Cocktail:
    """CocktailSGD's compressor C (Wang et al., ICML 2023, Algorithm 1); the keys of a recipe's `compression`.

    random_ratio=1, topk_ratio=1, quant_bits=32 is the identity.
    """

    random_ratio: float = 0.1  # p: share of the coordinates that a round visits, 1e-6 .. 1
    topk_ratio: float = 0.2  # K: share of the visited ones that is sent, the largest; 0 < K <= 1
    quant_bits: int = 4  # q: of 1, 2, 3, 4, 8, 16, or 32 (off)
    # whole blocks (a round reads only p of the memory), single elements, or one range after the other
    sample_kind: Kind = "block"
    block_size: int = 256  # neighbours visited together; a power of two
    quant_bucket_size: int = 128  # sent values that share a scale
    # ranges of the vector, or where each ends; all are compressed alone: draw, schedule and encode take one
    shards: int | tuple[int, ...] = 1
    uncompressed_rounds: int = 0  # rounds at the start that visit and send everything, in 16 bits
    topk_chunk: int = 0  # top-k within chunks of this many visited values; 0: over the whole sample
    quant_step: float = 0.0  # with 8 bits: levels so many root mean squares apart; 0: fitted ones
    random_ratios: tuple[float, ...] = ()  # every p that a round of the run may have; (): this one alone

    def __post_init__(self) -> None:
        block = self.block_size
        for name, fits, wanted in (
            ("random_ratio", 1e-6 <= self.random_ratio <= 1, "a share from 1e-6 to 1"),
            ("topk_ratio", 0 < self.topk_ratio <= 1, "a share above 0, up to 1"),
            ("quant_bits", self.quant_bits in BITS, f"one of {', '.join(map(str, BITS))}"),
            ("sample_kind", self.sample_kind in get_args(Kind), "block, element or fragment"),
            ("topk_chunk", 0 <= self.topk_chunk <= 1 << 20, f"from 1 to {1 << 20}, or 0"),
            (
                "block_size",
                block.bit_count() == 1 and 1 <= block <= 1 << 20,
                f"a power of two up to {1 << 20}",
            ),
            ("quant_bucket_size", 1 <= self.quant_bucket_size <= 1 << 20, f"from 1 to {1 << 20}"),
            ("shards", 1 <= self.shard_count <= MOST_SHARDS, f"from 1 to {MOST_SHARDS}"),
            (
                "shards",
                isinstance(self.shards, int) or rises(self.shards),
                "numbers that rise from 1 on",
            ),
        ):
            if not fits:
                raise ValueError(f"{name} {getattr(self, name)!r}: {wanted}")

    def cut(self, n: int, seed: int) -> tuple[Shard, ...]:
        """Cut a vector of n coordinates into shards, in a run of this seed."""
        return cut(n, self.shards, seed)

    @property
    def shard_count(self) -> int:
        """Count the shards."""
        return self.shards if isinstance(self.shards, int) else len(self.shards)

    def at(self, round: int) -> Cocktail:
        """Return the compressor of one round, whose `encode` is to be called."""
        if round >= self.uncompressed_rounds:
            return self
        everything = replace(self, random_ratio=1.0, topk_ratio=1.0, random_ratios=(), uncompressed_rounds=0)
        return replace(everything, quant_bits=max(self.quant_bits, 16))

    def of_length(self, n: int, seed: int, round: int, m: int) -> Cocktail:
        """Return the compressor of the p whose sample of this round has m coordinates, as a packet says; this
        one where there is none such, whose samples then do not fit the packet."""
        for p in self.random_ratios if round >= self.uncompressed_rounds else ():
            if replace(self, random_ratio=p, random_ratios=()).schedule(n, seed, round).m == m:
                return replace(self, random_ratio=p)
        return self

    def draw(self, n: int, seed: int, round: int, device: torch.device | str = "cpu") -> Sample:
        """Draw the coordinates, of n, that this round visits; they depend on nothing else, on any machine."""
        return self.schedule(n, seed, round).sample(device)

    def schedule(self, n: int, seed: int, round: int) -> Schedule:
        """Schedule the same round for a reader that goes through the vector window by window."""
        mix, in_order = self.at(round), self.sample_kind == "fragment"
        own = schedule(n, mix.random_ratio, self._unit, seed, round, in_order)
        # where two p visit as many coordinates, as of a very short vector, both are the first of them
        p = mix.of_length(n, seed, round, own.m).random_ratio
        return own if p == mix.random_ratio else schedule(n, p, self._unit, seed, round, in_order)

    def longest(self, n: int, round: int) -> int:
        """Return the most bytes of a packet of n coordinates in a round: what a receiver knows beforehand of
        any packet that `encode` makes, with this share K or a smaller one."""
        mix = self.at(round)
        m = most_sampled(n, mix.random_ratio, mix._unit)
        return longest(m, self.most_kept(m, round), mix.quant_bits, mix.quant_bucket_size)

    def most_kept(self, m: int, round: int) -> int:
        """Return the most values of a packet of m sampled coordinates, with this share K or a smaller one."""
        return topk.most_kept(m, self.at(round).topk_ratio, self.topk_chunk)

    @property
    def _unit(self) -> int:
        return 1 if self.sample_kind == "element" else self.block_size

    def encode(
        self,
        v: torch.Tensor,  # (m,) float32: what the sample holds
        names: Callable[[int], str] | None = None,  # position -> parameter, for the error message
        kernels: bool | None = None,  # True: Triton; False: NumPy, the reference; None: what is fastest here
    ) -> Encoded:
        """Compress v. NonFiniteError if v holds NaN or infinity; then nothing was encoded."""
        return self.encode_each([Delta(v.detach, names)], kernels)[0]

    def encode_each(self, deltas: Sequence[Delta], kernels: bool | None = None) -> list[Encoded]:
        """Compress vectors of one device like `encode`: it is waited for once, seldom more often."""
        steps = [self._steps(delta, kernels) for delta in deltas]
        encoded: dict[int, Encoded] = {}
        read: dict[int, list[np.ndarray] | None] = dict.fromkeys(range(len(deltas)))
        while read:
            wanted = {}
            for i, arrays in read.items():
                try:
                    wanted[i] = next(steps[i]) if arrays is None else steps[i].send(arrays)
                except StopIteration as end:
                    encoded[i] = end.value
            read = {**read_each(wanted)} if wanted else {}
        return [encoded[i] for i in range(len(deltas))]

    def _steps(
        self, delta: Delta, kernels: bool | None
    ) -> Generator[Sequence[torch.Tensor], list[np.ndarray], Encoded]:
        """Compress a vector; yields the parts on a device that are to be read, and is sent their bytes."""
        v, names = delta.make(), delta.names
        if v.dtype != torch.float32 or v.dim() != 1:
            raise ValueError(
                f"encode takes a flat float32 vector, this is {v.dtype} of shape {tuple(v.shape)}"
            )
        v, m = v.contiguous(), len(v)
        on_device = usable(v.device) if kernels is None else kernels
        identity = self.topk_ratio == 1 and self.quant_bits == 32  # it keeps zeros and denormals too
        try:
            if self.topk_chunk and self.topk_ratio < 1:
                # selected on the device of v, quantized on the host
                at = topk.in_chunks(v, self.topk_chunk, self.topk_ratio)
                kept = v[at]
                del v  # as below
                places, values = yield at, kept
                return self._pack(m, topk.sendable(places, values, m))
            if on_device and m and not identity:
                made = self._on_device(m, [v], delta.make)
                del v  # it has no place while the device is waited for
                if (encoded := (yield from made)) is not None:
                    return encoded
                v = delta.make().contiguous()
            x, loops = v.cpu().numpy(), compiled(m) if kernels is None else None
            if identity or (self.topk_ratio == 1 and topk.none_tiny(x)):
                return self._pack(m, topk.everything(x), loops)
            source = loops.Vector(x) if loops else topk.Plain(x)
            return self._pack(m, topk.largest(source, topk.share_of(m, self.topk_ratio)), loops)
        except NonFiniteError as error:
            raise NonFiniteError(error.value, error.position, names and names(error.position)) from None

    def encode_selected(self, m: int, kept: topk.Survivors) -> Encoded:
        """Encode what `topk.largest` selected of a vector of m, from a source of the caller's own."""
        return self._pack(m, kept, compiled(len(kept.values)))

    def _pack(self, m: int, kept: topk.Survivors, loops: ModuleType | None = None) -> Encoded:
        bits, bucket, step = self.quant_bits, self.quant_bucket_size, self.quant_step
        codes = quantize(kept.values, bits, bucket, loops, step)
        packet = write(m, encode_positions(kept.positions, m, loops), codes)
        return Encoded(packet, m)

    def _on_device(
        self, m: int, made: list[torch.Tensor], make: Callable[[], torch.Tensor]
    ) -> Generator[Sequence[torch.Tensor], list[np.ndarray], Encoded | None]:
        """Compress a vector of m by kernels, all of which are launched before anything is read; None: the
        host is to do it. made: the vector, if it was made already."""
        from compress import triton_kernels as device  # imports triton

        bits, bucket, step = self.quant_bits, self.quant_bucket_size, self.quant_step
        takes, fitted_there = device.takes(bits, bucket), bits not in BUDGET
        look: device.Look | None = device.first_look(m, topk.share_of(m, self.topk_ratio))
        while look is not None and look.k:
            kept = device.largest(made.pop() if made else make().contiguous(), look)
            parts, rows = [kept.numbers, kept.positions, kept.values], seen(kept.values[: look.k], bucket)
            if takes:
                if fitted_there:
                    how = plans(rows[None], bits, step)
                else:  # two thousand launches: the host fits, and is waited for
                    (few,) = yield [rows.flatten()]
                    with np.errstate(all="ignore"):  # of infinity, which is told of below
                        how = Plans.of(plan(few.view(np.float32).reshape(rows.shape), bits), rows.device)
                codes = device.quantize(kept, bits, bucket, how)
                places = device.coded(kept.positions, kept.count, m, byte_kind(look.k, m))
                parts = [kept.numbers, *places.parts, *codes.parts]
            del kept, rows
            numbers, *read = yield parts
            del parts
            found = device.Found(*numbers.view(np.int64).tolist())
            if found.largest >= topk.INFINITY:
                break  # the host says where
            again, count, cut = look.next(found), found.count, len(places.parts) if takes else 0
            if again is None and takes and (quantized := codes.codes(count, *read[cut:])) is not None:
                return Encoded(write(m, places.read(count, *read[:cut]), quantized), m)
            if again is None and not takes:
                at, values = read[0].view(np.int64)[:count], read[1].view(np.float32)[:count]
                return self._pack(m, topk.Survivors(at, values), compiled(count))
            look, fitted_there = again or look, fitted_there and again is not None
        return None
