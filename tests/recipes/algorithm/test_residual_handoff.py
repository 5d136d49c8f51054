"""A leaver's residual in the aggregator's hands: nothing of the swarm's mean is lost."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from compress import Cocktail
from recipes.algorithm import HELD, Aggregator, GlobalModel, RejectedUpdate, Worker, handoff_compressor
from recipes.algorithm.robust_mean import MEAN, OPEN, REFUSED, Rule

N, SEED, ROOM = 600, 3, 10**9
# sends a part, and that as it is
EXACT = Cocktail(random_ratio=0.5, topk_ratio=0.4, quant_bits=32, block_size=16)
WEIGHTS = {"ann": 1.0, "bob": 2.0, "cat": 3.0}


@dataclass
class Swarm:
    """Three peers whose shares of the mean stay what they are."""

    workers: dict[str, Worker]
    aggregator: Aggregator

    def round(self, steps: dict[str, Tensor]) -> None:
        sent = {name: worker.start() for name, worker in self.workers.items()}
        for name, step in steps.items():
            self.workers[name].x.add_(step)
        updates = [(name, part.packet, WEIGHTS[name]) for name, part in sent.items()]
        packet = self.aggregator.step(self.round_number, updates)
        for name, worker in self.workers.items():
            worker.finish(packet, sent[name])

    @property
    def round_number(self) -> int:
        return self.workers["ann"].global_model.round

    def mass(self) -> Tensor:
        """Compute x' once everything has been sent."""
        shares = {name: weight / sum(WEIGHTS.values()) for name, weight in WEIGHTS.items()}
        common = self.workers["ann"].global_model.vector
        residuals = sum(shares[n] * (w.x - w.global_model.vector) for n, w in self.workers.items())
        return common + self.aggregator.assigned[0].error + residuals

    def leave(self, name: str, room: int = ROOM) -> None:
        """Let a peer hand its residual off. In its place is one without a residual, so that the others keep
        their shares.
        """
        worker = self.workers[name]
        part = worker.handoff(room)
        assert part is not None
        self.aggregator.merge_handoff(name, part.packet, WEIGHTS[name] / sum(WEIGHTS.values()))
        worker.subtract(part)


def swarm_after(rounds: int, mix: Cocktail = EXACT, rule: Rule = OPEN) -> Swarm:
    x0 = torch.randn(N, generator=torch.Generator().manual_seed(1))
    workers = {name: Worker(x0.clone(), GlobalModel(x0.clone(), mix, SEED)) for name in WEIGHTS}
    # open: who has drained is no measure of who has not
    swarm = Swarm(workers, Aggregator(N, mix, SEED, rule))
    generator = torch.Generator().manual_seed(2)
    for _ in range(rounds):
        swarm.round({name: 0.01 * torch.randn(N, generator=generator) for name in WEIGHTS})
    return swarm


def drained(swarm: Swarm) -> Tensor:
    """x' once nobody computes any more and all has been sent."""
    for _ in range(80):
        swarm.round({})
    assert swarm.aggregator.assigned[0].error.abs().max() < 1e-6
    assert all(worker.residual_norm() < 1e-4 for worker in swarm.workers.values())
    return swarm.workers["ann"].global_model.vector


def test_x_prime_becomes_what_it_would_have_been_had_the_leaver_stayed() -> None:
    stayed, left = swarm_after(9), swarm_after(9)
    before = left.mass()
    left.leave("bob")

    torch.testing.assert_close(left.mass(), before, rtol=0, atol=1e-6)
    assert left.workers["bob"].residual_norm() < 1e-6
    torch.testing.assert_close(drained(left), drained(stayed), rtol=0, atol=1e-5)
    torch.testing.assert_close(left.workers["ann"].global_model.vector, before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("room", [120, 400, 900, ROOM])
def test_whatever_part_is_handed_over_the_rest_stays_with_the_leaver(room: int) -> None:
    """4 bits and little room: what the packet does not say is still in the residual, so nothing is lost."""
    swarm = swarm_after(9, Cocktail(random_ratio=0.25, topk_ratio=0.2, quant_bits=4, block_size=16))
    before, norm = swarm.mass(), swarm.workers["cat"].residual_norm()
    swarm.leave("cat", room)

    torch.testing.assert_close(swarm.mass(), before, rtol=0, atol=1e-6)
    assert swarm.workers["cat"].residual_norm() < norm


def test_the_largest_coordinates_go_first_and_the_packet_fits() -> None:
    worker = swarm_after(9).workers["ann"]
    d = (worker.x - worker.global_model.vector).abs()
    part = worker.handoff(400)

    assert part is not None
    assert len(part.packet) <= 400
    sent = part.shard_updates[0].update.decoded().positions
    assert 20 < len(sent) < 100
    assert d[sent].min() >= d.sort(descending=True).values[len(sent) - 1]
    assert worker.handoff(10) is None
    worker.x.copy_(worker.global_model.vector)
    assert worker.handoff(ROOM) is None, "there is nothing to hand over"


@pytest.mark.parametrize("windows", [1, 2, 3])
def test_a_search_that_has_no_more_time_hands_over_the_large_ones_of_what_it_has_seen(
    windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.algorithm.worker.WINDOW", 1 << 12)
    d, looks = torch.randn(3 << 12, generator=torch.Generator().manual_seed(4)), iter(range(1, 9))
    worker = Worker(d.clone(), GlobalModel(torch.zeros(len(d)), EXACT, SEED))
    part = worker.handoff(ROOM, topk_ratio=0.1, go_on=lambda: next(looks) < windows)

    assert part is not None
    border = d.abs().sort(descending=True).values[round(0.1 * len(d)) - 1]
    large = (d.abs()[: windows << 12] >= border).nonzero().view(-1)
    assert torch.equal(part.shard_updates[0].update.decoded().positions, large)
    worker.subtract(part)
    assert not worker.x[large].any()
    assert torch.equal(worker.x[windows << 12 :], d[windows << 12 :])


@pytest.mark.parametrize("damage", ["cut", "flipped", "other length"])
def test_a_handoff_that_is_none_is_refused_by_name_and_changes_nothing(damage: str) -> None:
    swarm = swarm_after(5)
    part = swarm.workers["bob"].handoff(ROOM)
    assert part is not None
    packet = bytearray(part.packet)
    if damage == "cut":
        packet = packet[:-7]
    elif damage == "flipped":
        packet[len(packet) // 2] ^= 0xFF
    else:
        packet = bytearray(EXACT.encode(torch.ones(N - 1)).packet)
    error = swarm.aggregator.assigned[0].error.clone()
    with pytest.raises(RejectedUpdate, match="the update of mallory is refused"):
        swarm.aggregator.merge_handoff("mallory", bytes(packet), 10.0)

    assert torch.equal(swarm.aggregator.assigned[0].error, error)


# ---- what a liar can hand over -----------------------------------------------------------------------------

COCKTAIL = Cocktail(random_ratio=0.25, topk_ratio=0.2, quant_bits=4, block_size=16)


def handoff_of(norm: float) -> bytes:
    v = torch.randn(N, generator=torch.Generator().manual_seed(9))
    return handoff_compressor(EXACT, 1.0).encode(norm * v / v.norm()).packet


@pytest.mark.parametrize("mix", [EXACT, COCKTAIL], ids=["exact", "cocktail"])
def test_an_honest_handoff_is_taken_whole(mix: Cocktail) -> None:
    swarm = swarm_after(30, mix, MEAN)
    for name, worker in swarm.workers.items():
        part = worker.handoff(ROOM)

        assert part is not None
        assert swarm.aggregator.merge_handoff(name, part.packet, 1 / 3) == 1.0


@pytest.mark.parametrize("rounds", [2, 5, 30])
def test_an_honest_aggregators_error_is_taken_whole_by_the_next_aggregator(rounds: int) -> None:
    one = swarm_after(rounds, COCKTAIL, MEAN).aggregator
    two = Aggregator(N, COCKTAIL, SEED)
    two.assigned[0].usual = one.assigned[0].usual  # it has aggregated a round by then

    assert (
        two.merge_handoff("one", handoff_compressor(EXACT, 1.0).encode(one.assigned[0].error).packet, 1.0)
        == 1.0
    )
    assert torch.equal(two.assigned[0].error, one.assigned[0].error)


def test_a_handoff_longer_than_a_residual_can_be_is_shortened_to_what_the_round_before_held() -> None:
    swarm = swarm_after(30, COCKTAIL, MEAN)
    longest = max(worker.residual_norm() for worker in swarm.workers.values())
    before = swarm.aggregator.assigned[0].error.clone()
    scale = swarm.aggregator.merge_handoff("mallory", handoff_of(20 * longest), 1.0)

    moved = float((swarm.aggregator.assigned[0].error - before).norm())
    limit = HELD * swarm.aggregator.assigned[0].usual * N**0.5
    assert moved == pytest.approx(scale * 20 * longest, rel=1e-4)
    assert moved == pytest.approx(limit, rel=1e-4)
    assert moved < 5 * longest, "what an honest leaver could have moved, five times"
    lately = swarm.aggregator.assigned[0].recent * N**0.5
    with pytest.raises(RejectedUpdate, match=r"mallory is refused: its norm \S+ is more than 20 times"):
        swarm.aggregator.merge_handoff("mallory", handoff_of(1.1 * REFUSED * lately), 1.0)


def test_who_leaves_before_anything_was_sent_has_nothing_to_hand_over() -> None:
    aggregator = Aggregator(N, COCKTAIL, SEED)
    nothing = COCKTAIL.encode(torch.zeros(aggregator.assigned[0].sample(0).m)).packet
    aggregator.step(0, [(name, nothing, 1.0) for name in WEIGHTS])

    assert aggregator.merge_handoff("mallory", handoff_of(1.0), 1.0) == 0.0
    assert not aggregator.assigned[0].error.any()
