"""How many sequences fit into a machine's memory at once, and what to do when they do not.

A lease is computed in parts, micro-batches, whose losses and gradients add up. So the size of a part is the
machine's own affair: it is found at the start, and halved when memory runs out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from recipes.data import Sample
from recipes.optim import STATE

if TYPE_CHECKING:
    from recipes.finetune import Lowered, Peer
    from recipes.local import Alone
    from recipes.schema import Recipe

T = TypeVar("T")

# What torch and oneDNN say on a CPU; on an accelerator there is torch.OutOfMemoryError.
FULL = ("DefaultCPUAllocator", "could not create a primitive", "backend out of memory")
MOST = 64  # sequences tried on an accelerator
ON_CPU = 8
LEAVE = 0.9  # of an accelerator's memory a trial may take so much: fragments and the codec need the rest


class MemoryFull(Exception):
    """This machine's memory does not hold one sequence of this recipe."""

    def __init__(self, message: str, hints: tuple[str, ...]) -> None:
        super().__init__(message)
        self.hints = hints


def is_full(error: BaseException) -> bool:
    """Whether memory ran out."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        words in str(error) for words in FULL
    )


def fitted(peer: Peer, work: Callable[[], T]) -> Generator[Lowered, None, T]:
    """`work`, again with half the micro-batch each time that memory runs out; `yield from` gives its result.

    Raises:
        MemoryFull: not even one sequence fits.
    """
    from recipes.finetune import Lowered

    while True:
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_full(error):
                raise
            if peer.micro_batch == 1:
                said = f"memory is full with one sequence at a time ({first_line(error)})"
                raise MemoryFull(said, fixes(peer.recipe)) from error
            said = first_line(error)
        # Outside of the handler: what the failed attempt held has gone with its traceback.
        release()
        peer.micro_batch = (peer.micro_batch + 1) // 2
        yield Lowered(peer.micro_batch, said)


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def release() -> None:
    """Give back what the accelerator's allocator holds in pieces."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def fixes(recipe: Recipe) -> tuple[str, ...]:
    """What helps, the mildest first; three of what the recipe has not done already."""
    training, lora = recipe.training, recipe.lora
    found = []
    if not training.activation_checkpointing:
        found.append("training.activation_checkpointing=true: activations are computed twice, not kept")
    if recipe.compression.state_device != "cpu" and torch.cuda.is_available():
        found.append("compression.state_device=cpu: the common model lies in the host's memory")
    if lora is None and STATE[training.optim] > STATE["adamw_8bit"]:
        found.append("training.optim=adamw_8bit: a quarter of the optimizer's memory")
    found.append(f"data.max_length={max(8, recipe.data.max_length // 2)}: shorter samples")
    if lora is None:
        found.append("lora.lora_r=16: only adapters are trained")
    elif not recipe.model.quantized:
        found.append("model.load_in_4bit=true: a quarter of the base's memory")
    found.append("a device with more memory, or fewer other programs on this one")
    return tuple(found[:3])


# ---- at the start ------------------------------------------------------------------------------------------


def micro_batch_for(local: Alone, recipe: Recipe, go_on: Callable[[], object] = lambda: None) -> int:
    """The micro-batch that this machine has memory for, at the recipe's length.

    An accelerator tries, with the optimizer's memory set aside. A CPU's system would end the process rather
    than say that memory is full, so there it is a modest guess.
    """
    if local.device.type == "cuda":
        return tried(local, recipe, go_on)
    return guessed(recipe, getattr(local.model, "config", None))


def tried(local: Alone, recipe: Recipe, go_on: Callable[[], object]) -> int:
    """The largest power of two whose forward and backward pass leaves a tenth of the memory."""
    length = recipe.data.max_length
    sample = Sample(np.zeros(length, np.int32), np.arange(length) > 0)
    fits, size = 1, 1
    bytes_aside = int(STATE[recipe.training.optim] * local.layout.size)
    aside = torch.empty(bytes_aside, dtype=torch.uint8, device=local.device)
    try:
        while size <= MOST:
            go_on()
            torch.cuda.reset_peak_memory_stats(local.device)
            local.zero()
            local.backward([[sample] * size], size * length)
            total = torch.cuda.get_device_properties(local.device).total_memory
            if torch.cuda.max_memory_allocated(local.device) > LEAVE * total:
                break
            fits, size = size, 2 * size
    except RuntimeError as error:
        if not is_full(error):
            raise
    finally:
        del aside
        local.zero()
        release()
    return fits


def guessed(recipe: Recipe, config: Any) -> int:
    """ON_CPU, or less where so many samples would take more than a quarter of the memory that is free."""
    free = free_memory()
    sizes = (getattr(config, name, 0) for name in ("vocab_size", "num_hidden_layers", "hidden_size"))
    vocabulary, layers, width = (value if isinstance(value, int) else 0 for value in sizes)
    kept = 2 if recipe.training.activation_checkpointing else 34  # vectors of each layer and token, about
    sample = 4 * recipe.data.max_length * (3 * vocabulary + (layers * kept + 34) * width)
    size = ON_CPU
    while size > 1 and size * sample > free / 4:
        size //= 2
    return size


def free_memory() -> float:
    """Bytes; where the system does not tell, as many as wanted."""
    try:
        pages = max(os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PHYS_PAGES") // 4)  # the cache can go
        return float(pages * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return float("inf")
