"""A peer's part of audits: it sketches the gradients of its lease's samples, and of those it is to audit."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import msgspec
from torch import nn

from recipes.config import Recipe
from recipes.data import Sample
from recipes.objectives import objective_of
from recipes.training import Event, Lease, Link, ModelExtension, Peer, Round, leased, shrink_to_fit
from transport.protocol import read_msgpack

from .bodies import AUDITED, NAME, Answers, Tasks
from .gradient_sketch import sketch_key, sketching


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
