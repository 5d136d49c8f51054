"""The micro-batch: how many sequences fit into a machine's memory, and what to say when not one does.

The losses and gradients of micro-batches add up to those of a lease. So their size is the machine's own
affair: it is found at the start, and the loop halves it when memory runs out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from recipes.algorithm import encoding_bytes
from recipes.config import Recipe
from recipes.hardware import host_memory
from recipes.objectives import objective_of

from .optimizers import STATE
from .types import Trainer

# What torch and oneDNN say on a CPU; on an accelerator there is torch.OutOfMemoryError.
FULL = ("DefaultCPUAllocator", "could not create a primitive", "backend out of memory")
MOST = 64  # sequences tried on an accelerator
ON_CPU = 8
GLOBAL_MODEL = 4  # bytes of a parameter of x'
LEAVE = 0.9  # of an accelerator's memory a trial may take so much: fragments and the codec need the rest
SIZES = ("vocab_size", "num_hidden_layers", "hidden_size")  # of a config


class MemoryFull(Exception):
    """This machine's memory does not hold one sequence of this recipe."""

    def __init__(self, message: str, hints: tuple[str, ...]) -> None:
        super().__init__(message)
        self.hints = hints


def is_full(error: BaseException) -> bool:
    """Did memory run out?"""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        words in str(error) for words in FULL
    )


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def release() -> None:
    """Return what the accelerator's allocator holds in fragments."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def fixes(recipe: Recipe) -> tuple[str, ...]:
    """List three remedies, the mildest first, that the recipe does not use already."""
    training, lora = recipe.training, recipe.lora
    found = []
    if not training.activation_checkpointing:
        found.append("training.activation_checkpointing=true: activations are computed twice, not kept")
    if recipe.compression.state_device != "cpu" and torch.cuda.is_available():
        found.append("compression.state_device=cpu: the global model is kept in the host's memory")
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


def micro_batch_for(local: Trainer, recipe: Recipe, go_on: Callable[[], object] = lambda: None) -> int:
    """Choose the micro-batch that this machine has memory for, at the recipe's length; for each device, where
    the model is spread over several.

    An accelerator tries, with the optimizer's memory set aside. A CPU's system would end the process rather
    than say that memory is full, so there it is a modest guess.
    """
    if local.kind == "cuda":
        return tried(local, recipe, go_on)
    return guessed(recipe, local.sizes, local.in_memory)


def tried(local: Trainer, recipe: Recipe, go_on: Callable[[], object] = lambda: None) -> int:
    """Find the largest power of two whose forward and backward pass leaves a tenth of the memory."""
    sample = objective_of(recipe).longest(recipe.data.max_length)
    fits, size, before = 1, 1, 0.0
    try:
        while size <= MOST:
            go_on()
            taken = local.attempt([sample] * size, STATE[recipe.training.optim])
            if taken > LEAVE:
                break
            fits, size = size, 2 * size
            # A share grows no slower than this. Ranks in which memory ran out begin again, which takes long.
            if before and taken + 2 * (taken - before) > LEAVE:
                break
            before = taken
    except (RuntimeError, MemoryError) as error:
        if not is_full(error):
            raise
    release()
    return fits


def global_model_fits(local: Trainer, recipe: Recipe) -> bool:
    """Choose the device of x' by `state_device`: True beside x_i, False the host's memory, of which a round
    then takes what it samples. `auto` tries one sequence on a GPU, with the memory of x', of the optimizer
    and of an exchange set aside."""
    where = recipe.compression.state_device
    if where != "auto" or local.kind != "cuda":
        return where != "cpu"
    size = local.layout.size
    exchange = encoding_bytes(recipe.compression, size, gpu=True) / size
    aside = STATE[recipe.training.optim] + GLOBAL_MODEL + exchange
    try:
        return local.attempt([objective_of(recipe).longest(recipe.data.max_length)], aside) <= LEAVE
    except (RuntimeError, MemoryError) as error:
        if not is_full(error):
            raise
    finally:
        release()
    return False


def share_taken(device: torch.device, aside: float, work: Callable[[], object]) -> float:
    """Do `work` with so many bytes set aside; return the largest share that was held of the device's memory,
    as far as other programs leave it. 0: not known."""
    counted, room = device.type == "cuda", 0
    if counted:
        release()
        room = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    held = torch.empty(int(aside), dtype=torch.uint8, device=device)
    work()
    del held
    if not counted:
        return 0.0
    return torch.cuda.max_memory_allocated(device) / room


def sizes_of(config: Any) -> tuple[int, ...]:
    """Read from a config what a guess is made from; 0: not known."""
    values = (getattr(config, name, 0) for name in SIZES)
    return tuple(value if isinstance(value, int) else 0 for value in values)


def guessed(recipe: Recipe, sizes: Sequence[int], in_memory: int) -> int:
    """Guess ON_CPU, or less where `in_memory` micro-batches of so many samples would take more than a quarter
    of the memory that is free."""
    vocabulary, layers, width = sizes
    kept = 2 if recipe.training.activation_checkpointing else 34  # vectors of each layer and token, about
    tokens = len(recipe.objective.sequences) * recipe.data.max_length
    sample = 4 * tokens * (3 * vocabulary + (layers * kept + 34) * width)
    size, room = ON_CPU, host_memory().free / 4 / in_memory
    while size > 1 and size * sample > room:
        size //= 2
    return size
