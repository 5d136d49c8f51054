"""Estimate a step of a run: bytes on the link, seconds of compute, and which of the two is the bottleneck."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import islice

from transformers import PreTrainedTokenizerBase

from compress import heavy_tailed_packet
from recipes.algorithm import adaptive_rate_of, compressor_of, cost_of
from recipes.config import Compression, Recipe, is_hub_id
from recipes.data import count_rows, make_row_tokenizer, read_rows
from recipes.errors import HubUnreachable

TRIAL = 1 << 21  # elements of the encoded trial vector: bits a parameter do not depend on its length
PEERS_UP, PEERS_DOWN = "each peer's up", "each peer's down"
HUBS_UP, HUBS_DOWN = "the hub's up", "the hub's down"
FIRST = 200  # rows of a data set that are tokenized


@dataclass(frozen=True)
class LinkSpeed:
    """A peer's connection to its hub, bytes a second, and which line bounds each way."""

    up: float
    down: float
    up_line: str = PEERS_UP
    down_line: str = PEERS_DOWN
    carries: float = 1.0  # share of these rates that packets get

    def behind(self, hub: LinkSpeed, peers: int, sent: float | None = None, passed: float = 0.0) -> LinkSpeed:
        """Return a peer's share of the lines of a round: N updates come in over the hub's.

        Args:
            sent: aggregates that go out over the hub's line; None: one for each peer.
            passed: aggregates that a peer which passes them on sends over its own.
        """
        ups = [(self.up, self.up_line), (hub.down / peers, HUBS_DOWN)]
        downs = [(self.down, self.down_line), (hub.up / (sent or peers), HUBS_UP)]
        downs += [(self.up / passed, PEERS_UP)] if passed else []
        (up, up_line), (down, down_line) = (min(lines, key=lambda line: line[0]) for lines in (ups, downs))
        return LinkSpeed(up, down, up_line, down_line, self.carries)


@dataclass(frozen=True)
class StepCost:
    """Cost of one step of one peer."""

    packet: int  # bytes, each way
    compute: float  # seconds
    up: float
    down: float
    link: LinkSpeed
    sparsest: int  # bytes of the smallest packet that the run sends by itself
    setting: Compression  # that lines and peers ask for

    @property
    def every(self) -> int:
        """Steps between two packets."""
        return self.setting.local_steps

    @property
    def staleness(self) -> int:
        """Rounds of compute that an exchange overlaps with."""
        return self.setting.staleness

    @property
    def rung(self) -> str:
        return self.setting.words

    @property
    def whole(self) -> float:
        """Seconds that the recipe's packets take the line, per step. With several rounds in flight one goes
        up while another comes down."""
        return (self.up + self.down if self.staleness < 2 else max(self.up, self.down)) / self.every

    @property
    def fitting(self) -> float:
        """Share of the recipe's packet that the run sends: as much as the compute hides, or its sparsest."""
        least = min(1.0, self.sparsest / self.packet)
        return min(1.0, max(least, self.compute / self.whole)) if self.whole else 1.0

    @property
    def busy(self) -> float:
        """Seconds that the packets that the run sends take the line, per step."""
        return self.whole * self.fitting

    @property
    def seconds(self) -> float:
        return max(self.compute, self.busy) if self.staleness else self.compute + self.busy

    @property
    def computing(self) -> float:
        """Share of the time that a device computes."""
        return self.compute / self.seconds if self.seconds else 1.0

    @property
    def slowest(self) -> str:
        """Name what bounds a round: the compute, or a line."""
        if self.bottleneck == "compute":
            return "the compute"
        return self.link.up_line if self.up >= self.down else self.link.down_line

    @property
    def bottleneck(self) -> str:
        return "network" if self.busy > self.compute * (1 + 1e-9) else "compute"


def packet_bytes(recipe: Recipe, parameters: int) -> int:
    """Estimate the bytes of a packet of P = `parameters` by encoding heavy-tailed numbers, as updates are."""
    mix = replace(compressor_of(recipe.compression), shards=1)
    n = min(parameters, TRIAL)
    return round(len(heavy_tailed_packet(mix, n, recipe.training.seed)) * parameters / n)


def cost_of_step(
    recipe: Recipe, packet: int, compute: float, link: LinkSpeed, peers: int = 1, rung: int | None = None
) -> StepCost:
    """Combine bytes of the recipe's own packet, compute seconds and link speed, on a rung; None: on the one
    that a run of so many peers goes to."""
    compression = recipe.compression
    ladder, own = compression.ladder, compressor_of(compression)
    if rung is None:
        exchange = packet / link.carries * (1 / link.up + 1 / link.down)
        fits = (at for at, one in enumerate(ladder) if exchange <= one.need * compute and peers >= one.peers)
        rung = next(fits, len(ladder) - 1)
    setting, mixes = compression.rungs[rung], adaptive_rate_of(compression).ladders[rung]
    sparsest, size = (round(packet * cost_of(mix) / cost_of(own)) for mix in (mixes[0], mixes[-1]))
    up, down = (size / (rate * link.carries) for rate in (link.up, link.down))
    return StepCost(size, compute, up, down, link, sparsest, setting)


@dataclass(frozen=True)
class DataSurvey:
    """Estimates of the data from their first rows."""

    rows: int | None  # None: their number is unknown
    # tokens of each of the first rows, before truncation; of several sequences the longest
    lengths: tuple[int, ...]
    kinds: tuple[str, ...] = ()  # type of the rows of each data set
    documents: tuple[int, ...] = ()  # tokens of what these rows are split into and teaches; (): of the rows

    def _documents(self, recipe: Recipe) -> list[int]:
        """Tokens of each document, truncated to max_length where rows are not packed."""
        longest = math.inf if recipe.data.packing else recipe.data.max_length
        return [int(min(length, longest)) for length in self.documents or self.lengths]

    def samples(self, recipe: Recipe) -> int | None:
        """Samples of the training set, after splitting and packing."""
        if self.rows is None:
            return None
        held = recipe.data.val_set_size
        rows = self.rows - (round(held * self.rows) if held < 1 else int(held))
        documents = self._documents(recipe)
        whole = sum(documents) / recipe.data.max_length if recipe.data.packing else len(documents)
        return max(1, round(rows * whole / len(self.lengths))) if rows and documents else rows

    def length(self, recipe: Recipe) -> float:
        """Tokens of a sample."""
        documents = self._documents(recipe)
        if recipe.data.packing or not documents:
            return recipe.data.max_length
        return sum(documents) / len(documents)


def survey_data(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> DataSurvey:
    """Count the rows, tokenize the first. Errors: DataError; none where the hub does not answer."""
    rows: int | None = 0
    lengths: list[int] = []
    documents: list[int] = []
    kinds: list[str] = []
    for dataset in recipe.datasets:
        try:
            source = read_rows(dataset, streaming=is_hub_id(dataset.path))
            first = list(islice(source, FIRST))
            if first:
                encoder = make_row_tokenizer(tokenizer, recipe.data, dataset, first[0], recipe.objective)
                kinds.append(encoder.row_type)
                for row in encoder.tokenize(first):
                    lengths.append(row.longest)
                    documents += [one.longest for one in (row, *row.earlier) if one.teaches]
            remote = is_hub_id(dataset.path) or "://" in dataset.path
            counted = None if remote and recipe.training.max_steps > 0 else count_rows(dataset)
        except HubUnreachable:
            counted = None
        rows = None if rows is None or counted is None else rows + counted
    return DataSurvey(rows, tuple(lengths), tuple(kinds), tuple(documents))
