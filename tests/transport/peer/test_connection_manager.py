"""The peer's transport thread, asked what it does at which time; its wire only remembers."""

from copy import deepcopy

import pytest

from transport.peer import LinkLimits, PeerState
from transport.peer.connection_manager import BACKED_OFF_S, CONTROL, ConnectionManager
from transport.protocol import ProtocolError, Unreachable, encode, messages
from transport.transfer import FIRST_FRAGMENT, ChunkBuffer
from transport.wire import Bandwidth, Connected, Disconnected, Frames, RateLimits, Received


class SilentWire:
    """Takes everything and brings nothing."""

    def __init__(self) -> None:
        self.did: list[tuple[str, int]] = []
        self.bytes: dict[int, int] = {}  # that have come on a flow, parts of messages
        self.acknowledged: dict[int, int] = {}

    def dial(self, flow: int) -> None:
        self.did.append(("dial", flow))

    def hang_up(self, flow: int) -> None:
        self.did.append(("hang up", flow))

    def poll(self, timeout: float) -> list[Connected | Disconnected | Received]:
        return []

    def send(self, flow: int, frames: Frames) -> bool:
        return True

    def crossed(self, flow: int) -> tuple[int, int]:
        return self.acknowledged.get(flow, 0), self.bytes.get(flow, 0)

    def wake(self) -> None: ...

    def close(self) -> None: ...


def joined(wire: SilentWire) -> ConnectionManager:
    """With two bulk flows, at the time 1."""
    state = PeerState(messages.Hello(messages.PROTOCOL, "token", "run", "ann"))
    connections = ConnectionManager(wire, state, "hub:1", LinkLimits(), RateLimits(Bandwidth()))
    connections._maintain(0.0)
    wire.did.clear()
    connections._flow_up(CONTROL, 0.0)
    state.receive(messages.Welcome(messages.PROTOCOL, "run", "ann", "s1", "{}", "00", [], 0, 1.0), 1.0)
    for flow in (1, 2):
        connections._flow_up(flow, 1.0)
    return connections


@pytest.mark.parametrize(("layer", "gives_up"), [("tcp", 5.0), ("handshake", 20.0)])
def test_a_hub_that_takes_connections_but_is_slow_is_dialled_for_longer(layer: str, gives_up: float) -> None:
    state = PeerState(messages.Hello(messages.PROTOCOL, "token", "run", "ann"))
    connections = ConnectionManager(SilentWire(), state, "hub:1", LinkLimits(), RateLimits(Bandwidth()))
    connections._give_up_at = 5.0
    connections._flow_down(CONTROL, Unreachable("hub", 1, layer, "no"), 1.0)
    with connections.changed:
        connections._maintain(gives_up - 0.1)
        assert connections.broken is None

        connections._maintain(gives_up)

    assert isinstance(connections.broken, Unreachable)


def test_with_rounds_in_flight_a_packet_is_asked_for_when_the_next_lease_is_here_or_late() -> None:
    connections = joined(SilentWire())
    transfers, data = connections.transfers, messages.Data("lease/1", 0, 5)
    transfers.up(1, 64, 0.05, 1.0)
    transfers.fetch("packet/0", ChunkBuffer, 100)
    transfers.fetch("lease/1", ChunkBuffer, 100)
    connections.leases_first = True
    connections._received(Received(CONTROL, [encode(messages.Committed(0, 100, "", ["ann"]))]), 2.0)
    asked = [(out.message.name, now) for now in (2.0, 2.9) for out in transfers.outgoing(now=now)]
    late = [out.message.name for out in deepcopy(transfers).outgoing(now=3.0)]

    connections._received_bulk(Received(1, [encode(data), b"12345"]), data, 2.9)

    assert asked == [("lease/1", 2.0)]
    assert late == [out.message.name for out in transfers.outgoing(now=2.9)] == ["packet/0"]


def test_a_link_that_swallows_everything_is_dialled_anew_whole_not_only_its_control_connection() -> None:
    wire = SilentWire()
    connections = joined(wire)
    state = connections.state
    connections._maintain(state.silent_until() - 0.1)
    assert ("hang up", CONTROL) not in wire.did
    wire.did.clear()

    connections._maintain(state.silent_until())

    assert wire.did[:3] == [("hang up", 0), ("hang up", 1), ("hang up", 2)]
    assert ("dial", CONTROL) in wire.did


def test_a_hub_whose_chunks_arrive_is_not_silent_however_long_its_pings_wait_behind_them() -> None:
    """The hub's line may carry the aggregates of four peers for longer than pings may be away."""
    wire = SilentWire()
    connections = joined(wire)
    late = connections.state.silent_until() + 1.0
    chunk = messages.Attached(64)
    connections._attach_sent_at[1] = 1.0
    connections._received_bulk(Received(1, [encode(chunk)]), chunk, late - 2.0)

    connections._maintain(late)

    assert ("hang up", CONTROL) not in wire.did


def test_on_a_thin_line_a_flow_whose_bytes_still_move_is_left_alone_until_they_stop() -> None:
    """One chunk may take minutes there, and pings wait behind it. To send it anew would never end."""
    wire = SilentWire()
    connections = joined(wire)
    connections.transfers.up(1, 64, 0.05, 1.0)
    connections.transfers.upload("update/0", bytes(FIRST_FRAGMENT), bytes(32)).agreed = True
    assert connections.transfers.outgoing(now=1.0)

    now = 1.0
    while now < 120.0:
        now += 0.5
        wire.bytes[1] = wire.bytes.get(1, 0) + 500
        connections._maintain(now)
        if now % 7 == 0:  # a ping, after a silence
            connections._received(Received(CONTROL, [encode(messages.Ping(now))]), now)
    assert wire.did == []
    connections._maintain(now + 5.9)
    assert wire.did == []
    connections._maintain(now + 6.0)
    assert wire.did[:3] == [("hang up", 0), ("hang up", 1), ("hang up", 2)]


def test_a_hub_whose_system_acknowledges_what_it_is_sent_and_that_says_nothing_is_silent() -> None:
    """Its process hangs, or is stopped. Else its peers would give it up later than its standby expects."""
    wire = SilentWire()
    connections = joined(wire)
    until = connections.state.silent_until()
    for step in range(1, 14):
        wire.acknowledged[1] = 500 * step
        connections._maintain(min(until, 1.0 + 0.5 * step))

    assert ("hang up", CONTROL) in wire.did


def test_bytes_of_messages_heard_long_ago_are_no_sign_of_life_of_a_hub_that_has_stopped() -> None:
    """A flow that begins to owe an answer late in a silence has carried much since it was last looked at.
    Else a standby that asks then hears the hub anew, and sends back the peers that have lost it."""
    wire = SilentWire()
    connections = joined(wire)
    wire.bytes[1] = 1_000_000
    connections._attach_sent_at[1] = 1.0
    connections._received_bulk(Received(1, []), messages.Attached(64), 2.0)
    silent = connections.state.silent_until()
    connections._maintain(silent - 2.0)
    connections.transfers.fetch("replica/manifest/1", ChunkBuffer, 1 << 20)
    assert connections.transfers.outgoing(now=silent - 2.0)

    for late in (1.5, 1.0, 0.5):
        connections._maintain(silent - late)
        assert wire.did == []
    connections._maintain(silent)

    assert ("hang up", CONTROL) in wire.did


def test_a_flow_that_the_others_leave_behind_is_dialled_anew_though_the_line_is_not_dark() -> None:
    """After a dark line TCP may wait on one connection for long. A line that is only slow is left alone."""
    wire = SilentWire()
    connections = joined(wire)
    for flow in (1, 2):
        connections.transfers.up(flow, 64, 0.05, 1.0)
    upload = connections.transfers.upload("update/0", bytes(64 * FIRST_FRAGMENT), bytes(32))
    upload.agreed = True
    sent = connections.transfers.outgoing(now=1.0)
    assert {out.flow for out in sent} == {1, 2}

    now = 1.0
    while now < 1.0 + BACKED_OFF_S - 0.1:
        now += 0.05
        (index,) = (fragment.index for fragment, on in connections.transfers._under.items() if on.flow == 2)
        connections._received_bulk(Received(2, []), messages.Ack("update/0", index), now)
        connections.transfers.outgoing(now=now)
        connections._maintain(now)
    assert wire.did == []
    connections._maintain(now + BACKED_OFF_S)
    assert wire.did == [], "nothing has come on any since"
    connections._received_bulk(Received(2, []), messages.Ack("update/0", index), now + 0.2)
    connections._maintain(now + 0.2)

    assert wire.did == [("hang up", 1), ("dial", 1)]


def test_a_hub_whose_message_has_no_end_is_dialled_no_more_and_the_link_says_why() -> None:
    wire = SilentWire()
    connections = joined(wire)

    connections._take(Disconnected(1, ProtocolError("a message has no end")), 2.0)

    assert str(connections.broken) == "a message has no end"
    connections._take(Disconnected(2, ProtocolError("another one")), 3.0)
    assert str(connections.broken) == "a message has no end", "the first is told"
