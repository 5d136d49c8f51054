"""Audits among simulated peers: who is found, how soon, at what cost; and that honest peers never are."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import Literal

import pytest

from cocktail_cli.extensions.audits.audit_book import (
    BITS,
    SKETCH,
    THRESHOLD,
    AuditBook,
    Case,
    DeliveredLease,
    differing,
)

SHARE = 0.02
NOISE_DIGITS = 10  # binary digits of a probability: .001
Kind = Literal["honest", "zero", "copied", "stale", "half", "slanders"]


def drawn(*seed: object) -> int:
    """Bits of a gradient that has nothing to do with another."""
    return int.from_bytes(blake2b(repr(seed).encode(), digest_size=SKETCH).digest(), "big")


def noisy(bits: int, random: Random, noise: float) -> bytes:
    """The sketch of a machine that rounds in its own way, at an x_i of its own.

    Each bit flips with the probability `noise`, all at once: a binary digit of it, the lowest first, halves
    the probability so far, and adds a half where it is 1.
    """
    flips = 0
    for place in range(NOISE_DIGITS):
        draw = random.getrandbits(BITS)
        flips = flips | draw if round(noise * 2**NOISE_DIGITS) >> place & 1 else flips & draw
    return (bits ^ flips).to_bytes(SKETCH, "big")


@dataclass
class Swarm:
    """Peers by name, each of a kind, and the hub's book; staleness 1, so what a round computes is reported in
    the next one."""

    kinds: dict[str, Kind]
    seed: int = 0
    batch: int = 64
    noise: float = 0.05
    share: float = SHARE
    machines: dict[str, str] = field(default_factory=dict)
    friends: Collection[str] = ()  # peers that slander only others, and agree with each other
    own: Collection[str] = ()  # peers of the host
    found: dict[str, int] = field(default_factory=dict)  # peer -> round
    round: int = 0
    # reported in the next round
    computed: dict[str, tuple[DeliveredLease, bytes, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.book = AuditBook(self.share, f"secret-{self.seed}")

    def sketch(self, peer: str, sample: int, lease: int, *, audits: bool = False) -> bytes:
        """Return the sketch that this peer sends of a sample."""
        kind, truth = self.kinds[peer], drawn("gradient", sample, lease)
        if kind == "zero":
            return bytes(SKETCH)
        if kind == "copied":  # the first one that it has made, for ever
            return drawn("first", peer).to_bytes(SKETCH, "big")
        if kind == "stale":  # of samples of long ago
            return drawn("old", peer, sample).to_bytes(SKETCH, "big")
        if kind == "half" and self.random.random() < 0.5:
            return drawn("filler", peer, sample).to_bytes(SKETCH, "big")
        if kind == "slanders" and audits:  # of friends it tells the truth
            return noisy(drawn("lie", sample, lease), self.random, self.noise)
        return noisy(truth, self.random, self.noise)

    def step(self) -> None:
        """One round: leases and audits go out; what the round before computed comes in and is accepted."""
        here = [peer for peer in sorted(self.kinds) if peer not in self.found]
        machines = {peer: self.machines.get(peer, peer) for peer in here}
        self.book.own = self.own
        self.book.opens(self.round, machines, float(self.batch), lambda sample: 1.0)
        reported, self.computed = self.computed, {}
        for number, peer in enumerate(here):
            samples = range(self.round * self.batch + number, (self.round + 1) * self.batch, len(here))
            sketches = b"".join(self.sketch(peer, one, self.round) for one in samples)
            answers = b""
            for task in self.book.tasks(self.round, peer):
                friendly = any(c.peer in self.friends for c in self.book.cases if c.sample == task.sample)
                answers += self.sketch(peer, task.sample, task.lease, audits=not friendly)
            self.computed[peer] = DeliveredLease(self.round, samples, sketches), answers, self.round
        for peer, (work, answers, asked) in reported.items():
            if peer in here:
                for machine in self.book.answered(peer, asked, answers):
                    for name in [name for name in self.kinds if machines.get(name) == machine]:
                        if name not in self.own:  # the hub refuses no update of these
                            self.found[name] = self.round
                self.book.delivered(peer, work)
        self.round += 1

    def run(self, rounds: int) -> Swarm:
        for _ in range(rounds):
            self.step()
        return self


def ten(*kinds: Kind, seed: int = 0, **more: object) -> Swarm:
    """Ten peers, of which the first ones, in an order of the seed, are of these kinds."""
    names = [f"p{n}" for n in range(10)]
    Random(seed).shuffle(names)
    of = dict.fromkeys(names, "honest") | dict(zip(names, kinds, strict=False))
    return Swarm(of, seed, **more)  # type: ignore[arg-type]


def lazy(swarm: Swarm) -> set[str]:
    return {peer for peer, kind in swarm.kinds.items() if kind != "honest"}


@pytest.mark.parametrize("kind", ["zero", "copied", "stale"])
def test_two_lazy_peers_of_ten_are_found_within_20_rounds_at_2_percent_extra_compute(kind: Kind) -> None:
    """In nine swarms of ten, with 64 samples a round. The budget is what takes time: it pays for 1.3 audits a
    round."""
    in_time = 0
    for seed in range(30):
        swarm = ten(kind, kind, seed=seed).run(20)
        in_time += swarm.found.keys() == lazy(swarm)

        assert swarm.found.keys() <= lazy(swarm), seed
        assert swarm.book.figures.cost <= SHARE * swarm.book.figures.work

    assert in_time >= 27


@pytest.mark.parametrize(("batch", "rounds"), [(64, 30), (128, 16), (256, 10)])
def test_how_soon_lazy_peers_are_found_follows_from_the_audits_that_the_budget_pays_for(
    batch: int, rounds: int
) -> None:
    for seed in range(20):
        swarm = ten("copied", "copied", seed=seed, batch=batch).run(rounds)

        assert swarm.found.keys() == lazy(swarm), seed


def test_cases_decided_before_it_is_known_what_is_usual_count_once_it_is() -> None:
    """In every other swarm the liars are forgotten meanwhile, with the cases that they have an opinion on."""
    counted = forgotten = 0
    for seed in range(20):
        swarm, seen, dropped = ten("copied", "copied", seed=seed), set[Case](), 0
        while swarm.book.median_distance is None:
            assert not swarm.book.figures.disagreements, seed
            swarm.step()
            seen |= set(swarm.book.cases)
            decided = [ruling for case in seen - set(swarm.book.cases) if (ruling := case.ruling())]
            wrong = sum(len(ruling.wrong) for ruling in decided)
            if seed % 2 and wrong and not dropped and swarm.book.median_distance is None:
                for liar in lazy(swarm):
                    swarm.book.forget(liar)
                dropped = wrong

        assert swarm.book.figures.disagreements == wrong - dropped, seed
        counted += wrong - dropped
        forgotten += dropped

    assert min(counted, forgotten) >= 5


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.12])
def test_honest_peers_are_never_found(noise: float) -> None:
    """Each rounds in its own way: up to 27 bits of 128 differ on average between two of them."""
    for seed in range(3):
        swarm = ten(seed=seed, noise=noise).run(1000)

        assert not swarm.found, seed
        assert swarm.book.figures.audited > 1000


@pytest.mark.parametrize("noise", [0.2, 0.3, 0.5])
def test_where_honest_peers_differ_as_much_as_liars_nobody_is_found(noise: float) -> None:
    for seed in range(4):
        assert not ten("copied", "zero", seed=seed, noise=noise).run(300).found


def test_who_leaves_out_half_of_the_samples_is_found_later() -> None:
    for seed in range(10):
        swarm = ten("half", "half", seed=seed, batch=128).run(80)

        assert swarm.found.keys() == lazy(swarm), seed


@pytest.mark.parametrize("slanderers", [1, 2])
def test_who_lies_as_an_auditor_is_found_and_expels_no_honest_peer(slanderers: int) -> None:
    """Two agree on their lies, and work honestly themselves: each lie is decided by a third at random."""
    kinds: list[Kind] = ["slanders"] * slanderers
    falsely = 0
    for seed in range(8):
        swarm = ten(*kinds, seed=seed, batch=128)
        swarm.friends = lazy(swarm)
        swarm.run(200)

        assert lazy(swarm) <= swarm.found.keys(), seed
        falsely += len(swarm.found.keys() - lazy(swarm))

    assert falsely == 0


def test_where_the_host_has_a_peer_of_its_own_no_majority_of_accomplices_expels_another_peer() -> None:
    for seed in range(4):
        swarm = ten(*["slanders"] * 6, seed=seed, batch=128)
        swarm.friends = lazy(swarm)
        swarm.own = sorted(swarm.kinds.keys() - lazy(swarm))[:1]
        swarm.run(200)

        assert swarm.found.keys() <= lazy(swarm), seed
        assert swarm.book.figures.disagreements > 10, seed


@pytest.mark.parametrize("share", [0.005, 0.02, 0.3])
def test_the_cost_of_audits_stays_within_the_share_at_any_time(share: float) -> None:
    """Also where samples cost unequal amounts."""
    book, random = AuditBook(share, "secret"), Random(1)
    costs = [random.uniform(0.1, 9.0) for _ in range(64 * 200)]
    peers = {f"p{n}": f"p{n}" for n in range(6)}
    for round in range(200):
        ids = range(round * 64, round * 64 + 64)
        book.opens(round, peers, sum(costs[i] for i in ids), costs.__getitem__)
        assert book.figures.cost <= share * book.figures.work
        for number, peer in enumerate(peers):
            tasks = book.tasks(round, peer)
            answers = [noisy(drawn("g", t.sample), random, 0.05) for t in tasks]
            book.answered(peer, round, b"".join(answers))
            mine = ids[number::6]
            sketches = b"".join(noisy(drawn("g", i), random, 0.05) for i in mine)
            book.delivered(peer, DeliveredLease(round, mine, sketches))

    # the less a share pays for, the coarser: one sample costs up to 2.8 % of a round here
    assert book.figures.cost > (0.9 if share < 0.1 else 0.15) * share * book.figures.work


def opened(swarm: Swarm) -> list[Case]:
    """Run until there are cases, and return them."""
    while not swarm.book.cases:
        swarm.step()
    return swarm.book.cases


def test_no_machine_audits_itself_under_another_name() -> None:
    names = [f"p{n}" for n in range(4)]
    swarm = Swarm(dict.fromkeys(names, "honest"), share=0.3, machines=dict.fromkeys(names[:3], "one machine"))
    for _ in range(50):
        swarm.step()
        for case in swarm.book.cases:
            assert case.auditor != case.peer
            assert "p3" in (case.auditor, case.peer)
    assert swarm.book.figures.audited


def test_evidence_stays_with_a_machine_that_comes_back_under_another_name() -> None:
    for seed in range(10):
        swarm = ten("copied", seed=seed, batch=128, share=0.05)
        [one] = lazy(swarm)
        swarm.machines = {one: "its machine", "new": "its machine"}
        while not swarm.book.records.get("its machine"):
            swarm.step()
        swarm.book.gone(one)
        swarm.kinds["new"] = swarm.kinds.pop(one)
        swarm.computed.pop(one)
        level = swarm.book.records["its machine"].level
        swarm.run(20)

        assert level > 0
        assert "new" in swarm.found or level > THRESHOLD


def test_who_joins_under_the_name_of_a_liar_that_left_has_none_of_its_evidence() -> None:
    """Cases on the liar, and those that it decides, are open while another machine joins under its name."""
    left_open = 0
    for seed in range(30):
        swarm = ten("copied", seed=seed, batch=64, share=0.1)
        [name] = lazy(swarm)
        swarm.machines = {name: "the liar"}
        while swarm.round < 4 or not any("the liar" in case.opinions for case in swarm.book.cases):
            swarm.step()
        left_open += sum("the liar" in case.opinions for case in swarm.book.cases)
        swarm.book.gone(name)
        if seed % 2:  # before the newcomer is there, the round is opened without it
            swarm.book.opens(swarm.round, {p: p for p in swarm.kinds if p != name}, 0.0, lambda sample: 1.0)
        swarm.computed.pop(name)
        swarm.kinds[name] = "honest"
        swarm.machines = {name: "newcomer"}
        swarm.found.clear()
        for _ in range(12):
            swarm.step()
            assert "newcomer" not in swarm.book.records, seed
        assert not swarm.found, seed

    assert left_open > 30


def test_what_a_peer_does_not_answer_is_asked_of_another() -> None:
    swarm = ten(batch=256)
    [case, *_] = opened(swarm)
    silent = case.auditor
    swarm.book.gone(silent)
    del swarm.kinds[silent]
    swarm.computed.pop(silent)
    swarm.run(6)

    assert case not in swarm.book.cases
    assert silent not in case.opinions
    assert len(case.opinions) == 2


def test_a_lease_that_took_many_rounds_is_not_audited() -> None:
    """Its peer is slow: x' has moved on since, and an auditor would find another gradient."""
    book, peers = AuditBook(0.5, "secret"), {"ann": "ann", "bob": "bob", "slow": "slow"}
    for round in range(30):
        book.opens(round, peers, 16.0, lambda sample: 1.0)
        for number, peer in enumerate(peers):
            book.answered(peer, round, bytes([1]) * SKETCH * len(book.tasks(round, peer)))
            lease = round - (5 if peer == "slow" else 0)
            samples = range(1000 * number + round * 4, 1000 * number + round * 4 + 4)
            book.delivered(peer, DeliveredLease(lease, samples, bytes([1]) * SKETCH * 4))
        assert "slow" not in {case.peer for case in book.cases}

    assert book.figures.audited > 20


def test_two_peers_alone_accuse_nobody() -> None:
    swarm = Swarm({"ann": "honest", "bob": "copied"}, share=0.3).run(200)

    assert not swarm.found
    assert not swarm.book.records
    assert swarm.book.figures.undecided


def test_nobody_knows_what_will_be_audited_without_the_hosts_secret() -> None:
    swarms = [ten(seed=seed, batch=256) for seed in (1, 1, 2)]
    for swarm in swarms[2:]:
        swarm.kinds = dict(sorted(swarms[0].kinds.items()))
    drawn_cases = [[(c.peer, c.auditor, c.sample) for c in opened(swarm)] for swarm in swarms]

    assert drawn_cases[0] == drawn_cases[1]
    assert drawn_cases[0] != drawn_cases[2]


def test_two_that_send_no_gradient_at_all_do_not_confirm_each_other() -> None:
    case = Case("ann", "ann", 0, 0, {"ann": bytes(SKETCH), "bob": bytes(SKETCH)})

    assert case.ruling() is None


def test_the_first_two_that_agree_are_right_and_who_is_near_one_of_them_is_not_wrong() -> None:
    right, wrong = (1 << 128) - 1, 1  # 127 bits apart
    near, between = right ^ ((1 << 30) - 1), right ^ (((1 << 40) - 1) << 60)  # 70 apart, 40 from right
    said = {"ann": wrong, "bob": right, "cat": near, "dan": between}
    case = Case("ann", "ann", 0, 0, {peer: bits.to_bytes(SKETCH, "big") for peer, bits in said.items()})
    ruling = case.ruling()

    assert differing(case.opinions["cat"], case.opinions["dan"]) > 48
    assert ruling is not None
    assert (set(ruling.right), set(ruling.wrong)) == ({"bob", "cat"}, {"ann"})
