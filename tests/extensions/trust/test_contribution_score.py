"""The contribution score finds peers that do harm, weighs useless ones less, and measures the loss."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cocktail_cli.extensions.trust.contribution_score import (
    ENOUGH,
    FOUND,
    ROUNDS,
    Evidence,
    Gain,
    Probe,
    Updates,
)
from compress import Sample as Drawn
from compress import decode, join
from recipes.config import Recipe
from recipes.data import Corpus, Sample, collate
from recipes.objectives import loss_sum

PEERS = [f"p{i}" for i in range(10)]
VOCABULARY = 11


class Rounds:
    """Rounds of a swarm whose honest packets do 1 of good each, with some noise of their own."""

    def __init__(self, noise: float = 0.2, seed: int = 0, lasts: float = 0.0) -> None:
        self.evidence, self.noise, self.lasts = Evidence(fills=50), noise, lasts
        self.dice = np.random.default_rng(seed)
        self.off = self.dice.standard_normal(len(PEERS))
        self.why = dict[str, str]()

    def next(
        self, batch: float = 1.0, peers: int = len(PEERS), held: frozenset[str] = frozenset(), **gains: float
    ) -> list[str]:
        """Play a round and return the peers that are found.

        Args:
            batch: gain of a good packet on this round's probe batch.
            gains: gains of some peers.
        """
        fresh = self.dice.standard_normal(len(PEERS))
        self.off = self.lasts * self.off + (1 - self.lasts**2) ** 0.5 * fresh
        said = zip(PEERS[:peers], self.off, strict=False)
        good = {p: Gain(gains.get(p, batch) + self.noise * float(off)) for p, off in said}
        found = {peer: case.why for peer, case in self.evidence.add(good, held).items()}
        self.why |= found
        return list(found)

    def counts(self) -> dict[str, float]:
        """Weigh the packets of each peer."""
        return {p: self.evidence.doubts[p].weight if p in self.evidence.doubts else 1.0 for p in PEERS}

    def until_found(self, most: int, **gains: float) -> int:
        """Count the rounds until exactly the peers named here are found, all of them."""
        found = set[str]()
        for round in range(most):
            found |= set(self.next(**gains))
            if found == gains.keys():
                return round + 1
        raise AssertionError(f"{gains.keys()} are liars, found are {found}")


# ---- the test over rounds ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("harm", "rounds"), [(-2.0, 10), (-1.0, 30)])
def test_who_undoes_the_work_of_others_is_found_within_rounds_and_nobody_else(
    harm: float, rounds: int
) -> None:
    swarm = Rounds()

    assert swarm.until_found(rounds, p0=harm, p7=harm) > ENOUGH // 10


def test_one_packet_never_suffices_however_much_it_hurts() -> None:
    swarm = Rounds(noise=0.01)
    for _ in range(ROUNDS):
        swarm.next()

    assert [swarm.next(p3=-1e9) for _ in range(3)] == [[], [], ["p3"]]


def test_long_good_conduct_is_no_credit() -> None:
    swarm = Rounds()
    for _ in range(100):
        assert swarm.next() == []

    swarm.until_found(10, p0=-2.0)


@pytest.mark.parametrize("gain", [0.0, 0.3, -0.2])
def test_a_peer_of_little_use_or_none_is_not_a_liar(gain: float) -> None:
    """Noise, old packets, and honest peers whose data have nothing to do with the aggregator's."""
    swarm = Rounds()

    assert not any(swarm.next(p0=gain, p1=gain) for _ in range(100))
    assert swarm.evidence.cases.get("p0") is None or swarm.evidence.cases["p0"].level < FOUND / 2


@pytest.mark.parametrize("peers", [3, 10])
@pytest.mark.parametrize("lasts", [0.0, 0.95], ids=["fresh noise", "noise that lasts"])
@pytest.mark.parametrize("noise", [1.0, 30.0])
def test_where_gains_drown_in_noise_nobody_is_found(noise: float, lasts: float, peers: int) -> None:
    """Late in training. Nothing is known there, of liars neither."""
    swarm = Rounds(noise, lasts=lasts)

    assert not any(swarm.next(peers=peers) for _ in range(60))


def test_noise_at_more_than_twice_the_usual_length_is_found_and_who_is_that_long_and_of_use_is_not() -> None:
    swarm = Rounds()
    for _ in range(40):
        swarm.next(p0=0.0, p1=2.0, held=frozenset({"p0", "p1"}))

    assert swarm.why.keys() == {"p0"}
    assert "are longer than the others and of no use" in swarm.why["p0"]


def test_a_batch_on_which_all_packets_seem_to_hurt_says_nothing_of_anybody() -> None:
    swarm = Rounds(noise=0.05)
    for _ in range(ROUNDS):
        swarm.next()

    assert not any(swarm.next(batch=-1.0) for _ in range(ROUNDS // 2 - 1))
    assert not swarm.evidence.cases


def test_where_most_packets_hurt_for_long_nobody_is_found() -> None:
    swarm = Rounds()

    assert not any(swarm.next(batch=-1.0) for _ in range(50))


def test_two_peers_cannot_say_which_of_them_lies() -> None:
    swarm = Rounds()

    assert not any(swarm.next(peers=2, p0=-2.0) for _ in range(50))


def test_a_verdict_says_how_long_and_by_how_much() -> None:
    swarm = Rounds(noise=0.0)
    for _ in range(ROUNDS):
        swarm.next()
    for _ in range(3):
        found = swarm.evidence.add({peer: Gain(-2.5 if peer == "p0" else 1.0) for peer in PEERS})

    assert [case.why for case in found.values()] == [
        "its last 3 packets raise the loss of the host's probe batch, by 2.5 times what the usual "
        "packet lowers it"
    ]


# ---- what counts for less ----------------------------------------------------------------------------------


def settled(noise: float = 0.2) -> Rounds:
    swarm = Rounds(noise)
    for _ in range(60):
        swarm.next()
    return swarm


def test_who_is_of_no_use_soon_counts_for_nothing_and_nobody_else_for_less() -> None:
    swarm = Rounds()
    for _ in range(20):
        assert swarm.next(p0=0.0, p7=0.0) == []

    counts = swarm.counts()
    assert counts.pop("p0") < 0.1
    assert counts.pop("p7") < 0.1
    assert set(counts.values()) == {1.0}


def test_one_packet_makes_nobody_count_for_less_however_much_it_hurts() -> None:
    swarm = settled(noise=0.01)
    swarm.next(p3=-1e9)
    assert swarm.counts()["p3"] == 1.0
    swarm.next(p3=-1e9)
    assert swarm.counts()["p3"] < 0.02


def test_who_does_more_than_half_of_what_is_usual_counts_in_full() -> None:
    swarm = Rounds()
    for _ in range(200):
        swarm.next(p0=0.7)
        assert set(swarm.counts().values()) == {1.0}


def test_who_is_of_little_use_counts_for_that() -> None:
    swarm = settled()
    for _ in range(200):
        swarm.next(p0=0.2)

    assert swarm.counts()["p0"] == pytest.approx(0.2, abs=0.1)


def test_who_is_of_use_again_counts_in_full_again() -> None:
    swarm = settled()
    for _ in range(500):
        swarm.next(p0=0.0)
    assert swarm.counts()["p0"] < 0.1
    for _ in range(12):
        swarm.next()

    assert swarm.counts()["p0"] == 1.0


@pytest.mark.parametrize("rounds", [50, 400])
def test_a_newcomer_whose_residual_has_yet_to_fill_counts_in_full(rounds: int) -> None:
    """A newcomer does as little good as its packets are short, and that counts against no peer."""
    swarm = settled()
    for round in range(rounds):
        grown = min((round + 1) / 50, 1.0)
        swarm.evidence.add({p: Gain(grown, grown) if p == "new" else Gain(1.0) for p in ["new", *PEERS]})
        assert "new" not in swarm.evidence.doubts or swarm.evidence.doubts["new"].weight == 1.0


def test_who_is_short_and_of_no_use_is_excused_no_longer_than_a_newcomer() -> None:
    swarm = settled()
    for _ in range(60):
        swarm.evidence.add({p: Gain(0.0, 0.01) if p == "new" else Gain(1.0) for p in ["new", *PEERS]})

    assert swarm.evidence.doubts["new"].weight < 0.01


def test_where_all_began_together_nobody_is_excused_for_being_short() -> None:
    swarm = Rounds()
    for _ in range(12):
        swarm.evidence.add({p: Gain(0.0, 0.01) if p == "p0" else Gain(1.0) for p in PEERS})

    assert swarm.counts()["p0"] < 0.01


@pytest.mark.parametrize(("share", "counts"), [(1 / 16, 1.0), (1.0, 0.25)])
def test_of_who_had_few_samples_less_is_expected(share: float, counts: float) -> None:
    swarm = settled()
    for _ in range(100):
        swarm.evidence.add({p: Gain(0.25, share=share) if p == "p0" else Gain(1.0) for p in PEERS})

    assert swarm.counts()["p0"] == pytest.approx(counts, abs=0.01)


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
def test_chance_alone_takes_next_to_nothing_from_the_weight_of_honest_peers(noise: float) -> None:
    swarm, counted = Rounds(noise), list[float]()
    for _ in range(300):
        swarm.next()
        counted += swarm.counts().values()

    assert np.mean(counted) > 0.97


def test_a_batch_on_which_all_packets_seem_to_hurt_makes_nobody_count_for_less() -> None:
    swarm = settled()
    for _ in range(ROUNDS // 2 - 1):
        swarm.next(batch=-1.0)

    assert set(swarm.counts().values()) == {1.0}


def test_a_doubt_says_how_long_and_by_how_much() -> None:
    swarm = settled(noise=0.0)
    for _ in range(3):
        swarm.next(p0=0.1)

    assert swarm.evidence.doubts["p0"].why == (
        "its last 3 packets lower the loss of the host's probe batch by 0.1 times what usual ones would, "
        "and count for no more than that"
    )


# ---- the gradient ------------------------------------------------------------------------------------------


class Bigram(nn.Module):
    """The smallest language model: the next token's scores are a row of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=seeded(1)))

    def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def corpus() -> Corpus:
    dice = np.random.default_rng(0)
    lengths = dice.integers(3, 9, 12)
    samples = [
        Sample(dice.integers(0, VOCABULARY, n).astype(np.int32), np.arange(n) > 0) for n in lengths.tolist()
    ]
    return Corpus(tuple(samples), (), 24, 0, True)


def probe(batch: int = 12, ratio: float = 1.0, shards: int = 1) -> Probe:
    recipe = Recipe.model_validate(
        {
            "version": 1,
            "name": "test",
            "model": {"model_name_or_path": "bigram"},
            "datasets": [{"path": "none"}],
            "compression": {
                "random_ratio": ratio,
                "shards": shards,
                "topk_ratio": 1.0,
                "quant_bits": 32,
                "sample_kind": "element",
            },
        }
    )
    return Probe(Bigram(), recipe, corpus(), batch)


def loss_of(probe: Probe) -> float:
    with torch.no_grad():
        total, tokens = loss_sum(probe.flat.model, collate(probe.corpus.samples))
    return float(total) / tokens


def said(probe: Probe, vectors: list[Tensor]) -> Updates:
    return [(f"p{i}", probe.global_model.compressor.encode(v).packet, 1.0) for i, v in enumerate(vectors)]


def b_of(probe: Probe, updates: Updates) -> dict[str, float]:
    return {peer: gain.b for peer, gain in probe.gains(updates).items()}


def sample_of(probe: Probe) -> Drawn:
    [(_, sample)] = probe.global_model.samples()
    return sample


def test_what_is_measured_is_what_a_packet_does_to_the_loss() -> None:
    """Against adding the packet to x' and looking; the batch is the whole corpus, so there is no chance."""
    p = probe(batch=12)
    m = sample_of(p).m
    vectors = [1e-3 * torch.randn(m, generator=seeded(i)) for i in range(5)]
    updates, before = said(p, vectors), loss_of(p)
    p.look()
    gains = b_of(p, updates)

    falls = {}
    for peer, packet, _ in updates:
        sample = sample_of(p)
        sample.add_(p.flat.vector, decode(packet, m))
        falls[peer] = before - loss_of(p)
        sample.add_(p.flat.vector, decode(packet, m), alpha=-1)
    scale = sum(map(abs, falls.values())) / sum(map(abs, gains.values()))
    assert gains == pytest.approx({peer: fall / scale for peer, fall in falls.items()}, rel=0.05, abs=1e-3)


def test_a_gain_is_a_cosine_times_a_length_that_is_held() -> None:
    p = probe(ratio=0.5)
    sample = sample_of(p)
    p.look()
    downhill = -sample.take(p.flat.grad)
    gains = b_of(p, said(p, [downhill, 0.5 * downhill, -downhill, 10 * downhill, downhill]))

    assert gains == pytest.approx({"p0": 1, "p1": 0.5, "p2": -1, "p3": 2, "p4": 1}, rel=1e-4)


def test_of_a_vector_in_shards_the_same_is_measured() -> None:
    """The whole of both is visited, so they are sent the same."""
    whole, cut = probe(ratio=1.0), probe(ratio=1.0, shards=3)
    whole.look()
    cut.look()
    sent = [torch.randn(whole.flat.vector.numel(), generator=seeded(i)) for i in range(3)]
    packets = []
    for v in sent:
        x = torch.empty_like(v)
        sample_of(whole).put_(x, v)
        parts = [sample.take(shard.of(x)) for shard, sample in cut.global_model.samples()]
        packets.append(join([cut.global_model.compressor.encode(part).packet for part in parts]))

    told = b_of(cut, [(f"p{i}", packet, 1.0) for i, packet in enumerate(packets)])

    assert told == pytest.approx(b_of(whole, said(whole, sent)), rel=1e-4)


@pytest.mark.parametrize("first", [0, 2])
def test_a_packet_without_a_shard_hides_no_shard_of_the_others(first: int) -> None:
    p = probe(ratio=1.0, shards=3)
    p.look()
    updates = []
    for peer in range(3):
        parts = [torch.randn(sample.m, generator=seeded(peer)) for _, sample in p.global_model.samples()]
        packets = [p.global_model.compressor.encode(part).packet for part in parts]
        packets[0] = b"" if peer == first else packets[0]
        updates.append((f"p{peer}", join(packets), 1.0))

    assert b_of(p, updates) == pytest.approx(b_of(p, updates[::-1]))


def test_where_nothing_was_sent_or_x_has_diverged_nothing_is_said_of_anybody() -> None:
    p = probe()
    m = sample_of(p).m
    p.look()
    assert p.gains(said(p, [torch.zeros(m)] * 4)) == {}
    p.flat.vector.fill_(float("nan"))
    p.look()
    assert p.gains(said(p, [torch.ones(m)] * 4)) == {}


def test_each_gradient_is_of_other_rows_until_all_were_seen() -> None:
    p = probe(batch=4)
    seen = []
    for _ in range(3):
        seen += [p.order[(p.next + i) % 12] for i in range(4)]
        p.look()

    assert sorted(seen) == list(range(12))


def test_a_probe_that_is_told_to_stop_does() -> None:
    p = probe()
    p.look(stop=lambda: True)

    assert not p.flat.grad.any()
