"""Hostile members of a run, each with a key of its own: one process is started as

    python -m scripts.fault_injection.hostile_members KIND '{"url": ..., "members": 50, "seconds": 25, ...}'

They have the run's URL. They greet, answer pings, and do what their KIND says. They run at idle priority, and
never sleep: even so they slow the others of a small machine, and so all kinds do as much. It prints a line of
JSON at the end: how many were admitted, and what they did.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from transport import RunURL, parse_url
from transport.protocol import CurveKeys, ProtocolError, as_z85, decode_to_peer, encode, messages
from transport.wire import raise_file_limit

TICK_S = 0.02
BURST = 10  # messages of a member in a tick
FLOWS = 8  # connections of a member beside control
UPDATE = 800_000  # bytes
CHUNK = 64 * 1024


@dataclass
class Attack:
    """State that the members of a process share."""

    url: RunURL
    sources: list[str]  # addresses they come from
    ledger: str = ""  # events of the hub, which tell the fingerprints of x' as any honest peer has them
    context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context)
    did: Counter[str] = field(default_factory=Counter)
    numbers: int = 0

    def next_number(self) -> int:
        self.numbers += 1
        return self.numbers

    def newest(self) -> tuple[int, int]:
        """Return the newest round and its fingerprint."""
        with suppress(OSError), Path(self.ledger).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16_384))
            for line in reversed(file.read().splitlines()):
                with suppress(ValueError, KeyError, TypeError):
                    told = json.loads(line)
                    if told["event"] == "step" and told["fingerprint"]:
                        return told["round"], int(told["fingerprint"], 16)
        return 0, 0


class Member:
    """A session that answers pings."""

    def __init__(self, attack: Attack, number: int) -> None:
        self.attack, self.number = attack, number
        self.keys, self.source = CurveKeys.generate(), attack.sources[number % len(attack.sources)]
        self.session, self.round, self.asked = "", 0, -1
        self.flows: list[zmq.Socket[bytes]] = []
        self.control = self.dealer()
        hello = messages.Hello(messages.PROTOCOL, attack.url.token, attack.url.run, f"m{number}")
        self.say(hello)

    def dealer(self) -> zmq.Socket[bytes]:
        sock = self.attack.context.socket(zmq.DEALER)
        sock.linger, sock.rcvhwm, sock.sndhwm = 0, 200, 200
        sock.setsockopt(zmq.RECONNECT_IVL, -1)
        sock.curve_serverkey = as_z85(self.attack.url.key)
        sock.curve_publickey, sock.curve_secretkey = as_z85(self.keys.public), as_z85(self.keys.secret)
        sock.connect(f"tcp://{self.source}:0;{self.attack.url.host}:{self.attack.url.port}")
        return sock

    def say(self, message: messages.Message, payload: bytes = b"", flow: int = -1) -> None:
        sock = self.control if flow < 0 else self.flows[flow]
        with suppress(zmq.Again):
            sock.send_multipart([encode(message), *([payload] if payload else [])], zmq.DONTWAIT)
            self.attack.did[type(message).__name__] += 1

    def attach(self) -> None:
        """Open the connections for transfers."""
        while len(self.flows) < FLOWS:
            self.flows.append(self.dealer())
            self.say(messages.Attach(self.session), flow=len(self.flows) - 1)

    def ready(self) -> None:
        round, fingerprint = self.attack.newest()
        self.say(messages.Ready(round, fingerprint))

    def hear(self, kind: Kind) -> bool:
        """Handle what has come; False where the hub has refused this member."""
        for sock in self.flows:
            with suppress(zmq.Again):
                while kind.reads:
                    sock.recv_multipart(zmq.DONTWAIT)
        with suppress(zmq.Again, ProtocolError):
            while True:
                message = decode_to_peer(self.control.recv_multipart(zmq.DONTWAIT)[0])
                if isinstance(message, messages.Ping):
                    self.say(messages.Pong(message.sent))
                elif isinstance(message, messages.Welcome):
                    self.session, self.round = message.session, message.round
                    self.attack.did["admitted"] += 1
                    kind.begins(self)
                elif isinstance(message, messages.Round) and message.exchange:
                    self.asked = message.round
                    self.attack.did["asked"] += 1
                    kind.asked(self, message)
                elif isinstance(message, messages.Committed):
                    self.round = message.round + 1
                    if 0 <= self.asked <= message.round:
                        self.asked = -1
                        kind.missed(self)
                elif isinstance(message, messages.Refused):
                    self.attack.did[f"refused: {message.code}"] += 1
                    return False
        return True

    def close(self) -> None:
        for sock in (self.control, *self.flows):
            sock.close(0)


def nothing(member: Member, *_: object) -> None:
    pass


@dataclass(frozen=True)
class Kind:
    """Actions of the members of a kind: as they are welcomed, asked for an update, have missed a round, at
    each tick."""

    begins: Callable[[Member], object] = nothing
    asked: Callable[[Member, messages.Round], object] = nothing
    missed: Callable[[Member], object] = nothing
    tick: Callable[[Member], object] = nothing
    reads: bool = True
    comes_anew: bool = False  # with another key, at each tick


def begin_update(member: Member, message: messages.Round) -> None:
    """Begin an update of the round, and send the most of it."""
    name, size = f"update/{message.round}", UPDATE
    member.say(messages.Put(name, size, bytes(32), CHUNK), flow=0)
    for index in range(size // CHUNK - 1):
        member.say(messages.Chunk(name, index), bytes(CHUNK), flow=index % FLOWS)


def ask(name: Callable[[Member, int], str]) -> Callable[[Member], None]:
    """Ask for names on all connections."""

    def tick(member: Member) -> None:
        for at in range(BURST):
            number = member.attack.next_number()
            member.say(messages.Get(name(member, number), 0, 1024), flow=at % FLOWS)

    return tick


def put(name: Callable[[Member, int], str], size: int = 1000) -> Callable[[Member], None]:
    def tick(member: Member) -> None:
        for at in range(BURST):
            named = name(member, member.attack.next_number())
            member.say(messages.Put(named, size, bytes(32), 1024), flow=at % FLOWS)
            member.say(messages.Chunk(named, 0), bytes(1024), flow=at % FLOWS)

    return tick


def read_base(member: Member) -> None:
    for at in range(BURST):
        index = member.attack.next_number() % 16
        member.say(messages.Get("base/model.safetensors", index, 256 * 1024), flow=at % FLOWS)


def chatter(member: Member) -> None:
    for _ in range(BURST):
        member.say(messages.Pong(1.0))
        member.say(messages.Evaluated(member.round, 0, -1e30, 2**40))


def lie(member: Member, message: messages.Round) -> None:
    """Report all that is false, and no packet."""
    wrong = {
        "loss_sum": -1e30,
        "tokens": 2**40,
        "compute_s": 1e-30,
        "grad_norm": 1e30,
        "needs": 1e30,
        "fits": 1,
    }
    member.say(messages.Report(message.round, 1, [*range(64)], **wrong))  # type: ignore[arg-type]


def attach_and_be_ready(member: Member) -> None:
    member.attach()
    member.ready()


KINDS = {
    "idle": Kind(),
    "never-deliver": Kind(Member.ready, missed=Member.ready, tick=nothing),
    "begin-updates": Kind(attach_and_be_ready, begin_update, Member.ready),
    "ask-for-names": Kind(
        Member.attach, tick=ask(lambda member, n: f"nobody/{member.number}/{n}-" + "x" * 200)
    ),
    "ask-for-manifests": Kind(Member.attach, tick=ask(lambda member, n: f"replica/manifest/{n}")),
    "ask-for-leases": Kind(Member.attach, tick=ask(lambda member, n: f"lease/{n}")),
    "ask-for-shards": Kind(Member.attach, tick=ask(lambda member, n: f"packet/0/0-{1 + n % 1000}")),
    "put-names": Kind(Member.attach, tick=put(lambda member, n: f"nobody/{n}-" + "x" * 200)),
    "put-trials": Kind(Member.attach, tick=put(lambda member, n: f"trial/{n}", 4 << 20)),
    "put-old-updates": Kind(Member.attach, tick=put(lambda member, n: f"update/{n % 4}")),
    "read-the-base": Kind(Member.attach, tick=read_base),
    "read-nothing": Kind(Member.attach, tick=read_base, reads=False),
    "chatter": Kind(Member.ready, tick=chatter),
    "lie-in-reports": Kind(Member.ready, lie, Member.ready),
    "lie-when-ready": Kind(lambda member: member.say(messages.Ready(max(0, member.round - 1), 1))),
    "new-keys": Kind(comes_anew=True),
    "new-keys-ready": Kind(Member.ready, comes_anew=True),
}


def run(kind: Kind, attack: Attack, members: int, seconds: float) -> None:
    """Be so many members for so long; who is refused comes back with another key."""
    there, until = [Member(attack, n) for n in range(members)], time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.monotonic()
        for at, member in enumerate(there):
            if not member.hear(kind) or (kind.comes_anew and member.session):
                member.close()
                there[at] = Member(attack, member.number)
            elif member.session:
                kind.tick(member)
            if time.monotonic() > until:
                break
        while time.monotonic() < began + TICK_S:  # no sleep: members of each kind compute as much
            pass
    for member in there:
        member.close()


def main(kind: str, asked: dict[str, object]) -> None:
    raise_file_limit()
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    attack = Attack(parse_url(str(asked["url"])), list(asked["sources"]), str(asked.get("events", "")))  # type: ignore[call-overload]
    attack.context.set(zmq.MAX_SOCKETS, 20_000)
    run(KINDS[kind], attack, int(str(asked["members"])), float(str(asked["seconds"])))
    print(json.dumps(attack.did), flush=True)
    os._exit(0)  # thousands of sockets close with the process


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
