"""Algorithms 1 and 2 against a dense float64 reference written from the paper, and the laws they keep."""

from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress import Cocktail, PackedUpdate, decode, fingerprint
from recipes.algorithm import (
    Aggregator,
    DecodedPacket,
    GlobalModel,
    OuterOptimizer,
    RejectedUpdate,
    Worker,
    replay,
)
from recipes.algorithm.robust_mean import OPEN
from recipes.algorithm.worker import fetched_difference

SEED = 7
LOSSLESS = Cocktail(random_ratio=1.0, topk_ratio=1.0, quant_bits=32)
MIXES = {
    "cocktail": Cocktail(random_ratio=0.1, topk_ratio=0.2, quant_bits=4, block_size=16),
    "element": Cocktail(random_ratio=0.25, topk_ratio=0.1, quant_bits=2, sample_kind="element"),
    "lossless": LOSSLESS,
    "sharded": Cocktail(random_ratio=0.25, topk_ratio=0.2, quant_bits=4, block_size=16, shards=3),
}


@dataclass
class Swarm:
    """N workers and their aggregator, without a network."""

    workers: list[Worker]
    aggregator: Aggregator

    @property
    def error(self) -> Tensor:
        return torch.cat([aggregator.error for aggregator in self.aggregator.assigned.values()])

    def round(self, steps: list[Tensor], weights: list[float] | None = None) -> bytes:
        """One round in which worker i's optimizer adds steps[i]."""
        sent = [worker.start() for worker in self.workers]
        for worker, step in zip(self.workers, steps, strict=True):
            worker.x.add_(step)
        updates = [(f"peer-{i}", part.packet, weights[i] if weights else 1.0) for i, part in enumerate(sent)]
        packet = self.aggregator.step(self.workers[0].global_model.round, updates)
        for worker, part in zip(self.workers, sent, strict=True):
            worker.finish(packet, part)
        return packet


def swarm(mix: Cocktail, n: int = 400, peers: int = 4) -> Swarm:
    x0 = torch.randn(n, generator=torch.Generator().manual_seed(1))
    workers = [Worker(x0.clone(), GlobalModel(x0.clone(), mix, SEED)) for _ in range(peers)]
    return Swarm(workers, Aggregator(n, mix, SEED))


def steps_of(peers: int, n: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [0.01 * torch.randn(n, generator=generator) for _ in range(peers)]


def C(mix: Cocktail, d: np.ndarray, round: int) -> np.ndarray:
    """The compressor as an operator on dense float64 vectors, for the reference."""
    dense = np.zeros(d.size)
    for shard in mix.cut(d.size, SEED):
        sample = mix.draw(shard.size, shard.seed, round)
        taken = sample.take(torch.from_numpy(d[shard.start : shard.stop]).float())
        update = decode(mix.encode(taken).packet, sample.m)
        at = shard.start + sample.coordinates(update.positions).numpy()
        dense[at] = update.values.double().numpy()
    return dense


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
def test_every_round_is_what_the_paper_says(mix: Cocktail) -> None:
    """x_i, x' and e after each round equal the dense reference's, from the same state before it."""
    trio = swarm(mix)
    n = len(trio.error)
    for t in range(12):
        x = [worker.x.double().numpy() for worker in trio.workers]
        common, e = trio.workers[0].global_model.vector.double().numpy(), trio.error.double().numpy()
        steps = steps_of(4, n, seed=t)

        compressed = [C(mix, x_i - common, t) for x_i in x]  # Algorithm 1
        D = sum(compressed) / 4 + e  # Algorithm 2
        CD = C(mix, D, t)
        want_e, want_common = D - CD, common + CD
        want_x = [
            x_i + step.double().numpy() + CD - c for x_i, step, c in zip(x, steps, compressed, strict=True)
        ]
        trio.round(steps)

        np.testing.assert_allclose(trio.error.double().numpy(), want_e, atol=2e-6)
        for worker, want in zip(trio.workers, want_x, strict=True):
            np.testing.assert_allclose(worker.x.double().numpy(), want, atol=2e-6)
            np.testing.assert_allclose(worker.global_model.vector.double().numpy(), want_common, atol=2e-6)


def test_lossless_and_fresh_it_is_synchronous_sgd_on_the_whole_batch() -> None:
    """p = K = 1, 32 bit, the step inside the packet, weighted by samples: plain SGD over all the data."""
    generator = torch.Generator().manual_seed(3)
    A, b = torch.randn(60, 30, generator=generator), torch.randn(60, generator=generator)
    shares = [slice(0, 10), slice(10, 35), slice(35, 60)]
    trio, lr = swarm(LOSSLESS, n=30, peers=3), 0.02
    plain = trio.workers[0].x.clone()
    for t in range(20):
        plain -= lr * A.T @ (A @ plain - b) / 60
        for worker, share in zip(trio.workers, shares, strict=True):
            rows = A[share]
            worker.x.sub_(lr * rows.T @ (rows @ worker.x - b[share]) / len(rows))
        sent = [worker.start() for worker in trio.workers]
        updates = [(str(i), s.packet, float(len(b[shares[i]]))) for i, s in enumerate(sent)]
        packet = trio.aggregator.step(t, updates)
        for worker, part in zip(trio.workers, sent, strict=True):
            worker.finish(packet, part)

    torch.testing.assert_close(trio.workers[0].global_model.vector, plain, rtol=1e-5, atol=1e-6)


@settings(max_examples=25)
@given(
    mix=st.sampled_from(list(MIXES.values())),
    peers=st.integers(1, 5),
    seed=st.integers(0, 2**16),
    weights=st.lists(st.floats(0, 1000), min_size=5, max_size=5),
)
def test_nothing_is_lost(mix: Cocktail, peers: int, seed: int, weights: list[float]) -> None:
    """Owner: mean of what was sent + e = change + e'. Worker: d' = d - C[d] + its own step."""
    group = swarm(mix, peers=peers)
    n = len(group.error)
    group.round(steps_of(peers, n, seed))
    steps = steps_of(peers, n, seed + 1)
    before_e, before = group.error, group.workers[0].global_model.vector.clone()
    d = [worker.x - worker.global_model.vector for worker in group.workers]
    sent = [worker.start() for worker in group.workers]
    share = weights[:peers] if sum(weights[:peers]) > 0 else [1.0] * peers

    group.round(steps, share)

    def dense(part: DecodedPacket) -> Tensor:
        out = torch.zeros(n)
        for piece in part.shard_updates:
            piece.add_(out)
        return out

    mean = sum(w / sum(share) * dense(c) for w, c in zip(share, sent, strict=True))
    change = group.workers[0].global_model.vector - before
    torch.testing.assert_close(mean + before_e, change + group.error, rtol=0, atol=2e-6)
    for worker, d_i, c, step in zip(group.workers, d, sent, steps, strict=True):
        torch.testing.assert_close(
            worker.x - worker.global_model.vector, d_i - dense(c) + step, rtol=0, atol=2e-6
        )


def test_all_peers_and_whoever_folds_the_packets_hold_the_same_bits() -> None:
    mix = MIXES["cocktail"]
    group = swarm(mix)
    start = group.workers[0].global_model.vector.clone()
    packets = [group.round(steps_of(4, start.numel(), seed)) for seed in range(10)]

    *_, joiner = replay(GlobalModel(start, mix, SEED), packets)

    assert joiner.round == 10
    for worker in group.workers:
        assert torch.equal(worker.global_model.vector.view(torch.int32), joiner.vector.view(torch.int32))
        assert worker.global_model.fingerprint == joiner.fingerprint == fingerprint(joiner.vector)


def test_a_fingerprint_that_follows_the_packets_notices_a_single_bit() -> None:
    group = swarm(MIXES["cocktail"])
    n = len(group.error)
    before = group.workers[0].global_model.vector.clone()
    group.round(steps_of(4, n, 0))
    group.round(steps_of(4, n, 1))
    changed = int((group.workers[0].global_model.vector != before).nonzero()[0])
    other = group.workers[0].global_model.vector.clone()
    other.view(torch.int32)[changed] ^= 1

    assert fingerprint(other) != group.workers[0].global_model.fingerprint


def test_a_packet_that_came_too_late_stays_in_the_residual() -> None:
    """Law 3: the peer that was left out offers the same d again, plus its new step."""
    group = swarm(MIXES["cocktail"], peers=2)
    n = len(group.error)
    group.round(steps_of(2, n, 0))
    punctual, late = group.workers
    step = steps_of(1, n, 5)[0]
    d = late.x - late.global_model.vector
    sent = punctual.start()
    late.start()
    late.x.add_(step)
    packet = group.aggregator.step(1, [("punctual", sent.packet, 1.0)])

    punctual.finish(packet, sent)
    late.finish(packet, None)

    torch.testing.assert_close(late.x - late.global_model.vector, d + step, rtol=0, atol=1e-6)
    assert torch.equal(late.global_model.vector, punctual.global_model.vector)


def test_a_packet_that_does_not_decode_is_refused_by_name_and_changes_nothing() -> None:
    group = swarm(MIXES["cocktail"], peers=2)
    n = len(group.error)
    group.round(steps_of(2, n, 0))
    sent = [worker.start() for worker in group.workers]
    error = group.error
    broken = bytearray(sent[1].packet)
    broken[len(broken) // 2] ^= 0xFF

    with pytest.raises(RejectedUpdate, match="the update of mallory is refused"):
        group.aggregator.step(1, [("alice", sent[0].packet, 1.0), ("mallory", bytes(broken), 1.0)])

    assert torch.equal(group.error, error)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
def test_an_aggregator_that_replays_what_was_committed_goes_on_to_the_bit(
    mix: Cocktail, tmp_path: Path
) -> None:
    """Killed after round 9, with e of round 4 on its disk: the same e, the same packet of round 10."""
    group = swarm(mix)
    n = len(group.error)
    history = []
    for t in range(10):
        if t == 4:
            group.aggregator.save(tmp_path / "error", t)
        sent = [worker.start() for worker in group.workers]
        updates = [(f"peer-{i}", part.packet, 0.1 + i) for i, part in enumerate(sent)]
        for worker, step in zip(group.workers, steps_of(4, n, t), strict=True):
            worker.x.add_(step)
        packet = group.aggregator.step(t, updates)
        for worker, part in zip(group.workers, sent, strict=True):
            worker.finish(packet, part)
        history.append((updates, packet))
    last = [(f"peer-{i}", worker.start().packet, 1.0) for i, worker in enumerate(group.workers)]

    packets = []
    for saved in (False, True):
        again = Aggregator(n, mix, SEED)
        start = again.load(tmp_path / "error") if saved else 0
        assert start == (4 if saved else 0)
        for t in range(start, 10):
            again.replay(t, *history[t])

        error = Swarm([], again).error
        assert torch.equal(error.view(torch.int32), group.error.view(torch.int32))
        assert error.any() == (mix != LOSSLESS)  # which sends all of D
        packets.append(again.step(10, last))
    assert packets == [group.aggregator.step(10, last)] * 2


def test_a_saved_error_of_another_length_or_no_error_at_all_is_refused(tmp_path: Path) -> None:
    Aggregator(10, LOSSLESS, SEED).save(tmp_path / "error", 3)
    (tmp_path / "junk").write_bytes(b"no safetensors")

    with pytest.raises(ValueError, match=r"\(10,\), not \(11,\)"):
        Aggregator(11, LOSSLESS, SEED).load(tmp_path / "error")
    with pytest.raises(ValueError, match="does not hold an aggregator's error feedback"):
        Aggregator(11, LOSSLESS, SEED).load(tmp_path / "junk")


def test_the_sum_does_not_depend_on_the_order_of_arrival() -> None:
    mix = MIXES["cocktail"]
    group = swarm(mix)
    n = len(group.error)
    group.round(steps_of(4, n, 0))
    updates = [(name, worker.start().packet, 1.0) for name, worker in zip("dbca", group.workers, strict=True)]
    other = Aggregator(n, mix, SEED)
    other.assigned[0].error.copy_(group.error)

    assert group.aggregator.step(1, updates) == other.step(1, updates[::-1])


def test_a_diverged_model_is_reported_with_the_name_of_the_parameter() -> None:
    common = GlobalModel(torch.zeros(100), LOSSLESS, SEED)
    worker = Worker(torch.zeros(100), common, name_at=lambda i: "head.weight" if i >= 50 else "embed.weight")
    worker.x[70] = float("nan")

    with pytest.raises(ValueError, match=r"head\.weight"):
        worker.start()


@settings(max_examples=10, deadline=None)
@given(
    mix=st.sampled_from(list(MIXES.values())),
    staleness=st.integers(1, 4),
    seed=st.integers(0, 2**16),
    late=st.lists(st.sets(st.integers(0, 2), max_size=2), min_size=9, max_size=9),
)
@example(LOSSLESS, 1, 3205, [set(), set(), set(), set(), set(), {0}, {0}, {0}, set()])
def test_with_rounds_in_flight_nothing_is_lost_or_twice_and_x_prime_is_one(
    mix: Cocktail, staleness: int, seed: int, late: list[set[int]]
) -> None:
    """d_i = x_i - x' - what is in flight, and no other is encoded. The sum of all steps ever made = what is
    committed + e + the sum of d_i, at the end of every round and whichever packets came too late. After the
    last round S joins bring everything home."""
    group = swarm(mix, peers=3)
    n, workers, start = len(group.error), group.workers, group.workers[0].x.clone()
    # a sum: nobody's weight; and no update is shortened, whoever was late thrice and sends four steps at once
    group.aggregator = Aggregator(n, mix, SEED, OPEN, OuterOptimizer("packets"))
    committed, made = GlobalModel(start.clone(), mix, SEED), torch.zeros(n)
    flights = deque[tuple[bytes, dict[int, DecodedPacket]]]()  # aggregate, updates in it by peer

    def in_flight(i: int) -> list[DecodedPacket]:
        return [taken[i] for _, taken in flights if i in taken]

    def delta(i: int) -> Tensor:
        d = workers[i].x - workers[i].global_model.vector
        for update in [one for part in in_flight(i) for one in part.shard_updates]:
            update.add_(d, alpha=-1)
        return d

    def join() -> None:
        packet, taken = flights.popleft()
        for i, worker in enumerate(workers):
            worker.finish(packet, taken.get(i))
        assert len({worker.global_model.fingerprint for worker in workers}) == 1

    for t, missing in enumerate(late):
        sent = [worker.start(round=t, in_flight=in_flight(i)) for i, worker in enumerate(workers)]
        for i, part in enumerate(sent):
            want = torch.zeros(n)
            for update in part.shard_updates:
                update.add_(want)
            np.testing.assert_allclose(want.double().numpy(), C(mix, delta(i).numpy(), t), atol=1e-6)
        for worker, step in zip(workers, steps_of(3, n, seed + t), strict=True):
            worker.x.add_(step)
            made += step
        taken = {i: part for i, part in enumerate(sent) if i not in missing}
        packet = group.aggregator.step(t, [(f"peer-{i}", part.packet, 1.0) for i, part in taken.items()])
        committed.apply(packet)
        flights.append((packet, taken))
        while len(flights) >= staleness:
            join()

        found = committed.vector - start + group.error + sum(map(delta, range(3)))
        torch.testing.assert_close(found, made, rtol=0, atol=1e-5)
    while flights:
        join()
    assert torch.equal(workers[0].global_model.vector, committed.vector)


def test_a_difference_to_the_hosts_memory_has_the_bits_of_one_beside_it() -> None:
    """state_device: cpu. On the CPU alone there are no two devices: this is the arithmetic of that way."""
    x, y = torch.randn(2, 10_000, generator=torch.Generator().manual_seed(0))
    for kind, block in (("block", 64), ("element", 1)):
        sample = Cocktail(random_ratio=0.3, sample_kind=kind, block_size=block).draw(len(x), 7, 3)  # type: ignore[arg-type]
        assert torch.equal(fetched_difference(sample, x, y), sample.difference(x, y))


@pytest.mark.parametrize("worth", [0, 1 << 20])  # from how many elements on an update stays packed
def test_threads_move_x_to_the_bits_of_one(monkeypatch: pytest.MonkeyPatch, worth: int) -> None:
    monkeypatch.setattr("compress.backends.WORTH", worth)
    monkeypatch.setattr(PackedUpdate, "window", None)  # nor is one written out
    monkeypatch.setattr("recipes.algorithm.global_model.AT_ONCE", 1 << 12)  # three threads do not divide it
    monkeypatch.setattr("recipes.algorithm.global_model.SMALL", 1 << 10)
    x, threads = torch.randn(60_000, generator=torch.Generator().manual_seed(1)), torch.get_num_threads()
    mix, ends = Cocktail(random_ratio=0.5, topk_ratio=0.2), []
    packet = mix.encode(mix.draw(len(x), 1, 0).take(x)).packet
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            model = GlobalModel(x.clone(), mix, 1)
            model.apply(packet)
            ends.append(model)
    finally:
        torch.set_num_threads(threads)

    assert torch.equal(ends[0].vector, ends[1].vector)
    assert not torch.equal(ends[0].vector, x)
    assert ends[0].fingerprint == ends[1].fingerprint == fingerprint(ends[1].vector)


def test_an_update_and_its_aggregate_share_a_sample() -> None:
    """A permutation of long vectors takes milliseconds."""
    mix = Cocktail(random_ratio=0.5)
    model = GlobalModel(torch.randn(10_000), mix, 1)
    ((_, sample),) = model.samples()

    assert model.decode(mix.encode(torch.randn(sample.m)).packet).shard_updates[0].sample is sample
