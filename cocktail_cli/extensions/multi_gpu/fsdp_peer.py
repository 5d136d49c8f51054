"""The own process of a peer whose x_i, gradient and optimizer are sharded over workers of its machine.

This process has x', in memory that all of them see, the packets and the loop; the workers (fsdp_worker.py)
have the rest, a shard each. All answer the same request, one after another. Of x_i only what a round samples
comes here, as x_i - x', and only what a packet changes goes there. The shared memory has no name: it is gone
when the last of them is, however that ended:

    x' (P,) float32 | coordinates (WINDOW,) int64 | values (WINDOW,) float32
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from compress import Sample as Sampled
from compress import Shard, Update
from recipes.algorithm import ShardUpdate, each_window, worker_of
from recipes.config import Recipe
from recipes.data import Sample, batches, pack_samples
from recipes.errors import ModelError
from recipes.models import open_trained
from recipes.objectives import Measured, Objective, objective_of
from recipes.training import LOCAL, NOISE, NOISE_VALUES, OPTIMIZER, RANK, Lazy, ModelExtension, Peer, parsed
from recipes.weight_files import Layout

WINDOW = 1 << 22  # coordinates
PAGE = 1 << 12

# The methods of FsdpWorker that a peer calls over a pipe: a request is a name and the method's keywords
REQUESTS = {
    *("load", "restore", "zero", "attempt", "backward", "partly", "clip", "step", "use_global_model"),
    *("score", "use_local_model", "add", "distance", "states", "expect", "take", "read", "write"),
    *("noise_state", "bytes"),
}


class SharedMemory:
    """One process's view of it.

    Args:
        file: its descriptor, of `anonymous_file`.
        parameters: P; the file grows to what that takes.
    """

    def __init__(self, file: int, parameters: int) -> None:
        ends = [0]
        for size in (4 * parameters, 8 * WINDOW, 4 * WINDOW):
            ends.append(ends[-1] + size + -size % PAGE)
        if os.fstat(file).st_size < ends[-1]:
            os.ftruncate(file, ends[-1])
        memory = mmap.mmap(file, ends[-1])
        self.global_model = torch.frombuffer(memory, dtype=torch.float32, count=parameters)  # x'   (P,)
        self.where = torch.frombuffer(memory, dtype=torch.int64, count=WINDOW, offset=ends[1])
        self.values = torch.frombuffer(memory, dtype=torch.float32, count=WINDOW, offset=ends[2])


def anonymous_file() -> int:
    """Create an empty file in memory, or where the system cannot, on the disk; return its descriptor."""
    if hasattr(os, "memfd_create"):  # not in /dev/shm, which containers make small
        return os.memfd_create("cocktail")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def windows(start: int, stop: int, size: int = WINDOW) -> Iterator[tuple[int, int]]:
    """Divide start .. stop - 1 into windows of `size`."""
    for begin in range(start, stop, size):
        yield begin, min(begin + size, stop)


class FsdpWorkers(Protocol):
    """The worker processes, however they were started."""

    count: int
    file: int  # the descriptor of what they share with this process

    def all(self, do: str, parts: Sequence[bytes] = (), **fields: Any) -> list[dict[str, Any]]:
        """Send every worker the request `do`, with its part, where there are parts; return their answers, by
        rank.

        Raises where one of them cannot, or has ended; then all have.
        """

    def beside(self, do: str, **fields: Any) -> list[dict[str, Any]]:
        """Send every worker a request that it answers at once, while it computes; return their answers."""


def build_fsdp_peer(
    ranks: FsdpWorkers,
    base: Path,
    snapshot: Path | None,  # folder of x' of `round`; None: x_0
    recipe: Recipe,
    micro_batch: int,
    round: int = 0,
) -> Peer:
    """Build a peer like `build_peer`. What is trained is read here, once, into x'.

    Raises:
        ModelError: the folder is no model, or one that cannot be sharded.
    """
    with closing(open_trained(recipe, base, snapshot)) as x:
        layout = x.layout
        shared = SharedMemory(ranks.file, layout.size)
        for start, stop in windows(0, layout.size):
            shared.global_model[start:stop] = torch.from_numpy(x.read(start, stop))
    answers = ranks.all("load", base=str(base), recipe=recipe.to_json())
    assert all(answer["parameters"] == layout.size for answer in answers)
    local = FsdpTrainer(ranks, shared, layout, answers[0], objective_of(recipe))
    worker = worker_of(recipe, local, shared.global_model, layout.name_at, round)
    return Peer(local, worker, recipe, answers[0]["vocabulary"], micro_batch)


def check_fsdp(recipe: Recipe) -> None:
    """Raise ModelError where several devices cannot do together what the recipe asks for."""
    training, model = recipe.training, recipe.model
    cannot = {
        "training.fp32_master_weights=false": not training.fp32_master_weights,
        "model.load_in_4bit, load_in_8bit": model.quantized,
        "compression.momentum_masking": recipe.compression.momentum_masking,
        # whose sums and products go over rows of other ranks
        f"training.optim={training.optim}": training.optim in ("adafactor", "muon", "soap"),
    }
    for what, asked in cannot.items():
        if asked:
            raise ModelError(f"{what}: a peer on several GPUs cannot do that", "--gpus 1")


class FsdpTrainer:
    """The loop's `Trainer` and the worker's `LocalModel`. Every vector it is given is x'.

    Args:
        loaded: what a worker says of the model.
    """

    from_global_model = False
    extensions: Sequence[ModelExtension] = ()

    def __init__(
        self,
        ranks: FsdpWorkers,
        shared: SharedMemory,
        layout: Layout,
        loaded: Mapping[str, Any],
        objective: Objective,
    ) -> None:
        self.ranks, self.shared, self.layout, self.objective = ranks, shared, layout, objective
        self.kind: str = loaded["kind"]
        self.sizes: Sequence[int] = loaded["sizes"]
        self.numbers: Sequence[int] = loaded["numbers"]  # the layout's, as the optimizer has its parameters
        self.at_once = self.in_memory = ranks.count
        self.stepped = False
        self.brought: dict[int, tuple[ShardUpdate, int]] = {}  # what ranks have: update, count of windows

    # ---- training ------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.ranks.all("bytes")  # any question

    def zero(self, share: float = 1.0) -> None:
        self.ranks.all("zero", share=share)

    def attempt(self, part: Sequence[Sample], aside: float) -> float:
        """Try all at once: what one of them has no memory for, none does."""
        terms = self.at_once * self.objective.terms(part)
        answers = self._deal("attempt", [part] * self.at_once, terms=terms, aside=aside)
        return max(float(answer["share"]) for answer in answers)

    def backward(self, parts: Sequence[Sequence[Sample]], terms: int, lease: int | None = None) -> Measured:
        answers = self._deal("backward", parts, terms=terms, lease=lease)
        return sum((Measured(**answer) for answer in answers[: len(parts)]), Measured())  # others were idle

    def partly(self, done: float) -> None:
        self.ranks.all("partly", done=done)

    def clip(self, limit: float) -> float | None:
        norm: float | None = self.ranks.all("clip", limit=limit)[0]["norm"]  # all have the same
        return norm

    def step(self, rate: float, beta1: float | None = None) -> None:
        self.ranks.all("step", rate=rate, beta1=beta1)
        self.stepped = True

    def evaluate(self, vector: Tensor, samples: Sequence[Sample], size: int) -> Measured:
        assert vector.data_ptr() == self.shared.global_model.data_ptr()
        self.ranks.all("use_global_model")
        answers: list[dict[str, Any]] = []
        for group in batches(samples, size * self.at_once):
            answers += self._deal("score", list(batches(group, size)))
        self.ranks.all("use_local_model")
        return sum((Measured(**answer) for answer in answers), Measured())

    def _deal(self, do: str, parts: Sequence[Sequence[Sample]], **fields: Any) -> list[dict[str, Any]]:
        """Deal a micro-batch to each rank; one without gets a sample that does not count."""
        idle = [[self.objective.uncounted(parts[0][0])]] * (self.at_once - len(parts))
        return self.ranks.all(do, [pack_samples(part) for part in [*parts, *idle]], **fields)

    # ---- x_i -----------------------------------------------------------------------------------------------

    def difference(self, shard: Shard, sample: Sampled, other: Tensor) -> Tensor:
        assert other.data_ptr() == self.shared.global_model.data_ptr()
        out, block = torch.empty(sample.m), sample.block_size
        units = sample.units * block + shard.start
        for start, stop in windows(0, len(units), WINDOW // block):
            self.shared.where[: stop - start] = units[start:stop]
            self.ranks.beside("difference", units=stop - start, block=block)
            place = out[start * block : stop * block]  # the last block may be a short one
            place.copy_(self.shared.values[: len(place)])
        return out

    def bring(self, piece: ShardUpdate) -> None:
        self.brought[id(piece)] = piece, self._bring(piece)

    def add_(self, piece: ShardUpdate, alpha: int = 1) -> None:
        _, count = self.brought.pop(id(piece), (piece, 0))
        if count == 0 or not self._added(piece, count, alpha):
            self._bring(piece, lambda: self._added(piece, 1, alpha))

    def _bring(self, piece: ShardUpdate, then: Callable[[], object] = lambda: None) -> int:
        """Give the ranks an update, window by window; return how many there are."""
        count = 0

        def bring(window: Update) -> None:
            nonlocal count
            where = piece.sample.coordinates(window.positions) + piece.shard.start
            self.shared.where[: len(where)] = where
            self.shared.values[: len(where)] = window.values
            self.ranks.beside("bring", update=id(piece), count=len(where))
            count += 1
            then()

        each_window(piece.update, torch.device("cpu"), bring)
        return count

    def _added(self, piece: ShardUpdate, count: int, alpha: int) -> bool:
        """Let the ranks add an update that they have in so many windows. False: they have begun since."""
        answers = self.ranks.all("add", update=id(piece), count=count, alpha=alpha)
        return all(answer["added"] for answer in answers)

    def distance(self, other: Tensor) -> float:
        assert other.data_ptr() == self.shared.global_model.data_ptr()
        return float(sum(answer["square"] for answer in self.ranks.all("distance")) ** 0.5)

    # ---- what is kept --------------------------------------------------------------------------------------

    def tensors(self) -> Mapping[str, Tensor]:
        made: dict[str, Callable[[], Tensor]] = {LOCAL: partial(self._read, LOCAL)}
        made[NOISE] = lambda: torch.tensor(self.ranks.all("noise_state")[0]["state"])  # all have the same
        for answer in self.ranks.all("states"):
            for name, value in answer["states"].items():  # of all ranks the same, or of each its own
                if isinstance(value, float):
                    made[name] = partial(torch.tensor, value, dtype=torch.float32)
                else:
                    made[name] = partial(self._read, name, value)
        return Lazy(made)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = {f"{OPTIMIZER}.{n}": self.layout.shapes[i] for n, i in enumerate(self.numbers)}
        return {LOCAL: (self.layout.size,), NOISE: (NOISE_VALUES,), **shapes}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self._write(LOCAL, tensors[LOCAL])
        if NOISE in tensors:
            self.ranks.all("noise_state", state=tensors[NOISE].tolist())
        names = [name for name in tensors if name not in (LOCAL, NOISE)]
        own = bool(names) and all(RANK in name and name.endswith(f"/{self.at_once}") for name in names)
        if not own and any(RANK in name or "|" in name for name in names):
            names = []  # of 8 bits, as one device has them or another number: the optimizer begins anew
        kept: dict[str, float | list[int] | None] = {}
        for name in names:
            shape = list(tensors[name].shape)
            kept[name] = (shape if own else None) if shape else float(tensors[name])
        self.ranks.all("expect", states=kept)
        for name in names:
            if not isinstance(kept[name], float):
                self._write(name, tensors[name])
        if own:
            self.ranks.all("take")
        self.stepped = bool(names)

    def _read(self, name: str, own: Sequence[int] | None = None) -> Tensor:
        """Read x_i, or the optimizer's state of one parameter, from all ranks; or from the one whose `own` it
        is, in that shape."""
        first, last = self._range(name) if own is None else (0, prod(own))
        out = torch.empty(last - first)
        for start, stop in windows(first, last):
            self.ranks.all("read", name=name, start=start, stop=stop)
            out[start - first : stop - first] = self.shared.values[: stop - start]
        return out.view(self.shapes()[name.rpartition(".")[0] or name] if own is None else tuple(own))

    def _write(self, name: str, tensor: Tensor) -> None:
        first, last = (0, tensor.numel()) if RANK in name else self._range(name)
        flat = tensor.reshape(-1)
        for start, stop in windows(first, last):
            self.shared.values[: stop - start] = flat[start - first : stop - first]
            self.ranks.all("write", name=name, start=start, stop=stop)

    def _range(self, name: str) -> tuple[int, int]:
        """Return the coordinates of a name in the vector."""
        if name == LOCAL:
            return 0, self.layout.size
        i = self.numbers[parsed(name)[0]]
        return self.layout.offsets[i], self.layout.offsets[i + 1]
