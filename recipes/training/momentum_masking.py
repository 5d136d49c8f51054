"""Momentum masking of Deep Gradient Compression (Lin et al., ICLR 2018, section 3.2).

A coordinate that was sent has left the residual. Its momentum is made of gradients that the swarm has by
then, and would push x_i the same way once more, so it starts again from zero there. A run without
`compression.momentum_masking` does not come here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from compress import Update
from recipes.algorithm import ShardUpdate, each_window


def mask_momentum(
    optimizer: Optimizer, parameters: Sequence[Tensor], offsets: Sequence[int], taken: ShardUpdate
) -> None:
    """Set AdamW's first moment to zero at the coordinates of an update that the aggregator has taken. One of
    a whole shard, as in uncompressed steps, leaves it: nothing there was late.

    Args:
        parameters: those of all of x_i, in the vector's order.
        offsets: start of each parameter in the vector, and P at the end (`Layout.offsets`).
    """
    if taken.update.count == taken.shard.size:
        return
    device = parameters[0].device
    starts = torch.tensor(offsets, device=device)

    def clear(window: Update) -> None:
        at = taken.sample.coordinates(window.positions) + taken.shard.start  # (k,) ascending
        cuts = torch.searchsorted(at, starts).tolist()
        for n, parameter in enumerate(parameters):
            if state := optimizer.state.get(parameter):  # empty before its first step
                state["exp_avg"].view(-1)[at[cuts[n] : cuts[n + 1]] - starts[n]] = 0

    each_window(taken.update, device, clear)
