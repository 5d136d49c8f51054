"""A machine of a replica from its start on: nothing, then a stage that the head fills, then its part.

    held    whose parameters are here already, and of which round
    load    recipe and config of the model; the stage is built on the meta device
    fill    values of one parameter
    begin   the stage trains: every later request is its part's

A machine behind the head needs no run URL, no account, and no disk unless `activation_bits` is below 32. The
head reads weights from its own disk, window by window, so no machine ever has more than its stage. One that
has the run's base on its own disk reads its layers there.

Its part is its layers, and its ranges of x_i, x', the gradient and the optimizer. To the algorithm these
ranges are a vector of their own, whose shards are whole shards of the run's (`stages:` makes each layer one):
the same `Worker` and `GlobalModel` as of an ordinary peer encode, decode and move them. Every machine answers
the same requests, the head too; the others get them by the ring.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor, nn

from cocktail_cli.assembly import recipe_type
from recipes.algorithm import DecodedPacket, GlobalModel, Part, Worker, adaptive_rate_of, compressor_of
from recipes.config import Recipe, recipe_from_json
from recipes.errors import ModelError
from recipes.models import build_on_meta, frozen_name, open_trained, open_vector
from recipes.training import FlatParameters, GradientNoise, SingleDeviceTrainer, positions_within
from recipes.weight_files import Layout, StoredVector, layout_of

from .activation_codec import ActivationDecoder, ActivationEncoder, ActivationMemory
from .ring_request import BRINGS, Answer, StageLost
from .stage_model import StageModel, stage_ranges
from .stage_worker import Line, StageWorker

# of weights, as a stage names them
DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
WINDOW = 1 << 21  # parameters of a `fill`: 8 MiB, which a line takes at once


class WeightsReader:
    """Reads the values of parameters: what is trained, of x'; the rest, of the base."""

    def __init__(self, trained: StoredVector, base: StoredVector | None) -> None:
        self.trained, self.base = trained, base

    def has(self, wanted: object) -> bool:
        """Tell whether this is name, size and dtype of a parameter, as a stage asks for it."""
        if not isinstance(wanted, list | tuple) or [type(one) for one in wanted] != [str, int, str]:
            return False
        name, _, dtype = wanted
        frozen = self.base is not None and frozen_name(self.base, name) in self.base.layout.names
        return dtype in DTYPES and (frozen or name in self.trained.layout.names)

    def windows(self, name: str, dtype: str) -> Iterator[tuple[int, bytes]]:
        """Yield the start and the bytes of each window of a parameter."""
        stored = self.trained
        if name not in stored.layout.names:
            assert self.base is not None
            stored, name = self.base, frozen_name(self.base, name)
        at = stored.layout.names.index(name)
        first, last = stored.layout.offsets[at], stored.layout.offsets[at + 1]
        for start in range(first, last, WINDOW):
            values = torch.from_numpy(stored.read(start, min(start + WINDOW, last))).to(DTYPES[dtype])
            yield start - first, values.view(torch.uint8).numpy().tobytes()


@contextmanager
def open_weights(recipe: Recipe, base: Path, snapshot: Path | None = None) -> Iterator[WeightsReader]:
    """Open the model in `base`, at x' of a snapshot, or x_0. Errors: ModelError."""
    with ExitStack() as files:
        trained = files.enter_context(closing(open_trained(recipe, base, snapshot)))
        frozen = None
        if recipe.lora is not None:
            frozen = files.enter_context(closing(open_vector(base, recipe.model.trust_remote_code)))
        yield WeightsReader(trained, frozen)


CONFIG = "config.json"
T = TypeVar("T")


class StageMachine:
    """One machine's end of all requests.

    Args:
        number: of its stage; 0: the head's.
        device: where it trains.
        base: folder of the run's base model on this machine, called like the head's; None: it has none.
    """

    def __init__(self, number: int, device: torch.device | str = "cpu", base: Path | None = None) -> None:
        self.number, self.device, self._base = number, torch.device(device), base
        self.trained: StagePart | None = None
        self.filling: LoadingStage | None = None  # that the head fills
        self._key = ""  # of the loading that gave it its part

    @property
    def loading(self) -> LoadingStage:
        """Return the stage that is being filled. Raises StageLost: `load` went to the process before."""
        return given(self.filling)

    @property
    def part(self) -> StagePart:
        """Return what is trained. Raises StageLost: it went with the process before."""
        return given(self.trained)

    def answer(self, do: str, fields: Mapping[str, Any], data: bytes) -> Answer:
        """Do what the head asks. Raises KeyError where it is no request."""
        asked: StageMachine | StagePart = self
        if do not in ("held", "load", "fill", "begin"):
            asked = self.part
            if do not in REQUESTS:
                raise KeyError(do)
        found = getattr(asked, do)(**fields, **({"data": data} if do in BRINGS else {}))
        return found if isinstance(found, Answer) else Answer(found or {})

    def held(self) -> dict[str, Any]:
        """Say which loading gave this machine its part, the round of its x', and the last step that it knows.
        No key: it has none."""
        if self.trained is None:
            return {"key": "", "round": 0, "step": -1}
        part = self.trained
        return {"key": self._key, "round": part.worker.global_model.round, "step": part.compute.step}

    def load(
        self, recipe: str, config: str, layers: Mapping[str, Sequence[int]], source: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Build this machine's stage, if it is one of these, with the values that its disk has; says which it
        needs. What it trained before is gone.

        Args:
            source: `base`, the name of the head's folder; and whether x' is `from_snapshot`.
        """
        if (mine := layers.get(str(self.number))) is None:
            return {"parameters": []}
        self.trained = self.filling = None
        here = range(*mine)
        self.filling = LoadingStage(
            recipe_from_json(recipe, recipe_type), config, here, self.number == 0, self.device
        )
        if self._base is not None and self._base.name == source["base"]:
            self.filling.read(self._base, trained=not source["from_snapshot"])
        return {"parameters": self.loading.wanted}

    def fill(self, data: bytes, stage: int, name: str, start: int) -> None:
        """Take values of one parameter of one stage, from element `start` on."""
        if stage == self.number:
            self.loading.fill(name, start, data)

    def begin(self, name: str, round: int, step: int, key: str = "") -> dict[str, Any]:
        """Train what was filled: x' of `round`, of the replica `name`; steps are counted on from `step`. A
        machine that has its part already goes on with it."""
        if self.trained is not None:
            return self.trained.state()
        loaded, self.filling, self._key = self.loading, None, key
        self.trained = StagePart(loaded.stage, loaded.whole, loaded.recipe, name, round, self.device)
        self.trained.compute.step = step
        return self.trained.state()


def given(what: T | None) -> T:
    """Return what this process was given. Raises StageLost: it was the process before it."""
    if what is None:
        raise StageLost("it was started again, and has nothing to train")
    return what


class LoadingStage:
    """A stage on its way from the meta device to one with values.

    Args:
        config: the text of the model's config.json.
    """

    def __init__(self, recipe: Recipe, config: str, layers: range, first: bool, device: torch.device) -> None:
        check_staged(recipe)
        self.recipe = recipe
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / CONFIG).write_text(config, encoding="utf-8")
            model: nn.Module = build_on_meta(Path(folder), recipe, device)
        self.whole: Layout = layout_of(model)
        self.stage = StageModel(model, layers, first)
        self.flat: dict[str, Tensor] = {}
        self._here: set[str] = set()  # parameters that were read from the disk
        self._allocate()

    def _allocate(self) -> None:
        """Give each parameter memory, a tied one once."""
        names = {parameter: name for name, parameter in self.stage.model.named_parameters()}
        made: dict[Tensor, nn.Parameter] = {}
        for owner in self.stage.model.modules():
            for attribute, empty in list(owner.named_parameters(recurse=False)):
                if not empty.is_meta:
                    continue
                if empty not in made:
                    values = torch.empty(empty.shape, dtype=empty.dtype)
                    made[empty] = nn.Parameter(values, empty.requires_grad)
                    self.flat[names[empty]] = values.view(-1)
                owner._parameters[attribute] = made[empty]  # as `register_parameter`, which may be patched

    @property
    def wanted(self) -> list[tuple[str, int, str]]:
        """List name, size and dtype of each parameter that the head is to give."""
        return [
            (name, len(flat), str(flat.dtype)) for name, flat in self.flat.items() if name not in self._here
        ]

    def read(self, base: Path, *, trained: bool) -> None:
        """Read the frozen parameters from a base model's folder, and where `trained` those of x_0."""
        with open_weights(self.recipe, base) as reader:
            for name, flat in self.flat.items():
                if trained or name not in self.whole.names:
                    for start, values in reader.windows(name, str(flat.dtype)):
                        self.fill(name, start, values)
                    self._here.add(name)

    def fill(self, name: str, start: int, data: bytes) -> None:
        flat = self.flat[name]
        values = torch.frombuffer(bytearray(data), dtype=flat.dtype)
        flat[start : start + len(values)] = values


MEMORY = 2 << 30  # bytes of samples' activations that each of a machine's two ends remembers, on disk
MOST_SAMPLES = 1 << 16
REQUESTS = (  # methods of StagePart
    *("state", "settle", "catch_up", "encode", "decode", "move", "zero", "partly", "square", "scale", "step"),
    *("follow", "subtract", "handoff", "distance", "use_global_model", "use_local_model"),
)
OTHERWISE = "the run's host can launch it with another value; a machine that holds the whole model can join"


def check_staged(recipe: Recipe) -> None:
    """Raise ModelError where stages cannot do together what the recipe asks for."""
    training, model = recipe.training, recipe.model
    cannot = {
        "a recipe without `stages:`": "stages" not in recipe.extensions,
        "compression.momentum_masking": recipe.compression.momentum_masking,
        "training.fp32_master_weights=false": not training.fp32_master_weights,
        "model.load_in_4bit, load_in_8bit": model.quantized,
        "model.trust_remote_code": model.trust_remote_code,  # a stage's machine gets no files of code
        "training.fp16": training.fp16,
    }
    cannot |= {name: section.one_machine for name, section in recipe.extensions.items()}
    for what, asked in cannot.items():
        if asked:
            raise ModelError(f"{what}: a replica of several machines cannot do that", OTHERWISE)


def bits_of(recipe: Recipe) -> tuple[int, int]:
    """Return the bits of an activation on a line between stages, and of its gradient."""
    bits = getattr(recipe.extensions.get("stages"), "activation_bits", 32)
    return bits, 8 if bits < 32 else 32


class StagePart:
    """The part of one machine, at x' of `round`.

    Args:
        stage: the machine's layers, at x'.
        whole: layout of the whole model.
        name: of the replica; its machines share the noise of stochastic rounding.
        device: where it trains; None: where the model is.
    """

    def __init__(
        self,
        stage: StageModel,
        whole: Layout,
        recipe: Recipe,
        name: str = "",
        round: int = 0,
        device: torch.device | None = None,
    ) -> None:
        check_staged(recipe)
        own = crc32(name.encode())
        self.whole, self.recipe = whole, recipe
        self.trainer = SingleDeviceTrainer(stage.model, recipe, own, device)
        if self.trainer.half == torch.float16:
            said = f"{self.trainer.device}: stages compute in bfloat16 or float32, not in float16"
            raise ModelError(said, "training.bf16=false, or another device")
        assert isinstance(self.trainer.flat, FlatParameters)
        self.flat = self.trainer.flat
        places = positions_within(whole, self.flat.layout)
        self.trainer.noise = GradientNoise(places, recipe.training.adam_beta2, self.trainer.device)
        apart = recipe.compression.state_device == "cpu"
        vector = self.flat.vector.to("cpu" if apart else self.trainer.device, copy=True)
        part = Part(stage_ranges(whole, self.flat.layout), whole.size)
        compression = recipe.compression
        rate, name_at = adaptive_rate_of(compression), self.flat.layout.name_at
        mix, seed = compressor_of(compression), recipe.training.seed
        model = GlobalModel(vector, mix, seed, round, part, rate.richest)
        self.worker = Worker(self.flat.vector, model, name_at, rate=rate)
        columns, rows = int(stage.causal.config.hidden_size), recipe.data.max_length
        # of the lines' memories; gone with this part
        self.files = tempfile.TemporaryDirectory(prefix="cocktail-stage-", ignore_cleanup_errors=True)
        self.line = quantised_line(bits_of(recipe), columns, rows, Path(self.files.name))
        if sys.platform != "win32":  # else the folder is gone now, and its mapped files with the process
            self.files.cleanup()
        self.exact = exact_line(columns)
        self.compute = StageWorker(stage, self.line, self.trainer.device, lambda: self.trainer.precision())
        self.sent: dict[int, DecodedPacket] = {}  # by round: updates in flight, or handed over
        self.aggregates: dict[int, DecodedPacket] = {}  # by round
        self._evaluating = ExitStack()

    @property
    def share(self) -> float:
        """Return this machine's share of the parameters."""
        return self.flat.layout.size / self.whole.size

    # ---- the model x' and the exchange ---------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Say which x' is here: its round, its part of the fingerprint; and which shards."""
        model = self.worker.global_model
        shards = [shard.number for shard in model.shards]
        told = {"round": model.round, "fingerprint": model.fingerprint, "shards": shards}
        return {**told, "stepped": self.trainer.stepped}

    def encode(self, round: int, budget: int, alone: bool, flights: Sequence[int], rung: int) -> Answer:
        """Encode this machine's shards of C[d_i] (lines 1 and 2). budget: bytes for all of the replica."""
        earlier = [self.sent[one] for one in flights if one in self.sent]
        sent = self.sent[round] = self.worker.start(int(budget * self.share), alone, round, earlier, rung)
        short, self.worker.short_of_memory = self.worker.short_of_memory, False
        return Answer({"usual": self.worker.usual, "short": short}, sent.packet)

    def decode(self, data: bytes, round: int) -> None:
        """Decode this machine's shards of a round's aggregate (line 5). Raises PacketError."""
        self.aggregates[round] = self.worker.global_model.decode(data, round)

    def move(self, round: int) -> dict[str, Any]:
        """x' <- x' + C[D] (line 7)."""
        self.worker.global_model.move(self.aggregates[round])
        return self.state()

    def follow(self, round: int, taken: bool) -> None:
        """x_i <- x_i + C[D] - C[d_i] (line 6), without the latter where it was not `taken`."""
        aggregate = self.aggregates.pop(round)
        sent = self.sent.pop(round, None)
        self.worker.follow(aggregate, sent if taken else None)

    def subtract(self, round: int) -> None:
        """Take an update, or a handoff, out of d_i: the aggregator has it."""
        if (sent := self.sent.pop(round, None)) is not None:
            self.worker.subtract(sent)

    def catch_up(self, data: bytes, round: int) -> dict[str, Any]:
        """Apply the aggregate of a round that this replica took no part in; a part that has it, does not."""
        if self.worker.global_model.round == round:
            self.worker.catch_up(data)
            self.sent.clear()  # of a session that is over
            self.aggregates.clear()
        return self.state()

    def settle(self, taken: Sequence[int] | None) -> dict[str, Any]:
        """Complete the rounds in flight of a session that is over, whose updates the aggregator has of the
        rounds `taken`; None: of all. x_i follows where x' has moved. An evaluation under way is over too."""
        self.use_local_model()
        model = self.worker.global_model
        for round in sorted({*self.sent, *self.aggregates}):
            sent = self.sent.get(round) if taken is None or round in taken else None
            if round < model.round and round in self.aggregates:
                self.worker.follow(self.aggregates[round], sent)
            elif sent is not None:
                self.worker.subtract(sent)
        self.sent.clear()
        self.aggregates.clear()
        return self.state()

    def handoff(self, budget: int) -> Answer | None:
        """Encode the largest of this machine's d_i; no bytes where nothing is."""
        part = self.worker.handoff(int(budget * self.share))
        if part is None:
            return None
        self.sent[part.round] = part
        return Answer(data=part.packet)

    def distance(self) -> dict[str, Any]:
        return {"square": self.worker.residual_norm() ** 2}

    # ---- the step ------------------------------------------------------------------------------------------

    def zero(self, share: float = 1.0) -> None:
        self.trainer.zero(share)

    def partly(self, done: float) -> None:
        """Note g_i as it is after this share of its terms."""
        self.trainer.partly(done)

    def square(self) -> dict[str, Any]:
        """Sum the squares of this machine's part of g_i, and what is known of its noise."""
        views = self.flat.layout.views(self.flat.grad)
        norms = torch.stack([torch.linalg.vector_norm(view, dtype=torch.float32) for view in views])
        if self.trainer.noise.wanted:
            self.trainer.noise.take(self.trainer.sampled())
        noise = self.trainer.noise.sums.told()
        return {"square": float(norms.double().square().sum()), "noise": noise}

    def scale(self, factor: float) -> None:
        self.flat.grad.mul_(factor)
        self.trainer.noise.scaled(factor)

    def step(self, rate: float, beta1: float | None, longer: float) -> None:
        """x_i <- x_i - optimizer(g_i), so many times as long."""
        self.trainer.lengthened_step(rate, beta1, longer)

    def use_global_model(self) -> None:
        """Compute losses at x' from now on, with activations as they are: no sample is remembered by them."""
        self._evaluating.enter_context(self.flat.use(self.worker.global_model.vector))
        self.compute.learns, self.compute.line = False, self.exact
        self.compute.stage.model.eval()

    def use_local_model(self) -> None:
        """Reverse `use_global_model`."""
        self._evaluating.close()
        self.compute.learns, self.compute.line = True, self.line
        self.compute.stage.model.train()


def exact_line(columns: int) -> Line:
    """Make the ends of lines that carry numbers as they are, and remember nothing."""
    ends = [ActivationMemory(1, 1, columns) for _ in range(2)]
    return Line(ActivationEncoder(32, ends[0]), ActivationDecoder(32, ends[1]), 32)


def quantised_line(bits: tuple[int, int], columns: int, rows: int, folder: Path) -> Line:
    """Make the ends of a stage's lines as a recipe has them. Both ends of a line have as many places.

    Args:
        bits: of an activation, and of its gradient.
        columns, rows: of the longest sample's activations.
        folder: of the memories, which are files: the system may drop them from its memory.
    """
    own, of_gradients = bits
    if own == 32:
        return exact_line(columns)
    places = min(max(1, MEMORY // (2 * rows * columns)), MOST_SAMPLES)
    ends = [ActivationMemory(places, rows, columns, folder / side) for side in ("after", "before")]
    encoder, decoder = ActivationEncoder(own, ends[0]), ActivationDecoder(own, ends[1])
    return Line(encoder, decoder, of_gradients)
