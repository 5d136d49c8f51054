"""A hub's side of a relay: one control connection, and one more connection for each that a peer makes. A lent
machine that nobody can dial has one as well, in place of a hub.

The relay is a stranger: what it says of addresses is believed only as far as limits by origin go, and all it
announces together is limited here. What passes through it is CURVE between peer and hub.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from contextlib import closing
from functools import partial

from cocktail_cli.assembly import Server
from transport.protocol import Unreachable
from transport.wire import Connected, DealerWire, Disconnected, Received, TokenBuckets, raise_file_limit

from . import relay_socks
from .dialling import RELAY_HINT, first_answer, relay_routes, request, run_name
from .proxies import NO_PROXIES, Proxies
from .relay_server import DIALS, DIALS_S, LOST_S, PING_S
from .streams import LoopThread, PolledWire, TaskSet, dial_loopback, splice

FIRST_RETRY, LAST_RETRY = 0.25, 4.0  # seconds between dials
ANSWER_S = 10.0  # for the relay to answer with a peer
WORKS_S = 30.0  # a claim that held for so long makes the next retry the first
MOST = 4096  # connections through the relay, and no more than a quarter of the descriptors
GUEST = re.compile(r"guest ([0-9a-f]{32}) ([0-9a-f:.-]{0,64})")
KEY = re.compile(r"[A-Za-z0-9_-]{43}")  # CURVE, base64url
CONTROL = f"{relay_socks.CONTROL}.{relay_socks.PROBE}"

log = logging.getLogger(__name__)


class ClaimLost(Exception):
    """The relay does not have this run, or not any more."""


class HubTunnel:
    """Makes a server on this machine reachable through a relay, and goes on dialling a relay that is gone.

    Args:
        relay: "host:port" of the relay, which is shown proof of the server's keys.
        server: of the hub; or another one, with keys made for this. Is told when the relay is lost, or there
            again; from a thread.
        proxies: of this machine.
    """

    def __init__(self, relay: str, server: Server, proxies: Proxies = NO_PROXIES) -> None:
        self.address = f"{relay}/{run_name(server.keys.public)}"  # by which other machines dial it
        self._server = server
        self._routes = [*relay_routes(relay, f"{relay_socks.CONTROL}.{relay_socks.RELAY}", proxies)]
        self._most = min(MOST, raise_file_limit() // 4)
        self._dials = TokenBuckets(DIALS_S, DIALS)
        self._guests = TaskSet()
        self._lost = ""  # why there is no claim, once told
        self._route = self._routes[0]  # by which the relay was reached last
        self.claims = 0  # how often the relay accepted the claim
        self.claimed = threading.Event()  # it has, once
        self.refused = 0  # announced connections beyond the limits
        self._thread = LoopThread("cocktail-hub-tunnel", self._main)

    def close(self) -> None:
        self._thread.stop()

    async def _main(self) -> None:
        retry = FIRST_RETRY
        while True:
            started = time.monotonic()
            try:
                await self._hold_claim()
            except (Unreachable, ClaimLost) as error:
                self._tell_lost(str(error))
            retry = FIRST_RETRY if time.monotonic() - started >= WORKS_S else retry
            await asyncio.sleep(retry)
            retry = min(2 * retry, LAST_RETRY)

    def _tell_lost(self, why: str) -> None:
        if not self._lost:
            self._server.warn(f"{self._server.what} is not reachable through its relay for now: {why}")
        self._lost = why

    async def _hold_claim(self) -> None:
        """Claim the run and fetch peers until the control connection ends. Raises Unreachable, ClaimLost."""
        key, self._route = await first_answer(self._routes, CONTROL)
        if not KEY.fullmatch(key):
            raise ClaimLost(f"{self._route} sent no key")
        self._routes.sort(key=lambda route: route != self._route)
        dealer = DealerWire((self._route,), key, self._server.keys)
        wire = PolledWire(dealer)
        dealer.dial(0)
        try:
            ping_at = give_up_at = time.monotonic() + LOST_S
            async for events in wire.events():
                now = time.monotonic()
                for event in events:
                    if isinstance(event, Disconnected):
                        raise event.error or ClaimLost(f"{self._route} hung up")
                    give_up_at = now + LOST_S
                    if isinstance(event, Connected):
                        wire.call(partial(dealer.send, 0, [b"claim"]))
                        ping_at = now + PING_S
                    elif isinstance(event, Received):
                        self._receive(event.frames[0].decode("ascii", "replace"), now)
                if now >= give_up_at:
                    raise ClaimLost(f"{self._route} is silent")
                if now >= ping_at:
                    wire.call(partial(dealer.send, 0, [b"ping"]))
                    ping_at = now + PING_S
        finally:
            await wire.close()

    def _receive(self, message: str, now: float) -> None:
        if guest := GUEST.fullmatch(message):
            if len(self._guests) >= self._most or not self._dials.take("relay", now):
                self.refused += 1
                return
            self._guests.start(self._fetch(*guest.groups()))
        elif message == "claimed":
            self.claims += 1
            self.claimed.set()
            if self._lost:
                self._server.warn(f"{self._server.what} is reachable through its relay again")
            self._lost = ""
        elif message == "full":
            raise ClaimLost(f"{self._route} has as many runs as it may")

    async def _fetch(self, ticket: str, origin: str) -> None:
        """Join a peer at the relay with the hub."""
        try:
            tunnel, _ = await request(self._route, f"{ticket}.{relay_socks.GUEST}", ANSWER_S)
            here = self._server.host, self._server.port
            with closing(tunnel), closing(await dial_loopback(*here, origin)) as hub:
                await splice(hub, tunnel)
        except (OSError, Unreachable) as error:
            log.debug("a peer at the relay could not be fetched: %s", error)


def check_relay(relay: str, proxies: Proxies = NO_PROXIES) -> None:
    """Raise Unreachable (layer: relay) where no relay answers at "host:port"."""
    try:
        asyncio.run(first_answer(relay_routes(relay, CONTROL, proxies), CONTROL))
    except Unreachable as error:
        raise Unreachable(error.host, error.port, "relay", str(error), RELAY_HINT) from None
