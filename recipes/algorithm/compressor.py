"""The compressor C that a recipe's `compression` section describes."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from compress import Cocktail, decode
from compress.backends import WORTH
from recipes.config import Compression

from .update_windows import each_window

OWN = ("uncompressed_rounds", "quant_step", "block_size", "quant_bucket_size")  # of the compressor
SHARED = [one.name for one in fields(Cocktail) if one.name not in OWN]  # attributes of `Compression` too


def compressor_of(compression: Compression) -> Cocktail:
    """Build C. Every key reaches the field of the same name; `uncompressed_steps` are counted in rounds."""
    rounds = -(-compression.uncompressed_steps // compression.step_rungs[0])
    if rounds:
        rounds += compression.staleness > 0  # a stale round sends the steps before it
    shared = {name: getattr(compression, name) for name in SHARED}
    return Cocktail(**shared, uncompressed_rounds=rounds)


def handoff_compressor(compressor: Cocktail, topk_ratio: float) -> Cocktail:
    """Build the C of a residual handoff: it visits the whole vector and keeps this share of it."""
    # blocks: a unit for each element takes 8 bytes; of each chunk something is kept, however small K is
    everything = replace(compressor, random_ratio=1.0, sample_kind="block", uncompressed_rounds=0)
    return replace(everything, topk_ratio=topk_ratio, topk_chunk=0)


def warm_up_codec(compressor: Cocktail, parameters: int) -> None:
    """Encode and decode one packet and drop it: where the shards of so many parameters are long, the first
    packet on a machine waits seconds for a compiler, and the first of a process for its imports."""
    if compressor.random_ratio * parameters >= WORTH * compressor.shard_count:
        x = torch.linspace(-1, 1, 2 * WORTH)
        sample = replace(compressor, random_ratio=0.5).draw(len(x), 0, 0)
        sent = compressor.encode(sample.difference(x, torch.zeros_like(x)))
        sample.add_(x, decode(sent.packet, sample.m))  # both decoders are compiled as well
        each_window(sent.update(), x.device, lambda window: sample.add_(x, window))
