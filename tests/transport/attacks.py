"""Attackers of a hub, each at a bounded rate: one is started as

    python tests/transport/attacks.py NAME '{"url": ..., "seconds": ..., "source": "127.0.0.2"}'

They have the run's URL, so also what only somebody with it can do. `source` is the address they come from,
where it is not the machine's own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from transport import parse_url
from transport.protocol import CurveKeys, RunURL, as_z85, decode_to_peer, encode, messages
from transport.wire import raise_file_limit
from transport.wire.zeromq_sockets import MAX_FRAME

BLOB = "base/blob"  # an object of some megabytes that the hub has
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Attack:
    """A target, an end, and the address it comes from."""

    url: RunURL
    until: float  # monotonic
    source: str = ""
    context: zmq.Context[zmq.Socket[bytes]] | None = None

    def paced(self, rate: float) -> Iterator[int]:
        """Count so many a second, until it is over."""
        began = time.monotonic()
        for number in itertools.count():
            if (now := time.monotonic()) >= self.until:
                return
            time.sleep(max(0.0, began + number / rate - now))
            yield number

    def dealer(self, keys: CurveKeys | None = None, **options: int) -> zmq.Socket[bytes]:
        """Connect and prove a key, its own or a fresh one."""
        assert self.context is not None
        sock, mine = self.context.socket(zmq.DEALER), keys or CurveKeys.generate()
        sock.linger, sock.sndtimeo, sock.rcvtimeo = 0, 1000, 3000
        for name, value in options.items():
            sock.setsockopt(getattr(zmq, name), value)
        sock.curve_serverkey = as_z85(self.url.key)
        sock.curve_publickey, sock.curve_secretkey = as_z85(mine.public), as_z85(mine.secret)
        sock.connect(f"tcp://{self.source + ':0;' if self.source else ''}{self.url.host}:{self.url.port}")
        return sock

    def hello(self, name: str, token: str = "") -> bytes:
        return encode(messages.Hello(messages.PROTOCOL, token or self.url.token, self.url.run, name))

    def session(self, keys: CurveKeys, name: str = "mallory") -> tuple[zmq.Socket[bytes], str]:
        """Open a control connection that is welcomed; it, and its session."""
        sock = self.dealer(keys)
        sock.send(self.hello(name))
        while not isinstance(answer := decode_to_peer(sock.recv()), messages.Welcome):
            pass
        return sock, answer.session


# ---- without a key -----------------------------------------------------------------------------------------


def crowd(attack: Attack, said: bytes, rate: float, most: int) -> None:
    """Open TCP connections that say this, and stay until there are too many."""
    open: deque[socket.socket] = deque()
    for _ in attack.paced(rate):
        sock = socket.socket()
        sock.setblocking(False)
        if attack.source:
            sock.bind((attack.source, 0))
        sock.connect_ex((attack.url.host, attack.url.port))
        open.append(sock)
        if len(open) > 100:
            with contextlib.suppress(OSError):
                open[-100].send(said)
        if len(open) > most:
            open.popleft().close()


def idle(attack: Attack) -> None:
    """1000 connections a second that say nothing, 6000 at once."""
    crowd(attack, b"", 1000, 6000)


# ---- with the hub's key ------------------------------------------------------------------------------------


def frames(attack: Attack) -> None:
    """Messages of 256 frames of 1 MiB, as fast as the line takes them."""
    parts(attack, bytes(MAX_FRAME - 64), 256)


def dust(attack: Attack) -> None:
    """Messages of 200,000 frames of one byte."""
    parts(attack, b".", 200_000)


def parts(attack: Attack, part: bytes, count: int) -> None:
    sock = attack.dealer(SNDHWM=1)
    while time.monotonic() < attack.until:
        try:
            for _ in range(count):
                sock.send(part, zmq.SNDMORE)
            sock.send(b"")
        except zmq.Again:
            sock.close()
            sock = attack.dealer(SNDHWM=1)


# ---- with the token ----------------------------------------------------------------------------------------


def newcomers(attack: Attack) -> None:
    """200 greetings a second, each from a fresh key on a connection of its own; 200 stay."""
    open: deque[zmq.Socket[bytes]] = deque()
    for number in attack.paced(200):
        sock = attack.dealer()
        with contextlib.suppress(zmq.Again):
            sock.send(attack.hello(f"m{number}"), zmq.DONTWAIT)
        open.append(sock)
        if len(open) > 200:
            open.popleft().close()


def talk(attack: Attack) -> None:
    """Control messages as fast as the line takes them, on 8 connections."""
    flood(attack, messages.Pong(1.0))


def flood(attack: Attack, message: messages.Message) -> None:
    socks, said = [attack.dealer() for _ in range(8)], encode(message)
    while time.monotonic() < attack.until:
        for sock in socks:
            with contextlib.suppress(zmq.Again):
                for _ in range(100):
                    sock.send(said, zmq.DONTWAIT)
        time.sleep(0.001)


def unread(attack: Attack) -> None:
    """2000 chunks a second asked for by one session, on 8 connections that read nothing."""
    keys = CurveKeys.generate()
    control, session = attack.session(keys)
    socks = [attack.dealer(keys, RCVHWM=1) for _ in range(8)]
    for sock in socks:
        sock.send(encode(messages.Attach(session)))
        assert isinstance(decode_to_peer(sock.recv()), messages.Attached)
    asked = encode(messages.Get(BLOB, 0, MIB))
    for number in attack.paced(2000):
        with contextlib.suppress(zmq.Again):
            socks[number % 8].send(asked, zmq.DONTWAIT)
    control.close()


ALL = (idle, frames, dust, newcomers, talk, unread)
ATTACKS: dict[str, Callable[[Attack], None]] = {attack.__name__: attack for attack in ALL}


def main(name: str, asked: dict[str, Any]) -> None:
    raise_file_limit()
    url = parse_url(asked["url"])
    os.nice(10)  # the hub is measured, and may have most of a small machine
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ATTACKS[name](Attack(url, time.monotonic() + asked["seconds"], asked.get("source", ""), context))
    context.destroy(0)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
