"""The processes of bench_hub.py: a hub and many peers in one process, and the same traffic over raw ZeroMQ.

    python hub_swarm.py hub   '{"folder": ..., "keys": ..., "peers": 64, "work": "owner" | "relay", ...}'
    python hub_swarm.py peers '{"port": ..., "keys": ..., "first": 0, "count": 32, "size": ...}'
    python hub_swarm.py raw   '{"keys": ..., "peers": 64, "size": ...}'
    python hub_swarm.py raws  '{"port": ..., "keys": ..., "count": 32, "size": ...}'

A peer fetches its lease and the aggregate of the round before, uploads its packet, and reports; it has no
model, and says of each x' the same fingerprint. All peers of a process share one thread and one poll. Its
packets were made beforehand and are sent in turn. Each process says what happens in lines of JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from transport import Hub, Ledger, RunKeys, RunSettings
from transport.hub.malloc_tuning import keep_freed_memory
from transport.protocol.events import RoundCommitted, RunEnded, Warned
from transport.protocol.keys import CurveKeys, as_z85
from transport.protocol.message_codec import decode_to_peer, encode
from transport.protocol.messages import (
    OF,
    PROTOCOL,
    Attach,
    Attached,
    Chunk,
    Committed,
    Data,
    Get,
    Hello,
    Message,
    Over,
    Ping,
    Pong,
    Put,
    PutDone,
    Ready,
    Report,
    Round,
    Welcome,
)
from transport.transfer.transfers import CHUNK
from transport.wire.zeromq_sockets import COMMON, HUB, PEER, raise_file_limit, set_options

RUN, SAME = "bench", 7  # SAME: fingerprint of every x'
SEED, VARIANTS = 1, 8  # different packets, sent in turn


def say(kind: str, **what: Any) -> None:
    print(json.dumps({"kind": kind, "t": time.monotonic(), **what}), flush=True)


def mix() -> Any:
    from compress import Cocktail

    return Cocktail()


def parameters(size: int) -> int:
    """P of a model whose packets at the defaults have about `size` bytes, the same sample length each round.

    0.1341 bit a parameter; a tenth of the blocks of 256 is visited.
    """
    return max(1, round(size * 8 / 0.1341 / 2560)) * 2560


# ---- the hub -----------------------------------------------------------------------------------------------


class Relay:
    """An owner that does no arithmetic: the first packet is the aggregate. What is left is transport."""

    def samples(self, ids: Sequence[int]) -> bytes:
        return bytes(4096)

    def tokens(self, ids: Sequence[int]) -> int:
        return 10 * len(ids)

    def arrived(self, round: int, peer: str, packet: bytes) -> None:
        """Nothing to do."""

    def aggregate(self, round: int, updates: Sequence[tuple[str, bytes, float]]) -> bytes:
        return updates[0][1]

    def inherit(self, peer: str, packet: bytes, share: float) -> None:
        """Nobody leaves."""

    def committed(self, round: int, packet: bytes) -> None:
        """Nothing to do."""

    def fingerprint(self, round: int) -> int:
        return SAME

    def object(self, name: str) -> bytes:
        raise KeyError(name)


class OwnerWork(Relay):
    """The owner of a real run, with the books of its error."""

    def __init__(self, size: int, ledger: Ledger) -> None:
        from cocktail_cli.aggregation.durable_aggregator import KeptOwner
        from recipes.algorithm.cocktail_sgd import rehearse
        from recipes.algorithm.shard_aggregator import Owners

        owner = Owners(parameters(size), mix(), SEED)
        rehearse(mix(), parameters(size))
        self.owner = KeptOwner(owner, ledger.folder)
        self.owner.recover(ledger)

    def arrived(self, round: int, peer: str, packet: bytes) -> None:
        self.owner.owner.arrived(round, peer, packet)

    def aggregate(self, round: int, updates: Sequence[tuple[str, bytes, float]]) -> bytes:
        return self.owner.aggregate(round, updates)

    def committed(self, round: int, packet: bytes) -> None:
        self.owner.committed(round)


def run_hub(asked: dict[str, Any]) -> None:
    peers = asked["peers"]
    settings = RunSettings(
        run=RUN,
        recipe="{}",
        recipe_hash="00",
        samples=1 << 40,
        global_batch=peers,
        min_peers=peers,
        first_peers=peers,
        max_update=2 * asked["size"] + (1 << 20),
        linger_s=1.0,
    )
    ledger = Ledger(Path(asked["folder"]), run=RUN, samples=settings.samples)
    work = OwnerWork(asked["size"], ledger) if asked["work"] == "owner" else Relay()
    hub = Hub("127.0.0.1", 0, RunKeys(**asked["keys"]), ledger, settings, work)
    signal.signal(signal.SIGTERM, lambda *_: hub.stop(now=True))
    hub.start()
    say("listening", port=hub.port)
    for event in hub.events():
        if isinstance(event, RoundCommitted):
            if event.round == 0:
                say("threads", names=thread_names())
            down = event.size * len(event.members)
            say("round", packets=len(event.accepted), up=sum(event.packets.values()), down=down)
        elif isinstance(event, Warned | RunEnded):
            say("told", text=str(event))
    ledger.close()


def thread_names() -> dict[str, str]:
    """Of the threads of Python; ZeroMQ's own are none."""
    return {str(t.native_id): t.name for t in threading.enumerate()}


# ---- peers -------------------------------------------------------------------------------------------------


def packets_of(size: int) -> list[bytes]:
    """A few packets of heavy-tailed updates, each whole and of about `size` bytes."""
    import torch

    m, generator = mix().draw(parameters(size), SEED, 0).m, torch.Generator().manual_seed(SEED)
    values = torch.randn(m, generator=generator) / torch.rand(m, generator=generator).add_(0.05)
    return [mix().encode(torch.roll(values, 1000 * i)) for i in range(VARIANTS)]


class Wires:
    """The sockets of all peers of one process, in one poll."""

    def __init__(self, port: int, server: str) -> None:
        raise_file_limit()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self._port, self._server = port, server
        self._epoll = select.epoll()
        self._socks: dict[int, zmq.Socket[bytes]] = {}  # by descriptor
        self._owner: dict[zmq.Socket[bytes], Any] = {}
        self._used: set[zmq.Socket[bytes]] = set()

    def dial(self, keys: CurveKeys, owner: Any) -> zmq.Socket[bytes]:
        sock = self._context.socket(zmq.DEALER)
        set_options(sock, COMMON | PEER | {"HANDSHAKE_IVL": 60_000, "IMMEDIATE": 0})
        sock.curve_serverkey = as_z85(self._server)
        sock.curve_publickey, sock.curve_secretkey = as_z85(keys.public), as_z85(keys.secret)
        sock.connect(f"tcp://127.0.0.1:{self._port}")
        number = int(sock.getsockopt(zmq.FD))
        self._epoll.register(number, select.EPOLLIN)
        self._socks[number], self._owner[sock] = sock, owner
        return sock

    def send(self, sock: zmq.Socket[bytes], data: bytes | memoryview, *, more: bool = False) -> None:
        """Whole pieces are not copied. What comes while libzmq sends is told by no descriptor."""
        sock.send(data, zmq.SNDMORE if more else 0, copy=isinstance(data, bytes))
        self._used.add(sock)

    def turn(self) -> None:
        """Wait until something is here, and hand it to whom it belongs to. ZeroMQ's own poll asks all sockets
        each time: half of what a peer of few messages takes."""
        self._used.update(self._socks[number] for number, _ in self._epoll.poll(1.0))
        while self._used:
            sock = self._used.pop()
            with contextlib.suppress(zmq.Again):
                while True:
                    self._owner[sock].came(sock.recv_multipart(zmq.DONTWAIT, copy=False))


class Peer:
    """What any peer says in a round, without a model."""

    def __init__(self, wires: Wires, run: RunKeys, number: int, packets: list[bytes]) -> None:
        self.wires, self.number, self.packets = wires, number, packets
        self.keys = CurveKeys.generate()
        self.digests = [hashlib.sha256(p).digest() for p in packets]
        self.opened: Round | None = None  # the next one, to be sent to once the aggregate before it is here
        self.missing = 0  # pieces of the aggregate under way
        self.bulk: zmq.Socket[bytes] | None = None
        self.over = False
        self.control = wires.dial(self.keys, self)
        self.say(Hello(PROTOCOL, run.token, RUN, f"p{number:04}"))

    def say(self, message: Message, sock: zmq.Socket[bytes] | None = None) -> None:
        self.wires.send(sock or self.control, encode(message))

    def came(self, frames: list[zmq.Frame]) -> None:
        message = decode_to_peer(frames[0].buffer)
        if isinstance(message, Data):
            self.missing -= message.name.startswith("packet/")
            self.turn()
        elif isinstance(message, Committed):
            pieces = -(-message.size // CHUNK)
            for i in range(pieces):
                self.say(Get(f"packet/{message.round}", i, CHUNK), self.bulk)
            self.missing += pieces
        elif isinstance(message, Round):
            self.opened = message
            self.say(Get(f"lease/{message.round}", 0, CHUNK), self.bulk)
            self.turn()
        elif isinstance(message, Ping):
            self.say(Pong(message.sent))
        elif isinstance(message, Welcome):
            self.bulk = self.wires.dial(self.keys, self)
            self.say(Attach(message.session), self.bulk)
        elif isinstance(message, Attached):
            self.say(Ready(0, SAME))
        elif isinstance(message, Over):
            self.over = True
        elif isinstance(message, PutDone) and not message.ok:
            raise SystemExit(f"p{self.number:04} was refused: {message.reason}")

    def turn(self) -> None:
        """Upload, once a round is open and the aggregate of the one before is here."""
        if self.opened is None or self.missing:
            return
        assert self.bulk is not None
        round, which = self.opened.round, (self.number + self.opened.round) % VARIANTS
        name, packet, self.opened = f"update/{round}", memoryview(self.packets[which]), None
        self.say(Put(name, len(packet), self.digests[which], CHUNK), self.bulk)
        for i in range(-(-len(packet) // CHUNK)):
            self.wires.send(self.bulk, encode(Chunk(name, i, self.digests[which][:OF])), more=True)
            self.wires.send(self.bulk, packet[i * CHUNK : (i + 1) * CHUNK])
        self.say(Report(round, SAME, [round], 30.0, 10))


def run_peers(asked: dict[str, Any]) -> None:
    keys, size = RunKeys(**asked["keys"]), asked["size"]
    packets = packets_of(size) if asked["work"] == "owner" else [os.urandom(size) for _ in range(VARIANTS)]
    wires = Wires(asked["port"], keys.public)
    numbers = range(asked["first"], asked["first"] + asked["count"])
    peers = [Peer(wires, keys, number, packets) for number in numbers]
    while not all(peer.over for peer in peers):
        wires.turn()
    os._exit(0)  # what is under way is nobody's concern


# ---- the same bytes, and nothing else ----------------------------------------------------------------------


def run_raw(asked: dict[str, Any]) -> None:
    """A ROUTER: what came up from a peer, all pieces of it, goes down again."""
    raise_file_limit()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(2)
    router, keys = context.socket(zmq.ROUTER), RunKeys(**asked["keys"])
    set_options(router, COMMON | HUB)
    router.curve_server = True
    router.curve_publickey, router.curve_secretkey = as_z85(keys.public), as_z85(keys.secret)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    peers, size = asked["peers"], asked["size"]
    down, got, done = pieces_of(bytes(size)), Counter[bytes](), 0
    say("listening", port=port)
    say("threads", names=thread_names())
    while True:
        id, _ = router.recv_multipart(copy=False)
        got[id.bytes] += 1
        if got[id.bytes] % len(down) == 0:
            for piece in down:
                router.send(id.bytes, zmq.SNDMORE)
                router.send(piece, copy=False)
            done += 1
            if done % peers == 0:
                say("round", packets=peers, up=peers * size, down=peers * size)


def pieces_of(data: bytes) -> list[memoryview]:
    return [memoryview(data)[i : i + CHUNK] for i in range(0, len(data), CHUNK)]


class Dealer:
    """Sends all pieces, waits until as many have come, and so on."""

    def __init__(self, wires: Wires, data: bytes) -> None:
        self.wires, self.pieces, self.missing = wires, pieces_of(data), 1
        self.sock = wires.dial(CurveKeys.generate(), self)
        self.came([])

    def came(self, frames: list[zmq.Frame]) -> None:
        self.missing -= 1
        if not self.missing:
            self.missing = len(self.pieces)
            for piece in self.pieces:
                self.wires.send(self.sock, piece)


def run_raws(asked: dict[str, Any]) -> None:
    wires, data = Wires(asked["port"], RunKeys(**asked["keys"]).public), os.urandom(asked["size"])
    dealers = [Dealer(wires, data) for _ in range(asked["count"])]
    while dealers:
        wires.turn()


if __name__ == "__main__":
    roles = {"hub": run_hub, "peers": run_peers, "raw": run_raw, "raws": run_raws}
    keep_freed_memory()  # as `cocktail launch` does; the others alike, for the comparison
    with contextlib.suppress(KeyboardInterrupt):
        roles[sys.argv[1]](json.loads(sys.argv[2]))
