"""The load that one hub carries, and where its time goes, beside raw ZeroMQ with CURVE on the same bytes.

    scripts/bench_hub --peers 64 --rounds 100           on two cores, three minutes
    scripts/bench_hub --peers 256 --megabytes 0.25
    scripts/bench_hub --only relay --rounds 1000        does its memory grow?

Three rows, each a hub and its peers in the same processes on this machine:

raw      a ROUTER and a DEALER for each peer: a packet up in chunks of 256 KiB, the same down, nothing else
relay    the hub, its ledger and the whole protocol; the first packet is taken for the aggregate
owner    the hub with the aggregator of a real run: decodes, adds, encodes, keeps its error feedback on disk

`of raw` compares MB/s, and CPU-s a GB, with the raw row above it; where other programs run beside it, MB/s
say little. Rows can be had several times: --only raw,relay,raw,relay. CPU is read from /proc, by thread for
the hub, so this runs on Linux only. What a real peer computes beside the protocol is not in it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from cocktail_cli.machine import keep_freed_memory
from scripts.swarms.idle_delegate import IdleDelegate
from scripts.swarms.lab import parser
from scripts.swarms.processes import Line, Process, program, say, status_bytes
from transport import Hub, Ledger, RunKeys, RunSettings
from transport.protocol import WeightedPacket
from transport.protocol import messages as m
from transport.protocol.events import RoundCommitted, RunEnded, Warned
from transport.protocol.keys import CurveKeys, as_z85
from transport.protocol.message_codec import decode_to_peer, encode
from transport.transfer.transfers import CHUNK
from transport.wire.zeromq_sockets import COMMON, HUB, PEER, raise_file_limit, set_options

RUN, SAME = "bench", IdleDelegate().fingerprint(0)  # SAME: fingerprint of every global model
SEED, VARIANTS = 1, 8  # different packets, sent in turn
BITS = 0.1341  # of a packet at the defaults, a parameter
WARM = 3  # rounds before the clock starts: connections, a compiler, files
TICKS = os.sysconf("SC_CLK_TCK")
# parts of the hub's threads, by the beginning of their names
PARTS = {"cocktail-hub": "I/O", "cocktail-opener": "open", "cocktail-commit": "commit"}
PARTS |= {"cocktail-reader": "read", "ZMQbg": "ZeroMQ"}


def parameters(size: int) -> int:
    """Find the P of a model whose packets have about `size` bytes, and the same sample length each round.

    A tenth of the blocks of 256 is visited.
    """
    return max(1, round(size * 8 / BITS / 2560)) * 2560


# ---- the programs: a hub -----------------------------------------------------------------------------------


class Aggregating(IdleDelegate):
    """The delegate of a real run, with its error feedback on disk."""

    def __init__(self, size: int, ledger: Ledger) -> None:
        from cocktail_cli.host import DurableAggregator
        from compress import Cocktail
        from recipes.algorithm import Aggregator, warm_up_codec

        mix = Cocktail()
        warm_up_codec(mix, parameters(size))
        self.durable = DurableAggregator(Aggregator(parameters(size), mix, SEED), ledger.folder)
        self.durable.recover(ledger)

    def arrived(self, round: int, peer: str, packet: bytes) -> None:
        self.durable.aggregator.add(round, peer, packet)

    def aggregate(self, round: int, updates: Sequence[WeightedPacket]) -> bytes:
        return self.durable.aggregate(round, updates)

    def committed(self, round: int, packet: bytes) -> None:
        self.durable.committed(round)


def run_hub(asked: Line) -> None:
    """Host rounds of all peers, or of so many `members` in turns; `samples`: after which the run is over."""
    peers, members = asked["peers"], asked.get("members", asked["peers"])
    samples, turns = asked.get("samples", 1 << 40), list[Any]()
    if members < peers:
        from cocktail_cli.extensions.turns.hub import Turns

        turns = [partial(Turns, places=members)]
    everybody = {"global_batch": members, "min_peers": members, "first_peers": peers}
    most = 2 * asked["size"] + (1 << 20)
    settings = RunSettings(RUN, "{}", "00", samples, **everybody, max_update=most, linger_s=1.0)
    ledger = Ledger(Path(asked["folder"]), run=RUN, samples=samples)
    work = Aggregating(asked["size"], ledger) if asked["work"] == "owner" else IdleDelegate()
    hub = Hub(("127.0.0.1", 0), RunKeys(**asked["keys"]), ledger, settings, work, turns)
    signal.signal(signal.SIGTERM, lambda *_: hub.stop(now=True))
    hub.start()
    say("listening", port=hub.port)
    for event in hub.events():
        if isinstance(event, RoundCommitted):
            if event.round == 0:
                say("threads", names=thread_names())
            down, of = event.size * len(event.members), list(event.accepted) if turns else []
            say("round", packets=len(event.accepted), up=sum(event.packets.values()), down=down, of=of)
        elif isinstance(event, Warned | RunEnded):
            say("told", text=str(event))
    ledger.close()


def thread_names() -> dict[str, str]:
    """The names of Python's threads, by their native ids; ZeroMQ's own are none."""
    return {str(t.native_id): t.name for t in threading.enumerate()}


# ---- the programs: peers -----------------------------------------------------------------------------------


def packets_of(size: int) -> list[bytes]:
    """Encode a few heavy-tailed updates, each of about `size` bytes."""
    import torch

    from compress import Cocktail

    mix, generator = Cocktail(), torch.Generator().manual_seed(SEED)
    m = mix.draw(parameters(size), SEED, 0).m
    values = torch.randn(m, generator=generator) / torch.rand(m, generator=generator).add_(0.05)
    return [mix.encode(torch.roll(values, 1000 * i)).packet for i in range(VARIANTS)]


class Wires:
    """The sockets of all peers of one process, in one poll."""

    def __init__(self, ports: Sequence[int], server: str) -> None:
        raise_file_limit()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self._ports, self._server = ports, server
        self._epoll = select.epoll()
        self._socks: dict[int, zmq.Socket[bytes]] = {}  # by descriptor
        self._owner: dict[zmq.Socket[bytes], Any] = {}
        self._used: set[zmq.Socket[bytes]] = set()

    def dial(self, keys: CurveKeys, owner: Any, number: int = 0) -> zmq.Socket[bytes]:
        """Dial the hub of the peer of this number: they take turns."""
        sock = self._context.socket(zmq.DEALER)
        set_options(sock, COMMON | PEER | {"HANDSHAKE_IVL": 60_000, "IMMEDIATE": 0})
        sock.curve_serverkey = as_z85(self._server)
        sock.curve_publickey, sock.curve_secretkey = as_z85(keys.public), as_z85(keys.secret)
        sock.connect(f"tcp://127.0.0.1:{self._ports[number % len(self._ports)]}")
        number = int(sock.getsockopt(zmq.FD))
        self._epoll.register(number, select.EPOLLIN)
        self._socks[number], self._owner[sock] = sock, owner
        return sock

    def send(self, sock: zmq.Socket[bytes], data: bytes | memoryview, *, more: bool = False) -> None:
        """Send without a copy of whole chunks. What comes while libzmq sends wakes no descriptor."""
        sock.send(data, zmq.SNDMORE if more else 0, copy=isinstance(data, bytes))
        self._used.add(sock)

    def turn(self) -> None:
        """Wait until something is here, and hand it to its peer. ZeroMQ's own poll asks all sockets
        each time: half of what a peer of few messages takes."""
        self._used.update(self._socks[number] for number, _ in self._epoll.poll(1.0))
        while self._used:
            sock = self._used.pop()
            with contextlib.suppress(zmq.Again):
                while True:
                    self._owner[sock].came(sock.recv_multipart(zmq.DONTWAIT, copy=False))


class Peer:
    """A peer that fetches its lease and the last aggregate, uploads and reports, and has no model."""

    def __init__(self, wires: Wires, run: RunKeys, number: int, packets: list[bytes]) -> None:
        self.wires, self.number, self.packets = wires, number, packets
        self.keys = CurveKeys.generate()
        self.digests = [hashlib.sha256(p).digest() for p in packets]
        self.opened: m.Round | None = None  # the next one, to be sent to once the aggregate before it is here
        self.missing = 0  # chunks of the aggregate under way
        self.bulk: zmq.Socket[bytes] | None = None
        self.over = False
        self.control = wires.dial(self.keys, self, number)
        self.say(m.Hello(m.PROTOCOL, run.token, RUN, f"p{number:04}"))

    def say(self, message: m.Message, sock: zmq.Socket[bytes] | None = None) -> None:
        self.wires.send(sock or self.control, encode(message))

    def came(self, frames: list[zmq.Frame]) -> None:
        message = decode_to_peer(frames[0].buffer)
        if isinstance(message, m.Data):
            self.missing -= message.name.startswith("packet/")
            self.turn()
        elif isinstance(message, m.Committed):
            count = -(-message.size // CHUNK)
            for i in range(count):
                self.say(m.Get(f"packet/{message.round}", i, CHUNK), self.bulk)
            self.missing += count
        elif isinstance(message, m.Round):
            self.opened = message
            self.say(m.Get(f"lease/{message.round}", 0, CHUNK), self.bulk)
            self.turn()
        elif isinstance(message, m.Ping):
            self.say(m.Pong(message.sent))
        elif isinstance(message, m.Welcome):
            self.bulk = self.wires.dial(self.keys, self, self.number)
            self.say(m.Attach(message.session), self.bulk)
        elif isinstance(message, m.Attached):
            self.say(m.Ready(0, SAME))
        elif isinstance(message, m.Over):
            self.over = True
        elif isinstance(message, m.PutDone) and not message.ok:
            raise SystemExit(f"p{self.number:04} was refused: {message.reason}")

    def turn(self) -> None:
        """Upload, once a round is open and the aggregate of the one before is here."""
        if self.opened is None or self.missing:
            return
        assert self.bulk is not None
        round, which = self.opened.round, (self.number + self.opened.round) % VARIANTS
        delivers = [round] if self.opened.samples else []
        name, packet, self.opened = f"update/{round}", memoryview(self.packets[which]), None
        self.say(m.Put(name, len(packet), self.digests[which], CHUNK), self.bulk)
        for i in range(-(-len(packet) // CHUNK)):
            chunk = m.Chunk(name, i, self.digests[which][: m.UPLOAD_TAG])
            self.wires.send(self.bulk, encode(chunk), more=True)
            self.wires.send(self.bulk, packet[i * CHUNK : (i + 1) * CHUNK])
        self.say(m.Report(round, SAME, delivers, 30.0, 10))


def run_peers(asked: Line) -> None:
    keys, size = RunKeys(**asked["keys"]), asked["size"]
    packets = packets_of(size) if asked["work"] == "owner" else [os.urandom(size) for _ in range(VARIANTS)]
    wires = Wires(asked["ports"], keys.public)
    numbers = range(asked["first"], asked["first"] + asked["count"])
    peers = [Peer(wires, keys, number, packets) for number in numbers]
    while not all(peer.over for peer in peers):
        wires.turn()
    os._exit(0)  # what is under way matters to no process


# ---- the programs: the same bytes, and nothing else --------------------------------------------------------


def run_raw(asked: Line) -> None:
    """A ROUTER: send a packet down to each peer whose packet has come up."""
    raise_file_limit()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(2)
    router, keys = context.socket(zmq.ROUTER), RunKeys(**asked["keys"])
    set_options(router, COMMON | HUB)
    router.curve_server = True
    router.curve_publickey, router.curve_secretkey = as_z85(keys.public), as_z85(keys.secret)
    say("listening", port=router.bind_to_random_port("tcp://127.0.0.1"))
    say("threads", names=thread_names())
    peers, size = asked["peers"], asked["size"]
    down, got, done = chunks_of(bytes(size)), Counter[bytes](), 0
    while True:
        id, _ = router.recv_multipart(copy=False)
        got[id.bytes] += 1
        if got[id.bytes] % len(down) == 0:
            for chunk in down:
                router.send(id.bytes, zmq.SNDMORE)
                router.send(chunk, copy=False)
            done += 1
            if done % peers == 0:
                say("round", packets=peers, up=peers * size, down=peers * size)


def chunks_of(data: bytes) -> list[memoryview]:
    return [memoryview(data)[i : i + CHUNK] for i in range(0, len(data), CHUNK)]


class Dealer:
    """Sends all chunks of a packet, waits until as many have come, and so on."""

    def __init__(self, wires: Wires, data: bytes) -> None:
        self.wires, self.chunks, self.missing = wires, chunks_of(data), 1
        self.sock = wires.dial(CurveKeys.generate(), self)
        self.came([])

    def came(self, frames: list[zmq.Frame]) -> None:
        self.missing -= 1
        if not self.missing:
            self.missing = len(self.chunks)
            for chunk in self.chunks:
                self.wires.send(self.sock, chunk)


def run_raws(asked: Line) -> None:
    wires, data = Wires(asked["ports"], RunKeys(**asked["keys"]).public), os.urandom(asked["size"])
    dealers = [Dealer(wires, data) for _ in range(asked["count"])]
    while dealers:
        wires.turn()


# ---- what the kernel knows ---------------------------------------------------------------------------------


def cpu(stat: Path) -> float:
    """Read the seconds of CPU of a process or a thread so far; 0 where it is gone."""
    try:
        fields = stat.read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def threads(pid: int, names: dict[str, str]) -> Counter[str]:
    """Sum the seconds of CPU so far by what the threads are for."""
    spent: Counter[str] = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            name = names.get(task.name) or (task / "comm").read_text()
            part = next((part for start, part in PARTS.items() if name.startswith(start)), "other")
            spent[part] += cpu(task / "stat")
    return spent


# ---- a row -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """The measured rounds of one kind."""

    rounds_s: float
    mb_s: float  # payload, both directions
    hub_cpu: float  # CPU-s a GB of payload
    all_cpu: float
    parts: dict[str, float]  # ms of CPU a round of the hub's threads, and of the peers
    peak: float  # MB
    grown: dict[int, float]  # MB resident after so many rounds
    packets: float  # that a round had


@dataclass(frozen=True)
class Load:
    """The load of a measurement."""

    peers: int = 64
    megabytes: float = 1.0  # of a packet, about
    rounds: int = 100  # measured ones
    processes: int = 2  # that the peers are in
    folder: str | None = None  # where the ledger is; None: the system's folder for temporary files


def measure(kind: str, load: Load) -> Row:
    """Start the hub and its peers, and measure the rounds after the first few."""
    size, module = round(load.megabytes * 1e6), "scripts.bench.hub"
    with tempfile.TemporaryDirectory(dir=load.folder) as folder:
        asked = {"keys": asdict(RunKeys.generate()), "peers": load.peers, "size": size}
        asked |= {"folder": folder, "work": kind}
        started = [Process(program(module, "raw" if kind == "raw" else "hub", asked))]
        try:
            port = started[0].until("listening")["port"]
            for part in range(load.processes):
                first, last = (load.peers * n // load.processes for n in (part, part + 1))
                mine = asked | {"ports": [port], "first": first, "count": last - first}
                started.append(Process(program(module, "raws" if kind == "raw" else "peers", mine)))
            return watch(started, load.rounds)
        finally:
            for process in started:
                process.stop(signal.SIGTERM)


def watch(started: Sequence[Process], count: int) -> Row:
    """Measure so many rounds; the hub is the first of the processes."""
    hub, grown = started[0], {}
    names = hub.until("threads", timeout=600)["names"]
    first = hub.until("round", WARM, timeout=600)
    before, parts = [cpu(Path(f"/proc/{p.pid}/stat")) for p in started], threads(hub.pid, names)
    for at in [n for n in (10, 100, 1000) if n < count] + [count]:
        last = hub.until("round", WARM + at, timeout=600)
        grown[at] = status_bytes("VmRSS", hub.pid) / 2**20
    used = [cpu(Path(f"/proc/{p.pid}/stat")) - b for p, b in zip(started, before, strict=True)]
    spent = threads(hub.pid, names)
    spent.subtract(parts)
    spent["rest"] = used[0] - sum(spent.values())  # threads that live for one sum; what ticks round off
    rounds = hub.heard("round")[WARM : WARM + count]
    seconds, gigabytes = last["t"] - first["t"], sum(r["up"] + r["down"] for r in rounds) / 1e9
    split = {part: 1000 * s / len(rounds) for part, s in spent.items()}
    return Row(
        rounds_s=len(rounds) / seconds,
        mb_s=1000 * gigabytes / seconds,
        hub_cpu=used[0] / gigabytes,
        all_cpu=sum(used) / gigabytes,
        parts=split | {"peers": 1000 * sum(used[1:]) / len(rounds)},
        peak=status_bytes("VmHWM", hub.pid) / 2**20,
        grown=grown,
        packets=sum(r["packets"] for r in rounds) / len(rounds),
    )


def options() -> argparse.Namespace:
    asked, usual = parser(__doc__), Load()
    asked.add_argument("--peers", type=int, default=usual.peers)
    asked.add_argument("--megabytes", type=float, default=usual.megabytes, help="of a packet, about")
    asked.add_argument("--rounds", type=int, default=usual.rounds, help="measured ones")
    asked.add_argument("--processes", type=int, default=usual.processes, help="that the peers are in")
    asked.add_argument("--only", default="raw,relay,owner", help="rows, by name")
    asked.add_argument("--folder", help="where the ledgers are; the system's folder for temporary files")
    return asked.parse_args()


def main() -> None:
    begun, args = time.monotonic(), options()
    load = Load(args.peers, args.megabytes, args.rounds, args.processes, args.folder)
    print(f"{load.peers} peers in {load.processes} processes, packets of {load.megabytes:g} MB, ", end="")
    print(f"{load.rounds} rounds, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before\n")
    print("| | rounds/s | MB/s | CPU-s/GB: hub | all | of raw: MB/s | CPU | peak MB | MB after rounds |")
    print("|---" * 9 + "|", flush=True)
    raw: Row | None = None
    rows: list[tuple[str, Row]] = []
    for kind in args.only.split(","):
        row = measure(kind, load)
        rows.append((kind, row))
        raw = row if kind == "raw" else raw
        share = f"{row.mb_s / raw.mb_s:.0%} | {raw.all_cpu / row.all_cpu:.0%}" if raw else "|"
        grown = ", ".join(f"{mb:.0f} ({n})" for n, mb in row.grown.items())
        costs = f"{row.rounds_s:.2f} | {row.mb_s:.0f} | {row.hub_cpu:.2f} | {row.all_cpu:.2f}"
        print(f"| {kind} | {costs} | {share} | {row.peak:.0f} | {grown} |", flush=True)
    print("\nms of CPU a round:")
    for kind, row in rows:
        parts = ", ".join(f"{part} {ms:.0f}" for part, ms in sorted(row.parts.items()) if ms >= 0.5)
        print(f"  {kind}: {parts}; a round of {row.packets:g} packets took {1000 / row.rounds_s:.0f} ms")
    print(f"\n{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    roles = {"hub": run_hub, "peers": run_peers, "raw": run_raw, "raws": run_raws}
    if sys.argv[1:2] and sys.argv[1] in roles:
        keep_freed_memory()  # as `cocktail launch` does; the others alike, for the comparison
        with contextlib.suppress(KeyboardInterrupt):
            roles[sys.argv[1]](json.loads(sys.argv[2]))
    else:
        main()
