"""A change of rung loses nothing of residuals, of e, of updates in flight; and packets say enough of it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress import PacketError, decode
from recipes.algorithm import (
    Aggregator,
    DecodedPacket,
    GlobalModel,
    PacketLimits,
    Worker,
    adaptive_rate_of,
    compressor_of,
    replay,
)
from recipes.config import Compression

N, SEED = 30_000, 3
DEFAULT = Compression()
MIX, RATE = compressor_of(DEFAULT), adaptive_rate_of(DEFAULT)
LOSSLESS = replace(RATE, decays=(1.0,) * len(RATE.ladders))  # as `cocktail-thin` is not
FLIGHTS = [rung.staleness for rung in DEFAULT.rungs]
rungs = st.integers(0, len(RATE.ladders) - 1)


class Duo:
    """Two workers and an aggregator, who are told the rung of each round."""

    def __init__(self, mix=MIX, rate=LOSSLESS, n: int = N) -> None:  # type: ignore[no-untyped-def]
        self.dice = torch.Generator().manual_seed(1)
        self.workers = [
            Worker(torch.zeros(n), GlobalModel(torch.zeros(n), mix, SEED), rate=rate) for _ in range(2)
        ]
        self.aggregator = Aggregator(n, rate, SEED)
        self.made, self.packets = torch.zeros(n), list[bytes]()
        self.updates = list[list[tuple[str, bytes, float]]]()
        self.flights: list[tuple[bytes, list[DecodedPacket]]] = []

    def round(self, rung: int, most: int = 1) -> None:
        """most: rounds in flight."""
        earlier = [[sent[i] for _, sent in self.flights] for i in range(2)]
        now = len(self.packets)
        sent = [
            worker.start(10**9, True, now, mine, rung)
            for worker, mine in zip(self.workers, earlier, strict=True)
        ]
        for worker in self.workers:
            step = torch.randn(len(worker.x), generator=self.dice) ** 3
            worker.x.add_(step)
            self.made += step / 2
        self.aggregator.open(10**9, rung)
        self.updates.append([(str(i), one.packet, 1.0) for i, one in enumerate(sent)])
        self.packets.append(self.aggregator.step(now, self.updates[-1]))
        self.flights.append((self.packets[-1], sent))
        while len(self.flights) >= most:
            self.join()

    def join(self) -> None:
        packet, sent = self.flights.pop(0)
        for worker, own in zip(self.workers, sent, strict=True):
            worker.finish(packet, own)

    @property
    def whole(self) -> torch.Tensor:
        """All that was made, wherever it is: x' + e + the mean of d_i."""
        one, two = self.workers
        x = one.global_model.vector
        return x + self.aggregator.assigned[0].error + (one.x - x + two.x - x) / 2


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.lists(rungs, min_size=2, max_size=10))
def test_nothing_is_lost_whatever_rungs_follow_each_other_with_updates_in_flight(order: list[int]) -> None:
    duo = Duo()
    for rung in order:
        duo.round(rung, FLIGHTS[rung])
    while duo.flights:
        duo.join()

    one, two = duo.workers
    torch.testing.assert_close(duo.whole, duo.made, rtol=0, atol=1e-3)
    assert one.global_model.fingerprint == two.global_model.fingerprint


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.lists(rungs, min_size=2, max_size=8))
def test_who_has_the_packets_alone_finds_x_prime_and_e_to_the_bit(order: list[int]) -> None:
    """A joiner, an export, a verification and a hub that is started again are told of no rung."""
    duo, again = Duo(rate=RATE), Aggregator(N, RATE, SEED)
    for rung in order:
        duo.round(rung)
    *_, joiner = replay(GlobalModel(torch.zeros(N), MIX, SEED), duo.packets)
    for round, (updates, packet) in enumerate(zip(duo.updates, duo.packets, strict=True)):
        again.replay(round, updates, packet)

    assert joiner.fingerprint == duo.workers[0].global_model.fingerprint
    assert torch.equal(again.assigned[0].error, duo.aggregator.assigned[0].error)


@given(st.integers(1, 3_000), st.integers(0, 200), rungs)
def test_a_packet_says_by_its_length_which_coordinates_it_is_of(n: int, round: int, rung: int) -> None:
    """Two p that visit as many coordinates, as they do in a very short vector, visit the same ones."""
    mix = RATE.ladders[rung][-1]
    sample = mix.draw(n, SEED, round)
    read = MIX.of_length(n, SEED, round, sample.m).draw(n, SEED, round)

    assert torch.equal(read.units, sample.units)
    assert (read.m, read.block_size) == (sample.m, sample.block_size)


@pytest.mark.slow
@settings(max_examples=20)
@given(rungs, rungs, st.integers(1, 300))
def test_no_coordinate_waits_longer_for_a_change_of_rung_than_a_pass_and_two_more(
    before: int, after: int, at: int
) -> None:
    def visits(rung: int, rounds: range) -> torch.Tensor:
        seen = torch.zeros(N, dtype=torch.bool)
        for round in rounds:
            sample = RATE.ladders[rung][-1].draw(N, SEED, round)
            seen[sample.coordinates(torch.arange(sample.m))] = True
        return seen

    mixes = [RATE.ladders[rung][-1].random_ratio for rung in (before, after)]
    first, second = (int(1 / p) + 2 for p in mixes)
    seen = visits(before, range(max(0, at - first), at)) | visits(after, range(at, at + 2 * second))

    assert bool(seen.all())


def test_an_update_of_another_rung_than_the_rounds_is_refused_and_names_its_sender() -> None:
    duo = Duo()
    lie = duo.workers[0].start(10**9, True, 0, (), 2).packet
    honest = duo.workers[1].start(10**9, True, 0, (), 1).packet
    duo.aggregator.open(10**9, 1)

    with pytest.raises(Exception, match="the update of liar is refused"):
        duo.aggregator.step(0, [("ann", honest, 1.0), ("liar", lie, 1.0)])


def test_no_packet_of_any_rung_is_longer_or_has_more_values_than_its_receiver_knows() -> None:
    duo, limits = Duo(), PacketLimits(DEFAULT, N)
    strict = GlobalModel(torch.zeros(N), MIX, SEED, richest=RATE.richest)
    for round, rung in enumerate([0, 1, 2, 5, 1, 0]):
        duo.round(rung)
        strict.apply(duo.packets[-1])
        longest = max(len(packet) for _, packet, _ in duo.updates[-1])
        assert max(longest, len(duo.packets[-1])) <= limits.packet(round)

    wide = replace(RATE.ladders[0][-1], topk_ratio=0.2)
    sample = wide.draw(N, SEED, strict.round)
    lie = wide.encode(torch.randn(sample.m)).packet
    assert len(decode(lie, sample.m).positions) > RATE.ladders[0][-1].most_kept(sample.m, strict.round)
    with pytest.raises(PacketError, match="of which at most"):
        strict.apply(lie)


def test_a_sender_that_changes_the_rung_begins_there_at_what_its_line_carries() -> None:
    duo = Duo()
    worker, sizes = duo.workers[0], list[int]()
    for rung, budget in [(1, 10**6)] * 3 + [(2, 10**6)] * 2 + [(1, 600)] * 2:
        worker.x.add_(torch.randn(N, generator=duo.dice) ** 3)
        sent = worker.start(budget, True, None, (), rung)
        worker.finish(sent.packet, sent)
        sizes.append(len(sent.packet))
        usual = worker.usual

    assert worker.rate.rung == 1
    assert sizes[4] < 0.4 * sizes[2]
    assert sizes[-1] <= 1.1 * 600, "it does not begin with the recipe's K, and not with the sparsest"
    assert usual == pytest.approx(sizes[2], rel=0.3), "what the recipe's own take is known on any rung"
