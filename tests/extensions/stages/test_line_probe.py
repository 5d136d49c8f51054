"""The rate of a line is measured over the encrypted link, in few bytes, and for nobody but those named."""

import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocktail_cli.extensions.stages.lines import StageLink
from cocktail_cli.extensions.stages.lines.line_probe import (
    BUDGET,
    LONG_S,
    PATIENCE_S,
    LineProbe,
    Ping,
    ProbeAnswers,
    pack,
)
from scripts.swarms.tcp_link import Link
from transport.protocol import CurveKeys, Unreachable
from transport.wire import (
    OF_PEERS,
    Bandwidth,
    DealerWire,
    Disconnected,
    RouterWire,
    TcpRoute,
    try_route,
    wire_size,
)

HERE, THERE = CurveKeys.generate(), CurveKeys.generate()
FREE = Bandwidth()


def measured(up: float, down: float, latency: float, lends: Bandwidth = FREE) -> tuple[LineProbe, float, int]:
    """Measure a line of these bytes a second; returns the probe, the seconds it took, and its bytes."""
    probe, answers, now, total = LineProbe(lends), ProbeAnswers(), 0.0, 0
    answers.admit(["me"])
    while (frames := probe.next(now)) is not None:
        answer = answers.answer("me", frames, FREE)
        assert answer is not None
        took = wire_size(frames) / up + wire_size(answer) / down + 2 * latency
        total += wire_size(frames) + wire_size(answer)
        if took > PATIENCE_S:
            probe.look(now := now + 1.01 * PATIENCE_S)
            break
        now += took
        assert probe.receive(answer, now)
    assert probe.done
    return probe, now, total


RATES = st.floats(5.0, 8.5).map(lambda power: 10**power)


@settings(max_examples=15)
@given(RATES, RATES, st.floats(0.0, 0.15))
def test_both_rates_are_found_within_seconds_and_two_megabytes(
    up: float, down: float, latency: float
) -> None:
    probe, seconds, total = measured(up, down, latency)
    line = probe.measured
    assert line is not None
    assert line.there == pytest.approx(up, rel=0.1)
    assert line.back == pytest.approx(down, rel=0.1)
    assert total < BUDGET
    assert seconds < 4 * PATIENCE_S + 14 * 2 * latency


def test_a_line_too_thin_to_measure_has_at_most_what_was_seen_of_it() -> None:
    line = measured(1e3, 1e6, 0.0)[0].measured
    assert line is not None
    assert 1e3 < line.there == line.back <= (1 << 15) / PATIENCE_S * 1.2
    assert LONG_S < PATIENCE_S


def test_a_rate_is_that_which_both_machines_lend() -> None:
    line = measured(1e7, 1e7, 0.01, Bandwidth(up=2e5))[0].measured
    assert line is not None
    assert (line.there, round(line.back, -6)) == (2e5, 1e7)


def test_a_machine_answers_whom_the_hub_names_and_no_more_than_the_budget() -> None:
    answers, ask = ProbeAnswers(), pack(Ping(1, 1 << 19), 0)
    assert answers.answer("a", ask, FREE) is None
    answers.admit(["a", "b"])
    got = 0
    while (answer := answers.answer("a", ask, FREE)) is not None:
        got += wire_size(answer)
    assert 3 << 19 <= got <= BUDGET + wire_size(ask) + 100
    answers.admit(["a", "b", "c"])
    assert "a" not in answers
    assert answers.answer("b", [b"\xc1", b""], FREE) is None
    assert answers.answer("b", ask, FREE) is not None


@given(st.lists(st.one_of(st.binary(max_size=40), st.sampled_from([pack(Ping(1, 0), 0)[0]])), max_size=3))
def test_bytes_that_are_no_message_of_a_probe_change_nothing(frames: list[bytes]) -> None:
    answers, probe = ProbeAnswers(), LineProbe(FREE)
    answers.admit(["me"])
    probe.next(0.0)
    assert not probe.receive(frames, 0.1)
    if answers.answer("me", frames, FREE) is not None:
        assert frames[0] == pack(Ping(1, 0), 0)[0]
    assert "me" in answers


class Ends:
    """The stage links of two machines, and a line of 1 MB/s up from the first to the second."""

    def __init__(self) -> None:
        self.links: list[StageLink] = []
        for keys in (HERE, THERE):
            number = len(self.links)
            wire = RouterWire(
                "127.0.0.1", 0, keys, 1, allowed=lambda key, at=number: self.links[at].knows(key)
            )
            self.links.append(StageLink(wire, keys, 1 << 20))
        self.proxy = Link(self.links[1].port, up=1e6)
        self.address = f"127.0.0.1:{self.proxy.port}"

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.proxy.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def test_a_thin_line_is_measured_over_sockets(ends: Ends) -> None:
    here, there = ends.links
    there.admit([HERE.public])
    line = here.measure(THERE.public, ends.address)

    assert line is not None
    assert line.there < 2e6 < 4e6 < line.back
    assert there.bytes_down < BUDGET / 2
    assert there.bytes_up < BUDGET / 2


def test_a_stranger_gets_no_byte_and_one_that_asks_for_too_much_is_cut_off(ends: Ends) -> None:
    """A machine that is named may ask within its budget; then it is closed, and a stranger from then on."""
    there, route = ends.links[1], TcpRoute("127.0.0.1", ends.links[1].port)
    with pytest.raises(Unreachable) as refused:
        try_route(route, THERE.public, HERE)
    assert refused.value.layer == "key"

    there.admit([HERE.public])
    wire = DealerWire((route,), THERE.public, HERE, OF_PEERS)
    with closing(wire):
        wire.dial(0)
        until, cut = time.monotonic() + 10.0, False
        while not cut and time.monotonic() < until:
            for event in wire.poll(0.05):
                cut = isinstance(event, Disconnected)
                wire.send(0, pack(Ping(1, 1 << 19), 0))
    assert cut
    assert there.bytes_up <= BUDGET
    with pytest.raises(Unreachable):
        try_route(route, THERE.public, HERE)
