"""A swarm of real processes that train nothing: a hub and peers with packets of any size, for measurements on
lines. One program for both, started by line_lab.py in the namespaces of a network lab.

    python line_swarm.py hub  '{"folder": ..., "keys": ..., "settings": ..., ...}'
    python line_swarm.py peer '{"url": ..., "name": ..., "does": "up" | "down" | "rounds" | "visit", ...}'

A packet is a vector of FP32, the owner averages it with numpy, x' is the sum of what was committed. Each
process says what happens to it in lines of JSON, with `t`: monotonic seconds, the same clock for all. Both
write down each answer to a ping (the hub) or each ping (a peer: how late it came, as both read one clock).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from transport import Hub, Ledger, PeerLink, RunKeys, RunSettings, parse_url
from transport.protocol.errors import RunOver, SessionRenewed, TransportError
from transport.protocol.messages import Chunk, Get, Over, Ping, Pong, PutDone, Report, Round

TOKENS = 10  # of each sample
BLOB = "base/blob"
SLOWER = 10  # how many times as long SIGUSR1 makes a peer compute
Vector = NDArray[np.float32]

_saying = threading.Lock()


def say(kind: str, **what: Any) -> None:
    line = json.dumps({"t": time.monotonic(), "kind": kind, **what}, default=str)
    with _saying:
        print(line, flush=True)


def digest(x: Vector) -> str:
    return hashlib.sha256(x.tobytes()).hexdigest()


def fingerprint(x: Vector) -> int:
    return int(digest(x)[:16], 16)


# ---- the hub -----------------------------------------------------------------------------------------------


class MeanWork:
    """The owner's side: the weighted mean."""

    def __init__(self, size: int, objects: dict[str, int], ledger: Ledger) -> None:
        self.x: Vector = np.zeros(size // 4, np.float32)
        self.owed: Vector = np.zeros_like(self.x)  # of those who left
        self.fingerprints = [fingerprint(self.x)]
        self._objects = objects  # name -> bytes
        for round, packet in ledger.packets():
            self.committed(round, packet)

    def samples(self, ids: Sequence[int]) -> bytes:
        return json.dumps(list(ids)).encode()

    def tokens(self, ids: Sequence[int]) -> int:
        return TOKENS * len(ids)

    def arrived(self, round: int, peer: str, packet: bytes) -> None:
        """The mean is made at the close."""

    def aggregate(self, round: int, updates: Sequence[tuple[str, bytes, float]]) -> bytes:
        total, self.owed = self.owed, np.zeros_like(self.x)
        whole = sum(weight for _, _, weight in updates)
        for _, packet, weight in updates:  # by name, as they come: float sums depend on order
            total += np.frombuffer(packet, np.float32) * np.float32(weight / whole)
        return total.tobytes()

    def inherit(self, peer: str, packet: bytes, share: float) -> None:
        self.owed += np.frombuffer(packet, np.float32) * np.float32(share)

    def committed(self, round: int, packet: bytes) -> None:
        self.x += np.frombuffer(packet, np.float32)
        self.fingerprints.append(fingerprint(self.x))

    def fingerprint(self, round: int) -> int:
        return self.fingerprints[round]

    def object(self, name: str) -> bytes:
        return bytes(self._objects[name])


def run_hub(asked: dict[str, Any]) -> None:
    settings = RunSettings(run="lines", recipe="{}", recipe_hash="00", **asked["settings"])
    ledger = Ledger(Path(asked["folder"]), run=settings.run, samples=settings.samples)
    work = MeanWork(asked.get("size", 4), asked.get("objects", {}), ledger)
    hub = Hub("0.0.0.0", asked.get("port", 29400), RunKeys(**asked["keys"]), ledger, settings, work)
    hears = hub._state.receive

    def receive(conn: bytes, message: Any, now: float) -> Any:
        session = hub._state.members.by_conn(conn)
        if isinstance(message, Pong) and session is not None:
            say("pong", peer=session.name, s=now - message.sent)
        return hears(conn, message, now)

    hub._state.receive = receive  # type: ignore[method-assign]
    signal.signal(signal.SIGTERM, lambda *_: hub.stop())
    hub.start()
    say("listening")
    for event in hub.events():
        say(type(event).__name__, **asdict(event))
    audit = ledger.verify()
    say("audit", **asdict(audit), sha256=digest(work.x), accepted=[r.accepted for r in ledger.rounds()])
    ledger.close()


# ---- a peer ------------------------------------------------------------------------------------------------


class LinePeer:
    """What any training over PeerLink does, without the training. SIGUSR1 makes it slower, or fast again."""

    def __init__(self, link: PeerLink, asked: dict[str, Any]) -> None:
        self.link, self.asked = link, asked
        self.x: Vector = np.zeros(asked.get("size", 4) // 4, np.float32)
        self.round = 0  # x' is of this round
        self.pending: dict[int, list[int]] = {}  # leases trained and not delivered
        self.compute_s: float = asked.get("compute_s", 0.0)
        self._usual_s = self.compute_s
        signal.signal(signal.SIGUSR1, self._slower)

    def _slower(self, *_: object) -> None:
        self.compute_s = self._usual_s if self.compute_s > self._usual_s else SLOWER * self._usual_s

    def rounds(self) -> None:
        self.join()
        over: Over | None = None
        while over is None:
            try:
                over = self.turn()
            except SessionRenewed:
                say("renewed")
                self.pending.clear()
                self.join()
            except RunOver as error:
                over = Over(str(error), error.finished)
        self.catch_up(self.link.newest_round + 1)
        say("over", reason=over.reason, finished=over.finished, round=self.round, sha256=digest(self.x))
        self.link.leave("done")

    def join(self) -> None:
        self.catch_up(self.link.welcome.round)
        self.link.ready(self.round, fingerprint(self.x))

    def catch_up(self, round: int) -> None:
        while self.round < round:
            packet = self.link.fetch(f"packet/{self.round}")
            assert isinstance(packet, bytes)
            self.x += np.frombuffer(packet, np.float32)
            self.round += 1

    def turn(self) -> Over | None:
        opened = self.link.next_round()
        if not isinstance(opened, Round):
            return opened
        self.catch_up(opened.round)
        if opened.samples:
            lease = self.link.fetch(f"lease/{opened.round}")
            assert isinstance(lease, bytes)
            self.pending[opened.round] = json.loads(lease)
        started = time.monotonic()
        while (left := started + self.compute_s - time.monotonic()) > 0:  # a signal may have changed it
            time.sleep(min(0.05, left))
        delivers = sorted(self.pending)
        ids = [i for r in delivers for i in self.pending[r]]
        packet = np.full_like(self.x, np.float32(sum(ids))).tobytes()
        report = Report(opened.round, fingerprint(self.x), delivers, 0.0, TOKENS * len(ids))
        say("sends", round=opened.round)
        committed = self.link.exchange(opened.round, packet, report)
        in_it = self.link.name in committed.accepted
        for r in delivers if in_it else ():
            del self.pending[r]
        say("committed", round=opened.round, in_it=in_it)
        return None

    def up(self) -> None:
        """One update of `size` bytes, in the middle of silence."""
        self.join()
        opened = self.link.next_round()
        assert isinstance(opened, Round)
        packet = bytes(self.asked["size"])
        time.sleep(self.asked["quiet_s"])
        say("begins")
        self.link.exchange(opened.round, packet, Report(opened.round, fingerprint(self.x), []))
        time.sleep(self.asked["quiet_s"])
        self.link.leave("done")

    def down(self) -> None:
        """One object, in the middle of silence."""
        time.sleep(self.asked["quiet_s"])
        say("begins")
        say("ends", size=len(self.link.fetch(BLOB)))
        time.sleep(self.asked["quiet_s"])
        self.link.leave("done")

    def visit(self) -> None:
        """Be welcomed, and go."""
        self.link.leave("done")


def run_peer(asked: dict[str, Any]) -> None:
    link = PeerLink(parse_url(asked["url"]), asked["name"], told=lambda text: say("told", text=text))
    hears = link._state.receive

    def receive(message: Any, now: float) -> Any:
        if isinstance(message, Ping):
            say("ping", s=now - message.sent)
        return hears(message, now)

    link._state.receive = receive  # type: ignore[method-assign]
    carrier, blob, bulk = link._carrier, asked.get("blob", 0), [0]
    sends = carrier._send

    def send(flow: int, message: Any, payload: Any = None) -> bool:
        """Counts what is sent of updates, and asked for of the blob."""
        done = sends(flow, message, payload)
        if done and isinstance(message, Chunk):
            bulk[0] += len(payload)
        elif done and isinstance(message, Get) and message.name == BLOB:
            bulk[0] += min(message.chunk, blob - message.index * message.chunk)
        return done

    carrier._send = send  # type: ignore[method-assign]
    takes = link._bulk.receive

    def take(message: Any, payload: bytes, now: float) -> None:
        if isinstance(message, PutDone) and message.ok and asked["does"] == "up":
            say("ends")
        windows.extend(w.limit for w in link._bulk.windows.values())
        takes(message, payload, now)

    windows: list[int] = [0]
    link._bulk.receive = take  # type: ignore[method-assign]
    try:
        link.connect(20.0)
        say("connected")
        getattr(LinePeer(link, asked), asked["does"])()
        say("done", up=link.bytes_up, down=link.bytes_down, bulk=bulk[0], window=max(windows))
    except TransportError as error:
        say("failed", error=f"{type(error).__name__}: {error}")
        link.close()
        raise SystemExit(1) from None


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        {"hub": run_hub, "peer": run_peer}[sys.argv[1]](json.loads(sys.argv[2]))
