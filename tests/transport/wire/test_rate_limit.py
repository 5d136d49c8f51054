"""A peer's bandwidth cap: the bucket, what bulk makes of it, and the real thing on the loopback."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hub_swarm import HubSwarm
from hypothesis import given
from hypothesis import strategies as st
from toy_swarm import PLENTY, ToyWork, toy_settings

from transport import Bandwidth, Hub, PeerLink
from transport.peer import LinkLimits
from transport.protocol import messages
from transport.transfer import CHUNK, ChunkBuffer, PeerTransfers
from transport.wire import TokenBucket
from transport.wire.rate_limit import SLACK_S

RATE = 2e6  # bytes a second: 16 mbit


@given(
    st.floats(1e3, 1e9),
    st.lists(st.tuples(st.floats(0.0, 10.0), st.integers(0, 1 << 20)), min_size=1, max_size=50),
)
def test_what_waits_for_the_bucket_never_exceeds_its_rate_by_more_than_slack_and_one_fragment(
    rate: float, fragments: list[tuple[float, int]]
) -> None:
    bucket, now, went = TokenBucket(rate), 100.0, 0
    for idle, size in fragments:
        now = max(now + idle, bucket.open_at(now + idle))
        assert bucket.level(now) > 0, "open_at does not lie"
        assert went <= rate * (now - 100.0 + SLACK_S) + 1.0
        bucket.take(size, now)
        went += size


def test_a_bucket_in_debt_says_when_it_opens_and_control_deepens_the_debt() -> None:
    bucket = TokenBucket(1000.0)
    bucket.take(550, 10.0)

    assert bucket.level(10.0) == -500
    assert bucket.open_at(10.0) == pytest.approx(10.501)
    bucket.take(100, 10.0)
    assert bucket.open_at(10.0) == pytest.approx(10.601)
    bucket.take(-610, 10.0)
    assert bucket.open_at(10.0) == 10.0, "less came than was expected"
    assert bucket.level(1e9) == 50.0, "idle hours are not saved up"


def test_without_a_rate_nothing_waits_and_a_rate_of_nothing_is_our_bug() -> None:
    free = TokenBucket(None)
    free.take(1 << 40, 0.0)

    assert free.level(0.0) == float("inf")
    assert free.open_at(0.0) == 0.0
    with pytest.raises(ValueError, match="a rate of 0"):
        TokenBucket(0)


def on_a_fast_line() -> PeerTransfers:
    """With one flow, and windows as wide as the hub allows."""
    peer = PeerTransfers()
    peer.up(1, 32, 0.01, 0.0)
    for window in peer.windows.values():
        window.answered(window.sent(1, 1 << 30, 0, 0.0), 1 << 30, 0.01, more=False)
    return peer


def test_bulk_sends_and_asks_only_while_there_is_something_left() -> None:
    peer = on_a_fast_line()
    peer.upload("update/1", bytes(5 * CHUNK), b"sum")
    peer.fetch("packet/0", lambda size, digest: ChunkBuffer(size, digest, CHUNK), PLENTY, 5 * CHUNK + 7)

    def kinds(up: float, down: float) -> list[type]:
        return [
            type(out.message)
            for out in peer.outgoing(up, down)
            if isinstance(out.message, messages.Chunk | messages.Get)
        ]

    assert kinds(0, 0) == []
    assert kinds(1, -5) == [messages.Chunk], "the last one may be larger than what is left"
    assert kinds(-1, CHUNK + 1) == [messages.Get, messages.Get]
    assert kinds(2 * CHUNK, 0) == [messages.Chunk, messages.Chunk]
    rest = peer.outgoing()
    assert [out.answer for out in rest if isinstance(out.message, messages.Get)] == [CHUNK] * 3 + [7]


def test_a_chunk_asked_for_is_expected_once() -> None:
    peer = on_a_fast_line()
    peer.fetch("packet/0", lambda size, digest: ChunkBuffer(size, digest, CHUNK), PLENTY, CHUNK + 7)
    peer.fetch("lease/1", lambda size, digest: ChunkBuffer(size, digest, CHUNK), PLENTY)
    peer.outgoing()

    assert [peer.expected("packet/0", i) for i in (0, 1, 2)] == [CHUNK, 7, 0]
    assert peer.expected("lease/1", 0) == 0, "its size is not known yet"
    peer.receive(messages.Data("packet/0", 1, CHUNK + 7, b""), bytes(7), 0.0)
    assert peer.expected("packet/0", 1) == 0


@contextmanager
def hub_and_peer(folder: Path, work: ToyWork, bandwidth: Bandwidth) -> Iterator[tuple[Hub, PeerLink]]:
    settings = toy_settings(ping_s=0.05, max_update=1 << 22, linger_s=0.1)
    with HubSwarm(settings, work, folder / "run", 0) as swarm:
        link = swarm.link("ann", LinkLimits(bandwidth=bandwidth))
        link.connect(30.0)
        yield swarm.hub, link


class SlowestPing:
    """The longest answer to a ping, as the hub measures it, while this is open."""

    def __init__(self, hub: Hub) -> None:
        self.hub, self.worst, self.heard, self._end = hub, 0.0, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._end.wait(0.02):
            for session in list(self.hub._state.members.sessions.values()):
                if session.rtt is not None:
                    self.worst, self.heard = max(self.worst, session.rtt), self.heard + 1

    def __enter__(self) -> SlowestPing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


@pytest.mark.alone  # a second counts here
@pytest.mark.slow
def test_two_megabytes_up_at_16_mbit_take_a_second_and_pings_are_answered(tmp_path: Path) -> None:
    packet = json.dumps(["x" * 1_999_996]).encode()
    assert len(packet) == 2_000_000
    with hub_and_peer(tmp_path, ToyWork(), Bandwidth(up=RATE)) as (hub, link):
        link.ready(0, 0)
        assert isinstance(link.next_round(), messages.Round)
        with SlowestPing(hub) as pings:
            started = time.monotonic()
            link.exchange(0, packet, messages.Report(0, 0, [], 0.0, 0, 0.0, 0.0))
            took = time.monotonic() - started

    assert 0.85 < took < 2.0  # never faster; slower only where the machine is busy
    assert pings.heard > 10
    assert pings.worst < 0.5  # 6 ms on a calm machine


@pytest.mark.alone  # a second counts here
@pytest.mark.slow
def test_two_megabytes_down_at_16_mbit_take_a_second_and_pings_are_answered(tmp_path: Path) -> None:
    work = ToyWork(objects={"base/model": bytes(2_000_000)})
    with hub_and_peer(tmp_path, work, Bandwidth(down=RATE)) as (hub, link), SlowestPing(hub) as pings:
        started = time.monotonic()
        fetched = link.fetch("base/model", PLENTY)
        took = time.monotonic() - started

    assert len(fetched) == 2_000_000  # type: ignore[arg-type]
    assert 0.85 < took < 2.0  # never faster; slower only where the machine is busy
    assert pings.heard > 10
    assert pings.worst < 0.5  # 6 ms on a calm machine
