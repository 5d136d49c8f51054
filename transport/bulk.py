"""Objects in chunks, without sockets. Every chunk is acknowledged, numbered and may come twice; nothing else is assumed.

A reconnect silently loses whatever the kernel held (measured: up to a whole window), in both directions. So:
    upload      Put -> Have(bitmap) -> Chunk* with an Ack each -> PutDone. After a reconnect Put comes first again:
                the hub says what it has, and only the rest is sent.
    download    the receiver pulls: Get(i) -> Data(i), as many under way as the window allows. What was asked on a
                flow that ended is asked again on another.
Several flows (TCP connections) of one peer share the work; a chunk belongs to the flow it was sent on.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from .errors import ProtocolError
from .messages import Ack, Chunk, Data, Get, Have, Message, NoObject, Put, PutDone

CHUNK = 256 * 1024  # bytes; zeromq.md: 64 KiB .. 1 MiB reach line rate, larger ones block heartbeats


def chunks_of(size: int, chunk: int) -> int:
    return max(1, -(-size // chunk))


class Parts:
    """An object that arrives in chunks, in any order, each perhaps more than once, in memory."""

    def __init__(self, size: int, sha256: bytes, chunk: int) -> None:
        self.size, self.sha256, self.chunk = size, sha256, chunk
        self.count = chunks_of(size, chunk)
        self._parts: dict[int, bytes] = {}  # nothing is allocated for what was only promised

    def add(self, index: int, payload: bytes) -> bool:
        """Take a chunk; False where it was here already. Raises ProtocolError where it does not fit."""
        if not 0 <= index < self.count:
            raise ProtocolError(f"chunk {index} of an object with {self.count}")
        want = min(self.chunk, self.size - index * self.chunk)
        if len(payload) != want:
            raise ProtocolError(f"chunk {index} has {len(payload)} bytes, expected {want}")
        if index in self._parts:
            return False
        self._parts[index] = payload
        return True

    @property
    def missing(self) -> list[int]:
        return [i for i in range(self.count) if i not in self._parts]

    @property
    def whole(self) -> bool:
        return len(self._parts) == self.count

    def bitmap(self) -> bytes:
        """Bit i, lowest first, is set where chunk i is here."""
        return sum(1 << i for i in self._parts).to_bytes((self.count + 7) // 8, "little")

    def finish(self) -> bytes:
        """The object. Raises ProtocolError where its checksum is wrong."""
        data = b"".join(self._parts[i] for i in range(self.count))
        if self.sha256 and hashlib.sha256(data).digest() != self.sha256:
            raise ProtocolError("the checksum of the whole is wrong")
        return data


class PartFile:
    """The same, in a file beside `path`: `path`.part and, for resuming in another process, `path`.have."""

    def __init__(self, path: Path, size: int, sha256: bytes, chunk: int) -> None:
        self.path, self.size, self.sha256, self.chunk = path, size, sha256, chunk
        self.count = chunks_of(size, chunk)
        self.part = path.with_name(path.name + ".part")
        self.have = path.with_name(path.name + ".have")
        self._stamp = b"%d %d %s\n" % (size, chunk, sha256.hex().encode())
        self._here = self._resume()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.part, "r+b" if self._here else "w+b")  # noqa: SIM115 (closed by finish)
        self._unsaved = 0

    def _resume(self) -> set[int]:
        try:
            stamp, _, bitmap = self.have.read_bytes().partition(b"\n")
            size = self.part.stat().st_size
        except OSError:
            return set()
        if stamp + b"\n" != self._stamp:
            return set()
        bits = int.from_bytes(bitmap, "little")
        return {
            i for i in range(self.count) if bits >> i & 1 and min(self.size, (i + 1) * self.chunk) <= size
        }

    def add(self, index: int, payload: bytes) -> bool:
        if not 0 <= index < self.count:
            raise ProtocolError(f"chunk {index} of an object with {self.count}")
        want = min(self.chunk, self.size - index * self.chunk)
        if len(payload) != want:
            raise ProtocolError(f"chunk {index} has {len(payload)} bytes, expected {want}")
        if index in self._here:
            return False
        self._file.seek(index * self.chunk)
        self._file.write(payload)
        self._here.add(index)
        self._unsaved += 1
        if self._unsaved >= 64:
            self.save()
        return True

    def save(self) -> None:
        """Let another process go on from here."""
        self._file.flush()
        bits = sum(1 << i for i in self._here).to_bytes((self.count + 7) // 8, "little")
        self.have.write_bytes(self._stamp + bits)
        self._unsaved = 0

    @property
    def missing(self) -> list[int]:
        return [i for i in range(self.count) if i not in self._here]

    @property
    def whole(self) -> bool:
        return len(self._here) == self.count

    def finish(self) -> Path:
        """The finished file under its own name. Raises ProtocolError, and begins anew, where the checksum is wrong."""
        self._file.close()
        if self.sha256 and file_digest(self.part) != self.sha256:
            self.part.unlink()
            self.have.unlink(missing_ok=True)
            raise ProtocolError(f"the checksum of {self.path.name} is wrong")
        self.part.replace(self.path)
        self.have.unlink(missing_ok=True)
        return self.path


def file_digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.digest()


class Sink(Protocol):
    """Parts or PartFile."""

    count: int

    def add(self, index: int, payload: bytes) -> bool: ...
    @property
    def missing(self) -> list[int]: ...
    @property
    def whole(self) -> bool: ...


# ---- the peer's end ----------------------------------------------------------------------------------------


@dataclass
class Download:
    """One object on its way to this peer."""

    name: str
    open_sink: Callable[[int, bytes], Parts | PartFile]  # (size, sha256), known with the first chunk
    sink: Parts | PartFile | None = None
    todo: deque[int] = field(default_factory=lambda: deque([0]))
    refused: str | None = None
    error: Exception | None = None

    @property
    def done(self) -> bool:
        return (
            self.refused is not None or self.error is not None or (self.sink is not None and self.sink.whole)
        )

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes here, bytes in all; (0, 0) before the first chunk."""
        if self.sink is None:
            return 0, 0
        here = self.sink.count - len(self.sink.missing)
        return min(self.sink.size, here * self.sink.chunk), self.sink.size


@dataclass
class Upload:
    """One object on its way to the hub."""

    name: str
    data: bytes
    sha256: bytes
    put_on: int | None = None  # flow that carries the unanswered Put
    agreed: bool = False  # Have has come
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
    message: Message
    payload: memoryview | None = None


class BulkPeer:
    """All transfers of one peer over its bulk flows."""

    def __init__(self) -> None:
        self.credit = 0  # chunks under way in each direction; the hub says
        self.downloads: dict[str, Download] = {}
        self.uploads: dict[str, Upload] = {}
        self.flows: dict[
            int, dict[tuple[str, int], str]
        ] = {}  # flow -> {("up"/"down", index), ...} under way
        self._under: dict[int, set[tuple[str, str, int]]] = {}

    def up(self, flow: int, credit: int) -> None:
        """The flow is attached to the session."""
        self.credit = credit
        self._under[flow] = set()

    def down(self, flow: int) -> None:
        """The flow ended: what was under way on it is lost, as far as anybody knows."""
        for way, name, index in self._under.pop(flow, ()):
            download, upload = self.downloads.get(name), self.uploads.get(name)
            if way == "down" and download is not None and not download.done:
                download.todo.appendleft(index)
            if way == "up" and upload is not None:
                upload.agreed, upload.put_on = False, None  # ask first what has come through
        for upload in self.uploads.values():
            if upload.put_on == flow:
                upload.put_on = None

    def fetch(self, name: str, open_sink: Callable[[int, bytes], Parts | PartFile]) -> Download:
        self.downloads[name] = Download(name, open_sink)
        return self.downloads[name]

    def upload(self, name: str, data: bytes) -> Upload:
        self.uploads[name] = Upload(name, data, hashlib.sha256(data).digest())
        return self.uploads[name]

    def offer_again(self) -> None:
        """The hub may have lost what it had of every upload: ask."""
        for upload in self.uploads.values():
            upload.done, upload.agreed = None, False

    def forget(self, name: str) -> None:
        """Whatever became of it, it is not wanted any more."""
        self.downloads.pop(name, None)
        self.uploads.pop(name, None)
        for under in self._under.values():
            under.difference_update([u for u in under if u[1] == name])

    def receive(self, flow: int, message: Message, payload: bytes) -> None:
        """What came on a flow. Answers to transfers that are forgotten mean nothing."""
        if isinstance(message, Data):
            self._data(flow, message, payload)
        elif isinstance(message, NoObject):
            if message.name in self.downloads:
                self.downloads[message.name].refused = message.reason
            self._settle(flow, "down", message.name, None)
        elif isinstance(message, Have) and message.name in self.uploads:
            upload = self.uploads[message.name]
            have = int.from_bytes(message.chunks, "little")
            upload.todo = deque(i for i in range(chunks_of(len(upload.data), CHUNK)) if not have >> i & 1)
            upload.agreed, upload.put_on = True, None
            for under in self._under.values():  # sent before, and counted in the bitmap or to be sent again
                under.difference_update([u for u in under if u[0] == "up" and u[1] == message.name])
        elif isinstance(message, Ack):
            self._settle(flow, "up", message.name, message.index)
        elif isinstance(message, PutDone) and message.name in self.uploads:
            upload = self.uploads[message.name]
            upload.done = upload.done or message  # the answer to a chunk sent twice says nothing new
            upload.put_on = None
            self._settle(flow, "up", message.name, None)

    def _data(self, flow: int, message: Data, payload: bytes) -> None:
        self._settle(flow, "down", message.name, message.index)
        download = self.downloads.get(message.name)
        if download is None or download.done:
            return
        try:
            if download.sink is None:
                download.sink = download.open_sink(message.size, message.sha256)
                download.todo = deque(i for i in download.sink.missing if i != message.index)
            download.sink.add(message.index, payload)
        except (ProtocolError, OSError) as error:
            download.error = error

    def _settle(self, flow: int, way: str, name: str, index: int | None) -> None:
        for under in self._under.values():
            under.difference_update([u for u in under if u[:2] == (way, name) and index in (None, u[2])])

    @property
    def pending(self) -> bool:
        """Is anything under way: if so and nothing comes for long, the flow is dead."""
        return any(self._under.values()) or any(u.put_on is not None for u in self.uploads.values())

    def outgoing(self) -> list[Out]:
        """What to send now. Uploads before downloads: the round waits for them."""
        out: list[Out] = []
        for upload in self.uploads.values():
            if upload.done is None and not upload.agreed and upload.put_on is None and self._under:
                upload.put_on = self._least()
                out.append(Out(upload.put_on, upload.put))
            while upload.done is None and upload.agreed and upload.todo and self._room("up"):
                index, flow = upload.todo.popleft(), self._least()
                self._under[flow].add(("up", upload.name, index))
                out.append(Out(flow, Chunk(upload.name, index), upload.chunk(index)))
        for download in self.downloads.values():
            while not download.done and download.todo and self._room("down"):
                index, flow = download.todo.popleft(), self._least()
                self._under[flow].add(("down", download.name, index))
                out.append(Out(flow, Get(download.name, index, CHUNK)))
        return out

    def unsent(self, out: Out) -> None:
        """The wire did not take it: as if it had been sent and lost."""
        self.down_one(out)

    def down_one(self, out: Out) -> None:
        m = out.message
        if isinstance(m, Put):
            self.uploads[m.name].put_on = None
        elif isinstance(m, Chunk):
            self._under.get(out.flow, set()).discard(("up", m.name, m.index))
            self.uploads[m.name].todo.appendleft(m.index)
        elif isinstance(m, Get):
            self._under.get(out.flow, set()).discard(("down", m.name, m.index))
            self.downloads[m.name].todo.appendleft(m.index)

    def _room(self, way: str) -> bool:
        return (
            bool(self._under)
            and sum(u[0] == way for under in self._under.values() for u in under) < self.credit
        )

    def _least(self) -> int:
        """The flow with the least under way."""
        return min(self._under, key=lambda flow: (len(self._under[flow]), flow))


# ---- the hub's end -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrived:
    """An upload is here, whole and checked."""

    session: str
    name: str
    data: bytes


class Inbox:
    """All uploads to a hub, by (session, name). `wanted(session, name, size)` says why one is not, or None."""

    def __init__(self, wanted: Callable[[str, str, int], str | None]) -> None:
        self._wanted = wanted
        self._parts: dict[tuple[str, str], Parts] = {}

    def receive(self, session: str, message: Put | Chunk, payload: bytes) -> list[Message | Arrived]:
        """The answers to one message, and the upload if it is whole now."""
        key = (session, message.name)
        if isinstance(message, Put):
            reason = self._wanted(session, message.name, message.size)
            if reason is not None:
                self._parts.pop(key, None)
                return [PutDone(message.name, False, reason)]
            old = self._parts.get(key)
            if old is None or (old.size, old.sha256, old.chunk) != (
                message.size,
                message.sha256,
                message.chunk,
            ):
                self._parts[key] = Parts(message.size, message.sha256, message.chunk)
            return [Have(message.name, self._parts[key].bitmap())]
        parts = self._parts.get(key)
        if parts is None:
            return [PutDone(message.name, False, "no upload of this name is under way")]
        try:
            parts.add(message.index, payload)
            answers: list[Message | Arrived] = [Ack(message.name, message.index)]
            if parts.whole:
                del self._parts[key]
                data = parts.finish()
                answers += [PutDone(message.name, True), Arrived(session, message.name, data)]
        except ProtocolError as error:
            self._parts.pop(key, None)
            return [PutDone(message.name, False, str(error))]
        return answers

    def drop(self, session: str) -> None:
        for key in [k for k in self._parts if k[0] == session]:
            del self._parts[key]

    def keep(self, names: Iterable[str]) -> None:
        """Forget uploads of other names: their round is closed."""
        names = set(names)
        for key in [k for k in self._parts if k[1] not in names]:
            del self._parts[key]
