"""A port of the loopback that leads along a route, so that libzmq needs to know of no relay, proxy or TLS.

libzmq speaks SOCKS, but 4.3.5 aborts the process when a SOCKS server closes or refuses a connection."""

from __future__ import annotations

import socket
from contextlib import closing

from transport.protocol import Route, Unreachable

from .dialling import request
from .loop_thread import LoopThread, TaskSet
from .streams import SocketStream, Stream, accept, prepare, splice

ANSWER_S = 10.0  # for a relay to have the hub fetch a connection
AT_ONCE = 64  # connections: a peer has up to five, and its probes; no other program may fill this one


class Bridge:
    """Each connection to 127.0.0.1:`port` becomes one along the route; what cannot be opened is closed."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=AT_ONCE)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._carried = TaskSet()
        self._thread = LoopThread("cocktail-bridge", self._main)

    def close(self) -> None:
        self._thread.stop()

    async def _main(self) -> None:
        with self._listener:
            while True:
                sock, _ = await accept(self._listener)
                if len(self._carried) < AT_ONCE:
                    self._carried.start(self._carry(SocketStream(prepare(sock))))
                else:
                    sock.close()

    async def _carry(self, near: Stream) -> None:
        with closing(near):
            try:
                far, _ = await request(self._route, self._route.name, ANSWER_S)
            except Unreachable:  # the dialler finds its connection closed, and asks for the reason by a probe
                return
            with closing(far):
                await splice(near, far)
