"""A toy of training for the tests of transport: x' is the list of packets applied, a packet names the samples
it holds.

With it a test can say what a peer did, and a ledger can be checked against what was really trained.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from transport import PeerLink, RunSettings
from transport.protocol import Leaving, RunOver, SessionRenewed, TransportError, UpdateRejected, messages
from transport.transfer import FreeDisk, Spool

TOKENS = 10  # of each sample
PLENTY = 1 << 30  # bytes: where a test is not about how long an object may be


class ToyBounds:
    """What the objects of a toy run take at most (transport.peer.SizeBounds)."""

    def lease(self, opened: messages.Round) -> int:
        return 2 + 22 * opened.samples

    def packet(self, round: int) -> int:
        return PLENTY


BOUNDS = ToyBounds()


def toy_spool(folder: Path) -> Spool:
    return Spool(folder / "spool", FreeDisk(folder))


def toy_settings(**changes: object) -> RunSettings:
    toy = RunSettings(
        run="toy-run",
        recipe="{}",
        recipe_hash="00",
        samples=40,
        global_batch=8,
        start_timeout=60.0,
        step_timeout=60.0,
        peer_timeout=90.0,
        linger_s=2.0,
        recover_s=3.0,
    )
    return replace(toy, **changes)  # type: ignore[arg-type]


def toy_fingerprint(packets: Sequence[bytes]) -> int:
    digest = hashlib.sha256(b"".join(packets)).digest()
    return int.from_bytes(digest[:8], "little")


@dataclass
class ToyWork:
    """The owner's side of the toy."""

    packets: list[bytes] = field(default_factory=list)
    objects: dict[str, bytes | Path] = field(default_factory=dict)
    reject: str = ""  # packets of this peer cannot be used
    inherited: list[tuple[str, bytes, float]] = field(default_factory=list)
    came: list[tuple[int, str, bytes]] = field(default_factory=list)  # packets, before their round closed

    def samples(self, ids: Sequence[int]) -> bytes:
        return json.dumps(list(ids)).encode()

    def tokens(self, ids: Sequence[int]) -> int:
        return TOKENS * len(ids)

    def weight(self, ids: Sequence[int]) -> float:
        return float(TOKENS * len(ids))

    def arrived(self, round: int, peer: str, packet: bytes) -> None:
        self.came.append((round, peer, packet))

    def aggregate(self, round: int, updates: Sequence[tuple[str, bytes, float]]) -> bytes:
        assert [u[0] for u in updates] == sorted(u[0] for u in updates)
        for peer, packet, _ in updates:
            if peer == self.reject or packet == b"bad":
                raise UpdateRejected(peer, "not a packet")
        return json.dumps(
            [round, [[peer, json.loads(packet), weight] for peer, packet, weight in updates]]
        ).encode()

    def inherit(self, peer: str, packet: bytes, share: float) -> None:
        if packet == b"bad":
            raise UpdateRejected(peer, "not a packet")
        self.inherited.append((peer, packet, share))

    def committed(self, round: int, packet: bytes) -> None:
        assert round == len(self.packets)
        self.packets.append(packet)

    def opens(self, size: int, rung: int) -> None:
        """A packet of this toy is as long as it is."""

    def fingerprint(self, round: int) -> int:
        return toy_fingerprint(self.packets[:round])

    def object(self, name: str) -> bytes | Path:
        return self.objects[name]


@dataclass
class ToyPeer:
    """A volunteer's side: the loop that any training over PeerLink has. `staleness` as in the algorithm."""

    link: PeerLink
    staleness: int = 1
    before_exchange: Callable[[messages.Round], None] = lambda _: None
    pack: Callable[[int, list[int]], bytes] = lambda _, ids: json.dumps(ids).encode()  # the packet of a round
    legacy: bytes = b""  # what it hands over when it is asked to leave
    needs: float = 0.0  # local steps, as it reports them
    packets: list[bytes] = field(default_factory=list)  # x'
    pending: dict[int, list[int]] = field(default_factory=dict)  # leases trained and not delivered
    rounds: list[int] = field(default_factory=list)
    over: messages.Over | None = None
    error: BaseException | None = None
    renewed: int = 0
    refused: list[str] = field(default_factory=list)  # why packets of its own could not be used
    thread: threading.Thread | None = None

    def run(self) -> None:
        try:
            self.link.bounds = BOUNDS
            self.link.connect(30.0)
            self.join()
            while self.over is None:
                try:
                    self.turn()
                except SessionRenewed:
                    self.renewed += 1
                    self.pending.clear()
                    self.join()
                except RunOver as over:
                    self.over = messages.Over(str(over), over.finished)
                except Leaving:
                    self.over = messages.Over("asked to leave", False)
            if self.legacy and self.link.leave_requested.is_set():
                self.link.hand_over(len(self.packets), self.legacy)
            self.part()
            self.link.leave("done")
        except (TransportError, KeyError, AssertionError) as error:
            self.error = error
            self.link.close()

    def join(self) -> None:
        self.catch_up(self.link.welcome.round)
        self.link.ready(len(self.packets), toy_fingerprint(self.packets))

    def catch_up(self, round: int) -> None:
        while len(self.packets) < round:
            self.packets.append(self.link.fetch(f"packet/{len(self.packets)}", PLENTY))

    def turn(self) -> None:
        opened = self.link.next_round()
        if isinstance(opened, messages.Over):
            self.over = opened
            if opened.finished:
                self.catch_up(self.link.newest_round + 1)
            return
        self.rounds.append(opened.round)
        self.catch_up(opened.round)
        if opened.eval_parts:
            self.link.evaluated(
                opened.round, opened.eval_part, 2.0 * (opened.eval_part + 1), opened.eval_part + 1
            )
        if not opened.exchange:
            if not opened.eval_parts:  # a call
                self.link.ready(len(self.packets), toy_fingerprint(self.packets))
            return
        if self.staleness == 0:
            self.train(opened)
        delivers = sorted(self.pending)
        ids = [i for r in delivers for i in self.pending[r]]
        report = messages.Report(
            opened.round,
            toy_fingerprint(self.packets),
            delivers,
            3.0 * TOKENS * len(ids),
            TOKENS * len(ids),
            0.1,
            0.0,
            needs=self.needs,
        )
        self.before_exchange(opened)
        if self.staleness == 1:
            self.train(opened)
        committed = self.exchange(opened, self.pack(opened.round, ids), report)
        self.refused += [why for name, why in committed.refused.items() if name == self.link.name]
        if self.link.name in committed.accepted:
            for r in delivers:
                del self.pending[r]

    def part(self) -> None:
        """Before the goodbye."""

    def exchange(self, opened: messages.Round, packet: bytes, report: messages.Report) -> messages.Committed:
        return self.link.exchange(opened.round, packet, report)

    def train(self, opened: messages.Round) -> None:
        if opened.samples:
            lease = self.link.fetch(f"lease/{opened.round}", BOUNDS.lease(opened))
            self.pending[opened.round] = json.loads(lease)
            assert len(self.pending[opened.round]) == opened.samples

    def start(self) -> threading.Thread:
        self.thread = threading.Thread(target=self.run, name=f"toy-{id(self)}", daemon=True)
        self.thread.start()
        return self.thread


def trained(work: ToyWork) -> list[int]:
    """Every sample that is in x', as often as it is."""
    return sorted(i for packet in work.packets for _, ids, _ in json.loads(packet)[1] for i in ids)
