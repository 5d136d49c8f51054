"""Objects in chunks, without sockets. Each chunk is acknowledged, numbered, and may come twice.

A reconnect silently loses whatever the kernel held (measured: up to a whole window), in both directions. So:
    upload      Put, Chunk*, with an Ack each, PutDone for the last. After a reconnect Put comes first again
                and its answer, Have(bitmap), is waited for: only the rest is sent.
    download    the receiver pulls: Get(i) -> Data(i), as many under way as the credit allows. What was asked
                on a flow that ended is asked again on another.
Several flows (TCP connections) of one peer share the work; a chunk belongs to the flow it was sent on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf

from .chunks import ChunkMap, PartFile, Parts
from .errors import ProtocolError
from .messages import Ack, Chunk, Data, Get, Have, Message, NoObject, Put, PutDone

CHUNK = 256 * 1024  # bytes; measured: 64 KiB .. 1 MiB reach line rate, larger ones block the I/O thread

OpenSink = Callable[[int, bytes], Parts | PartFile]  # (size, sha256), which come with the first chunk


# ---- the peer's end ----------------------------------------------------------------------------------------


@dataclass
class Download:
    """One object on its way to this peer."""

    name: str
    open_sink: OpenSink
    sink: Parts | PartFile | None = None
    todo: deque[int] = field(default_factory=lambda: deque([0]))
    size: int = 0  # bytes, where they are known before the first chunk
    ahead: bool = False  # nobody has asked for it yet
    refused: str | None = None
    error: Exception | None = None

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

    def length(self, index: int) -> int:
        """Bytes of one chunk; 0 where nobody knows yet."""
        size = self.size if self.sink is None else self.sink.map.size
        return max(0, min(CHUNK, size - index * CHUNK))


@dataclass
class Upload:
    """One object on its way to the hub."""

    name: str
    data: bytes
    sha256: bytes
    put_on: int | None = None  # flow that carries the unanswered Put
    agreed: bool = False  # Have has come
    # Until something went wrong the hub has nothing of it: chunks follow the Put at once, on its flow, and
    # save an answer's time.
    eager: bool = True
    todo: deque[int] = field(default_factory=deque)
    done: PutDone | None = None

    @property
    def put(self) -> Put:
        return Put(self.name, len(self.data), self.sha256, CHUNK)

    def chunk(self, index: int) -> memoryview:
        return memoryview(self.data)[index * CHUNK : (index + 1) * CHUNK]


@dataclass(frozen=True)
class Out:
    """Send this on a flow."""

    flow: int
    message: Put | Chunk | Get
    payload: memoryview | None = None
    answer: int = 0  # bytes of payload that are sure to come for it


@dataclass(frozen=True)
class Underway:
    """A chunk sent and not acknowledged, or asked for and not come."""

    up: bool
    name: str
    index: int
    expected: int = field(default=0, compare=False)  # bytes of payload, as far as known when it was asked for


class BulkPeer:
    """All transfers of one peer over its bulk flows."""

    def __init__(self) -> None:
        self.credit = 0  # chunks under way in each direction; the hub says
        self.downloads: dict[str, Download] = {}
        self.uploads: dict[str, Upload] = {}
        self._under: dict[int, set[Underway]] = {}  # by flow

    def up(self, flow: int, credit: int) -> None:
        """The flow is attached to the session."""
        self.credit = credit
        self._under[flow] = set()

    def down(self, flow: int) -> None:
        """The flow ended: what was under way on it is lost, as far as anybody knows."""
        for lost in self._under.pop(flow, ()):
            if not lost.up and lost.name in self.downloads:
                self.downloads[lost.name].todo.appendleft(lost.index)
            elif lost.up and lost.name in self.uploads:
                self._ask_again(self.uploads[lost.name])
        for upload in self.uploads.values():
            if upload.put_on == flow:
                self._ask_again(upload)

    def _ask_again(self, upload: Upload) -> None:
        """Nobody knows what has come through: ask first."""
        upload.agreed, upload.eager, upload.put_on = False, False, None

    def fetch(self, name: str, open_sink: OpenSink, size: int = 0, *, ahead: bool = False) -> Download:
        """Begin a download. With its `size` known all of it can be asked for at once."""
        count = max(1, -(-size // CHUNK))
        self.downloads[name] = Download(name, open_sink, None, deque(range(count)), size, ahead)
        return self.downloads[name]

    def upload(self, name: str, data: bytes, sha256: bytes) -> Upload:
        self.uploads[name] = Upload(name, data, sha256, todo=deque(ChunkMap(len(data), CHUNK).missing))
        return self.uploads[name]

    def offer_again(self) -> None:
        """The hub may have lost what it had of every upload: ask."""
        for upload in self.uploads.values():
            upload.done = None
            self._ask_again(upload)

    def forget(self, name: str) -> None:
        """Whatever became of it, it is not wanted any more."""
        self.downloads.pop(name, None)
        self.uploads.pop(name, None)
        self._settle(lambda u: u.name == name)

    def receive(self, message: Message, payload: bytes) -> None:
        """What came on any flow. Answers to transfers that are forgotten mean nothing."""
        if isinstance(message, Data):
            self._settle(lambda u: not u.up and (u.name, u.index) == (message.name, message.index))
            if message.name in self.downloads:
                self._data(self.downloads[message.name], message, payload)
        elif isinstance(message, NoObject) and message.name in self.downloads:
            self.downloads[message.name].refused = message.reason
            self._settle(lambda u: not u.up and u.name == message.name)
        elif isinstance(message, Have) and message.name in self.uploads:
            upload = self.uploads[message.name]
            have = int.from_bytes(message.chunks, "little")
            under = self._indices(up=True, name=message.name)
            missing = ChunkMap(len(upload.data), CHUNK, have).missing
            upload.todo = deque(i for i in missing if i not in under)
            upload.agreed, upload.put_on = True, None
        elif isinstance(message, Ack):
            self._settle(lambda u: u.up and (u.name, u.index) == (message.name, message.index))
        elif isinstance(message, PutDone) and message.name in self.uploads:
            upload = self.uploads[message.name]
            upload.done = upload.done or message  # the answer to a chunk sent twice says nothing new
            upload.put_on = None
            self._settle(lambda u: u.up and u.name == message.name)

    def _data(self, download: Download, message: Data, payload: bytes) -> None:
        if download.done:
            return
        try:
            if download.sink is None:
                download.sink = download.open_sink(message.size, message.sha256)
                under = self._indices(up=False, name=download.name) | {message.index}
                download.todo = deque(i for i in download.sink.map.missing if i not in under)
            download.sink.add(message.index, payload)
        except (ProtocolError, OSError) as error:
            download.error = error

    def expected(self, name: str, index: int) -> int:
        """Bytes of payload that this chunk was asked for with; 0: unknown, or it was not asked for."""
        asked = (u for under in self._under.values() for u in under if not u.up)
        return max((u.expected for u in asked if (u.name, u.index) == (name, index)), default=0)

    def _indices(self, *, up: bool, name: str) -> set[int]:
        """What is under way of one object."""
        return {u.index for under in self._under.values() for u in under if (u.up, u.name) == (up, name)}

    def _settle(self, which: Callable[[Underway], bool]) -> None:
        """These are not under way any more."""
        for under in self._under.values():
            under.difference_update([u for u in under if which(u)])

    @property
    def pending(self) -> bool:
        """Does the hub owe an answer: if so and nothing comes for long, the flows are dead."""
        return any(self._under.values()) or any(u.put_on is not None for u in self.uploads.values())

    @property
    def crowded(self) -> bool:
        """Is there more to do than the credit lets go at once: then more flows may help."""
        todo = [*(d.todo for d in self.downloads.values()), *(u.todo for u in self.uploads.values())]
        return any(todo) and bool(self._under) and not (self._room(up=True) and self._room(up=False))

    def outgoing(self, up: float = inf, down: float = inf) -> list[Out]:
        """What to send now. Uploads before downloads: the round waits for them.

        Chunks are sent while `up` bytes are not used up, and asked for while `down` are not: the last one may
        be larger than what is left.
        """
        out: list[Out] = []
        for upload in self.uploads.values():
            if upload.done is None and not upload.agreed and upload.put_on is None and self._under:
                upload.put_on = self._least()
                out.append(Out(upload.put_on, upload.put))
            agreed = upload.agreed or (upload.eager and upload.put_on is not None)
            while upload.done is None and agreed and upload.todo and up > 0 and self._room(up=True):
                index = upload.todo.popleft()
                flow = self._mark(Underway(True, upload.name, index), upload.put_on)
                out.append(Out(flow, Chunk(upload.name, index), upload.chunk(index)))
                up -= len(upload.chunk(index))
        for download in self.downloads.values():
            while not download.done and download.todo and down > 0 and self._room(up=False):
                index = download.todo.popleft()
                size = download.length(index)
                flow = self._mark(Underway(False, download.name, index, size))
                out.append(Out(flow, Get(download.name, index, CHUNK), answer=size))
                down -= size
        return out

    def unsent(self, out: Out) -> None:
        """The wire did not take it: it is still to be sent."""
        m = out.message
        if isinstance(m, Put):
            self._ask_again(self.uploads[m.name])
        else:
            up = isinstance(m, Chunk)
            self._under[out.flow].discard(Underway(up, m.name, m.index))
            todo = self.uploads[m.name].todo if up else self.downloads[m.name].todo
            todo.appendleft(m.index)

    def _room(self, *, up: bool) -> bool:
        return (
            bool(self._under)
            and sum(u.up == up for under in self._under.values() for u in under) < self.credit
        )

    def _mark(self, what: Underway, flow: int | None = None) -> int:
        flow = self._least() if flow is None else flow
        self._under[flow].add(what)
        return flow

    def _least(self) -> int:
        """The flow with the least under way."""
        return min(self._under, key=lambda flow: (len(self._under[flow]), flow))


# ---- the hub's end -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrived:
    """An upload is here, whole and checked."""

    session: str
    name: str
    parts: Parts


class Inbox:
    """All uploads to a hub. `refuses(session, name, size)` says why one is not wanted, or None."""

    def __init__(self, refuses: Callable[[str, str, int], str | None]) -> None:
        self._refuses = refuses
        self._parts: dict[tuple[str, str], Parts] = {}

    def receive(self, session: str, message: Put | Chunk, payload: bytes) -> list[Message | Arrived]:
        """The answers to one message, and the upload if it is whole now."""
        key = (session, message.name)
        if isinstance(message, Put):
            return [self._put(key, message)]
        parts = self._parts.get(key)
        if parts is None:
            return [PutDone(message.name, False, "no upload of this name is under way")]
        try:
            parts.add(message.index, payload)
        except ProtocolError as error:
            del self._parts[key]
            return [PutDone(message.name, False, str(error))]
        if not parts.map.whole:
            return [Ack(message.name, message.index)]
        del self._parts[key]
        if not parts.good:
            return [PutDone(message.name, False, "the checksum of the whole is wrong")]
        return [PutDone(message.name, True), Arrived(session, message.name, parts)]

    def _put(self, key: tuple[str, str], m: Put) -> Message:
        reason = self._refuses(*key, m.size)
        if reason is not None:
            self._parts.pop(key, None)
            return PutDone(m.name, False, reason)
        old = self._parts.get(key)
        if old is None or (old.map.size, old.map.chunk, old.sha256) != (m.size, m.chunk, m.sha256):
            old = self._parts[key] = Parts(m.size, m.sha256, m.chunk)
        return Have(m.name, old.map.bitmap())

    def drop(self, session: str) -> None:
        """The session is over."""
        for key in [k for k in self._parts if k[0] == session]:
            del self._parts[key]

    def keep(self, names: Iterable[str]) -> None:
        """Forget uploads of other names: their round is closed."""
        names = set(names)
        for key in [k for k in self._parts if k[1] not in names]:
            del self._parts[key]
