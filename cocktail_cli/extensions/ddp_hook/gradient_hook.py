"""Gradients of torch's DistributedDataParallel, compressed with error feedback, for a slow network.

    model = DistributedDataParallel(model)
    model.register_comm_hook(CocktailState(), cocktail_hook)

The N ranks cut each bucket of gradients into N shards; rank r sums up shard r (Algorithm 2 of CocktailSGD,
Wang et al., ICML 2023, on gradients in place of models). With g_i the gradient and e_i the error of rank i,
E_r that of shard r:

    d_i = g_i + e_i;  C[d_i] is sent, shard by shard, to the rank that sums it up;  e_i <- d_i - C[d_i]
    D_r = mean of C[d_i] + E_r;  C[D_r] is sent to all;  E_r <- D_r - C[D_r]

So a rank sends and receives two packets a step, however many ranks there are. All ranks decode the same
packets, to the same bits.
"""

# DDP compares the annotations of a hook with classes: they may not be strings.
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compress import Cocktail, NonFiniteError, decode_packed

A_FIFTH = Cocktail(random_ratio=1.0, topk_ratio=0.2, quant_bits=4)
DENSE_STEPS = 2  # at least: DDP cuts its buckets anew after the first
FEW = 1024  # gradients of a bucket up to which they are averaged exactly: a packet would not be shorter
NOT_FINITE = b"?"  # in place of a packet: a gradient holds NaN or infinity, as a loss scaler may see to
Errors = dict[int, tuple[Tensor, Tensor]]  # by number of the bucket: e_i (n,) and E_r, of this rank's shard


class CocktailState:
    """State of `cocktail_hook` for one model, on one rank.

    Args:
        compressor: C; its shards are the ranks'. The default sends a fifth of the gradient, the largest, in 4
            bits: 24 times less than FP32. Of `random_ratio` below 1 each step visits only that share.
        process_group: that of the model; None: the default one.
        seed: of the samples, the same on all ranks.
        dense_steps: steps, from the first, whose gradients are averaged exactly. ValueError below 2: DDP cuts
            its buckets anew after the first.
    """

    def __init__(
        self,
        compressor: Cocktail = A_FIFTH,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        dense_steps: int = DENSE_STEPS,
    ) -> None:
        if not isinstance(compressor, Cocktail):
            raise TypeError(f"the compressor is {compressor!r:.80}, expected a compress.Cocktail")
        if dense_steps < DENSE_STEPS:
            why = "as DDP cuts its buckets anew after the first"
            raise ValueError(f"dense_steps {dense_steps}: at least {DENSE_STEPS}, {why}")
        self.process_group, self.seed, self.dense_steps = process_group, seed, dense_steps
        self.compressor = replace(compressor, shards=dist.get_world_size(process_group))
        self.step, self.dense_until = 0, dense_steps
        self.errors: Errors = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the errors of this rank and the step, for a checkpoint of the rank."""
        return {"step": self.step, "errors": dict(self.errors), "ranks": self.compressor.shard_count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned on this rank. The next two steps are exact: DDP cuts
        its buckets anew. ValueError: it is of another number of ranks, or no such state."""
        if not isinstance(state, Mapping) or state.keys() != self.state_dict().keys():
            raise ValueError(f"{state!r:.80} is not what state_dict() of a CocktailState returned")
        if state["ranks"] != self.compressor.shard_count:
            ranks = self.compressor.shard_count
            raise ValueError(f"a checkpoint of {state['ranks']} ranks, there are {ranks}")
        self.step, self.errors = state["step"], dict(state["errors"])
        self.dense_until = max(self.dense_steps, self.step + DENSE_STEPS)

    def errors_of(self, number: int, like: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Return e_i and E_r of a bucket, zeros at first. RuntimeError: DDP has cut its buckets anew."""
        if number not in self.errors:
            shard = self.compressor.cut(len(like), self.seed)[rank]
            self.errors[number] = torch.zeros_like(like), like.new_zeros(shard.size)
        own, shared = self.errors[number]
        if own.shape != like.shape:
            raise RuntimeError(
                f"bucket {number} has {len(like):,} gradients and had {len(own):,}: its errors are of other"
                " parameters. Give each DistributedDataParallel a state of its own, which may load another's"
                " state_dict(); or raise dense_steps, so that DDP cuts its buckets before."
            )
        return own.to(like.device), shared.to(like.device)


def cocktail_hook(state: CocktailState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Replace the gradients of a bucket with the mean over all ranks of what they have sent.

    Where a rank's gradients are not finite all of them become NaN on each rank, which a loss scaler passes
    over, and no error changes.
    """
    if not isinstance(state, CocktailState):
        hint = "model.register_comm_hook(CocktailState(), cocktail_hook)"
        raise TypeError(f"the state of cocktail_hook is {state!r:.80}, expected a CocktailState: {hint}")
    buffer, group = bucket.buffer(), state.process_group
    if state.step < state.dense_until or len(buffer) <= FEW:
        dist.all_reduce(buffer.div_(dist.get_world_size(group)), group=group)
    else:
        buffer.copy_(_mean(state, bucket.index(), buffer.float()))
    state.step += bucket.is_last()
    done = torch.futures.Future[Tensor](devices=[buffer.device] if buffer.is_cuda else None)
    done.set_result(buffer)
    return done


def _mean(state: CocktailState, number: int, gradient: Tensor) -> Tensor:
    """Return the mean of what all ranks send of a gradient, (n,) float32."""
    group, mix, round = state.process_group, state.compressor, state.step
    rank, n, device = dist.get_rank(group), len(gradient), gradient.device
    own, shared = state.errors_of(number, gradient, rank)
    shards = mix.cut(n, state.seed)
    samples = [mix.draw(shard.size, shard.seed, round, device) for shard in shards]
    d = gradient + own
    try:
        sent = [mix.encode(at.take(shard.of(d))).packet for shard, at in zip(shards, samples, strict=True)]
    except NonFiniteError:
        sent = [NOT_FINITE] * len(shards)
    received = _to_each(sent, device, group)
    if NOT_FINITE in received:
        return torch.full_like(gradient, torch.nan)
    for shard, sample, packet in zip(shards, samples, sent, strict=True):
        sample.add_(shard.of(d), decode_packed(packet, sample.m).decoded(), alpha=-1)
    mine, total = samples[rank], shared.clone()
    sums = torch.zeros(mine.m)
    for packet in received:
        decode_packed(packet, mine.m).add_to(sums, 0, mine.m, 1 / len(received))
    at_mine = mine.take(total) + sums.to(device)
    aggregate = mix.encode(at_mine).packet
    mine.put_(total, at_mine)
    mine.add_(total, decode_packed(aggregate, mine.m).decoded(), alpha=-1)
    state.errors[number] = d, total
    mean = torch.zeros_like(gradient)
    for shard, sample, packet in zip(
        shards, samples, _to_each([aggregate] * len(shards), device, group), strict=True
    ):
        sample.add_(shard.of(mean), decode_packed(packet, sample.m).decoded())
    return mean


def _to_each(packets: Sequence[bytes], device: torch.device, group: dist.ProcessGroup | None) -> list[bytes]:
    """Send packet r to rank r; return what each rank has sent to this one."""
    lengths = torch.tensor([len(one) for one in packets], device=device)
    coming = torch.empty_like(lengths)
    dist.all_to_all_single(coming, lengths, group=group)
    going, sizes = torch.frombuffer(bytearray(b"".join(packets)), dtype=torch.uint8), coming.tolist()
    came = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    dist.all_to_all_single(came, going.to(device), sizes, lengths.tolist(), group=group)
    return [part.cpu().numpy().tobytes() for part in torch.split(came, sizes)]
