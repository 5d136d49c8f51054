"""The bytes of a hub whose rounds take some of its peers (`turns.members_per_round`), beside rounds of all.

    scripts/start scripts.bench.turns --peers 256 --members 32 --rounds 240

Two runs of the whole hub, with peers in other processes and real messages; the first packet is taken for the
aggregate. Peers that wait fetch nothing. One that becomes a member fetches every packet that it has missed;
a real one takes a snapshot where that is smaller, as it is after some 200 packets. Bytes are those of
packets, counted at the peers.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import asdict

import zmq

from scripts.bench.hub import CHUNK, SAME, Peer, Wires
from scripts.swarms.lab import parser
from scripts.swarms.processes import Line, Process, divided, program, run_role, say, started
from transport import RunKeys
from transport.protocol import messages as m
from transport.protocol.message_codec import decode_to_peer


class Member(Peer):
    """A peer that fetches the packets it has missed when a round, or a call, needs them."""

    def __init__(self, wires: Wires, run: RunKeys, number: int, packets: list[bytes]) -> None:
        self.has, self.sizes = 0, dict[int, int]()  # packets it has; sizes of those after
        self.member, self.called = -1, -1  # newest round as a member; of a call
        self.up = self.down = 0
        super().__init__(wires, run, number, packets)

    def came(self, frames: list[zmq.Frame]) -> None:
        message = decode_to_peer(frames[0].buffer)
        if isinstance(message, m.Data) and message.name.startswith("packet/"):
            self.down += len(frames[1].buffer)
        if isinstance(message, m.Committed):
            self.sizes[message.round] = message.size
            if message.round == self.member:
                self.fetch(message.round + 1)
        elif isinstance(message, m.Round) and not message.exchange:
            self.called = message.round
            self.fetch(message.round)
            self.turn()
        else:
            if isinstance(message, m.Round):
                self.member = message.round
                self.fetch(message.round)
            super().came(frames)

    def fetch(self, stop: int) -> None:
        for round in range(self.has, stop):
            count = -(-self.sizes.pop(round) // CHUNK)
            for i in range(count):
                self.say(m.Get(f"packet/{round}", i, CHUNK), self.bulk)
            self.missing += count
        self.has = max(self.has, stop)

    def turn(self) -> None:
        if self.called >= 0 and not self.missing:
            self.say(m.Ready(self.has, SAME))
            self.called = -1
        if self.opened is not None and not self.missing:
            self.up += len(self.packets[0])
        super().turn()


def run_peers(asked: Line) -> None:
    keys, packets = RunKeys(**asked["keys"]), [os.urandom(asked["size"]) for _ in range(8)]
    wires = Wires(asked["ports"], keys.public)
    peers = [Member(wires, keys, asked["first"] + number, packets) for number in range(asked["count"])]
    while not all(peer.over for peer in peers):
        wires.turn()
    say("bytes", up=sum(peer.up for peer in peers), down=sum(peer.down for peer in peers))
    os._exit(0)


def measure(peers: int, members: int, rounds: int, size: int) -> Line:
    """Run to the end. Returns the packets' bytes up and down, and who took part."""
    with tempfile.TemporaryDirectory() as folder, started("scripts.bench.turns") as start:
        asked = {"keys": asdict(RunKeys.generate()), "peers": peers, "members": members, "work": "relay"}
        asked |= {"folder": folder, "size": size, "samples": rounds * members}
        hub = Process(program("scripts.bench.hub", "hub", asked))
        try:
            asked["ports"] = [hub.until("listening")["port"]]
            mine = [start("peers", **asked, first=part.start, count=len(part)) for part in divided(peers, 2)]
            said = [process.until("bytes", timeout=3600) for process in mine]
            hub.end()
        finally:
            hub.kill()
    told = hub.heard("round")
    found = {"rounds": len(told), "packets": sum(row["packets"] for row in told)}
    found["peers"] = len({peer for row in told for peer in row["of"]}) or peers
    return found | {way: sum(one[way] for one in said) for way in ("up", "down")}


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--peers", type=int, default=256)
    asked.add_argument("--members", type=int, default=32)
    asked.add_argument("--rounds", type=int, default=240)
    asked.add_argument("--kilobytes", type=float, default=10.0, help="of a packet")
    args = asked.parse_args()
    print("| members of a round | rounds | packets up | peers that took part | MB up | MB down |")
    print("|---" * 6 + "|")
    rows = []
    for members in (args.peers, args.members):
        begun = time.monotonic()
        row = measure(args.peers, members, args.rounds, round(1000 * args.kilobytes))
        rows.append(row)
        sizes = f"{row['up'] / 1e6:.1f} | {row['down'] / 1e6:.1f}"
        print(f"| {members} | {row['rounds']} | {row['packets']} | {row['peers']} | {sizes} |", flush=True)
        print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr)
    parts = [rows[0][way] / rows[1][way] for way in ("up", "down")]
    print(f"\nrounds of all carry {parts[0]:.1f} times as much up, {parts[1]:.1f} times as much down")


if __name__ == "__main__":
    run_role({"peers": run_peers}, main)
