"""What a step of a run costs: bytes on the line, seconds of compute, and which of the two one waits for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from compress import heavy_tailed_packet
from recipes.algorithm import compressor_of
from recipes.config import Recipe
from recipes.data import RowTokenizer, detect_row_type, sources
from recipes.errors import HubUnreachable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UTILISED = 0.35  # of a device's peak, as a rule of thumb: `--step-time` replaces it by a measurement
SAMPLE = 1 << 21  # elements of the vector whose packet is made: bits a parameter do not depend on its length
FIRST = 200  # rows of a data set whose length is looked at


@dataclass(frozen=True)
class LinkSpeed:
    """A peer's connection, bytes a second."""

    up: float
    down: float


@dataclass(frozen=True)
class StepCost:
    """One step of one peer."""

    packet: int  # bytes, each way
    every: int  # steps between two of them
    compute: float  # seconds
    up: float
    down: float
    hidden: bool  # the exchange happens during the compute of the next steps

    @property
    def exchange(self) -> float:
        """The packet goes up, is aggregated, and comes back: a step's part of that."""
        return (self.up + self.down) / self.every

    @property
    def seconds(self) -> float:
        return max(self.compute, self.exchange) if self.hidden else self.compute + self.exchange

    @property
    def bottleneck(self) -> str:
        return "network" if self.exchange > self.compute else "compute"


def packet_bytes(recipe: Recipe, parameters: int) -> int:
    """Bytes of a packet of P = `parameters`: of a real one, made of heavy-tailed numbers as updates are."""
    mix = replace(compressor_of(recipe.compression), shards=1)
    n = min(parameters, SAMPLE)
    return round(len(heavy_tailed_packet(mix, n, recipe.training.seed)) * parameters / n)


def samples_per_peer(recipe: Recipe, peers: int) -> float:
    """Samples a step and peer, where all are equally fast."""
    return recipe.training.global_batch_size / peers


def compute_seconds(flops: float, peak: float) -> float:
    """`flops` of work on a device that can do `peak` a second."""
    return flops / (UTILISED * peak)


def cost_of_step(recipe: Recipe, packet: int, compute: float, line: LinkSpeed) -> StepCost:
    hidden, every = recipe.compression.staleness == 1, recipe.compression.local_steps
    return StepCost(packet, every, compute, packet / line.up, packet / line.down, hidden)


def topk_within(recipe: Recipe, parameters: int, line: LinkSpeed, seconds: float) -> float | None:
    """The largest K, of round ones, whose exchange takes at most `seconds`. None: not even the smallest."""
    for keep in (0.2, 0.15, 0.1, 0.08, 0.05, 0.03, 0.02, 0.01):
        if keep < recipe.compression.topk_ratio:
            changed = recipe.model_copy(
                update={"compression": recipe.compression.model_copy(update={"topk_ratio": keep})}
            )
            packet = packet_bytes(changed, parameters)
            if packet / line.up + packet / line.down <= seconds:
                return keep
    return None


@dataclass(frozen=True)
class DataSurvey:
    """What is known of the data without reading all of it."""

    rows: int | None  # None: nobody says how many there are
    tokens: float  # mean of a row, cut to max_length

    def samples(self, recipe: Recipe) -> int | None:
        """Rows of the training set, once they are split and packed."""
        if self.rows is None:
            return None
        held = recipe.data.val_set_size
        rows = self.rows - (round(held * self.rows) if held < 1 else int(held))
        return max(1, round(rows * self.tokens / recipe.data.max_length)) if recipe.data.packing else rows

    def length(self, recipe: Recipe) -> float:
        """Tokens of a sample."""
        return recipe.data.max_length if recipe.data.packing else self.tokens


def survey_data(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> DataSurvey:
    """How many rows, and how long the first ones are. Errors: DataError; a silent hub is none here."""
    rows: int | None = 0
    lengths: list[int] = []
    for dataset in recipe.datasets:
        try:
            source = sources.read_rows(dataset, streaming=sources.is_hub_id(dataset.path))
            first = list(islice(source, FIRST))
            if first:
                encoder = RowTokenizer(tokenizer, recipe.data, dataset, detect_row_type(dataset, first[0]))
                lengths += [len(document.tokens) for document in encoder.tokenize(first)]
            counted = None if recipe.training.max_steps > 0 else sources.count_rows(dataset)
        except HubUnreachable:
            counted = None
        rows = None if rows is None or counted is None else rows + counted
    longest = recipe.data.max_length
    cut = lengths if recipe.data.packing else [min(length, longest) for length in lengths]
    return DataSurvey(rows, sum(cut) / len(cut) if cut else longest)
