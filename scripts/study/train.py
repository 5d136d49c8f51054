"""One cell of the quality study: N peers in lockstep, in one process, with the real workers, aggregators and
packets.

A byte-level GPT-NeoX, pre-trained on Python's own source, is fine-tuned on Python's own documentation. Both
texts come with CPython, so that anybody can have the figures again; another version has other texts.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from pydoc_data import topics
from typing import Any, Final, Literal, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from compress import Cocktail, Sample, Shard
from recipes.algorithm import (
    Aggregator,
    DecodedPacket,
    GlobalModel,
    Worker,
    compressor_of,
    outer_optimizer_of,
)
from recipes.config.schema import Compression, Training
from recipes.training import (
    LINEAR,
    FlatParameters,
    GradientNoise,
    build_optimizer,
    clip,
    compared_in,
    embeddings_of,
    learning_rate,
    mask_momentum,
    positions_of,
    set_learning_rate,
)
from scripts.study.adapters import Adapters
from scripts.study.begun import Begun
from scripts.study.device_exchange import Deltas, DeviceExchange, in_turn
from scripts.study.model import Models

STRETCH = 4096  # bytes; every tenth stretch of the documentation is held out
WeightedPacket = tuple[str, bytes, float]  # peer, packet, weight
Optim = Literal["adamw_torch_fused", "muon", "soap", "adafactor", "adamw_8bit", "sgd"]
ADAMW: Final = "adamw_torch_fused"
ELEMENTWISE: tuple[Optim, ...] = (ADAMW, "sgd")
CLIP = 1.0  # of the gradient's norm


@dataclass(frozen=True)
class Size:
    """The sizes that all cells of a study share."""

    hidden: int = 64
    layers: int = 2
    length: int = 128  # bytes of a sample
    rows: int = 8  # samples of a step, over all peers
    steps: int = 1600
    base_steps: int = 4000  # of the pre-training, with twice as many rows
    device: str = "cpu"
    model: str = ""  # a folder of a causal language model, or `smollm2`; "": the study's own
    text: str = ""  # a folder of documents for it, or a file of their tokens; "": this machine's manual pages
    held: int = 128  # held-out rows of each half, of a language model

    @property
    def base_name(self) -> str:
        return f"{self.hidden}x{self.layers}-{self.length}x{2 * self.rows}x{self.base_steps}"

    @property
    def name(self) -> str:
        if self.model:
            held = "" if self.held == Size.held else f"-{self.held}"
            return f"{Path(self.text).stem}-{self.length}x{self.rows}x{self.steps}{held}"
        return f"{self.base_name}-{self.rows}x{self.steps}"

    @property
    def evals(self) -> int:
        """Count the held-out losses along the way, on a quarter of the text."""
        return 8 if self.model else 4


# key of a recipe -> name of a setting
COMPRESSION = {
    "random_ratio": "sample",
    "topk_ratio": "keep",
    "quant_bits": "bits",
    "outer_learning_rate": "outer_rate",
    "outer_momentum": "momentum",
    "momentum_masking": "masked",
    "uncompressed_steps": "uncompressed",
} | {name: name for name in ("staleness", "local_steps", "error_decay")}
TRAINING = {"adam_beta1": "beta1", "adam_beta2": "beta2", "optim": "optim", "momentum": "matrix_momentum"}


@dataclass(frozen=True)
class Setting:
    """One way to train. The defaults of what a recipe has too are those of preset `cocktail-paper`."""

    peers: int = 4  # 0: synchronous all-reduce in FP32, which is one model on the whole batch
    sample: float = 0.1  # p
    keep: float = 0.2  # K
    bits: int = 4
    staleness: Literal[0, 1, 2, 3, 4] = 1
    local_steps: int = 1  # H
    outer_rate: float = 1.0  # 0: `packets`, and `rate` is the swarm's
    momentum: float = 0.0  # of the owner's step
    error_decay: float = 1.0
    masked: int = 0  # 1: momentum masking
    uncompressed: int = 0  # first steps that send everything in 16 bits
    beta1: float = 0.9
    beta2: float = 0.999
    dropped: float = 0.0  # share of the packets that come too late
    rows: int = 0  # of a step, where it is not the study's
    optim: Optim = ADAMW
    matrix_momentum: float = 0.95  # of Muon
    lora: int = 0  # rank of adapters, which are trained in place of the model; 0: none
    shares: str = ""  # rows of each peer, as `1:7`; "": equal ones
    turns: str = ""  # how many of the peers there are in each part of the run, as `2:8:2`; "": all
    own_noise: int = 1  # 1: peers divide by the noise of their own samples; 0: by that of the step's mean
    # 1, of what the product has not (device_exchange.py):
    ahead: int = 0  # a step takes back the one before and is taken twice, for the delay (arXiv 2606.30634)
    seen: int = 0  # top-K of what a forward pass in BF16 sees most
    correlated: int = 0  # values are rounded at random, by draws that the peers share
    in_turn: int = 0  # A is trained and sent in even steps, B in odd ones
    gathering: int = 0  # so many first steps move nothing: they begin the optimizer's moments

    @property
    def by_vectors(self) -> bool:
        """Tell whether a `DeviceExchange` can do it."""
        return self.staleness < 2 and not (self.masked or self.uncompressed or self.dropped or self.turns)

    @property
    def only_by_vectors(self) -> bool:
        """Tell whether nothing else can do it."""
        return bool(self.seen or self.correlated or self.in_turn)

    @property
    def compression(self) -> Compression:
        given: dict[str, Any] = {key: getattr(self, name) for key, name in COMPRESSION.items()}
        rate = {"outer_learning_rate": self.outer_rate or "packets", "momentum_masking": bool(self.masked)}
        return Compression(**given | rate)

    def training(self, rate: float, seed: int, steps: int) -> Training:
        given: dict[str, Any] = {key: getattr(self, name) for key, name in TRAINING.items()}
        return Training(learning_rate=rate, seed=seed, max_steps=steps, **given)


@dataclass(frozen=True)
class Outcome:
    """The end of a cell; losses are held-out, in nats a byte."""

    loss: float  # of x', on all held-out text
    mean: float  # of mean_i x_i + e: as if nothing were left unsent
    curve: tuple[float, ...]  # of x', on a quarter of the text
    up: float  # bytes that a peer sends in a step
    down: float  # bytes that everybody receives in a step
    ratio: float  # FP16 both ways, each step, over what went both ways
    residual: float  # mean length of x_i - x' at the end, over the length of x' - x_0
    seconds: float  # of processor time
    halves: tuple[float, ...] = ()  # of x': the half that settings are chosen on, the half that is reported
    done: float = 1.0  # share of the steps; below 1: the cell was cut short
    choice: float = 0.0  # share of the right one of four continuations, of a language model
    other: float = 0.0  # loss on another text, which it was not trained on


class Text:
    """Bytes of a text, or its tokens, in windows."""

    def __init__(self, raw: bytes | Tensor, length: int) -> None:
        self.raw = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if isinstance(raw, bytes) else raw
        self.length = length

    def rows(self, count: int, seed: int, step: int) -> Tensor:
        """Draw (count, length) windows from anywhere, the same for each method."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.raw) - self.length + 1, (count, 1), generator=generator)
        return self.raw[starts + torch.arange(self.length)].long()

    def all(self) -> Tensor:
        """Cut the text into (rows, length), one after the other."""
        return self.raw[: len(self.raw) // self.length * self.length].view(-1, self.length).long()


def sources() -> bytes:
    """Read the standard library's modules, without tests and without the other text, the documentation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "test", "tests", "idle_test", "pydoc_data", "lib2to3"}
    files = sorted(f for f in root.rglob("*.py") if not left_out & set(f.relative_to(root).parts))
    return b"\n".join(f.read_bytes() for f in files)


def documentation(length: int) -> tuple[Text, Text]:
    """Read what `help('TOPIC')` shows: a text to train on, and a held-out one."""
    raw = "\n".join(topics.topics.values()).encode()
    stretches = [raw[i : i + STRETCH] for i in range(0, len(raw) - STRETCH + 1, STRETCH)]
    train = b"".join(s for i, s in enumerate(stretches) if i % 10 != 9)
    return Text(train, length), Text(b"".join(stretches[9::10]), length)


def new_model(size: Size) -> FlatParameters:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": size.hidden,
        "intermediate_size": 4 * size.hidden,
        "num_hidden_layers": size.layers,
    }
    sizes |= {"num_attention_heads": max(size.hidden // 32, 1), "max_position_embeddings": size.length}
    config = GPTNeoXConfig(vocab_size=256, attn_implementation="sdpa", **sizes)
    return FlatParameters(GPTNeoXForCausalLM(config).to(size.device).train())


def backward(flat: FlatParameters, rows: Tensor, limit: float) -> float:
    """Compute the clipped gradient of the mean loss over these rows; return the loss."""
    flat.grad.zero_()
    rows = rows.to(flat.vector.device)
    loss = flat.model(input_ids=rows, labels=rows).loss
    loss.backward()
    clip(flat.layout.views(flat.grad), limit)
    return loss.item()


@torch.no_grad()
def loss_at(flat: FlatParameters, vector: Tensor, rows: Tensor) -> float:
    with flat.use(vector) as model:
        parts = rows.to(vector.device).split(64)
        return sum(float(model(input_ids=part, labels=part).loss) * len(part) for part in parts) / len(rows)


def base(size: Size, folder: Path) -> Tensor:
    """Load the pre-trained model (P,), made once and saved in `folder`."""
    path = folder / f"base-{size.base_name}.safetensors"
    if not path.exists():
        flat, raw = new_model(size), sources()
        text = Text(raw, size.length)
        training = Training(learning_rate=2e-3, adam_beta1=0.9, adam_beta2=0.99)
        optimizer = build_optimizer(flat.masters, training, embeddings_of(flat.model))
        rate = learning_rate(training, size.base_steps)
        for step in range(size.base_steps):
            loss = backward(flat, text.rows(2 * size.rows, 0, step), CLIP)
            set_learning_rate(optimizer, rate(step))
            optimizer.step()
            if step % 100 == 0:
                print(f"base: step {step} of {size.base_steps}, loss {loss:.3f}", file=sys.stderr, flush=True)
        told = {"python": sys.version.split()[0], "sha256": hashlib.sha256(raw).hexdigest()}
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"vector": flat.vector.cpu()}, path, told)
    return load_file(path)["vector"].to(size.device)


class SharedGlobalModel(GlobalModel):
    """The global model of all peers, equal to the bit: stored once, and sampled once a round."""

    def __init__(self, vector: Tensor, compressor: Cocktail, seed: int) -> None:
        super().__init__(vector, compressor, seed)
        self.drawn: dict[int, list[tuple[Shard, Sample]]] = {}  # by round, from that of x' on

    def samples(
        self, round: int | None = None, compressor: Cocktail | None = None
    ) -> Iterator[tuple[Shard, Sample]]:
        wanted = self.round if round is None else round
        if wanted not in self.drawn:
            later = {number: drawn for number, drawn in self.drawn.items() if number >= self.round}
            self.drawn = {**later, wanted: [*super().samples(wanted)]}
        yield from self.drawn[wanted]


class Peer:
    """A simulated peer: its model as a vector, its half of the algorithm, its optimizer."""

    def __init__(
        self,
        flat: FlatParameters,
        setting: Setting,
        global_model: GlobalModel,
        training: Training,
        embeddings: frozenset[int],
    ) -> None:
        self.flat = flat
        self.flat.take(global_model.vector)
        self.worker = Worker(self.flat.vector, global_model, decay=setting.error_decay)
        apart = (flat.masters[0::2], flat.masters[1::2]) if setting.in_turn else (flat.masters,)
        if training.optim in ELEMENTWISE and not (setting.in_turn or setting.masked or training.weight_decay):
            whole = flat.vector.detach()  # one parameter: a step is one launch
            whole.grad, apart = flat.grad, ([whole],)
        self.optimizers = [build_optimizer(masters, training, embeddings) for masters in apart]
        self.ahead = torch.zeros_like(flat.vector) if setting.ahead else None  # the last step, (P,)
        self.gathering = setting.gathering
        self.noise = GradientNoise(positions_of(flat.layout), training.adam_beta2, flat.vector.device)
        self.linear, self.steps = training.optim in LINEAR, 0
        if setting.masked:
            masks = partial(mask_momentum, self.optimizers[0], flat.masters, flat.layout.offsets)
            self.worker.on_taken = masks

    def step(self, grad: Tensor, half: tuple[float, Tensor] | None, rate: float, beta1: float) -> None:
        """Step with a gradient (P,), of which `half` is a share and that part's sample. The device is waited
        for only where the noise is measured."""
        limit = CLIP * self.noise.sums.norms(self.noise.share)
        clipped = (limit / (torch.linalg.vector_norm(grad) + 1e-6)).clamp(max=1.0)
        torch.mul(grad, clipped, out=self.flat.grad)
        if half is not None:
            self.noise.partly(half[0], half[1] * clipped)
        longer = 1.0 if self.linear else self.noise.sums.factor
        optimizer = self.optimizers[self.steps % len(self.optimizers)]
        rate = rate if self.steps >= self.gathering else 0.0
        self.steps += 1
        if self.noise.wanted:
            self.noise.take(self.flat.grad[self.noise.positions])
        self.noise.observe()
        set_learning_rate(optimizer, rate, beta1, longer)
        before = self.flat.vector[:0] if self.ahead is None else self.flat.vector.clone()
        optimizer.step()
        if self.ahead is not None:
            step = self.flat.vector - before
            self.flat.vector.add_(step - self.ahead)
            self.ahead.copy_(step)


@dataclass(frozen=True)
class Started:
    """A round that has begun: packets by peer, or the peers' deltas on a device."""

    packets: list[DecodedPacket] = field(default_factory=list)
    deltas: Deltas | None = None


@dataclass(frozen=True)
class RoundInFlight:
    """A committed round whose aggregate no peer has applied yet."""

    aggregate: bytes
    packets: list[DecodedPacket]  # by peer
    late: set[int]  # peers whose packets came too late


class Model(Protocol):
    """A model as its vector of trained parameters, with their gradients and losses."""

    start: Tensor  # (P,) x_0
    embeddings: frozenset[int]  # numbers of its parameters that are embeddings or the head

    def new_flat(self) -> FlatParameters:
        """Make the parameters of a peer's own."""

    def gradients(self, vectors: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
        """Compute the gradients (N, P) of the vectors' mean losses, each over its own rows (B, T)."""

    def loss(self, vector: Tensor, rows: Tensor) -> float:
        """Measure the mean loss of a vector over rows."""


class ByteModel:
    """The study's own model: GPT-NeoX on bytes, or its adapters. A `Model`.

    Args:
        start: the pre-trained one, (P,).
        rank: of adapters; 0: the model itself is trained.
    """

    def __init__(self, size: Size, start: Tensor, rank: int = 0) -> None:
        self.whole = new_model(size)  # to run any model in
        self.adapters = Adapters(self.whole.layout, start, rank) if rank else None
        self.start, whole = start, None  # what makes a model of the vector
        self.new_flat = partial(new_model, size)
        self.embeddings = embeddings_of(self.whole.model)
        if self.adapters is not None:
            self.start, whole, self.embeddings = self.adapters.first, self.adapters.whole, frozenset()
            self.new_flat = self.adapters.new_flat
        self.models = Models(self.whole.model.config, self.whole.layout, size.length, size.device, whole)

    def gradients(self, vectors: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
        return self.models.gradients(vectors, rows)[0]

    def loss(self, vector: Tensor, rows: Tensor) -> float:
        model = vector if self.adapters is None else self.adapters.whole(vector[None])[0]
        return loss_at(self.whole, model, rows)


class Swarm:
    """N peers and the aggregator of all shards, in lockstep: no clock, no sockets, one thread.

    Args:
        on_device: they exchange vectors on their device in the place of packets; None: if it is a GPU, and
            the setting allows it.
    """

    def __init__(
        self, model: Model, setting: Setting, training: Training, on_device: bool | None = None
    ) -> None:
        self.model, self.setting, self.seed, self.training = model, setting, training.seed, training
        mix, outer = compressor_of(setting.compression), outer_optimizer_of(setting.compression)
        self.outer, self.trained = outer, model.start
        self.global_model = SharedGlobalModel(self.trained.clone(), mix, training.seed)
        self.turns = [int(count) for count in setting.turns.split(":") if count] or [max(setting.peers, 1)]
        self.peers = [self.new_peer() for _ in range(self.turns[0])]
        self.aggregator = Aggregator(self.trained.numel(), mix, training.seed, outer=outer)
        self.up = self.down = self.round = 0
        self.flights: deque[RoundInFlight] = deque()  # with a staleness of S never more than S
        if on_device is None:
            on_device = (self.trained.is_cuda and setting.by_vectors) or setting.only_by_vectors
        self.on_device = self.exchange_on_device() if on_device else None

    def exchange_on_device(self) -> DeviceExchange:
        """Make the exchange of vectors that the setting describes."""
        given, layout = self.setting, self.peers[0].flat.layout
        return DeviceExchange(
            self.global_model,
            self.outer,
            given.error_decay,
            seen=bool(given.seen),
            correlated=bool(given.correlated),
            parts=in_turn(layout.offsets, self.trained.device) if given.in_turn else (),
        )

    def new_peer(self) -> Peer:
        """Make a peer that begins at the global model."""
        parameters, model = self.model.new_flat(), self.model
        return Peer(parameters, self.setting, self.global_model, self.training, model.embeddings)

    @property
    def shared(self) -> Tensor:
        """The global model (P,); of all-reduce the one model there is."""
        return self.global_model.vector if self.setting.peers else self.peers[0].flat.vector

    def attend(self, share: float) -> None:
        """Let peers join at x', or hand over their residuals and leave, as it is after a share of the run."""
        wanted = self.turns[min(int(share * len(self.turns)), len(self.turns) - 1)]
        while len(self.peers) > wanted:
            weight, left = 1 / len(self.peers), self.peers.pop()
            if (part := left.worker.handoff(1 << 40)) is not None:
                self.aggregator.merge_handoff(str(len(self.peers)), part.packet, weight)
        self.peers += [self.new_peer() for _ in range(wanted - len(self.peers))]

    def parts_of(self, rows: Tensor) -> list[Tensor]:
        """Divide the rows of a step among the peers."""
        if self.setting.shares:
            return list(rows.split([int(count) for count in self.setting.shares.split(":")]))
        return [rows[i :: len(self.peers)] for i in range(len(self.peers))]

    def step(self, rows: Tensor, rate: float) -> None:
        """Take a step of every peer, on its share of the rows."""
        peers, share = self.peers, self.outer.peers_share(len(self.peers))
        parts = self.parts_of(rows)
        self.weights = [float(len(part)) for part in parts]  # of the packets that hold this step
        for size in {len(part) for part in parts}:  # together, those with as many rows
            alike = [(peer, part) for peer, part in zip(peers, parts, strict=True) if len(part) == size]
            grads, halves = self.gradients(alike, 1.0 if self.setting.own_noise else size / len(rows))
            for (peer, _), grad, half in zip(alike, grads, halves, strict=True):
                peer.step(grad, half, share * rate, share * self.setting.beta1)

    def gradients(
        self, alike: Sequence[tuple[Peer, Tensor]], share: float
    ) -> tuple[Tensor, list[tuple[float, Tensor] | None]]:
        """Compute the gradients (N, P) of peers on their rows; where their noise is measured in halves, and
        how much of them the first is, with its sample."""
        vectors, size = [peer.flat.vector for peer, _ in alike], len(alike[0][1])
        first = size // 2 if share < 1 and compared_in(alike[0][0].steps) else 0
        cuts = [(0, first), (first, size)] if first else [(0, size)]
        total = torch.zeros(len(alike), len(vectors[0]), device=vectors[0].device)
        halves: list[tuple[float, Tensor] | None] = [None] * len(alike)
        for peer, _ in alike:
            peer.noise.begin(share)
        for start, stop in cuts:
            grads = self.model.gradients(vectors, [part[start:stop] for _, part in alike])
            total += grads * ((stop - start) / size)
            if stop < size:
                both = zip(alike, total, strict=True)
                halves = [(stop / size, grad[peer.noise.positions]) for (peer, _), grad in both]
        return total, halves

    def start(self) -> Started:
        """Encode the packets of a round, without what is in flight (lines 1 and 2)."""
        if self.on_device is not None:
            return Started(deltas=self.on_device.start(self.vectors, self.round))
        packets = [
            peer.worker.start(
                round=self.round, in_flight=[f.packets[i] for f in self.flights if i not in f.late]
            )
            for i, peer in enumerate(self.peers)
        ]
        return Started(packets)

    @property
    def vectors(self) -> list[Tensor]:
        """Every x_i."""
        return [peer.flat.vector for peer in self.peers]

    def exchange(self, started: Started, late: set[int]) -> None:
        """Aggregate a round without the late packets (lines 3 and 4), and apply old aggregates, so that less
        than S are in flight."""
        packets = started.packets
        if self.on_device is not None and started.deltas is not None:
            self.on_device.finish(self.vectors, started.deltas, self.weights)
            self.round += 1
            return
        weighted = zip(packets, self.weights, strict=True)
        taken = [(str(i), one.packet, w) for i, (one, w) in enumerate(weighted) if i not in late]
        flight = RoundInFlight(self.aggregator.step(self.round, taken), packets, late)
        self.flights.append(flight)
        self.up += sum(len(one.packet) for one in packets)
        self.down += len(flight.aggregate)
        self.round += 1
        self.apply(max(self.setting.staleness, 1) - 1)

    def count_bytes(self) -> None:
        """Count what was exchanged by vectors; this waits for their device."""
        if self.on_device is not None:
            up, down = self.on_device.bytes_sent()
            self.up, self.down = self.up + up * len(self.peers), self.down + down

    def apply(self, in_flight: int) -> None:
        """Apply the rounds in flight to x' and every x_i (lines 5 to 7), until so many are left."""
        while len(self.flights) > in_flight:
            flight = self.flights.popleft()
            moved = self.global_model.apply(flight.aggregate)
            for i, (peer, packet) in enumerate(zip(self.peers, flight.packets, strict=True)):
                peer.worker.follow(moved, None if i in flight.late else packet)

    def late(self) -> set[int]:
        """Draw the peers whose packets come too late this round; never all of them."""
        generator = torch.Generator().manual_seed(self.seed * 7919 + self.round)
        drawn = torch.rand(len(self.peers), generator=generator) < self.setting.dropped
        late = set(torch.nonzero(drawn).flatten().tolist())
        return late if len(late) < len(self.peers) else late - {self.round % len(self.peers)}

    def feedback(self) -> Iterator[tuple[str, Tensor]]:
        """Name the aggregator's e and v."""
        if self.on_device is not None:
            yield from (("error.0", self.on_device.error), ("momentum.0", self.on_device.momentum))
            return
        for number, shard in self.aggregator.assigned.items():
            yield f"error.{number}", shard.error
            yield f"momentum.{number}", shard.momentum

    def model_with_all_residuals(self) -> Tensor:
        """Compute mean_i x_i + e (P,): the model as if nothing were unsent."""
        if not self.setting.peers:
            return self.shared
        total = torch.stack(self.vectors).mean(0)
        if self.on_device is not None:
            return total + self.on_device.error
        for number, shard in self.aggregator.assigned.items():
            self.aggregator.shards[number].of(total).add_(shard.error.to(total.device))
        return total


def train(
    size: Size, setting: Setting, rate: float, seed: int, folder: Path, begun: Begun | None = None
) -> Outcome:
    """Train one cell; at a rate of 0 the untouched model is measured."""
    begun, began = begun or Begun(), time.process_time()
    model, texts = prepared(size, setting, folder)
    training = setting.training(rate or 1e-3, seed, size.steps)
    swarm = Swarm(model, setting, training)
    begun.load(swarm)
    every = steps(size, swarm, texts.text, learning_rate(training, size.steps), begun.step)
    for step in every if rate else ():
        begun.step = step + 1
        if step * size.evals // size.steps != (step + 1) * size.evals // size.steps:
            swarm.count_bytes()
            begun.measured(model.loss(swarm.shared, texts.along), begun.step / size.steps)
        if begun.step < size.steps:
            begun.save(swarm, begun.step, time.process_time() - began)
            if begun.over and not begun.step % setting.local_steps:
                break
    seconds = begun.seconds + time.process_time() - began
    return outcome(size, swarm, texts, begun.curve, seconds, begun.step / size.steps if rate else 1.0)


@dataclass(frozen=True)
class Texts:
    """The rows that a cell trains on, and those that it measures."""

    text: Text
    halves: tuple[Tensor, Tensor]  # rows on which settings are chosen, and rows that are reported
    along: Tensor  # rows of losses along the way
    beyond: Callable[[Tensor], dict[str, float]] = lambda _: {}  # further fields of an outcome


def prepared(size: Size, setting: Setting, folder: Path) -> tuple[Model, Texts]:
    """Load the model and the texts of a cell."""
    if size.model:
        from scripts.study import language  # imports peft

        return language.prepared(size, setting.lora, folder)
    torch.set_num_threads(1)
    text, held = documentation(size.length)
    rows = held.all()
    # whole stretches go in turn to each half, so that no document is in both
    first = torch.arange(len(rows)) // (STRETCH // size.length) % 2 == 0
    return ByteModel(size, base(size, folder), setting.lora), Texts(
        text, (rows[first], rows[~first]), rows[::4]
    )


def steps(
    size: Size, swarm: Swarm, text: Text, rate: Callable[[int], float], begin: int = 0
) -> Iterator[int]:
    """Take all steps from `begin` on, with an exchange after each H of them. With staleness S its packets are
    made before those steps, and the aggregate arrives S rounds later. One more round delivers the last steps,
    and the rounds in flight are brought home.
    """
    setting = swarm.setting
    stale = bool(setting.peers and setting.staleness)
    last = size.steps + (setting.local_steps if stale else 0)
    for first in range(begin, last, setting.local_steps):
        swarm.attend(first / size.steps)
        started = swarm.start() if stale else None
        for step in range(first, min(first + setting.local_steps, size.steps)):
            rows = text.rows(setting.rows or size.rows, swarm.seed, step)
            swarm.step(rows, rate(step))
            if step + 1 < min(first + setting.local_steps, size.steps):
                yield step
        if setting.peers:
            swarm.exchange(started or swarm.start(), swarm.late())
        if first < size.steps:
            yield min(first + setting.local_steps, size.steps) - 1
    swarm.apply(0)


def outcome(
    size: Size, swarm: Swarm, texts: Texts, curve: tuple[float, ...], seconds: float, done: float
) -> Outcome:
    model, peers, took = swarm.model, max(swarm.setting.peers, 1), max(done * size.steps, 1)

    def measured(vector: Tensor) -> tuple[float, ...]:
        return tuple(model.loss(vector, half) for half in texts.halves)

    def over_all(losses: tuple[float, ...]) -> float:
        rows = [len(half) for half in texts.halves]
        return sum(loss * count for loss, count in zip(losses, rows, strict=True)) / sum(rows)

    swarm.count_bytes()
    halves = measured(swarm.shared)
    loss = over_all(halves)
    mean = over_all(measured(swarm.model_with_all_residuals())) if swarm.setting.peers else loss
    up, down = swarm.up / peers / took, swarm.down / took
    moved = max(float(torch.dist(swarm.shared, swarm.trained)), 1e-30)
    residual = sum(peer.worker.residual_norm() for peer in swarm.peers) / len(swarm.peers) / moved
    fp16 = 2 * 2 * swarm.trained.numel()  # bytes of a step, both ways
    ratio = fp16 / max(up + down, 1) if swarm.setting.peers else 0.5
    found = Outcome(loss, mean, curve, up, down, ratio, residual, seconds, halves, done)
    return replace(found, **texts.beyond(swarm.shared))
