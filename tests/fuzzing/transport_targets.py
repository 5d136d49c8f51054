"""Targets of transport: messages, the hub, a peer's connections, catching up, packet records.

The hub and the peer are real; their wires, ledger and other threads are replaced, so that a case is a
function of its bytes.
"""

import io
import json
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from math import isfinite
from pathlib import Path
from random import Random
from typing import Any, NoReturn

from msgspec import msgpack

from scripts.fuzzing.mutate import INTS, Target, bent, joined, message, mutated, parts_of
from scripts.swarms.idle_delegate import IdleDelegate
from transport.hub import Hub
from transport.hub.hub_threads import Reading
from transport.ledger import Counted, Ledger, OpenSession, Recovered, RoundRow, pack_header, read_packets
from transport.ledger.packet_log import CRC, HEADER, MAGIC
from transport.peer import CatchUp, CatchUpState, LinkLimits, PeerState
from transport.peer.connection_manager import PREFETCHED, ConnectionManager
from transport.peer.peer_state import KEPT
from transport.protocol import LedgerError, ProtocolError, RunKeys, RunSettings, message_codec
from transport.protocol import messages as m
from transport.scheduling import Phase
from transport.transfer import CHUNK, MAX_CONNECTIONS, MAX_UPLOADS, ChunkBuffer
from transport.wire import Bandwidth, Connected, Frames, RateLimits, Received
from transport.wire.zeromq_sockets import MAX_FRAME

SHA = "ab" * 32
FILE = m.File("model.safetensors", 3 << 20, SHA, SHA)
OFFERS = [m.SnapshotOffer(2, 400, SHA, 50)]
WELCOME = m.Welcome(m.PROTOCOL, "toy-run", "ann", "s-ann", "{}", "00", [FILE], 3, 1.0, False, 2, 99, OFFERS)
TO_HUB: list[m.Message] = [
    m.Hello(m.PROTOCOL, "token", "toy-run", "cyd", "CPU", {"codec": "1"}),
    m.Hello(m.PROTOCOL, "token", "toy-run", "ann"),
    m.Resume(m.PROTOCOL, "toy-run", "ann", "s-ann", 0, True, [0], 1),
    m.Resume(m.PROTOCOL, "toy-run", "bob", "s-bob", -1, True),
    m.Ready(1, 7, {"base": "00ff"}),
    m.Report(1, 7, [1], 1.5, 10, 0.1, 0.2),
    m.Evaluated(1, 0, 2.5, 7),
    m.Leave("enough"),
    m.Extension("audits", b"what"),
    m.Ping(1.0),
    m.Pong(1.0),
    m.AskStatus(m.PROTOCOL, "token", "toy-run"),
    m.AskStop(m.PROTOCOL, "guess", "toy-run", True),
    m.AskAdmin(m.PROTOCOL, "stop-secret", "toy-run", "ban", "bob", "why"),
    m.AskAdmin(m.PROTOCOL, "guess", "toy-run", "token", token="new"),
    m.Attach("s-ann"),
    m.Attach("s-bob"),
    m.Put("update/1", 2000, b"", 1024),
    m.Put("handoff/1", 1024, b"", 1024),
    m.Chunk("update/1", 0),
    m.Chunk("update/1", 1),
    m.Chunk("handoff/1", 0),
    m.Put("update/1", 2000, b"k" * 32, 1024),
    m.Chunk("update/1", 1, b"k" * 8),
    m.Get("packet/0", 0, 1024),
    m.Get("lease/1", 0, 1024),
    m.Get("packets/0-1", 0, 1024),
]
TO_PEER: list[m.Message] = [
    WELCOME,
    m.Welcome(m.PROTOCOL, "toy-run", "ann", "s-new", "{}", "00", [], 5, 1.0, True, 2),
    m.Refused("session", "no"),
    m.Refused("token", "no"),
    m.Wait("the owner is asked"),
    m.Round(3, 1, 5, ["ann"], 8, True, 0, 1),
    m.Round(4, 1, 5, ["ann", "bob"], 0, True),
    m.Round(4, 1, 5, ["ann"], 8, True, extra={"an extension": b"what"}),
    m.Committed(3, 100, SHA, ["ann"]),
    m.Committed(3, 100, SHA, ["ann"], extra={"receipt": b"r" * 64}),
    m.Extension("audits", b"what"),
    m.Over("done", True),
    m.Ping(1.0),
    m.Pong(1.0),
    m.Status("{}"),
    m.Attached(32),
    m.Have("update/3", b"\1"),
    m.Ack("update/3", 0),
    m.PutDone("update/3", True),
    m.Data("packets/0-3", 0, 9, b""),
    m.Data("file", 1, 3 << 20, b""),
    m.Data("lease/3", 0, 9, b""),
    m.NoObject("packets/0-3", "none"),
]
HUB_BYTES, PEER_BYTES = [message_codec.encode(x) for x in TO_HUB], [message_codec.encode(x) for x in TO_PEER]


def check_message(decode: Callable[[bytes], m.Message], data: bytes) -> bool:
    try:
        taken = decode(data)
    except ProtocolError:
        return False
    assert decode(message_codec.encode(taken)) == taken, "what was taken is said again as it is"
    return True


check_to_hub = partial(check_message, message_codec.decode_to_hub)
check_to_peer = partial(check_message, message_codec.decode_to_peer)


# ---- the hub -----------------------------------------------------------------------------------------------


class AtOnce:
    """An executor that runs a job at once."""

    def submit(self, job: Callable[..., object], *args: object) -> None:
        job(*args)

    def read(self, reading: Reading) -> None:
        reading.job()

    def forget(self, origin: str, payer: str) -> None:
        """Do nothing: no job of this target waits."""


class HubEnd:
    """A wire that records what the hub says."""

    port = 0

    def __init__(self) -> None:
        self.said: list[m.ToPeer] = []
        self.hung_up = 0

    def send(self, conn: bytes, frames: Frames) -> bool:
        self.said.append(message_codec.decode_to_peer(frames[0]))
        return conn != name_of(7)  # a connection that is always closed already

    def held(self, conn: bytes) -> int:
        return 0

    def hang_up(self, conn: bytes) -> None:
        self.hung_up += 1

    def wake(self) -> None:
        """Ignore it: there is no thread to wake."""


class Books:
    """A ledger that checks what SQLite would do with these values."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def recover(self) -> Recovered:
        names = ("ann", "bob")
        return Recovered(1, ((0, 4),), tuple(OpenSession(f"s-{n}", n, "CPU", n) for n in names), term=1)

    def note(self, *values: object) -> None:
        for value in values:
            assert not isinstance(value, int) or -(2**63) <= value < 2**63, f"{value} does not fit SQLite"
            assert not isinstance(value, float) or isfinite(value), value

    session = gone = leased = given_back = stand = note

    def evaluated(self, row: Any) -> None:
        self.note(row.round, row.step, row.loss, row.tokens)

    def commit(
        self,
        row: Any,
        packet: bytes,
        counted: Sequence[Counted],
        given: Any = None,
        fingerprints: Mapping[int, int] | None = None,
    ) -> Any:
        self.note(*(fingerprint >> 1 for fingerprint in (fingerprints or {}).values()))
        self.note(row.round, row.step, row.fingerprint >> 1, row.loss, row.tokens)
        return row


class HubWork(IdleDelegate):
    """A delegate that takes any packet."""

    def tokens(self, ids: Sequence[int]) -> int:
        return len(ids)

    def weight(self, ids: Sequence[int]) -> float:
        return float(len(ids))

    def object(self, name: str) -> bytes:
        return {"eval": b"held out", "base/w": b"weights"}[name]


@lru_cache(maxsize=1)
def ledger_folder() -> Path:
    """Make a ledger of one round, to be read."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    with Ledger(folder, run="toy-run", samples=4) as ledger:
        ledger.commit(RoundRow(0, 0, 1.0, 2.0, 7, ("ann",), ("ann",), 1.0, 40), b"packet", ())
    return folder


@lru_cache(maxsize=1)
def keys() -> RunKeys:
    return RunKeys("p" * 43, "s" * 43, "token", "stop-secret")


SETTINGS = RunSettings(
    run="toy-run", recipe="{}", recipe_hash="00", samples=40, global_batch=4, eval=True, eval_every=1,
    min_peers=2, versions={"codec": "1"}, holds={"base": "00ff"}, max_update=4096,
)  # fmt: skip


def open_hub() -> Hub:
    """Make a hub in the middle of a round: ann and bob are members, each has a bulk connection."""
    hub = Hub(HubEnd(), keys(), Books(ledger_folder()), SETTINGS, HubWork())  # type: ignore[arg-type]
    hub._reader.shutdown()  # a million cases would have a million threads
    hub._commits._thread = hub._reader = AtOnce()  # type: ignore[assignment]
    for number, name in enumerate(("ann", "bob")):
        resume = m.Resume(m.PROTOCOL, "toy-run", name, f"s-{name}", -1, True)
        hear(hub, number, message_codec.encode(resume))
        hear(hub, number + 2, message_codec.encode(m.Attach(f"s-{name}")))
    assert hub._state.rounds.phase is Phase.OPEN
    return hub


def name_of(conn: int) -> bytes:
    """Name a connection: two of ann, two of bob, and strangers, each with a key of its own."""
    key = ("ann", "bob", "ann", "bob")[conn] if conn < 4 else f"k{conn}"
    return f"{key}.{conn}".encode()


def hear(hub: Hub, conn: int, data: bytes) -> None:
    """Let the hub hear one message. A Chunk's bytes follow it; libzmq refuses longer frames."""
    if len(data) > MAX_FRAME:
        return
    payload = b"x" * (1024 if data[-1:] == b"\0" else 976)
    frames = [data, payload] if b"Chunk" in data else [data]
    hub._receive(name_of(conn), frames)
    hub._run_calls()
    hub._act(hub._state.tick(hub._state.rounds._ticked))
    hub._run_calls()


def no_number(word: str) -> NoReturn:
    raise AssertionError(f"{word} is no JSON")


def check_hub(case: bytes) -> bool:
    hub, conns = open_hub(), {0, 1, 2, 3}
    state = hub._state
    for conn, data in parts_of(case):
        hear(hub, conn, data)
        conns.add(conn)
    hub._objects.close()
    assert hub.error is None, repr(hub.error)
    assert sum(state.rounds.leases.places()) == SETTINGS.samples
    assert len(state.members.sessions) <= len(conns)
    assert set(state.members.traffic) <= set(state.members.sessions)
    assert set(hub._connections.sessions.values()) <= set(state.members.sessions)
    assert len(hub._connections.sessions) <= (MAX_CONNECTIONS + 1) * len(state.members.sessions)
    assert len(hub._inbox._parts) <= MAX_UPLOADS * len(state.members.sessions)
    assert not hub._connections.reading
    assert len(state.rounds.history.commits) <= 64
    assert state.deadline() > 0
    json.loads(state.status(state.rounds._ticked), parse_constant=no_number)
    return state.members.refused == 0


# ---- a peer ------------------------------------------------------------------------------------------------


class PeerEnd:
    """A wire that accepts everything and delivers nothing."""

    def dial(self, flow: int) -> None:
        """Ignore it: connections come up by hand."""

    hang_up = dial

    def crossed(self, flow: int) -> tuple[int, int]:
        return 0, 0

    def send(self, flow: int, frames: Frames) -> bool:
        return True

    def wake(self) -> None:
        """Ignore it: there is no thread to wake."""

    close = wake


def joined_connections() -> ConnectionManager:
    """A peer in a run: one bulk flow, downloads and an upload under way."""
    hello = m.Hello(m.PROTOCOL, "token", "toy-run", "ann")
    connections = ConnectionManager(
        PeerEnd(), PeerState(hello), "hub:1", LinkLimits(60.0), RateLimits(Bandwidth())
    )  # type: ignore[arg-type]
    connections._take(Connected(0), 0.0)
    connections._take(Received(0, [PEER_BYTES[0]]), 0.0)
    connections._take(Connected(1), 0.0)
    connections._take(Received(1, [message_codec.encode(m.Attached(32))]), 0.0)
    connections.transfers.fetch("packets/0-3", ChunkBuffer, 1 << 20)
    connections.transfers.fetch("file", ChunkBuffer, 3 << 20, 3 << 20)
    connections.transfers.upload("update/3", bytes(2 * CHUNK), b"")
    connections.state.report(m.Report(3, 7, [3]))
    connections._send_all()
    return connections


def check_connections(case: bytes) -> bool:
    connections = joined_connections()
    state, bulk = connections.state, connections.transfers
    for number, (flow, data) in enumerate(parts_of(case)):
        frames = [data, bytes(9)] if b"lease" in data or b"packets" in data else [data, bytes(CHUNK)]
        connections._take(Received(flow & 1, frames), 0.01 * number)
        connections._send_all()
        connections._maintain(0.01 * number)
    assert len(bulk.downloads) <= 2 + PREFETCHED
    assert len(bulk.uploads) <= 1
    assert len(state.commits) <= KEPT
    assert len(state.rounds) <= KEPT
    assert connections.broken is None
    assert isfinite(connections._deadline())
    assert sum(window.under for window in bulk.windows.values()) >= 0
    for download in bulk.downloads.values():
        if download.sink is not None:
            assert 0 <= download.sink.map._here <= download.sink.map.count
    return state.ignored == 0


def make_catch_up(rng: Random) -> bytes:
    plain = msgpack.decode(PEER_BYTES[0])
    own = rng.choice((-1, 0, 2, rng.choice([n for n in INTS if 0 <= n <= 2**62])))
    newest = [rng.choice([n for n in INTS if 0 <= n <= 2**62]) for _ in range(3)]
    return msgpack.encode([bent(rng, plain), own, newest])


def check_catch_up(case: bytes) -> bool:
    """Check that the requests ahead are bounded whatever a hub says it has."""
    from cocktail_cli.errors import Failure
    from cocktail_cli.volunteer import check_files

    plain, own, newest = msgpack.decode(case)
    try:
        welcome = message_codec.decode_to_peer(msgpack.encode(plain))
        assert isinstance(welcome, m.Welcome)
        check_files(welcome.base)
    except (ProtocolError, Failure, AssertionError):
        return False
    machine = CatchUp(welcome, 100, own if own >= 0 else None, 1e9)
    machine.weights_here()
    for round in newest:
        machine.heard(round)
        asked = 0
        while (range_ := machine.next_range()) is not None:
            assert range_.start < range_.stop
            asked += 1
        assert asked <= 2000
        progress = machine.progress(1.0)
        assert isfinite(progress.total)
    assert machine.state in (CatchUpState.PACKETS, CatchUpState.READY)
    return True


# ---- records -----------------------------------------------------------------------------------------------


def make_records(rng: Random) -> bytes:
    packets = [rng.randbytes(rng.choice((0, 1, 40, 300))) for _ in range(rng.randrange(1, 4))]
    records = b"".join(pack_header(i, p) + p for i, p in enumerate(packets))
    if rng.random() < 0.3:  # a header that says what it likes, and is right
        numbers = [n for n in INTS if n >= 0]
        return records + forged_header(rng.choice(numbers), rng.choice(numbers)) + rng.randbytes(20)
    return mutated(rng, records, records)


def forged_header(round: int, size: int) -> bytes:
    head = HEADER.pack(MAGIC, round, size, bytes(32))
    return head + CRC.pack(zlib.crc32(head))


def check_records(case: bytes) -> bool:
    try:
        taken = list(read_packets(io.BytesIO(case)))
    except LedgerError:
        return False
    assert b"".join(pack_header(round, packet) + packet for round, packet in taken) == case
    return True


def some_messages(rng: Random, examples: Sequence[bytes], most: int) -> bytes:
    """Draw several, on several connections; sound ones among them, so that the others meet a working
    machine."""
    parts = []
    for _ in range(rng.randrange(1, 9)):
        data = rng.choice(examples) if rng.random() < 0.5 else message(rng, examples)
        parts.append((rng.randrange(most), data))
    return joined(parts)


TARGETS = [
    Target("to-hub", "messages", 340, lambda r: message(r, HUB_BYTES), check_to_hub),
    Target("to-peer", "messages", 340, lambda r: message(r, PEER_BYTES), check_to_peer),
    Target("catch-up", "messages", 10, make_catch_up, check_catch_up),
    Target("hub", "bulk", 12, lambda r: some_messages(r, HUB_BYTES, 9), check_hub, 4 << 20),
    Target("carrier", "bulk", 12, lambda r: some_messages(r, PEER_BYTES, 2), check_connections, 24 << 20),
    Target("records", "packets", 60, make_records, check_records),
]
