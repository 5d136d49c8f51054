"""A peer's measures of its round: phases add up, and idle time is not its own."""

from __future__ import annotations

from cocktail_cli.measures import RoundTimer


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


def cycles(timer: RoundTimer, count: int) -> None:
    """Pass so many rounds of a second: the lease is here after .1 s, the report goes after .2 s."""
    for number in range(count):
        timer.took_round(number, number)
        timer.report(0.5, number + 0.2)
        timer.fetched_lease(number, number + 0.1)
        timer.committed(number + 0.4, number + 0.6)
        timer.fetched_aggregate(number + 0.6, number + 0.7)


def test_a_cycle_far_longer_than_usual_says_what_it_waits_for_while_it_lasts() -> None:
    timer = RoundTimer(staleness=1)
    cycles(timer, 12)  # the last report at 11.2

    assert timer.delayed(13.5, arrived=True) is None, "not long yet"
    computes, spent = timer.delayed(15.1, arrived=True) or (0.0, None)
    assert spent is not None
    assert (round(computes, 6), spent.cycle, spent.download) == (4.0, 3900, 0)
    assert timer.delayed(15.5, arrived=True) is None, "said a moment ago"
    with timer.under_way("packet", 14.0):
        computes, spent = timer.delayed(17.0, arrived=True) or (0.0, None)
    assert spent is not None
    assert (computes, spent.download) == (0.0, 3000), "what is fetched keeps it, not its compute"
    with timer.under_way("update", 14.0):
        _, spent = timer.delayed(19.0, arrived=False) or (0.0, None)
    assert spent is not None
    assert spent.upload == 5000


def test_a_peer_that_waits_for_others_is_not_delayed() -> None:
    timer = RoundTimer(staleness=0)
    cycles(timer, 12)

    with timer.under_way("round", 12.0):
        assert timer.delayed(60.0, arrived=True) is None
    with timer.under_way("update", 12.0):
        assert timer.delayed(60.0, arrived=True) is None
        assert timer.delayed(60.0, arrived=False) is not None
