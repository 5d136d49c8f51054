"""Objects in chunks, without sockets. Each chunk is acknowledged, numbered, and may come twice.

A reconnect silently loses whatever the kernel held (measured: up to a whole window), in both directions. So:
    upload      Put, Chunk*, with an Ack each, PutDone for the last. After a reconnect Put comes first again
                and its answer, Have(bitmap), is waited for: only the rest is sent.
    download    the receiver pulls: Get(i) -> Data(i), as many under way as the window allows. What was asked
                on a flow that ended is asked again on another.
Several flows (TCP connections) of one peer share the work; a chunk belongs to the flow it was sent on. How
much is under way, and in pieces of which size, window.py says. An upload keeps the size it began with. A
download is noted in chunks of CHUNK bytes, so that a file can be gone on with, and asked for in pieces of
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from transport.protocol import (
    UPLOAD_TAG,
    Ack,
    Chunk,
    Data,
    Get,
    Have,
    Message,
    NoObject,
    ProtocolError,
    Put,
    PutDone,
)

from .chunks import MAX_OBJECT, ChunkBuffer, ChunkFile, ChunkMap
from .congestion_window import MIN_FRAGMENT, CongestionWindow, Sent

CHUNK = 256 * 1024  # bytes; measured: 64 KiB .. 1 MiB reach line rate, larger ones block the I/O thread

FEW = 4  # chunks
MAX_UPLOADS = 2  # uploads of one session that are under way: an update, and what it hands over
Sink = ChunkBuffer | ChunkFile
OpenSink = Callable[[int, bytes], Sink]  # (size, sha256), which come with the first chunk


# ---- the peer's end ----------------------------------------------------------------------------------------


@dataclass
class Download:
    """One object on its way to this peer."""

    name: str
    open_sink: OpenSink
    sink: Sink | None = None
    todo: deque[int] = field(default_factory=lambda: deque([0]))  # chunks of which nothing was asked for
    size: int = 0  # bytes, where they are known before the first chunk
    prefetched: bool = False  # nobody has asked for it yet
    received: int = 0  # bytes of payload that came
    refused: str | None = None
    error: Exception | None = None
    piece: int = 0  # bytes that are asked for at once; 0: nothing was yet
    wanted: int = 0  # the same, of chunks that are not begun
    fixed: bool = False  # answers to an earlier fetch may still come, in pieces of this size
    asks: deque[int] = field(default_factory=deque)  # pieces to ask for, of chunks begun
    begun: dict[int, dict[int, bytes]] = field(default_factory=dict)  # chunk -> piece -> what is here of it

    @property
    def done(self) -> bool:
        return (
            self.refused is not None
            or self.error is not None
            or (self.sink is not None and self.sink.map.whole)
        )

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes here, bytes in all; (0, 0) before the first chunk."""
        return (0, 0) if self.sink is None else (self.sink.map.bytes_here, self.sink.map.size)

    def length(self, piece: int) -> int:
        """Bytes of one piece; 0 where nobody knows yet."""
        size = self.size if self.sink is None else self.sink.map.size
        return max(0, min(self.piece, size - piece * self.piece))

    def pieces(self, chunk: int) -> list[int]:
        """Of one chunk; the first alone where nobody knows how many there are."""
        per = CHUNK // self.piece
        there = [i for i in range(chunk * per, (chunk + 1) * per) if self.length(i)]
        return there or [chunk * per]

    @property
    def asking(self) -> bool:
        """Is there a piece to ask for now? Before pieces have another size the chunks that are begun are
        finished: what is here of them is never asked for again."""
        return bool(self.asks or (self.todo and (self.piece == self.wanted or not self.begun)))

    def next(self) -> int:
        """That piece."""
        if not self.asks:
            chunk, self.piece = self.todo.popleft(), self.wanted
            self.begun[chunk] = {}
            self.asks.extend(self.pieces(chunk))
        return self.asks.popleft()

    def add(self, index: int, payload: bytes, size: int, sha256: bytes) -> None:
        """Take a piece. Raises ProtocolError where it does not fit, OSError where the disk is full."""
        chunk = index // (CHUNK // self.piece)
        if self.sink is None:
            if self.size not in (0, size):
                raise ProtocolError(f"{self.name} has {size} bytes, expected {self.size}")
            known, self.sink = self.size, self.open_sink(size, sha256)
            self.todo = deque(i for i in self.sink.map.missing if i not in self.begun)
            self.asks.extend([] if known else self.pieces(chunk)[1:])
        if size != self.sink.map.size:
            raise ProtocolError(f"{self.name} has {size} bytes, expected {self.sink.map.size}")
        if len(payload) != (self.length(index) if size else 0):
            raise ProtocolError(f"piece {index} of {self.name} has {len(payload)} bytes")
        self.received += len(payload)
        parts = self.begun.get(chunk, {})
        parts[index] = payload
        if len(parts) == len(self.pieces(chunk)):
            del self.begun[chunk]
            whole = payload if len(parts) == 1 else b"".join(parts[i] for i in sorted(parts))
            self.todo.extendleft(reversed(self.sink.add(chunk, whole)))


@dataclass
class Upload:
    """One object on its way to the hub."""

    name: str
    data: bytes
    sha256: bytes
    piece: int  # bytes of a chunk
    put_on: int | None = None  # flow that carries the unanswered Put
    agreed: bool = False  # Have has come
    # Until something went wrong the hub has nothing of it: chunks follow the Put at once, on its flow, and
    # save an answer's time.
    eager: bool = True
    todo: deque[int] = field(default_factory=deque)
    done: PutDone | None = None

    @property
    def put(self) -> Put:
        return Put(self.name, len(self.data), self.sha256, self.piece)

    def missing(self, have: int = 0) -> list[int]:
        """Chunks beside these bits."""
        return ChunkMap(len(self.data), self.piece, have).missing

    @property
    def arrived(self) -> bool | None:
        """Does the hub have it, whole? None: not known; all of it was sent, or the hub was asked twice."""
        if self.done is not None and (self.done.ok or self.eager):
            return self.done.ok
        return False if self.todo else None

    def chunk(self, index: int) -> memoryview:
        return memoryview(self.data)[index * self.piece : (index + 1) * self.piece]


@dataclass(frozen=True)
class Outgoing:
    """Send this on a flow."""

    flow: int
    message: Put | Chunk | Get
    payload: memoryview | None = None
    answer: int = 0  # bytes of payload that are sure to come for it


@dataclass(frozen=True)
class FragmentKey:
    """Sent and not acknowledged, or asked for and not come."""

    up: bool
    name: str
    index: int


class PeerTransfers:
    """All transfers of one peer over its bulk flows."""

    def __init__(self, least: int = MIN_FRAGMENT) -> None:
        self.windows = {True: CongestionWindow(least), False: CongestionWindow(least)}  # up, down
        self.downloads: dict[str, Download] = {}
        self.uploads: dict[str, Upload] = {}
        self._flows: set[int] = set()
        self._under: dict[FragmentKey, Sent] = {}
        self._orphans: dict[str, int] = {}  # downloads that were forgotten while under way, and their piece

    def up(self, flow: int, credit: int, rtt: float, now: float) -> None:
        """The flow is attached to the session, which took `rtt` seconds."""
        if not self._flows:
            self._orphans.clear()
        self._flows.add(flow)
        for window in self.windows.values():
            window.most = credit * CHUNK
            if not window.under:
                window.clean(rtt, now)

    def down(self, flow: int) -> None:
        """The flow ended: what was under way on it is lost, as far as anybody knows."""
        self._flows.discard(flow)
        for piece in [p for p, sent in self._under.items() if sent.flow == flow]:
            self._lose(piece)
            if not piece.up and piece.name in self.downloads:
                self.downloads[piece.name].asks.appendleft(piece.index)
            elif piece.up and piece.name in self.uploads:
                self._ask_again(self.uploads[piece.name])
        for upload in self.uploads.values():
            if upload.put_on == flow:
                self._ask_again(upload)

    def _ask_again(self, upload: Upload) -> None:
        """Nobody knows what has come through: ask first."""
        upload.agreed, upload.eager, upload.put_on = False, False, None

    def fill(self, name: str, sink: ChunkFile) -> Download:
        """Begin a download of what `sink` lacks."""
        missing = deque(sink.map.missing)
        return self._begin(Download(name, lambda size, digest: sink, sink, missing, sink.map.size))

    def fetch(self, name: str, open_sink: OpenSink, size: int = 0, *, prefetched: bool = False) -> Download:
        """Begin a download. With its `size` known all of it can be asked for at once."""
        count = max(1, -(-min(size, MAX_OBJECT) // CHUNK))
        return self._begin(Download(name, open_sink, None, deque(range(count)), size, prefetched))

    def _begin(self, download: Download) -> Download:
        download.piece = download.wanted = self._orphans.get(download.name, 0)
        download.fixed = download.name in self._orphans
        self.downloads[download.name] = download
        return download

    def upload(self, name: str, data: bytes, sha256: bytes) -> Upload:
        upload = self.uploads[name] = Upload(name, data, sha256, min(CHUNK, self.windows[True].piece))
        upload.todo.extend(upload.missing())
        return upload

    def offer_again(self) -> None:
        """The hub may have lost what it had of every upload: ask."""
        for upload in self.uploads.values():
            upload.done = None
            self._ask_again(upload)

    def forget(self, name: str) -> None:
        """Whatever became of this download, it is not wanted any more. An upload may have the same name."""
        download = self.downloads.pop(name, None)
        if download is not None and any(p.name == name and not p.up for p in self._under):
            self._orphans[name] = download.piece
        self._lose_all(up=False, name=name)

    def withdraw(self, name: str) -> None:
        """The same, of an upload."""
        self.uploads.pop(name, None)
        self._lose_all(up=True, name=name)

    def receive(self, message: Message, payload: bytes, now: float) -> None:
        """What came on any flow. Answers to transfers that are forgotten mean nothing."""
        if isinstance(message, Data):
            asked = self._answered(FragmentKey(False, message.name, message.index), len(payload), now)
            if asked and message.name in self.downloads:
                self._data(self.downloads[message.name], message, payload)
        elif isinstance(message, NoObject) and message.name in self.downloads:
            self.downloads[message.name].refused = message.reason
            self._lose_all(up=False, name=message.name)
        elif isinstance(message, Have) and message.name in self.uploads:
            upload = self.uploads[message.name]
            missing = upload.missing(int.from_bytes(message.chunks, "little"))
            upload.todo = deque(i for i in missing if FragmentKey(True, message.name, i) not in self._under)
            upload.agreed, upload.put_on = True, None
        elif isinstance(message, Ack):
            piece = FragmentKey(True, message.name, message.index)
            sent = self._under.get(piece)
            self._answered(piece, sent.size if sent else 0, now)
        elif isinstance(message, PutDone) and message.name in self.uploads:
            upload = self.uploads[message.name]
            upload.done = upload.done or message  # the answer to a chunk sent twice says nothing new
            upload.put_on = None
            self._lose_all(up=True, name=message.name)

    def _data(self, download: Download, message: Data, payload: bytes) -> None:
        if download.done:
            return
        try:
            download.add(message.index, payload, message.size, message.sha256)
        except (ProtocolError, OSError) as error:
            download.error = error

    def expected(self, name: str, index: int) -> int:
        """Bytes of payload that this piece was asked for with; 0: unknown, or it was not asked for."""
        sent = self._under.get(FragmentKey(False, name, index))
        return sent.expected if sent else 0

    def owes(self, flow: int) -> bool:
        """Does the hub owe an answer on this flow: if so and nothing comes for long, the flow is dead."""
        put = any(u.put_on == flow for u in self.uploads.values())
        return put or any(sent.flow == flow for sent in self._under.values())

    @property
    def pending(self) -> bool:
        """Does the hub owe any answer?"""
        return any(self.owes(flow) for flow in self._flows)

    @property
    def crowded(self) -> bool:
        """Is there more to do than the windows let go at once: then more flows may help."""
        full = [up for up, window in self.windows.items() if not window.room]
        return bool(self._flows) and any(self._more(up) for up in full)

    def _more(self, up: bool) -> bool:
        """Is there anything that is not under way yet?"""
        if up:
            return any(u.todo and u.done is None for u in self.uploads.values())
        return any((d.todo or d.asks) and not d.done for d in self.downloads.values())

    def outgoing(self, up: float = inf, down: float = inf, now: float = 0.0) -> list[Outgoing]:
        """What to send now. Uploads before downloads: the round waits for them. Of downloads those with
        little to ask for go first, a lease not behind the weights of a model; others in the order begun.

        Chunks are sent while `up` bytes are not used up, and asked for while `down` are not: the last one may
        be larger than what is left.
        """
        out: list[Outgoing] = []
        if not self._flows:
            return out
        for window in self.windows.values():
            window.look(now)
        for upload in self.uploads.values():
            if upload.done is None and not upload.agreed and upload.put_on is None:
                upload.put_on = self._least()
                out.append(Outgoing(upload.put_on, upload.put))
            agreed = upload.agreed or (upload.eager and upload.put_on is not None)
            while upload.done is None and agreed and upload.todo and up > 0 and self.windows[True].room:
                index = upload.todo.popleft()
                data = upload.chunk(index)
                flow = self._mark(FragmentKey(True, upload.name, index), len(data), 0, now, upload.put_on)
                out.append(Outgoing(flow, Chunk(upload.name, index, upload.sha256[:UPLOAD_TAG]), data))
                up -= len(data)
        for download in sorted(self.downloads.values(), key=lambda d: len(d.todo) > FEW):
            self._fit(download)
            more = not download.done
            while more and download.asking and down > 0 and self.windows[False].room:
                index = download.next()
                size = download.length(index)
                flow = self._mark(
                    FragmentKey(False, download.name, index), size or download.piece, size, now, None
                )
                out.append(Outgoing(flow, Get(download.name, index, download.piece), answer=size))
                down -= size
        return out

    def _fit(self, download: Download) -> None:
        """Ask in pieces that fit the line, where nothing is under way in others."""
        piece = min(CHUNK, self.windows[False].piece)
        if download.wanted == piece or download.fixed or download.done:
            return
        if not any(p.name == download.name and not p.up for p in self._under):
            download.wanted = piece

    def unsent(self, out: Outgoing) -> None:
        """The wire did not take it: it is still to be sent."""
        m = out.message
        if isinstance(m, Put):
            self._ask_again(self.uploads[m.name])
        else:
            up = isinstance(m, Chunk)
            self._lose(FragmentKey(up, m.name, m.index))
            todo = self.uploads[m.name].todo if up else self.downloads[m.name].asks
            todo.appendleft(m.index)

    def _mark(self, piece: FragmentKey, size: int, expected: int, now: float, flow: int | None) -> int:
        flow = self._least() if flow is None else flow
        self._under[piece] = self.windows[piece.up].sent(flow, size, expected, now)
        return flow

    def _answered(self, piece: FragmentKey, size: int, now: float) -> bool:
        """An answer came; was it waited for?"""
        sent = self._under.pop(piece, None)
        if sent is not None:
            self.windows[piece.up].answered(sent, size, now, more=self._more(piece.up))
        return sent is not None

    def _lose(self, piece: FragmentKey) -> None:
        self.windows[piece.up].lost(self._under.pop(piece))

    def _lose_all(self, *, up: bool, name: str) -> None:
        for piece in [p for p in self._under if (p.up, p.name) == (up, name)]:
            self._lose(piece)

    def _least(self) -> int:
        """The flow with the least under way."""
        under = dict.fromkeys(sorted(self._flows), 0)
        for sent in self._under.values():
            if sent.flow in under:
                under[sent.flow] += sent.size
        return min(under, key=lambda flow: (under[flow], flow))


# ---- the hub's end -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompletedUpload:
    """An upload is here, whole. It is what was sent: CURVE vouches for every chunk, and each says which
    upload it is of. Whether that is of any use its reader must see: a packet has a checksum of its own."""

    session: str
    name: str
    parts: ChunkBuffer


class Inbox:
    """All uploads to a hub. `refuses(session, name, size)` says why one is not wanted, or None."""

    def __init__(self, refuses: Callable[[str, str, int], str | None]) -> None:
        self._refuses = refuses
        self.at_once = MAX_UPLOADS
        self._parts: dict[tuple[str, str], ChunkBuffer] = {}

    def receive(
        self, session: str, message: Put | Chunk, payload: bytes | memoryview
    ) -> list[Message | CompletedUpload]:
        """The answers to one message, and the upload if it is whole now."""
        key = (session, message.name)
        if isinstance(message, Put):
            return [self._put(key, message)]
        parts = self._parts.get(key)
        if parts is None:
            return [PutDone(message.name, False, "no upload of this name is under way")]
        if message.of not in (b"", parts.sha256[:UPLOAD_TAG]):
            return []  # sent before this `Put`, on another connection: nobody waits for its answer
        try:
            parts.add(message.index, payload)
        except ProtocolError as error:
            del self._parts[key]
            return [PutDone(message.name, False, str(error))]
        if not parts.map.whole:
            return [Ack(message.name, message.index)]
        del self._parts[key]
        return [PutDone(message.name, True), CompletedUpload(session, message.name, parts)]

    def _put(self, key: tuple[str, str], m: Put) -> Message:
        reason = self._refuses(*key, m.size)
        if reason is not None:
            self._parts.pop(key, None)
            return PutDone(m.name, False, reason)
        old = self._parts.get(key)
        if old is None or (old.map.size, old.map.chunk, old.sha256) != (m.size, m.chunk, m.sha256):
            old = self._parts[key] = ChunkBuffer(m.size, m.sha256, m.chunk)
            for other in [k for k in self._parts if k[0] == key[0]][: -self.at_once]:
                del self._parts[other]
        return Have(m.name, old.map.bitmap())

    def drop(self, session: str) -> None:
        """The session is over."""
        for key in [k for k in self._parts if k[0] == session]:
            del self._parts[key]

    def forget(self, which: Callable[[str], bool]) -> None:
        """Forget uploads by their names: their round is closed."""
        for key in [k for k in self._parts if which(k[1])]:
            del self._parts[key]
