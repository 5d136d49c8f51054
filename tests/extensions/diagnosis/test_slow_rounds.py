"""A peer that lengthens rounds is named with its cause; without a fault nobody is."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from msgspec import structs
from simulated_rounds import Machine, SimulatedRounds

from cocktail_cli.extensions.diagnosis.bodies import Culprit, Spent
from cocktail_cli.extensions.diagnosis.slow_rounds import HUB, PeerSample, Sight, SlowRounds

SWARM = {f"p{i}": Machine(sample=0.25 * (1 + 0.3 * i)) for i in range(4)}
MINE = SWARM["p2"]
WELL = 24  # rounds before a fault
FAULTS: Mapping[str, Machine] = {
    "upload": replace(MINE, up=2e4),
    "download": replace(MINE, down=3e4),
    "compute": replace(MINE, sample=1.6),
    "other load": replace(MINE, sample=1.2, encode=0.2, counters={"cpu_wait": 2.0}),
    "gpu load": replace(MINE, sample=1.2, counters={"gpu_wait": 2.0}),
    "memory": replace(MINE, sample=1.2, counters={"memory": 1.5}),
    "thermal": replace(MINE, sample=1.2, counters={"throttled": 2.0}),
    "disk": replace(MINE, apply=2.0, counters={"io": 1.8}),
    "stopped": replace(MINE, stops=4.0),
    "asleep": replace(MINE, encode=4.0, counters={"slept": 4.0}),
    "clock": replace(MINE, counters={"clock": -3600.0}),
}


def named(sim: SimulatedRounds, rounds: int, since: int = 0) -> list[Culprit]:
    """Culprits told in these rounds; none before `since`."""
    slow = SlowRounds()
    quiet = [one for _ in range(since) for one in slow.add(sim.round())]
    assert quiet == []
    return [one for _ in range(rounds) for one in slow.add(sim.round())]


def from_round(first: int, bad: Machine) -> Callable[[int, str], Machine | None]:
    return lambda number, name: bad if name == "p2" and number >= first else None


@pytest.mark.parametrize("cause", FAULTS)
def test_each_fault_is_named_within_three_rounds(cause: str) -> None:
    """Report and cycle lag by one round: what is slow in round r is measured when it ends, in round r + 1."""
    sim = SimulatedRounds(SWARM, noise=0.15, seed=3, fault=from_round(WELL, FAULTS[cause]))

    (found,) = named(sim, 4, WELL)

    assert (found.peer, found.cause) == ("p2", cause)
    assert found.evidence
    assert found.remedy


@pytest.mark.parametrize(("swarm", "seed"), [(SWARM, 1), ({"a": MINE, "b": Machine()}, 2)])
def test_nobody_is_accused_in_quiet_rounds(swarm: Mapping[str, Machine], seed: int) -> None:
    assert named(SimulatedRounds(swarm, noise=0.2, seed=seed), 0, since=500) == []


def test_a_slow_peer_with_a_share_of_its_own_slows_nobody() -> None:
    """The load balancer has given it less: all arrive at the same time."""
    slow = {**{f"p{i}": Machine(sample=0.1) for i in range(3)}, "old": Machine(sample=0.4)}

    assert named(SimulatedRounds(slow, batch=64, noise=0.1), 100) == []


def test_a_line_that_was_thin_from_the_beginning_is_named_too() -> None:
    """Without a better history a peer is compared with the others."""
    thin = {**SWARM, "p2": replace(MINE, up=2e4)}

    found = named(SimulatedRounds(thin, noise=0.1), 30)

    assert [(one.peer, one.cause) for one in found] == [("p2", "upload")]


def test_a_fault_that_lasts_is_told_once_and_stays_in_the_status_until_it_ends() -> None:
    sim = SimulatedRounds(
        SWARM,
        noise=0.1,
        fault=lambda number, name: FAULTS["upload"] if name == "p2" and WELL <= number < WELL + 60 else None,
    )
    slow = SlowRounds()
    told, shown = [], []
    for _ in range(WELL + 80):
        told += slow.add(sim.round())
        shown.append([one.peer for one in slow.culprits])

    assert [one.cause for one in told] == ["upload"]
    assert shown[WELL + 4 : WELL + 59] == [["p2"]] * 55
    assert shown[-1] == []


def test_the_hubs_disk_is_named_where_rounds_take_long_to_become_durable() -> None:
    sim = SimulatedRounds(SWARM, noise=0.1, hub_disk=lambda number: 0.02 if number < WELL else 2.0)

    (found,) = named(sim, 3, WELL)

    assert (found.peer, found.cause) == (HUB, "disk")


def test_a_peer_that_is_left_out_is_named_once_it_is_silent_and_explained_once_it_is_back() -> None:
    sim, slow = SimulatedRounds(SWARM, noise=0.05), SlowRounds()
    for _ in range(WELL):
        last = sim.round()
        slow.add(last)
    sample = sim.round()
    gone = PeerSample("p2", sample.opened + 9.0, whole=False)
    assert slow.add(replace(sample, peers={**sample.peers, "p2": gone})) == []
    sample = sim.round()

    others = {name: peer for name, peer in sample.peers.items() if name != "p2"}
    (silent,) = slow.add(replace(sample, peers=others, sights={"p2": Sight(11.0)}))
    (back,) = slow.late("p2", replace(gone, spent=Spent(cycle=40000, stopped=35000)))

    assert (silent.peer, silent.cause) == ("p2", "silent")
    assert (back.peer, back.cause) == ("p2", "stopped")
    assert slow.late("p2", replace(gone, spent=Spent())) == [], "it is told once"


def test_a_peer_that_a_round_went_on_without_says_in_the_next_why_its_update_was_late() -> None:
    """Its process may have had no core, or its line no room: the hub cannot know before."""
    for spent, cause in (
        (Spent(upload=6000), "upload"),
        (Spent(upload=6000, cpu_wait=7000), "other load"),
    ):
        sim, slow = SimulatedRounds(SWARM, noise=0.05), SlowRounds()
        for _ in range(WELL):
            slow.add(sim.round())
        sample = sim.round()
        reported = replace(sample.peers["p2"], arrived=sample.opened + 9.0, whole=False)
        assert slow.add(replace(sample, peers={**sample.peers, "p2": reported})) == []
        sample = sim.round()

        (found,) = slow.add(
            replace(sample, peers={**sample.peers, "p2": replace(reported, spent=spent, whole=True)})
        )

        assert (found.peer, found.cause) == ("p2", cause)


def test_memory_is_named_with_the_seconds_that_tasks_stood_still_and_the_pages_read_again() -> None:
    thrashing = replace(MINE, sample=1.2, counters={"memory": 1.5, "faults": 2.1})
    sim = SimulatedRounds(SWARM, noise=0.15, seed=3, fault=from_round(WELL, thrashing))

    (found,) = named(sim, 4, WELL)

    assert found.cause == "memory"
    assert "for lack of memory for 1.5 s of" in found.evidence
    assert "2,100 of its pages were read from disk" in found.evidence


def test_a_slow_phase_is_no_news_of_a_peer_whose_machine_has_just_told_the_reason() -> None:
    """Code that was dropped for lack of memory has to be read again, which is slow as well."""

    def fault(number: int, name: str) -> Machine | None:
        if name != "p2" or number < WELL:
            return None
        return FAULTS["memory" if number < WELL + 3 else "compute"]

    sim = SimulatedRounds(SWARM, noise=0.15, seed=3, fault=fault)
    slow = SlowRounds()

    assert [one.cause for _ in range(WELL + 8) for one in slow.add(sim.round())] == ["memory"]


def test_an_older_peer_that_measures_nothing_is_judged_by_its_arrivals() -> None:
    sim, slow = SimulatedRounds(SWARM, noise=0.1, fault=from_round(WELL, FAULTS["upload"])), SlowRounds()
    told = []
    for _ in range(WELL + 4):
        sample = sim.round()
        old = {name: replace(peer, spent=None) for name, peer in sample.peers.items()}
        told += slow.add(replace(sample, peers=old))

    assert [(one.peer, one.cause) for one in told] == [("p2", "upload")]


def test_a_process_that_was_stopped_just_after_it_had_written_its_report_says_so_in_the_next() -> None:
    sim, slow = SimulatedRounds(SWARM, noise=0.05), SlowRounds()
    for _ in range(WELL):
        slow.add(sim.round())
    sample = sim.round()
    gone = replace(sample.peers["p2"], arrived=sample.opened + 9.0, whole=False, spent=None)
    slow.add(replace(sample, peers={**sample.peers, "p2": gone}))

    assert slow.late("p2", replace(gone, spent=Spent(cycle=1200))) == []
    (found,) = slow.late("p2", replace(gone, spent=Spent(cycle=9000, stopped=8000)))

    assert (found.peer, found.cause) == ("p2", "stopped")


def test_one_slow_round_on_a_line_that_loses_many_packets_suffices() -> None:
    for resent, rounds in ((150, 1), (20, 2)):
        sim, slow = (
            SimulatedRounds(SWARM, noise=0.05, fault=from_round(WELL, replace(MINE, up=6e4))),
            SlowRounds(),
        )
        for _ in range(WELL):
            slow.add(sim.round())
        told = list[Culprit]()
        for number in range(1, 4):
            sample = sim.round()
            peer = sample.peers["p2"]
            assert peer.spent is not None
            peers = {**sample.peers, "p2": replace(peer, spent=structs.replace(peer.spent, resent=resent))}
            told += slow.add(replace(sample, peers=peers))
            assert bool(told) == (number >= rounds)
        assert [(one.peer, one.cause) for one in told] == [("p2", "upload")]
