import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_swarm import SimPeer, SimSwarm
from toy_swarm import toy_settings

from transport.protocol import RoundCommitted, messages
from transport.scheduling import LoadBalancer, Phase
from transport.scheduling.leases import MOST, WINDOW, divide, split

speeds = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9)
LEARNT = 4  # rounds: of the first nobody knows how fast who is
PEERS = ["a", "b", "c", "d"]


def known(**samples_a_second: float) -> LoadBalancer:
    found = LoadBalancer()
    for name, speed in samples_a_second.items():
        found.note(name, 100, 100 / speed)
    return found


def counts(balancer: LoadBalancer, batch: int, names: list[str], round: int) -> list[int]:
    """Count each session's samples of a batch in which all cost the same."""
    return [len(portion.samples) for portion in balancer.portions([1.0] * batch, names, round, 1)]


@given(st.integers(0, 500), speeds, st.integers(0, 99))
def test_a_batch_is_shared_out_whole_and_by_speed(batch: int, speeds: list[float], round: int) -> None:
    shares = split(batch, speeds, round)

    assert sum(shares) == batch
    for share, speed in zip(shares, speeds, strict=True):
        assert share >= int(batch * speed / sum(speeds) * (1 - 1e-9)), "rounded down, and what was left over"


@given(st.integers(1, 60), speeds, st.integers(0, 99))
def test_no_peer_could_pass_a_sample_to_another_that_would_finish_earlier(
    batch: int, speeds: list[float], round: int
) -> None:
    shares = split(batch, speeds, round)
    last = max(range(len(speeds)), key=lambda i: shares[i] / speeds[i])
    fair = batch / sum(speeds)

    for share, speed in zip(shares, speeds, strict=True):
        assert shares[last] / speeds[last] <= max((share + 1) / speed, fair) * (1 + 1e-9)


@given(st.integers(0, 30), st.integers(1, 7), st.integers(0, 9))
def test_among_equals_shares_are_near_equal_and_the_remainder_rotates(
    batch: int, peers: int, round: int
) -> None:
    names = [f"p{i}" for i in range(peers)]
    shares = counts(LoadBalancer(), batch, names, round)
    again = counts(LoadBalancer(), batch, names, round + 1)

    assert sum(shares) == batch
    assert max(shares) - min(shares) <= 1
    assert again == shares[-1:] + shares[:-1]


@given(
    st.one_of(st.lists(st.just(1.0), max_size=200), st.lists(st.floats(1e-3, 1e3), max_size=50)),
    st.dictionaries(st.sampled_from(PEERS), st.floats(1e-6, 1e6)),
    st.integers(0, 9),
    st.integers(0, 40),
)
def test_the_global_batch_stays_whatever_peers_there_are(
    costs: list[float], speeds: dict[str, float], round: int, longest: int
) -> None:
    portions = known(**speeds).portions(costs, PEERS, round, longest)

    assert sorted(place for portion in portions for place in portion.samples) == list(range(len(costs)))
    assert all(1 <= portion.spans <= max(1, longest) for portion in portions)
    assert all(portion.samples for portion in portions if portion.spans > 1)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=60), speeds, st.integers(0, 99))
def test_no_share_of_unequal_samples_exceeds_the_fair_one_by_more_than_its_cheapest_sample(
    costs: list[float], speeds: list[float], round: int
) -> None:
    parts = divide([*costs, 11.0], speeds, round)
    a_second = (sum(costs) + 11.0) / sum(speeds)

    for part, speed in zip(parts, speeds, strict=True):
        mine = [[*costs, 11.0][place] for place in part]
        assert sum(mine) - min(mine, default=0) <= a_second * speed + 1e-6 or len(mine) == 1


@pytest.mark.parametrize(("batch", "at_most"), [(32, 0.05), (64, 0.02)])
def test_samples_of_lognormal_lengths_leave_unequal_peers_idle_for_less_than_a_twentieth(
    batch: int, at_most: float
) -> None:
    """Shares by number leave them idle for 32 and 26 % of the time."""
    generator, rates, idle = random.Random(1), {"a": 1.0, "b": 1.0, "c": 2.0, "d": 4.0}, []
    found = known(**rates)
    for round in range(100):
        costs = [generator.lognormvariate(0, 1) for _ in range(batch)]
        portions = found.portions(costs, PEERS, round, 1)
        loads = {name: sum(costs[i] for i in p.samples) for name, p in zip(PEERS, portions, strict=True)}
        times = [loads[name] / speed for name, speed in rates.items()]
        idle.append(1 - sum(times) / len(times) / max(times))
        for name, took in zip(PEERS, times, strict=True):
            found.note(name, loads[name], took)

    assert sum(idle) / len(idle) <= at_most


def test_an_impossible_reported_speed_is_bounded() -> None:
    assert counts(known(a=1.0, b=1.0, c=1.0, d=1e9), 110, PEERS, 0) == [10, 10, 10, 10 * MOST]


def test_an_unmeasured_peer_among_measured_ones_gets_one_sample() -> None:
    assert counts(known(a=5.0, b=5.0, d=1.0), 56, PEERS, 0) == [25, 25, 1, 5]


def test_one_outlier_does_not_change_a_share() -> None:
    found = known(a=1.0, b=1.0, c=1.0, d=1.0)
    for name in PEERS:
        for _ in range(WINDOW - 1):
            found.note(name, 100, 100.0)
    before = counts(found, 40, PEERS, 0)
    found.note("a", 10, 300.0)

    assert counts(found, 40, PEERS, 0) == before


@given(st.floats(0.1, 5), st.lists(st.floats(0.01, 1), min_size=2, max_size=5))
def test_shares_converge_to_equal_times_whatever_part_is_fixed(fixed: float, a_sample: list[float]) -> None:
    found, names, batch = LoadBalancer(), [str(i) for i in range(len(a_sample))], 2000
    slowest = max(a_sample)
    if min(a_sample) < slowest / MOST:
        return
    for round in range(30):
        shares = counts(found, batch, names, round)
        times = [fixed + n * seconds for n, seconds in zip(shares, a_sample, strict=True)]
        for name, n, took in zip(names, shares, times, strict=True):
            found.note(name, n, took)

    assert max(times) - min(times) <= 0.02 * max(times) + 2 * slowest


# ---- on the machine; seconds are of a virtual clock --------------------------------------------------------


class Worker(SimPeer):
    """Computes its lease in so many seconds a sample. Its packet goes when it has done that."""

    per_sample = 1.0
    busy = 0.0  # until when
    told: messages.Round | None = None

    def work(self) -> None:
        if self.swarm.now < self.busy:
            return
        super().work()
        if self.round is not None and self.uploaded and self.told is not self.round:
            self.told, self.compute_s = self.round, self.round.samples * self.per_sample
            self.busy = self.swarm.now + self.compute_s


def swarm_of(*per_sample: float, rounds: int = 40, batch: int = 64, longest: int = 16) -> SimSwarm:
    settings = toy_settings(
        samples=rounds * batch,
        global_batch=batch,
        longest_lease=longest,
        first_peers=len(per_sample),
        step_timeout=1e4,
        start_timeout=1e4,
        peer_timeout=1e6,
        ping_s=3600.0,
    )
    swarm = SimSwarm(1, settings)
    for i, seconds in enumerate(per_sample):
        peer = Worker(swarm, f"p{i}", 1)
        peer.per_sample = seconds
        swarm.peers.append(peer)
        peer.dial()
    return swarm


def run(swarm: SimSwarm) -> float:
    """To the end; the virtual seconds a round took once the shares followed."""
    for _ in range(100_000):
        if swarm.hub.rounds.phase is Phase.ENDED:
            took = [e.seconds for e in swarm.events if isinstance(e, RoundCommitted)]
            return sum(took[LEARNT:-1]) / len(took[LEARNT:-1])
        before = swarm.fingerprint(), [p.busy for p in swarm.peers]
        swarm.step()
        if (swarm.fingerprint(), [p.busy for p in swarm.peers]) == before:
            later = [p.busy for p in swarm.peers if p.busy > swarm.now]
            swarm.pass_time(max(0.001, min([*later, max(swarm.now, swarm.hub.deadline())]) - swarm.now))
    pytest.fail(f"stuck in {swarm.hub.rounds.phase} of round {swarm.hub.rounds.round}")


def test_a_peer_five_times_slower_costs_the_others_less_than_a_tenth() -> None:
    three, four = run(swarm_of(0.1, 0.1, 0.1)), run(swarm_of(0.1, 0.1, 0.1, 0.5))

    assert four < 1.1 * three


def test_a_peer_far_slower_than_the_median_is_in_every_nth_round_and_its_work_counts() -> None:
    alone, swarm = run(swarm_of(0.1, 0.1, 0.1)), swarm_of(0.1, 0.1, 0.1, 2.0)
    seconds = run(swarm)
    rounds = swarm.books.rounds
    with_it = [row.round for row in rounds if "p3" in row.accepted]

    assert seconds < 1.1 * alone
    assert sorted(swarm.trained) == list(range(swarm.settings.samples)), "each sample once"
    assert {after - one for one, after in pairwise(with_it[LEARNT:-1])} == {4}


def test_a_lease_names_the_least_that_members_can_fetch_apart_from_those_that_skip_rounds() -> None:
    swarm = swarm_of(0.1, 0.1, 0.1, 2.0)
    for peer, fits in zip(swarm.peers, (500, 300, 0, 10), strict=True):
        peer.fits = fits
    told: dict[int, int] = {}
    hears = swarm.peers[0].state.receive

    def hear(message: messages.ToPeer, now: float) -> list[messages.Message]:
        if isinstance(message, messages.Round):
            told[message.round] = message.fits
        return hears(message, now)

    swarm.peers[0].state.receive = hear  # type: ignore[method-assign]
    run(swarm)

    assert (told[0], told[1]) == (0, 10), "at first it is a member like the others"
    assert {told[round] for round in range(LEARNT + 1, 30)} == {300}
