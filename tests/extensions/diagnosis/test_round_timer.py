"""A peer's measures of its round: phases add up, and idle time is not its own."""

from __future__ import annotations

from cocktail_cli.extensions.diagnosis.round_timer import RoundTimer


def test_a_peer_that_waits_for_others_calls_that_time_idle() -> None:
    timer = RoundTimer(staleness=1)
    timer.took_round(0.0, 0.0)
    timer.report(0.0, 0.5)
    timer.fetched_lease(0.0, 0.2)  # and computes until 3.2
    timer.committed(uploaded=1.5, now=8.0)
    timer.stored(0.1)
    timer.fetched_aggregate(8.0, 9.0)
    timer.took_round(9.5, 10.0)

    said = timer.report(3.0, 10.4)

    assert said.cycle == 9900
    assert said.idle == 4800 + 500, "from the end of its compute to the commit, and until the next round"
    assert (said.lease, said.encode, said.download, said.apply, said.disk) == (200, 400, 1000, 500, 100)


def test_without_staleness_the_compute_of_a_round_comes_before_its_exchange() -> None:
    timer = RoundTimer(staleness=0)
    timer.took_round(0.0, 0.0)
    timer.report(0.0, 1.0)
    timer.committed(uploaded=2.0, now=5.0)
    timer.fetched_aggregate(5.0, 6.0)
    timer.took_round(6.5, 6.5)
    timer.fetched_lease(6.5, 7.0)

    said = timer.report(3.0, 10.2)

    assert (said.idle, said.lease, said.encode, said.apply) == (3000, 500, 200, 500)
