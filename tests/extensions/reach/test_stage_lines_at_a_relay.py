"""A line of stages between two machines that nobody can dial."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from queue import SimpleQueue

from cocktail_cli.assembly import Server
from cocktail_cli.extensions.reach.dialling import machine_routes
from cocktail_cli.extensions.reach.hub_tunnel import HubTunnel
from cocktail_cli.extensions.reach.relay_server import Relay
from transport.protocol import CurveKeys
from transport.stages import LineMessage, Neighbour, StageLink
from transport.wire import RouterWire

WAIT = 10.0


def started(stack: ExitStack) -> StageLink:
    """Start a stage's link on the loopback."""
    keys, links = CurveKeys.generate(), list[StageLink]()
    wire = RouterWire("127.0.0.1", 0, keys, 1, allowed=lambda key: links[0].knows(key))
    links.append(StageLink(wire, keys, 1 << 20))
    links[0].routes_to = machine_routes
    stack.callback(links[0].close)
    return links[0]


def relayed(stack: ExitStack, relay: str, link: StageLink) -> Neighbour:
    """Have a relay lead to a link."""
    server = Server(CurveKeys.generate(), "127.0.0.1", link.port)
    tunnel = stack.enter_context(closing(HubTunnel(relay, server)))
    assert tunnel.claimed.wait(WAIT)
    return Neighbour(link.key[:4], link.key, tunnel.address)


def received(link: StageLink) -> LineMessage:
    until = time.monotonic() + WAIT
    while time.monotonic() < until:
        came = link.receive(0.1)
        if came is not None and isinstance(came.what, LineMessage):
            return came.what
    raise AssertionError("it did not come")


def test_a_line_between_two_that_cannot_be_dialled_leads_through_a_relay() -> None:
    """The line loses and doubles nothing when the relay is killed and another is at its port: claims are made
    anew. A stranger is let in by no relay. The way there and back is measured by joining."""
    relay = Relay("127.0.0.1", 0)
    met = SimpleQueue[str]()
    first, second = (LineMessage(1, "activations", number, bytes([number]) * 300_000) for number in range(2))
    back = LineMessage(1, "gradients", 0, b"g")
    with ExitStack() as stack:
        near, far, stranger = (started(stack) for _ in range(3))
        ends = [relayed(stack, f"127.0.0.1:{relay.port}", link) for link in (near, far)]
        stranger.dialled = lambda neighbour, why: met.put(why.layer if why else "")
        near.connect(ends[1], ends[1], ends[0].address)
        far.connect(ends[0], ends[0], ends[1].address)
        near.send(first)
        assert received(far) == first
        stranger.connect(ends[0], ends[0], "")
        assert 0 < machine_routes(ends[1].address)[0].seconds(WAIT) < WAIT
        relay.close()
        near.send(second)
        far.send(back)
        relay = stack.enter_context(closing(Relay("127.0.0.1", relay.port)))
        assert received(far) == second
        assert received(near) == back
        assert met.get(timeout=WAIT)
