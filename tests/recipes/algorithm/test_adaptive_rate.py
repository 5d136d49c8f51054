from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from compress import PacketError, decode
from recipes.algorithm import (
    Aggregator,
    GlobalModel,
    PacketLimits,
    Worker,
    adaptive_rate_of,
    compressor_of,
    cost_of,
    replay,
    worker_of,
)
from recipes.algorithm.compressor import AHEAD, SKEW, SPARE, STEP, AdaptiveRate
from recipes.config import PRESETS, Compression, Model, Recipe

RICH = Compression(topk_ratio=0.1, auto=("topk_ratio", "quant_bits"))
ROUNDS = 40

rooms = st.floats(1.0, 1e9)


def packet_of(rate: AdaptiveRate, coordinates: float, skew: float = 1.0) -> float:
    """Bytes of a packet; `skew`: real ones are not quite in proportion to what a step is said to cost."""
    return coordinates / 8 * cost_of(rate.compressor) ** skew


def settled(rate: AdaptiveRate, coordinates: float, room: float, skew: float = 1.0) -> list[int]:
    """List the places, round after round, on a line that stays as it is."""
    found = []
    for _ in range(ROUNDS):
        rate = rate.sent(packet_of(rate, coordinates, skew)).within(room)
        found.append(rate.at)
    return found


def test_a_ladder_goes_from_bound_to_bound_and_each_step_costs_more_than_the_one_before() -> None:
    rate = adaptive_rate_of(RICH)
    keeps, costs = [c.topk_ratio for c in rate.ladder], [cost_of(c) for c in rate.ladder]

    assert (keeps[0], keeps[-1]) == pytest.approx((0.0125, 0.1))
    assert all(a < b <= a * STEP * 1.0001 for a, b in pairwise(keeps))
    assert costs == sorted(costs)
    assert {c.quant_bits for c in rate.ladder if c.topk_ratio < 0.049} == {1}


def test_nothing_is_richer_than_the_recipe_says() -> None:
    rate = adaptive_rate_of(Compression())

    assert rate.usual == len(rate.ladder) - 1
    assert rate.ladder[0].topk_ratio == pytest.approx(0.2 / 8)


@pytest.mark.parametrize(
    "changes",
    [
        {"auto": False},
        {"staleness": 0},
        *({"preset": one} for one in ("allreduce", "co2", "streaming-diloco")),
    ],
)
def test_what_has_nothing_to_hide_behind_is_as_the_recipe_says(changes: dict[str, object]) -> None:
    rate = adaptive_rate_of(Compression(**changes))  # type: ignore[arg-type]

    assert len(rate.ladder) == 1
    assert rate.sent(10**9).within(1).at == 0


def test_the_first_packet_is_the_sparsest_and_a_line_unknown_after_it_gets_what_the_recipe_says() -> None:
    first = adaptive_rate_of(RICH).within(0)

    assert first.at == 0 == adaptive_rate_of(RICH).within(1e9).at
    assert first.sent(10.0).within(0).compressor == compressor_of(RICH)


@given(st.lists(st.tuples(st.floats(0, 1e12), st.floats(0, 1e12)), max_size=30))
def test_whatever_is_measured_k_stays_within_the_recipes_bounds(told: list[tuple[float, float]]) -> None:
    rate = adaptive_rate_of(RICH)
    for size, room in told:
        rate = rate.sent(size).within(room)
        assert 0.01249 <= rate.compressor.topk_ratio <= 0.1


@given(rooms, st.floats(1e3, 1e9), st.floats(0.7, 1.3), st.sampled_from([2, 4]))
@example(20.0, 1000.0, 1.25, 2)  # eight steps at once were too many
@example(180.0, 1500.0, 1.25, 4)  # and so was the one from 2 bits to 4
def test_on_a_line_that_stays_as_it_is_it_comes_to_rest_and_does_not_swing(
    room: float, coordinates: float, skew: float, bits: int
) -> None:
    rate = adaptive_rate_of(RICH.model_copy(update={"quant_bits": bits}))
    where = settled(rate, coordinates, room, skew)
    turns = [b - a for a, b in pairwise(where) if a != b]

    assert where[-1] == where[-10]
    assert all(turn > 0 for turn in turns), "from the sparsest on it never has to turn back"


@given(rooms, st.floats(1e3, 1e9))
@example(18626819.0, 368127374.0)  # the next step is larger by more than the spare room
def test_it_rests_at_the_richest_packet_that_fits(room: float, coordinates: float) -> None:
    start = adaptive_rate_of(RICH)
    rate = replace(start, at=settled(start, coordinates, room)[-1])

    assert packet_of(rate, coordinates) <= room or rate.at == 0
    if rate.at < len(rate.ladder) - 1:
        richer = packet_of(replace(rate, at=rate.at + 1), coordinates)
        spare = max(1 / SPARE, (richer / packet_of(rate, coordinates)) ** SKEW)
        assert richer * spare > room * (1 - 1e-9)


@given(rooms, st.floats(1e3, 1e9), st.lists(st.floats(SPARE**0.5, 1), min_size=5, max_size=20))
def test_a_line_that_varies_by_less_than_the_spare_room_moves_it_only_down_once_it_has_settled(
    room: float, coordinates: float, noise: list[float]
) -> None:
    rate = adaptive_rate_of(RICH)
    rate = replace(rate, at=settled(rate, coordinates, SPARE**0.5 * room)[-1])
    at = rate.at
    where = []
    for part in noise:
        rate = rate.sent(packet_of(rate, coordinates)).within(room * part)
        where.append(rate.at)

    assert len(set(where)) <= 2
    assert all(b >= at for b in where)


@given(rooms, rooms, st.floats(1e3, 1e9))
def test_a_packet_is_hardly_longer_than_what_comes_back_however_wide_the_line(
    room: float, back: float, coordinates: float
) -> None:
    rate = adaptive_rate_of(RICH)
    for _ in range(ROUNDS):
        rate = rate.sent(packet_of(rate, coordinates)).within(room, back)

    assert packet_of(rate, coordinates) <= min(room, AHEAD * back) or rate.at == 0


def sent_with(fits: int, compression: Compression = RICH, rounds: int = 16) -> tuple[Worker, list[int]]:
    torch.manual_seed(0)
    x, mix = torch.zeros(200_000), compressor_of(compression)
    worker = Worker(x, GlobalModel(x.clone(), mix, seed=1), rate=adaptive_rate_of(compression))
    sizes = []
    for _ in range(rounds):
        x += torch.randn_like(x) ** 3
        part = worker.start(fits, alone=True)
        worker.finish(part.packet, part)
        sizes.append(len(part.packet))
    return worker, sizes


def test_real_packets_fit_after_a_few_rounds_whatever_fits() -> None:
    for fits in (400, 700, 1200, 1800):
        _, sizes = sent_with(fits)

        assert 0.6 * fits <= sizes[-1] <= 1.05 * fits


ADAPTERS = Compression(preset="lora-cocktail")


def test_adapters_are_sent_whole_from_the_second_round_on_where_that_fits_and_in_part_where_not() -> None:
    costs = [cost_of(c) for c in adaptive_rate_of(ADAPTERS).ladder]
    whole, _ = sent_with(1_000_000, ADAPTERS, rounds=2)
    part, sizes = sent_with(60_000, ADAPTERS)

    assert costs == sorted(costs)
    assert (whole.rate.compressor.topk_ratio, whole.rate.compressor.quant_bits) == (1.0, 4)
    assert 0.125 < part.rate.compressor.topk_ratio < 1
    assert sizes[-1] >= 0.6 * 60_000
    assert max(sizes) <= 60_000, "no packet makes a round wait"


def test_peers_that_differ_and_an_aggregator_at_the_slowest_agree_to_the_bit_and_e_is_replayed() -> None:
    torch.manual_seed(0)
    n, mix, rate = 100_000, compressor_of(RICH), adaptive_rate_of(RICH)
    workers = [Worker(torch.zeros(n), GlobalModel(torch.zeros(n), mix, 1), rate=rate) for _ in range(3)]
    aggregator, again = (Aggregator(n, rate, 1) for _ in range(2))
    packets, kept = [], []
    for round in range(16):
        for worker in workers:
            worker.x.add_(torch.randn(n) ** 3)
        parts = [worker.start(fits) for worker, fits in zip(workers, (200, 350, 8000), strict=True)]
        updates = [(str(i), part.packet, 1.0) for i, part in enumerate(parts)]
        aggregator.open(600, aggregator.rate.rung)
        packets.append(aggregator.step(round, updates))
        again.replay(round, updates, packets[-1])
        m = mix.draw(n, aggregator.shards[0].seed, round).m
        kept.append([decode(part.packet, m).positions.numel() for part in parts])
        for worker, part in zip(workers, parts, strict=True):
            worker.finish(packets[-1], part)

    assert len(packets[-1]) <= 630
    assert kept[-1][0] < kept[-1][1] < kept[-1][2], "each sends as much as its own line carries"
    assert len({worker.global_model.fingerprint for worker in workers}) == 1
    *_, joiner = replay(GlobalModel(torch.zeros(n), mix, 1), packets)
    assert joiner.fingerprint == workers[0].global_model.fingerprint
    assert torch.equal(aggregator.assigned[0].error, again.assigned[0].error)


@pytest.mark.parametrize(("peers", "alike"), [(2, 0.9), (2, 0.0), (4, 0.5), (8, 0.0)])
@pytest.mark.parametrize(("line", "at"), [(10**9, "usual"), (1200, "what fits")])
def test_peers_with_wide_lines_and_their_aggregator_grow_to_the_same_step(
    peers: int, alike: float, line: int, at: str
) -> None:
    torch.manual_seed(0)
    n, mix, rate = 100_000, compressor_of(Compression()), adaptive_rate_of(Compression())
    workers = [Worker(torch.zeros(n), GlobalModel(torch.zeros(n), mix, 1), rate=rate) for _ in range(peers)]
    aggregator = Aggregator(n, rate, 1)
    for round in range(15):
        common = torch.randn(n)
        for worker in workers:
            worker.x.add_(alike * common + (1 - alike) * torch.randn(n))
        parts = [worker.start(10**9 if round else 0) for worker in workers]
        aggregator.open(line if round else 0, aggregator.rate.rung)
        aggregate = aggregator.step(round, [(str(i), part.packet, 1.0) for i, part in enumerate(parts)])
        for worker, part in zip(workers, parts, strict=True):
            worker.finish(aggregate, part)

    keeps = {worker.rate.compressor.topk_ratio for worker in workers}
    assert all(0.85 < keep / aggregator.rate.compressor.topk_ratio < 1.15 for keep in keeps)
    assert at == "what fits" or aggregator.rate.at == aggregator.rate.usual == workers[0].rate.at
    assert at == "usual" or SPARE**2 * line <= len(aggregate) <= 1.05 * line


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("shards", [1, 3])
def test_no_packet_of_a_run_is_longer_than_its_receiver_knows_beforehand(preset: str, shards: int) -> None:
    parameters, fast = 8_001, 1e9
    compression = Compression(preset=preset, shards=shards, uncompressed_steps=2)
    limits, dice = PacketLimits(compression, parameters), torch.Generator().manual_seed(1)
    model = GlobalModel(torch.zeros(parameters), compressor_of(compression), 3)
    worker = Worker(torch.zeros(parameters), model, rate=adaptive_rate_of(compression))
    aggregator = Aggregator(parameters, adaptive_rate_of(compression), 3)
    aggregator.open(int(fast), aggregator.rate.rung)
    lengths: list[tuple[int, int]] = []
    for round in range(20):
        worker.x.add_(torch.randn(parameters, generator=dice))
        sent = worker.start(int(fast), alone=True)
        packet = aggregator.step(round, [("ann", sent.packet, 1.0)])
        worker.finish(packet, sent)
        lengths += [(len(one), limits.packet(round)) for one in (sent.packet, packet)]
    handoff = worker.handoff(int(fast))
    assert handoff is not None
    lengths.append((len(handoff.packet), limits.handoff()))

    assert [pair for pair in lengths if pair[0] > pair[1]] == []
    assert max(length for length, _ in lengths) <= limits.upload()
    assert limits.packet(20) <= limits.packet(0)


def test_an_aggregate_of_more_values_than_the_recipe_sends_is_refused_before_it_is_expanded() -> None:
    """A packet of 1 bit may be no longer than an honest one; its values would take many times the memory."""
    compression = Compression(random_ratio=1.0)
    model = worker_of(
        Recipe(
            version=1, name="a", model=Model(model_name_or_path="m"), datasets=[{"path": "d"}],
            compression=compression,
        ),
        torch.zeros(20_000), torch.zeros(20_000), str, 0,
    ).global_model  # fmt: skip
    everything = replace(compressor_of(compression), topk_ratio=0.9, quant_bits=1)
    lie = everything.encode(torch.linspace(2, 1, 20_000)).packet
    honest = replace(everything, topk_ratio=0.2).encode(torch.randn(20_000)).packet

    assert len(lie) <= PacketLimits(compression, 20_000).packet(0)
    assert model.decode(honest).shard_updates[0].update.count == 4000
    with pytest.raises(PacketError, match="18,000 values of 20,000, of which at most 4,000 are sent"):
        model.decode(lie)
