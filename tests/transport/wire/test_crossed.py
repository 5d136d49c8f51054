"""A hub's wire reports what the kernel has counted of each connection, over real sockets."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from scripts.swarms.tcp_link import Link
from transport.protocol import CurveKeys
from transport.wire import Crossed, DealerWire, RouterWire, TcpRoute

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO")
KEYS = CurveKeys.generate()


class Pair:
    """A hub, and a peer behind a link, whose first message the hub has."""

    def __init__(self, hub: RouterWire, link: Link) -> None:
        self.hub, self.link, self.said = hub, link, 0
        self.peer = DealerWire((TcpRoute("127.0.0.1", link.port),), KEYS.public)
        self.peer.dial(1)
        deadline = time.monotonic() + 10.0
        while not self.peer.send(1, [b"hello"]):
            assert time.monotonic() < deadline
            hub.poll(0.01)
            self.peer.poll(0.01)
        ((self.conn, _),) = hub.poll(10.0)
        self.until(lambda seen: seen.received_at > 0 and not seen.unacknowledged)

    def until(self, there: Callable[[Crossed], bool]) -> Crossed:
        """Guard the hub until the connection is so."""
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            self.said += len(self.hub.poll(0.01))
            self.peer.poll(0.0)
            self.hub.guard(time.monotonic(), lambda conn: "session")
            seen = self.hub.crossed(self.conn)
            if seen is not None and there(seen):
                return seen
        raise AssertionError(f"not so: {self.hub.crossed(self.conn)}")


@pytest.fixture
def pair() -> Iterator[Pair]:
    with (
        closing(RouterWire("127.0.0.1", 0, KEYS)) as hub,
        closing(Link(hub.port, up=1e6)) as link,
        closing((made := Pair(hub, link)).peer),
    ):
        yield made


def test_a_machine_whose_process_says_nothing_acknowledges_what_it_is_sent(pair: Pair) -> None:
    before = pair.hub.crossed(pair.conn)
    assert before is not None

    pair.hub.send(pair.conn, [b"ping"])
    after = pair.until(lambda seen: seen.acknowledged_at > before.acknowledged_at)

    assert after.received_at == before.received_at
    assert not after.is_peers, "on the loopback it may be a relay that acknowledges"


def test_a_message_on_a_thin_line_is_seen_before_it_is_whole(pair: Pair) -> None:
    pair.peer.send(1, [bytes(250_000)])

    first = pair.until(lambda seen: seen.partly > 0)
    more = pair.until(lambda seen: seen.partly > first.partly)

    assert more.received_at > first.received_at
    assert pair.said == 0
    pair.until(lambda seen: pair.said == 1)
    assert pair.until(lambda seen: True).partly == 0


def test_what_is_sent_and_not_acknowledged_is_counted_from_when_it_was_sent(pair: Pair) -> None:
    pair.link.deaf()
    sent = time.monotonic()
    for _ in range(80):
        pair.hub.send(pair.conn, [bytes(1 << 18)])

    seen = pair.until(lambda seen: seen.unacknowledged > 0 and seen.acknowledged > 0)

    assert seen.unacknowledged + seen.acknowledged > 20 << 20
    assert seen.caught_up_at <= sent
    pair.link.mend()
    pair.until(lambda seen: not seen.unacknowledged)
