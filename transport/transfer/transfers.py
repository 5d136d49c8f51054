"""A peer's uploads and downloads in chunks, without sockets. Chunks are numbered, acknowledged, and may
repeat.

A reconnect silently loses whatever the kernel held (measured: up to a whole window), in both directions. So:
    upload      Put, then Chunk with an Ack each, PutDone for the last. After a reconnect Put is sent again
                and its answer, Have(bitmap), awaited: only missing chunks are sent.
    download    the receiver pulls: Get(i) -> Data(i), as many at once as the window allows. A request on a
                flow that ended is repeated on another.
Several flows (TCP connections) of one peer share the work; a chunk belongs to the flow it was sent on. The
congestion window says how many bytes may be under way, and how large a fragment is: what one message carries.
An upload keeps the fragment size it began with. A download is recorded in chunks of CHUNK bytes, so that a
file can be resumed, and requested in fragments of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from transport.protocol import ProtocolError, TooLong, TransportError, messages

from .chunks import CHUNK, ChunkMap
from .congestion_window import MIN_FRAGMENT, CongestionWindow, Sent


class Sink(Protocol):
    """The receiving end of a download: an object in memory, or a file."""

    map: ChunkMap

    def add(self, index: int, payload: bytes) -> Sequence[int]:
        """Add a chunk. Returns the chunks to request again. Raises ProtocolError, OSError."""


OpenSink = Callable[[int, bytes], Sink]  # (size, sha256), which come with the first chunk


@dataclass
class Download:
    """One object being downloaded."""

    name: str
    open_sink: OpenSink
    most: int  # bytes that it can have, as this peer knows beforehand
    sink: Sink | None = None
    todo: deque[int] = field(default_factory=lambda: deque([0]))  # chunks of which nothing was requested
    size: int = 0  # bytes; 0: not known before the first chunk
    prefetched: bool = False  # no caller has asked for it yet
    chunk: int = field(default_factory=lambda: CHUNK)  # bytes
    received: int = 0  # bytes of payload
    refused: str | None = None
    error: Exception | None = None
    fragment: int = 0  # bytes of a request; 0: none yet
    wanted: int = 0  # bytes of a request, for chunks not begun
    fixed: bool = False  # answers of this size to an earlier fetch may still arrive
    asks: deque[int] = field(default_factory=deque)  # fragments to request, of chunks begun
    begun: dict[int, dict[int, bytes]] = field(default_factory=dict)  # chunk -> its fragments that are here

    @property
    def done(self) -> bool:
        return (
            self.refused is not None
            or self.error is not None
            or (self.sink is not None and self.sink.map.whole)
        )

    def length(self, fragment: int) -> int:
        """Return the bytes of one fragment; 0 if not known yet."""
        return max(0, min(self.fragment, self.size - fragment * self.fragment))

    def fragments(self, chunk: int) -> list[int]:
        """List the fragments of a chunk; only the first while their number is not known."""
        per = self.chunk // self.fragment
        there = [i for i in range(chunk * per, (chunk + 1) * per) if self.length(i)]
        return there or [chunk * per]

    def next(self) -> int | None:
        """Pop the next fragment to request; None: there is none now. Chunks begun are finished before the
        fragment size changes, so no byte of them is requested twice."""
        if not self.asks:
            if not self.todo or (self.begun and self.fragment != self.wanted):
                return None
            chunk, self.fragment = self.todo.popleft(), self.wanted
            self.begun[chunk] = {}
            self.asks.extend(self.fragments(chunk))
        return self.asks.popleft()

    def add(self, index: int, payload: bytes, size: int, sha256: bytes) -> None:
        """Add a fragment. Raises ProtocolError if it does not fit, TooLong where the object is longer than it
        can be, OSError or NoRoom if the disk is full. Nothing is kept then."""
        chunk = index // (self.chunk // self.fragment)
        if size > self.most:
            raise TooLong(f"{self.name} is announced with {size:,} bytes; it has {self.most:,} at most")
        if self.sink is None:
            if self.size not in (0, size):
                raise ProtocolError(f"{self.name} has {size} bytes, expected {self.size}")
            known, self.size, self.sink = self.size, size, self.open_sink(size, sha256)
            self.todo = deque(i for i in self.sink.map.missing if i not in self.begun)
            self.asks.extend([] if known else self.fragments(chunk)[1:])
        if size != self.size:
            raise ProtocolError(f"{self.name} has {size} bytes, expected {self.size}")
        if len(payload) != (self.length(index) if size else 0):
            raise ProtocolError(f"fragment {index} of {self.name} has {len(payload)} bytes")
        self.received += len(payload)
        parts = self.begun.get(chunk, {})
        parts[index] = payload
        if len(parts) == len(self.fragments(chunk)):
            del self.begun[chunk]
            whole = payload if len(parts) == 1 else b"".join(parts[i] for i in sorted(parts))
            self.todo.extendleft(reversed(self.sink.add(chunk, whole)))


@dataclass
class Upload:
    """One object being uploaded."""

    name: str
    data: bytes
    sha256: bytes
    fragment: int  # bytes of its chunks
    put_on: int | None = None  # flow that carries the unanswered Put
    agreed: bool = False  # Have has arrived
    # At first the hub has nothing of it: chunks follow the Put at once on the same flow, to save a round
    # trip.
    eager: bool = True
    todo: deque[int] = field(default_factory=deque)
    done: messages.PutDone | None = None

    @property
    def arrived(self) -> bool | None:
        """Return whether the hub has all of it; None if that is not known, as after a reconnect."""
        if self.done is not None and (self.done.ok or self.eager):
            return self.done.ok
        return False if self.todo else None


@dataclass(frozen=True)
class Outgoing:
    """One message to send on a flow."""

    flow: int
    message: messages.Put | messages.Chunk | messages.Get
    payload: memoryview | None = None
    answer: int = 0  # bytes of payload that will certainly arrive for it


@dataclass(frozen=True)
class FragmentKey:
    """A fragment under way: sent and not acknowledged, or requested and not received."""

    up: bool
    name: str
    index: int


class PeerTransfers:
    """All uploads and downloads of one peer over its bulk flows."""

    def __init__(self, least: int = MIN_FRAGMENT) -> None:
        self.windows = {True: CongestionWindow(least), False: CongestionWindow(least)}  # up, down
        self.downloads: dict[str, Download] = {}
        self.uploads: dict[str, Upload] = {}
        self._flows: set[int] = set()
        self._under: dict[FragmentKey, Sent] = {}
        self._orphans: dict[str, int] = {}  # forgotten while under way -> bytes of their fragments
        self.packets_from = 0.0  # when packets may be asked for; a lease that is here ends the wait

    def up(self, flow: int, credit: int, rtt: float, now: float) -> None:
        """Start using a flow; attaching it to the session took `rtt` seconds."""
        if not self._flows:
            self._orphans.clear()
        self._flows.add(flow)
        for window in self.windows.values():
            window.most = credit * CHUNK
            if not window.under:
                window.clean(rtt, now)

    def down(self, flow: int) -> None:
        """Requeue what was under way on a flow that ended."""
        self._flows.discard(flow)
        for fragment in [p for p, sent in self._under.items() if sent.flow == flow]:
            self._drop(fragment)
            if not fragment.up and fragment.name in self.downloads:
                self.downloads[fragment.name].asks.appendleft(fragment.index)
            elif fragment.up and fragment.name in self.uploads:
                self._renegotiate(self.uploads[fragment.name])
        for upload in self.uploads.values():
            if upload.put_on == flow:
                self._renegotiate(upload)

    def _renegotiate(self, upload: Upload) -> None:
        """Ask the hub what it has of an upload before more is sent."""
        upload.agreed, upload.eager, upload.put_on = False, False, None

    def fetch(
        self, name: str, open_sink: OpenSink, most: int, size: int = 0, *, prefetched: bool = False
    ) -> Download:
        """Begin a download. If its `size` is known, all of it can be requested at once.

        most: bytes that the object can have, whatever its sender says.
        """
        count = max(1, -(-min(size, most) // CHUNK))
        return self._begin(Download(name, open_sink, most, None, deque(range(count)), size, prefetched))

    def fetch_chunks(
        self, name: str, sink: Sink, chunks: Iterable[int], *, prefetched: bool = False
    ) -> Download:
        """Begin to download these chunks; `sink` gets the others from elsewhere."""
        size, chunk = sink.map.size, sink.map.chunk
        return self._begin(
            Download(name, lambda *_: sink, size, sink, deque(chunks), size, prefetched, chunk)
        )

    def _begin(self, download: Download) -> Download:
        download.fragment = download.wanted = min(download.chunk, self._orphans.get(download.name, 0))
        download.fixed = download.name in self._orphans
        self.downloads[download.name] = download
        return download

    def upload(self, name: str, data: bytes, sha256: bytes) -> Upload:
        upload = self.uploads[name] = Upload(name, data, sha256, min(CHUNK, self.windows[True].fragment))
        upload.todo.extend(ChunkMap(len(data), upload.fragment).missing)
        return upload

    def offer_again(self) -> None:
        """Ask the hub what it has of every upload: it may have lost them."""
        for upload in self.uploads.values():
            upload.done = None
            self._renegotiate(upload)

    def forget(self, name: str) -> None:
        """Drop a download, finished or not. An upload may have the same name."""
        download = self.downloads.pop(name, None)
        if download is not None and any(p.name == name and not p.up for p in self._under):
            self._orphans[name] = download.fragment
        self._drop_all(up=False, name=name)

    def withdraw(self, name: str) -> None:
        """Drop an upload, finished or not."""
        self.uploads.pop(name, None)
        self._drop_all(up=True, name=name)

    def receive(self, message: messages.Message, payload: bytes, now: float) -> None:
        """Handle a message from any flow. Answers to transfers that were dropped are ignored."""
        if isinstance(message, messages.Data):
            asked = self._answered(FragmentKey(False, message.name, message.index), len(payload), now)
            download = self.downloads.get(message.name) if asked else None
            if download is not None and not download.done:
                try:
                    download.add(message.index, payload, message.size, message.sha256)
                except (TransportError, OSError) as error:
                    download.error = error
                    download.begun.clear()
                if download.done and download.name.startswith("lease/"):
                    self.packets_from = 0.0
        elif isinstance(message, messages.NoObject) and message.name in self.downloads:
            self.downloads[message.name].refused = message.reason
            self._drop_all(up=False, name=message.name)
        elif isinstance(message, messages.Have) and message.name in self.uploads:
            upload = self.uploads[message.name]
            have = int.from_bytes(message.chunks, "little")
            missing = ChunkMap(len(upload.data), upload.fragment, have).missing
            upload.todo = deque(i for i in missing if FragmentKey(True, message.name, i) not in self._under)
            upload.agreed, upload.put_on = True, None
        elif isinstance(message, messages.Ack):
            fragment = FragmentKey(True, message.name, message.index)
            sent = self._under.get(fragment)
            self._answered(fragment, sent.size if sent else 0, now)
        elif isinstance(message, messages.PutDone) and message.name in self.uploads:
            upload = self.uploads[message.name]
            upload.done = upload.done or message  # a chunk sent twice is answered twice
            upload.put_on = None
            if message.ok:  # it answers the last chunk
                for fragment in [p for p in self._under if p.up and p.name == message.name]:
                    self._answered(fragment, self._under[fragment].size, now)
            self._drop_all(up=True, name=message.name)

    def expected(self, name: str, index: int) -> int:
        """Return the payload bytes expected of a requested fragment; 0 if unknown or not requested."""
        sent = self._under.get(FragmentKey(False, name, index))
        return sent.expected if sent else 0

    def owes(self, flow: int) -> bool:
        """True if the hub owes an answer on this flow; a flow that owes and stays silent is dead."""
        put = any(u.put_on == flow for u in self.uploads.values())
        return put or any(sent.flow == flow for sent in self._under.values())

    @property
    def pending(self) -> bool:
        """True if the hub owes an answer on any flow."""
        return any(self.owes(flow) for flow in self._flows)

    @property
    def saturated(self) -> bool:
        """True if a congestion window is full and more is waiting: then more flows may help."""
        full = [up for up, window in self.windows.items() if not window.room]
        return bool(self._flows) and any(self._more(up) for up in full)

    def _more(self, up: bool) -> bool:
        """True if something in this direction is not under way yet."""
        if up:
            return any(u.todo and u.done is None for u in self.uploads.values())
        return any((d.todo or d.asks) and not d.done for d in self.downloads.values())

    def outgoing(self, up: float = inf, down: float = inf, now: float = 0.0) -> list[Outgoing]:
        """Return the messages to send now, within `up` bytes to send and `down` bytes to request.

        Uploads go first because the round waits for them. Of downloads, that with the least left goes first:
        a lease must not wait behind a packet, nor a packet behind a model. The last fragment may exceed `up`
        or `down`.
        """
        out: list[Outgoing] = []
        if not self._flows:
            return out
        for window in self.windows.values():
            window.look(now)
        for upload in self.uploads.values():
            if upload.done is None and not upload.agreed and upload.put_on is None:
                upload.put_on = self._least_busy_flow()
                put = messages.Put(upload.name, len(upload.data), upload.sha256, upload.fragment)
                out.append(Outgoing(upload.put_on, put))
            agreed = upload.agreed or (upload.eager and upload.put_on is not None)
            while upload.done is None and agreed and upload.todo and up > 0 and self.windows[True].room:
                index = upload.todo.popleft()
                data = memoryview(upload.data)[index * upload.fragment : (index + 1) * upload.fragment]
                flow = self._mark(FragmentKey(True, upload.name, index), len(data), 0, now, upload.put_on)
                chunk = messages.Chunk(upload.name, index, upload.sha256[: messages.UPLOAD_TAG])
                out.append(Outgoing(flow, chunk, data))
                up -= len(data)
        for download in sorted(self.downloads.values(), key=lambda d: max(0, d.size - d.received)):
            if download.done or (now < self.packets_from and download.name.startswith("packet/")):
                continue
            fragment = min(download.chunk, self.windows[False].fragment)
            adapts = download.wanted != fragment and not download.fixed
            if adapts and not any(p.name == download.name and not p.up for p in self._under):
                download.wanted = fragment  # as now fits the line; none of another size is under way
            while down > 0 and self.windows[False].room and (asked := download.next()) is not None:
                size = download.length(asked)
                key = FragmentKey(False, download.name, asked)
                flow = self._mark(key, size or download.fragment, size, now, None)
                out.append(Outgoing(flow, messages.Get(download.name, asked, download.fragment), answer=size))
                down -= size
        return out

    def unsent(self, out: Outgoing) -> None:
        """Requeue a message that the wire did not take."""
        m = out.message
        if isinstance(m, messages.Put):
            self._renegotiate(self.uploads[m.name])
        else:
            up = isinstance(m, messages.Chunk)
            self._drop(FragmentKey(up, m.name, m.index))
            todo = self.uploads[m.name].todo if up else self.downloads[m.name].asks
            todo.appendleft(m.index)

    def _mark(self, fragment: FragmentKey, size: int, expected: int, now: float, flow: int | None) -> int:
        flow = self._least_busy_flow() if flow is None else flow
        self._under[fragment] = self.windows[fragment.up].sent(flow, size, expected, now)
        return flow

    def _answered(self, fragment: FragmentKey, size: int, now: float) -> bool:
        """Note an answer; returns False if it was not awaited."""
        sent = self._under.pop(fragment, None)
        if sent is not None:
            self.windows[fragment.up].answered(sent, size, now, more=self._more(fragment.up))
        return sent is not None

    def _drop(self, fragment: FragmentKey) -> None:
        self.windows[fragment.up].lost(self._under.pop(fragment))

    def _drop_all(self, *, up: bool, name: str) -> None:
        for fragment in [p for p in self._under if (p.up, p.name) == (up, name)]:
            self._drop(fragment)

    def _least_busy_flow(self) -> int:
        """Return the flow with the fewest bytes under way."""
        under = dict.fromkeys(sorted(self._flows), 0)
        for sent in self._under.values():
            if sent.flow in under:
                under[sent.flow] += sent.size
        return min(under, key=lambda flow: (under[flow], flow))
