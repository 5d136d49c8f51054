from collections.abc import Iterable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sim_swarm import SimSwarm
from toy_swarm import toy_settings

from transport.ledger import RungRow
from transport.protocol import RoundCommitted, Rung, events
from transport.scheduling.leases import BLOCK, SPARE, STAY, Ladder, need_of_round

# needs, local steps and peers as a default recipe has them
RUNGS = (
    Rung(1.0, 1, 8), Rung(3.3), Rung(20.0), Rung(40.0, 2), Rung(80.0, 4), Rung(160.0, 8),
)  # fmt: skip
needs = st.floats(0.01, 400)
unknown = st.just(0.0)
rungs = st.integers(0, len(RUNGS) - 1)
members = st.integers(1, 16)


def climbed(ladder: Ladder, measured: Iterable[tuple[float, int]]) -> list[int]:
    """The rung of each round, and of the one after the last."""
    found = [ladder.at]
    for round, (need, many) in enumerate(measured):
        ladder = ladder.committed(round, need, many)
        found.append(ladder.at)
    return found


@given(rungs, needs, members)
def test_with_steady_lines_and_members_it_comes_to_rest_where_the_need_fits_and_never_moves_again(
    start: int, need: float, many: int
) -> None:
    found = climbed(Ladder(RUNGS, start), [(need, many)] * 20 * BLOCK)
    rest = RUNGS[found[4 * BLOCK]]

    assert len(set(found[4 * BLOCK :])) == 1
    assert need <= rest.need or rest == RUNGS[-1]
    assert many >= STAY * rest.peers
    for better in RUNGS[: found[-1]]:
        assert need > SPARE * better.need or many < better.peers


@given(rungs, st.floats(0.01, 300), members, st.lists(st.floats(1, 1 / SPARE - 1e-6), max_size=30 * BLOCK))
def test_noise_of_less_than_a_quarter_never_makes_it_turn_back(
    start: int, least: float, many: int, noise: list[float]
) -> None:
    found = climbed(Ladder(RUNGS, start), [(least * factor, many) for factor in noise])

    assert found in (sorted(found), sorted(found, reverse=True))


@given(st.lists(st.integers(6, 8), max_size=30 * BLOCK))
def test_two_peers_that_come_and_go_change_no_more_than_one_rung_once(counts: list[int]) -> None:
    found = climbed(Ladder.of(RUNGS), [(0.1, many) for many in counts])

    assert found in (sorted(found, reverse=True),), "there is no way back"


@given(
    st.tuples(rungs, rungs),
    st.lists(st.tuples(needs, st.floats(0, 1), members, st.integers(0, 8)), max_size=20 * BLOCK),
)
def test_better_lines_and_more_members_at_any_time_never_lead_to_a_later_rung_at_any_time(
    starts: tuple[int, int], rounds: list[tuple[float, float, int, int]]
) -> None:
    better, worse = sorted(starts)
    easier = [(need * share + 1e-9, many + more) for need, share, many, more in rounds]
    wide = climbed(Ladder(RUNGS, better), easier)
    thin = climbed(Ladder(RUNGS, worse), [(need, many) for need, _, many, _ in rounds])

    assert all(one <= other for one, other in zip(wide, thin, strict=True))


@given(rungs, st.lists(st.tuples(needs | unknown, members), max_size=10 * BLOCK))
def test_it_moves_after_whole_blocks_alone_and_no_round_takes_more_than_twice_as_long(
    start: int, measured: list[tuple[float, int]]
) -> None:
    found = climbed(Ladder(RUNGS, start), measured)

    for round, (one, other) in enumerate(pairwise(found)):
        assert RUNGS[other].local_steps <= 2 * RUNGS[one].local_steps
        assert one == other or (round + 1) % BLOCK == 0


@given(rungs, st.lists(unknown, max_size=5 * BLOCK), needs)
def test_rounds_of_which_nothing_is_known_move_it_nowhere(
    start: int, silent: list[float], odd: float
) -> None:
    """Neither does one odd measurement among them."""
    silent[::BLOCK] = [odd] * len(silent[::BLOCK])

    assert set(climbed(Ladder(RUNGS, start), [(need, 4) for need in silent])) == {start}


@pytest.mark.parametrize("many", [2, 4, 8, 16])
@pytest.mark.parametrize("need", [0.8, 0.9, 2.7, 3.0, 3.3, 16.0, 18.0, 20.0, 36.0, 72.0, 144.0])
def test_members_that_measure_a_fifth_too_much_or_little_never_make_it_turn(many: int, need: float) -> None:
    dice = Random(1)
    measured = [[(need * dice.uniform(0.8, 1.2), 10) for _ in range(many)] for _ in range(40 * BLOCK)]
    found = climbed(Ladder.of(RUNGS), [(need_of_round(round), many) for round in measured])

    assert found in (sorted(found), sorted(found, reverse=True))


@pytest.mark.parametrize("phase", range(BLOCK))
@pytest.mark.parametrize(
    ("usual", "meanwhile", "expected"),
    [((0.2, 4), (7.1, 4), (1, 2)), ((0.2, 4), (0.2, 8), (1, 0)), ((28.4, 4), (56.8, 8), (3, 4))],
    ids=["1,000 Mbit/s, 20, 1,000", "4 peers, 8, 4", "4 peers, 8, 4 with the hub on 20 Mbit/s"],
)
def test_lines_that_change_and_peers_that_come_and_go_are_followed_within_ten_rounds(
    usual: tuple[float, int], meanwhile: tuple[float, int], expected: tuple[int, int], phase: int
) -> None:
    """A peer's own medians know of a change two rounds later."""
    changed, back = 8 * BLOCK + phase, 12 * BLOCK + phase
    found = climbed(Ladder.of(RUNGS), [usual] * changed + [meanwhile] * 4 * BLOCK + [usual] * 4 * BLOCK)

    assert (found[changed], {*found[changed + 8 : back]}) == (expected[0], {expected[1]})
    assert set(found[back + 8 :]) == {expected[0]}


@given(st.lists(st.tuples(needs | unknown, members), max_size=40), st.integers(0, 40))
def test_a_replay_of_the_rows_finds_the_same_rungs_wherever_a_hub_died(
    measured: list[tuple[float, int]], died: int
) -> None:
    found = climbed(Ladder.of(RUNGS), measured)
    rows = [RungRow(round, found[round], *one) for round, one in enumerate(measured)]
    again = Ladder.of(RUNGS)
    for row in rows[:died]:
        again = again.committed(row.round, row.need, row.members)

    for row in rows[died:]:
        assert again.at == row.rung
        again = again.committed(row.round, row.need, row.members)
    assert again.at == found[-1]


@given(st.lists(st.tuples(needs, st.integers(1, 100)), min_size=1, max_size=12))
def test_the_need_of_a_round_is_enough_for_three_quarters_of_the_work(peers: list[tuple[float, int]]) -> None:
    """And the smallest that is: so one slow line of four drags nobody, and a better line never raises it."""
    need, work = need_of_round(peers), sum(samples for _, samples in peers)

    assert sum(samples for one, samples in peers if one <= need) >= 0.75 * work
    assert sum(samples for one, samples in peers if one < need) < 0.75 * work


def test_who_does_not_know_its_line_or_did_no_work_has_no_say() -> None:
    assert need_of_round([(0.0, 100), (3.0, 10), (50.0, 0)]) == 3.0
    assert need_of_round([(0.0, 100), (2.0, 0)]) == need_of_round([]) == 0.0


# ---- in a run ----------------------------------------------------------------------------------------------


STEPS = (Rung(1.0), Rung(2.0, 2), Rung(4.0, 4), Rung(8.0, 8))


def swarm_of(peers: int, samples: int = 800, staleness: int = 1) -> SimSwarm:
    settings = toy_settings(
        samples=samples, global_batch=4, rungs=STEPS, step_timeout=20.0, start_timeout=300.0
    )
    swarm = SimSwarm(staleness, settings)
    for _ in range(peers):
        swarm.join()
    return swarm


def until_round(swarm: SimSwarm, round: int) -> None:
    for _ in range(2000):
        if swarm.hub.rounds.round >= round:
            return
        before = swarm.fingerprint()
        swarm.step()
        if swarm.fingerprint() == before:
            swarm.pass_time(0.1)
    raise AssertionError(f"round {round} never came: {swarm.hub.rounds.phase} of {swarm.hub.rounds.round}")


def say(swarm: SimSwarm, need: float) -> None:
    for peer in swarm.peers:
        peer.needs = need


def steps_by_round(swarm: SimSwarm) -> list[int]:
    """H of each round, which all who took part heard alike."""
    heard: dict[int, set[int]] = {}
    for peer in swarm.peers:
        for round, rung in peer.rungs.items():
            heard.setdefault(round, set()).add(STEPS[rung].local_steps)
    assert all(len(alike) == 1 for alike in heard.values()), heard
    return [heard[round].pop() for round in sorted(heard)]


def leased(swarm: SimSwarm) -> dict[int, int]:
    opened = [event for event in swarm.events if isinstance(event, events.RoundOpened)]
    return {event.round: event.samples for event in opened}


def test_lines_that_become_thin_in_a_run_make_its_rounds_longer_and_each_sample_counts_once() -> None:
    """They become wide again later, and rounds short. A peer that joins takes the steps of the others."""
    swarm = swarm_of(4)
    say(swarm, 0.5)
    until_round(swarm, 2 * BLOCK)
    say(swarm, 3.0)
    until_round(swarm, 4 * BLOCK + 2)
    swarm.join().needs = 3.0
    until_round(swarm, 6 * BLOCK)
    say(swarm, 0.5)
    ended = swarm.settle()
    found, samples = steps_by_round(swarm), leased(swarm)

    assert ended.finished
    assert sorted(swarm.trained) == list(range(800))
    assert found[2 * BLOCK - 1] == 1
    assert found[4 * BLOCK] == found[6 * BLOCK - 1] == 4
    assert found[8 * BLOCK + 1] == 1
    assert 8 not in found
    assert swarm.peers[4].rungs, "it took part"
    assert all(samples[round] == 4 * found[round] for round in range(8 * BLOCK))
    assert [c.local_steps for c in swarm.events if isinstance(c, RoundCommitted)] == found


def test_one_thin_line_among_four_makes_no_round_longer() -> None:
    swarm = swarm_of(4, samples=200)
    swarm.peers[2].needs = 50.0
    for peer in (swarm.peers[0], swarm.peers[1], swarm.peers[3]):
        peer.needs = 0.5
    assert swarm.settle().finished
    assert set(steps_by_round(swarm)) == {1}


def test_a_killed_hub_goes_on_on_the_rung_of_the_round_that_was_open() -> None:
    swarm = swarm_of(3)
    say(swarm, 3.0)
    until_round(swarm, 2 * BLOCK + 1)
    before = swarm.hub.rounds.ladder.steps
    swarm.restart_hub()
    assert swarm.hub.rounds.ladder.steps == before == 4
    ended = swarm.settle()

    assert ended.finished
    assert sorted(swarm.trained) == list(range(800))
    assert steps_by_round(swarm)[2 * BLOCK : 3 * BLOCK] == [4] * BLOCK


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 4),
    st.sampled_from([1, 3]),
    st.lists(st.tuples(needs | unknown, st.sampled_from(["", "kill", "join", "restart"])), max_size=8),
)
def test_whatever_lines_and_machines_do_each_sample_counts_once_in_rounds_that_all_have_alike(
    peers: int, staleness: int, history: list[tuple[float, str]]
) -> None:
    swarm = swarm_of(peers, samples=240, staleness=staleness)
    for number, (need, what) in enumerate(history):
        say(swarm, need)
        if swarm.ended is not None:
            break
        for _ in range(3 * BLOCK):
            swarm.step()
        if what == "kill":
            swarm.kill(swarm.peers[number % len(swarm.peers)])
        if what in ("join", "kill"):
            swarm.join()
        if what == "restart":
            swarm.restart_hub()
    ended = swarm.settle()
    steps_by_round(swarm)

    assert ended.finished
    assert sorted(swarm.trained) == list(range(240))
