"""A peer's part of audits: it sketches the gradients of its lease's samples, and of those it is to audit.

A gradient sketch has 128 bits that say which gradient was computed of a sample:

    G = gradient of the sample's loss with respect to its embedded tokens             (T, D)
    bit k = 1 where sum_t a_tk <g_t, r_k> > 0        a (T, 128), r (D, 128): signs, drawn from the key

G is the far end of the backward pass: there is no G without all of the forward and backward pass, and every
sample has its own, whatever micro-batch it was in. Bits are signs of random projections (SimHash: Charikar,
2002). Two gradients with cosine c differ in arccos(c) / pi of their bits: near equal ones in few, unrelated
ones in half. The scale of a loss changes none.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from hashlib import shake_128
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from recipes.config import Recipe
from recipes.data import Sample
from recipes.objectives import objective_of
from recipes.training import Event, Lease, Link, ModelExtension, Peer, Round, leased, shrink_to_fit
from transport.protocol import read_msgpack

from .bodies import AUDITED, NAME, Answers, Tasks

BITS = 128
CPU = torch.device("cpu")


def sketch_key(seed: int, round: int) -> str:
    """Return what the signs of a round's sketches are drawn from: bits of another round say nothing here."""
    return f"sketch/{seed}/{round}"


def signs(name: str, rows: int, device: torch.device = CPU) -> Tensor:
    """Return signs, the same on every machine: (rows, BITS) float32. Fewer rows are the first of more, so
    micro-batches padded to any length share few draws."""
    return drawn_signs(name, 1 << (rows - 1).bit_length(), device)[:rows]


@lru_cache(16)  # a round's, and those of leases that are audited in it
def drawn_signs(name: str, rows: int, device: torch.device) -> Tensor:
    """Draw signs and copy them to the device, once."""
    drawn = np.frombuffer(shake_128(name.encode()).digest(rows * BITS // 8), np.uint8)
    bits = np.unpackbits(drawn, bitorder="little").reshape(rows, BITS)
    return torch.from_numpy(bits * np.float32(2) - 1).to(device)


@contextmanager
def sketching(model: nn.Module, part: Sequence[Sample], key: str) -> Iterator[list[str]]:
    """Sketch the samples of the micro-batch whose loss and backward pass are computed inside.

    Yields a list that has the sketch of each sample afterwards, in hex. Several sequences of a sample come
    in the batch as all first ones, then all second ones, and so on.
    """
    found: list[str] = []
    projected: list[Tensor] = []

    def seen(gradient: Tensor) -> None:
        sequences, tokens, width = gradient.shape  # padded on the right, where the gradient is 0
        along = gradient.float() @ signs(f"{key}/width", width, gradient.device)  # (sequences, T, BITS)
        for number in range(sequences // len(part)):
            of_tokens = signs(f"{key}/tokens/{number}", tokens, gradient.device)
            first = number * len(part)
            projected.append((along[first : first + len(part)] * of_tokens).sum(dim=1))  # (B, BITS)

    def embedded(module: nn.Module, asked: Any, out: Tensor) -> None:
        if torch.is_grad_enabled():
            if not out.requires_grad:  # a frozen embedding, below adapters
                out.requires_grad_()
            out.register_hook(seen)  # type: ignore[no-untyped-call]

    embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    handle = embedding.register_forward_hook(embedded)
    try:
        yield found
    finally:
        handle.remove()
    if projected:
        bits = (torch.stack(projected).sum(dim=0) > 0).cpu().numpy()
        found += [row.tobytes().hex() for row in np.packbits(bits, axis=1, bitorder="little")]


class Auditor(ModelExtension):
    """Sketches gradients for the hub to compare."""

    name = NAME

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def observe(
        self, model: nn.Module, part: Sequence[Sample], lease: int
    ) -> AbstractContextManager[list[str]]:
        """Sketch the gradient of each sample."""
        return sketching(model, part, sketch_key(self.recipe.training.seed, lease))

    def beside(self, link: Link, peer: Peer, round: Round) -> Generator[Event, None, bytes]:
        """Sketch the samples that the hub has this peer audit."""
        if not (body := round.extra.get(NAME)):
            return b""
        return (yield from shrink_to_fit(peer, partial(audited, link, peer, round, body)))

    def report(self, delivered: Sequence[Lease]) -> bytes:
        """Return the sketches of these leases, and of what was audited beside them."""
        own = {lease.round: bytes.fromhex(lease.measured.notes.get(NAME, "")) for lease in delivered}
        audits = {lease.round: lease.beside[NAME] for lease in delivered if NAME in lease.beside}
        return msgspec.msgpack.encode(Answers(own, audits))


def audited(link: Link, peer: Peer, round: Round, body: bytes) -> bytes:
    """Sketch the gradients of samples that other peers had, one by one; no step is taken with them."""
    leases, sketches = read_msgpack(body, Tasks, "what the hub asks to audit").leases, ""
    packed = link.fetch_samples(f"{AUDITED}{round.round}", len(leases))
    for sample, lease in zip(leased(peer, packed, len(leases)), leases, strict=True):
        terms, held = objective_of(peer.recipe).terms([sample]), None
        while held is None:  # float16 may not hold it at the first try
            peer.trainer.zero()
            found = peer.trainer.backward([[sample]], terms, lease)
            held = peer.trainer.clip(0.0)
        sketches += found.notes[NAME]
    return bytes.fromhex(sketches)
