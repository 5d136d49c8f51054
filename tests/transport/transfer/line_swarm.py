"""Real processes that train nothing: a hub and peers with packets of any size, on the lines of a network lab.

    python line_swarm.py hub  '{"folder": ..., "keys": ..., "settings": ..., "size": ...}'
    python line_swarm.py peer '{"url": ..., "name": ..., "does": "up" | "down" | "rounds", ...}'

A packet is a vector of FP32, the hub averages them, and the global model is the sum of what was committed.
Both programs print each ping (a peer: how late it came, as both read one clock) and each answer (the hub).
"""

import contextlib
import hashlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scripts.swarms.idle_delegate import TOKENS, IdleDelegate
from scripts.swarms.processes import Line, Process, say
from transport import Hub, Ledger, PeerLink, RunKeys, RunSettings, parse_url
from transport.peer import PeerIdentity
from transport.protocol import RunOver, SessionRenewed, TransportError, WeightedPacket, messages

BLOB = "base/blob"
PLENTY = 1 << 30  # bytes of an object
SLOWER = 10  # times as long SIGUSR1 makes a peer compute
Vector = NDArray[np.float32]


class Swarm:
    """A hub and peers, each in the namespace of a member of the lab."""

    def __init__(self, folder: Path, settings: Line, **hub: Any) -> None:
        keys = RunKeys.generate()
        self.url = str(keys.url("10.77.0.1", 29400, "lines"))
        self._asked = {"folder": str(folder), "keys": asdict(keys), "settings": settings, **hub}
        self.processes: list[Process] = []
        self.hub = self.start_hub()

    def start_hub(self) -> Process:
        self.hub = self._start("hub", "hub", self._asked)
        self.hub.until("listening")
        return self.hub

    def peer(self, member: str, **asked: Any) -> Process:
        return self._start(member, "peer", {"url": self.url, "name": member, **asked})

    def _start(self, member: str, role: str, asked: Line) -> Process:
        self.processes.append(Process([sys.executable, __file__, role, json.dumps(asked)], member))
        return self.processes[-1]

    def hub_said(self, kind: str) -> list[Line]:
        """The lines of all hubs of this run, one after the other."""
        return [line for p in self.processes if p.member == "hub" for line in p.heard(kind)]


@contextmanager
def swarm(folder: Path, settings: Line, **hub: Any) -> Iterator[Swarm]:
    """A swarm whose processes are killed at the end."""
    made = Swarm(folder, settings, **hub)
    try:
        yield made
    finally:
        for process in made.processes:
            process.kill()


# ---- the hub -----------------------------------------------------------------------------------------------


class Mean(IdleDelegate):
    """Averages the packets, weighted."""

    def __init__(self, size: int, objects: dict[str, int], ledger: Ledger) -> None:
        self.x: Vector = np.zeros(size // 4, np.float32)
        self.residual: Vector = np.zeros_like(self.x)  # handed over by those who left
        self.fingerprints = [fingerprint(self.x)]
        self._objects = objects  # name -> bytes
        for round, packet in ledger.packets():
            self.committed(round, packet)

    def samples(self, ids: Sequence[int]) -> bytes:
        return json.dumps(list(ids)).encode()

    def aggregate(self, round: int, updates: Sequence[WeightedPacket]) -> bytes:
        total, self.residual = self.residual, np.zeros_like(self.x)
        whole = sum(weight for _, _, weight in updates)
        for _, packet, weight in updates:  # ordered by name: float sums depend on order
            total += np.frombuffer(packet, np.float32) * np.float32(weight / whole)
        return total.tobytes()

    def inherit(self, peer: str, packet: bytes, share: float) -> None:
        self.residual += np.frombuffer(packet, np.float32) * np.float32(share)

    def committed(self, round: int, packet: bytes) -> None:
        self.x += np.frombuffer(packet, np.float32)
        self.fingerprints.append(fingerprint(self.x))

    def fingerprint(self, round: int) -> int:
        return self.fingerprints[round]

    def object(self, name: str) -> bytes:
        return bytes(self._objects[name])


def digest(x: Vector) -> str:
    return hashlib.sha256(x.tobytes()).hexdigest()


def fingerprint(x: Vector) -> int:
    return int(digest(x)[:16], 16)


def run_hub(asked: Line) -> None:
    settings = RunSettings(run="lines", recipe="{}", recipe_hash="00", **asked["settings"])
    ledger = Ledger(Path(asked["folder"]), run=settings.run, samples=settings.samples)
    work = Mean(asked.get("size", 4), asked.get("objects", {}), ledger)
    hub = Hub(("0.0.0.0", asked.get("port", 29400)), RunKeys(**asked["keys"]), ledger, settings, work)
    hears = hub._state.receive

    def receive(conn: bytes, message: Any, now: float) -> Any:
        session = hub._state.members.by_conn(conn)
        if isinstance(message, messages.Pong) and session is not None:
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


class Peer:
    """The loop of any training over PeerLink, without the training. SIGUSR1 makes it slower, or fast
    again."""

    def __init__(self, link: PeerLink, asked: Line) -> None:
        self.link, self.asked = link, asked
        self.x: Vector = np.zeros(asked.get("size", 4) // 4, np.float32)
        self.round = 0  # of the global model
        self.pending: dict[int, list[int]] = {}  # leases trained and not delivered
        self.compute_s = self._usual_s = float(asked.get("compute_s", 0.0))
        signal.signal(signal.SIGUSR1, self._slower)

    def _slower(self, *_: object) -> None:
        self.compute_s = self._usual_s if self.compute_s > self._usual_s else SLOWER * self._usual_s

    def rounds(self) -> None:
        """Take part until the run is over."""
        self.join()
        over: messages.Over | None = None
        while over is None:
            try:
                over = self.turn()
            except SessionRenewed:
                say("renewed")
                self.pending.clear()
                self.join()
            except RunOver as error:
                over = messages.Over(str(error), error.finished)
        self.catch_up(self.link.newest_round + 1)
        say("over", reason=over.reason, finished=over.finished, round=self.round, sha256=digest(self.x))

    def join(self) -> None:
        self.catch_up(self.link.welcome.round)
        self.link.ready(self.round, fingerprint(self.x))

    def catch_up(self, round: int) -> None:
        while self.round < round:
            packet = self.link.fetch(f"packet/{self.round}", PLENTY)
            assert isinstance(packet, bytes)
            self.x += np.frombuffer(packet, np.float32)
            self.round += 1

    def turn(self) -> messages.Over | None:
        opened = self.link.next_round()
        if not isinstance(opened, messages.Round):
            return opened
        self.catch_up(opened.round)
        if opened.samples:
            lease = self.link.fetch(f"lease/{opened.round}", PLENTY)
            assert isinstance(lease, bytes)
            self.pending[opened.round] = json.loads(lease)
        started = time.monotonic()
        while (left := started + self.compute_s - time.monotonic()) > 0:  # a signal may have changed it
            time.sleep(min(0.05, left))
        delivers = sorted(self.pending)
        ids = [i for r in delivers for i in self.pending[r]]
        packet = np.full_like(self.x, np.float32(sum(ids))).tobytes()
        report = messages.Report(opened.round, fingerprint(self.x), delivers, 0.0, TOKENS * len(ids))
        committed = self.link.exchange(opened.round, packet, report)
        for r in delivers if self.link.name in committed.accepted else ():
            del self.pending[r]
        return None

    def up(self) -> None:
        """Upload one update of `size` bytes, in the middle of silence."""
        self.join()
        opened = self.link.next_round()
        assert isinstance(opened, messages.Round)
        packet = bytes(self.asked["size"])
        time.sleep(self.asked["quiet_s"])
        say("begins")
        self.link.exchange(opened.round, packet, messages.Report(opened.round, fingerprint(self.x), []))
        time.sleep(self.asked["quiet_s"])

    def down(self) -> None:
        """Fetch one object, in the middle of silence."""
        time.sleep(self.asked["quiet_s"])
        say("begins")
        say("ends", size=len(self.link.fetch(BLOB, PLENTY)))
        time.sleep(self.asked["quiet_s"])


def run_peer(asked: Line) -> None:
    link = PeerLink(
        parse_url(asked["url"]), PeerIdentity(asked["name"]), notify=lambda text: say("told", text=text)
    )
    seen = Watched(link, asked)
    try:
        link.connect(20.0)
        peer = Peer(link, asked)
        {"rounds": peer.rounds, "up": peer.up, "down": peer.down}[asked["does"]]()
        link.leave("done")
        say("done", up=link.bytes_up, down=link.bytes_down, bulk=seen.bulk, window=seen.window)
    except TransportError as error:
        say("failed", reason=f"{type(error).__name__}: {error}")
        link.close()
        raise SystemExit(1) from None


class Watched:
    """Listens in on a link: pings, the end of an upload, bytes of bulk data sent or asked for, windows."""

    def __init__(self, link: PeerLink, asked: Line) -> None:
        self.bulk = self.window = 0  # bytes
        blob, state, connections, transfers = (
            asked.get("blob", 0),
            link._state,
            link._connections,
            link._transfers,
        )
        hears, sends, takes = state.receive, connections._send, transfers.receive

        def receive(message: Any, now: float) -> Any:
            if isinstance(message, messages.Ping):
                say("ping", s=now - message.sent)
            return hears(message, now)

        def send(flow: int, message: Any, payload: Any = None) -> bool:
            done = sends(flow, message, payload)
            if done and isinstance(message, messages.Chunk):
                self.bulk += len(payload)
            elif done and isinstance(message, messages.Get) and message.name == BLOB:
                self.bulk += min(message.chunk, blob - message.index * message.chunk)
            return done

        def take(message: Any, payload: bytes, now: float) -> None:
            if isinstance(message, messages.PutDone) and message.ok and asked["does"] == "up":
                say("ends")
            self.window = max([self.window, *(w.limit for w in transfers.windows.values())])
            takes(message, payload, now)

        state.receive, connections._send, transfers.receive = receive, send, take  # type: ignore[method-assign]


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        {"hub": run_hub, "peer": run_peer}[sys.argv[1]](json.loads(sys.argv[2]))
