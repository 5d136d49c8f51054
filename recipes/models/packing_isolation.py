"""Test whether a model isolates the documents of a packed sample. One that does not would leak attention
between them, and only a slightly better loss would show it.
"""

from __future__ import annotations

import torch
from torch import nn

from recipes.errors import ModelError

from .sliced_loss import logits_of

TOLERANCE = 0.01  # of another document's influence beside an own token's: quantized weights round a little


def check_packing_isolation(model: nn.Module) -> None:
    """Raise ModelError where the last document of a sample depends on the one before."""
    if not isolates_documents(model):
        name = type(model).__name__
        raise ModelError(
            f"{name} of this version of transformers lets packed documents attend to each other "
            "(hint: data.packing_strategy=wrapped, if that is intended, or data.packing=false)"
        )


@torch.no_grad()
def isolates_documents(model: nn.Module) -> bool:
    """Compare the logits after two documents of three tokens: with another first document, and with another
    first token in the last document."""
    device, training = next(model.parameters()).device, model.training
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 0, 2, 4, 5, 6], [1, 2, 3, 0, 5, 6]])
    positions = torch.arange(3).repeat(3, 2)
    model.eval()
    try:
        batch = {"input_ids": tokens.to(device), "position_ids": positions.to(device)}
        last = logits_of(model, batch)[:, -1].float()  # (3, V)
    finally:
        model.train(training)
    other, own = (last[1:] - last[0]).abs().amax(dim=1).tolist()
    return bool(other <= TOLERANCE * own)
