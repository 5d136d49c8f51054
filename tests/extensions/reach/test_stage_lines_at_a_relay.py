"""A line of stages between two machines that nobody can dial."""

from contextlib import ExitStack, closing
from queue import SimpleQueue

from test_stage_link import KEYS, WAIT, Ring, activations, message, ring  # noqa: F401

from cocktail_cli.assembly import Server
from cocktail_cli.extensions.reach.dialling import machine_routes
from cocktail_cli.extensions.reach.hub_tunnel import HubTunnel
from cocktail_cli.extensions.reach.relay_server import Relay
from cocktail_cli.extensions.stages.lines import Neighbour, StageMessage
from transport.protocol import CurveKeys


def test_a_line_between_two_that_cannot_be_dialled_leads_through_a_relay(ring: Ring) -> None:  # noqa: F811
    """The line loses and doubles nothing when the relay is killed and another is at its port: claims are made
    anew. A stranger is let in by no relay. The way there and back is measured by joining."""
    relay = Relay("127.0.0.1", 0)
    met = SimpleQueue[str]()
    with ExitStack() as stack:
        near, far, stranger = (ring.start(number) for number in range(3))
        ends = list[Neighbour]()
        for number, link in enumerate((near, far)):
            server = Server(CurveKeys.generate(), "127.0.0.1", link.port)
            tunnel = stack.enter_context(closing(HubTunnel(f"127.0.0.1:{relay.port}", server)))
            assert tunnel.claimed.wait(WAIT)
            ends.append(Neighbour(f"s{number}", KEYS[number].public, tunnel.address))
        for link in (near, far, stranger):
            link.routes_to = machine_routes
        stranger.dialled = lambda neighbour, why: met.put(why.layer if why else "")
        near.connect(ends[1], ends[1], ends[0].address)
        far.connect(ends[0], ends[0], ends[1].address)
        near.send(activations(0))
        assert message(far) == activations(0)
        stranger.connect(ends[0], ends[0], "")
        assert 0 < machine_routes(ends[1].address)[0].seconds(WAIT) < WAIT
        relay.close()
        near.send(activations(1))
        far.send(StageMessage(1, "gradients", 0, b"g"))
        relay = stack.enter_context(closing(Relay("127.0.0.1", relay.port)))
        assert message(far) == activations(1)
        assert message(near) == StageMessage(1, "gradients", 0, b"g")
        assert met.get(timeout=WAIT)
