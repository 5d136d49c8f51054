"""A hub that keeps to the protocol, and lies where a test wants it to.

with LyingHub(MemoryHubWire()) as hub:
    hub.serves["lease/"] = endless(2**36)
    hub.lies[messages.Ready] = lambda ready: [messages.Over("enough", True)]
    link = hub.link()               # welcomed; the objects that it asked for are in `hub.asked`
assert messages.Ready in hub.heard
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from memory_sockets import MemoryHubWire, MemoryPeerWire
from msgspec.structs import replace

from transport.peer import LinkLimits, PeerIdentity, PeerLink
from transport.protocol import RunKeys, decode_to_hub, encode, messages
from transport.wire import HubWire

ZEROS = bytes(1 << 20)
IN_A_ROW = 64  # messages of a flood
WELCOME = messages.Welcome(messages.PROTOCOL, "toy-run", "ann", "s" * 22, "{}", "00", [], 0, 0.2)
IN_STATUS = ("run", "recipe", "recipe_hash", "base", "round", "log_bytes", "snapshots")  # of a welcome
Served = tuple[int, bytes] | bytes | None  # size of the whole and a chunk; or the whole
Serve = Callable[[messages.Get], Served]
Lie = Callable[[Any], list[messages.Message]]
Flood = Callable[["LyingHub"], bool]  # False: the line is full


def endless(size: int) -> Serve:
    """Serve zeros, as an object of so many bytes."""
    return lambda get: (size, ZEROS[: max(0, min(get.chunk, size - get.index * get.chunk))])


def nothing_said(hub: LyingHub, conn: bytes) -> None:
    """Say nothing to a peer that is ready."""


@dataclass
class LyingHub:
    """Answers in a thread of its own until its block ends.

    Args:
        lies: the answers in place of honest ones, by the kind of a message.
        status: the fields of the answer to AskStatus beside the welcome's.
        after_ready: called in the thread, once a peer says Ready.
    """

    wire: HubWire
    welcome: messages.Welcome = WELCOME
    serves: dict[str, Serve] = field(default_factory=dict)  # by the beginning of a name
    lies: dict[type, Lie] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)
    after_ready: Callable[[LyingHub, bytes], object] = nothing_said
    keys: RunKeys = field(default_factory=RunKeys.generate)
    asked: Counter[str] = field(default_factory=Counter)  # by name of an object
    heard: Counter[type] = field(default_factory=Counter)  # by kind of message
    sent: int = 0  # bytes of objects
    floods: Flood | None = None  # said again and again, as long as the line takes it
    flooded: int = 0  # how often that was said

    def __post_init__(self) -> None:
        self.control = self.bulk = b""  # the connections that were welcomed and attached last
        self._closing, self._pinged = False, 0.0
        self._thread = threading.Thread(target=self._run, name="lying-hub", daemon=True)

    def __enter__(self) -> LyingHub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self.wire.wake()
        self._thread.join(120)
        self.wire.close()

    @property
    def url(self) -> str:
        return str(self.keys.url("127.0.0.1", self.wire.port or 1, self.welcome.run))

    def link(self) -> PeerLink:
        """A peer's link in this process, welcomed."""
        assert isinstance(self.wire, MemoryHubWire)
        url = self.keys.url("memory", 1, self.welcome.run)
        link = PeerLink(url, PeerIdentity("ann"), LinkLimits(flows=1), wire=MemoryPeerWire(self.wire))
        link.connect(30.0)
        return link

    def say(self, message: messages.Message, payload: bytes | None = None, conn: bytes = b"") -> bool:
        frames = [encode(message)] if payload is None else [encode(message), payload]
        return self.wire.send(conn or self.control, frames)

    def _run(self) -> None:
        while not self._closing:
            for conn, frames in self.wire.poll(0.001 if self.floods else 0.1):
                self._answer(conn, decode_to_hub(frames[0]))
            while (flood := self.floods) is not None and flood(self):
                self.flooded += 1
                if self.flooded % IN_A_ROW == 0:
                    break
            if self.control and time.monotonic() > self._pinged + self.welcome.ping_s:
                self._pinged = time.monotonic()
                self.say(messages.Ping(1.0))

    def _answer(self, conn: bytes, m: messages.ToHub) -> None:
        self.heard[type(m)] += 1
        if (lie := self.lies.get(type(m))) is not None:
            for answer in lie(m):
                self.say(answer, conn=conn)
        elif isinstance(m, messages.AskStatus):
            known = msgspec.to_builtins({key: getattr(self.welcome, key) for key in IN_STATUS})
            self.say(messages.Status(json.dumps(known | dict(self.status))), conn=conn)
        elif isinstance(m, messages.Hello | messages.Resume):
            self.control = conn
            self.say(replace(self.welcome, resumed=isinstance(m, messages.Resume)))
        elif isinstance(m, messages.Attach):
            self.bulk = conn
            self.say(messages.Attached(32), conn=conn)
        elif isinstance(m, messages.Get):
            self._serve(conn, m)
        elif isinstance(m, messages.Put):
            self.say(messages.Have(m.name, b""), conn=conn)
        elif isinstance(m, messages.Ready):
            self.after_ready(self, conn)
        elif isinstance(m, messages.Leave):
            self.say(messages.Over("left", False), conn=conn)

    def _serve(self, conn: bytes, get: messages.Get) -> None:
        self.asked[get.name] += 1
        # the longest beginning is meant: "base/model" before "base/"
        rows = sorted((name for name in self.serves if get.name.startswith(name)), key=len)
        found = self.serves[rows[-1]](get) if rows else None
        if found is None:
            self.say(messages.NoObject(get.name, "there is none"), conn=conn)
            return
        start = get.index * get.chunk
        size, chunk = found if isinstance(found, tuple) else (len(found), found[start : start + get.chunk])
        self.sent += len(chunk)
        digest = hashlib.sha256(found).digest() if isinstance(found, bytes) else b""
        self.say(messages.Data(get.name, get.index, size, digest), chunk, conn)
