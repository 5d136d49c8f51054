"""A tree of hubs with 1,000 peers: bytes and CPU of each level, beside the arithmetic of transport/SCALE.md.

    scripts/start scripts.bench.tree                            # 1,000 peers over 32 inner hubs: minutes
    scripts/start scripts.bench.tree --peers 60 --hubs 4 --rounds 3

Root, inner hubs, and peers (in two processes) are processes of their own on this machine, with real sockets,
messages, ledgers and packets; peers compute nothing (bench/hub.py). CPU is read from /proc, so this runs on
Linux only. All levels share this machine's cores, so how long a round takes says nothing.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.bench.hub import RUN, SAME, SEED, Aggregating, cpu, parameters, resident, run_peers
from scripts.swarms.lab import parser
from scripts.swarms.processes import Line, Process, divided, run_role, say, started
from transport import Hub, Ledger, LinkLimits, PeerIdentity, PeerLink, RunKeys, RunSettings
from transport.hub import keep_freed_memory
from transport.protocol import Event, RoundCommitted, Warned, messages
from transport.tree import InnerHub, LeasedSample
from transport.tree.parent_leases import TOTAL

SAMPLE, TOKENS = 4096, 10  # bytes and trained tokens of each sample
WARM = 2  # rounds before the clock starts
TRANSPORT = 1.2, 1.6  # CPU-s a GB, of SCALE.md
SUM = 3.1  # ms a MB, of SCALE.md: decoding and adding

MOST = 1 << 30  # bytes of an object: the load is what is measured here, and no peer lies


def settings_of(asked: Line, samples: int, peers: int) -> RunSettings:
    here = {"min_peers": peers, "first_peers": peers, "first_s": 600.0, "start_timeout": 600.0}
    long = {"peer_timeout": 300.0, "max_update": 2 * asked["size"] + (1 << 20), "linger_s": 1.0}
    return RunSettings(RUN, "{}", "00", samples, asked["peers"], **here, **long)


class RootWork(Aggregating):
    """The root's delegate, whose leases have each sample."""

    def samples(self, ids: Sequence[int]) -> bytes:
        return bytes(SAMPLE * len(ids))


class Work:
    """The model side of an inner hub without a model: real packets, sums and logs."""

    def __init__(self, size: int, folder: Path) -> None:
        from cocktail_cli.subtree import InnerAggregator
        from compress import Cocktail
        from recipes.algorithm import Aggregator

        self.residual = InnerAggregator(Aggregator(parameters(size), Cocktail(), SEED), folder / "inner")

    def unpack(self, lease: bytes) -> list[LeasedSample]:
        return [LeasedSample(lease[i : i + SAMPLE], TOKENS, 1.0) for i in range(0, len(lease), SAMPLE)]

    def pack(self, samples: Sequence[LeasedSample]) -> bytes:
        return b"".join(sample.data for sample in samples)

    def fingerprint(self, round: int) -> int:
        return SAME

    def object(self, name: str) -> bytes:
        raise KeyError(name)


# ---- the programs ------------------------------------------------------------------------------------------


def tell(hub: str, event: Event | None) -> None:
    """Print what a round has moved between this hub and those below it."""
    if isinstance(event, RoundCommitted):
        up, down = sum(event.up.values()), sum(event.down.values())
        sizes = {
            "packets": len(event.accepted),
            "packet": max(event.packets.values()),
            "aggregate": event.size,
        }
        say("round", hub=hub, round=event.round, up=up, down=down, **sizes)
    elif isinstance(event, Warned):
        say("told", text=f"{hub}: {event.message}")


def run_root(asked: Line) -> None:
    samples = 1 << 40
    with Ledger(Path(asked["folder"]) / "root", run=RUN, samples=samples) as ledger:
        settings = settings_of(asked, samples, asked["hubs"])
        hub = Hub(
            ("127.0.0.1", 0), RunKeys(**asked["keys"]), ledger, settings, RootWork(asked["size"], ledger)
        )
        signal.signal(signal.SIGTERM, lambda *_: hub.stop(now=True))
        hub.start()
        say("listening", port=hub.port)
        for event in hub.events():
            tell("root", event)


def run_inner(asked: Line) -> None:
    keys, ports = RunKeys(**asked["keys"]), []
    for number in range(asked["hubs"]):
        hub = inner_hub(asked, keys, number)
        ports.append(hub.hub.port)
        follow = threading.Thread(
            target=lambda h=hub, n=number: [tell(f"h{n:02}", e) for e in h.hub.events()]
        )
        follow.daemon = True
        follow.start()
        hub.start()
    say("listening", ports=ports)
    signal.pause()


class OneSize:
    """Bounds every object by the size of the load's packets (transport.peer.SizeBounds)."""

    def __init__(self, most: int) -> None:
        self._most = most  # bytes

    def lease(self, opened: messages.Round) -> int:
        return self._most

    def audit(self, opened: messages.Round) -> int:
        return self._most

    def packet(self, round: int, shards: Collection[int] | None = None) -> int:
        return self._most

    def handoff(self) -> int:
        return self._most


def inner_hub(asked: Line, keys: RunKeys, number: int) -> InnerHub:
    """Make an inner hub; every hub of the tree has the same keys."""
    folder = Path(asked["folder"]) / f"h{number:02}"
    peers = len(range(number, asked["peers"], asked["hubs"]))
    link = PeerLink(
        keys.url("127.0.0.1", asked["port"], RUN), PeerIdentity(f"h{number:02}"), LinkLimits(flows=1)
    )
    link.connect(60.0)
    link.bounds = OneSize(MOST)
    ledger, work = Ledger(folder, run=RUN, samples=TOTAL), Work(asked["size"], folder)
    settings = settings_of(asked, TOTAL, peers)
    return InnerHub(link, ledger, work, lambda me: Hub(("127.0.0.1", 0), keys, ledger, settings, me))


# ---- the measurement ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """The load of a measurement."""

    peers: int = 1000
    hubs: int = 32
    megabytes: float = 0.05  # of a packet, about
    rounds: int = 10  # measured ones
    processes: int = 2  # that the peers are in


def measure(load: Load) -> None:
    size = round(load.megabytes * 1e6)
    with tempfile.TemporaryDirectory() as folder, started("scripts.bench.tree") as start:
        asked = {"keys": asdict(RunKeys.generate()), "peers": load.peers, "hubs": load.hubs, "size": size}
        asked |= {"folder": folder, "work": "owner"}
        root = start("root", **asked)
        asked["port"] = root.until("listening", timeout=120)["port"]
        inner = start("inner", **asked)
        asked["ports"] = inner.until("listening", timeout=300)["ports"]
        parts = divided(load.peers, load.processes)
        watch(load, [root, inner, *(start("peers", **asked, first=p.start, count=len(p)) for p in parts)])


def watch(load: Load, processes: Sequence[Process]) -> None:
    """Measure the rounds after the first few, and print the table."""
    root, inner = processes[:2]
    root.until("round", WARM, timeout=900)
    before = [cpu(Path(f"/proc/{p.pid}/stat")) for p in processes]
    root.until("round", WARM + load.rounds, timeout=900)
    used = [cpu(Path(f"/proc/{p.pid}/stat")) - b for p, b in zip(processes, before, strict=True)]
    above = root.heard("round")[WARM : WARM + load.rounds]
    rounds = {line["round"] for line in above}
    below = [line for line in inner.heard("round") if line["round"] in rounds]
    s = sum(line["packet"] for line in above) / len(above) / 1e6
    print(
        f"{load.peers} peers over {load.hubs} inner hubs, {len(rounds)} rounds, packets of {s:.3f} MB, ",
        end="",
    )
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}\n")
    print("| a hub, a round | packets | MB in | MB out | arithmetic, each way | CPU ms | arithmetic |")
    print("|---" * 7 + "|")
    show("root", above, s, used[0] / len(rounds), 1)
    show(f"{load.hubs} inner hubs, each", below, s, used[1] / len(rounds), load.hubs)
    peers = 1000 * sum(used[2:]) / len(rounds) / load.peers
    memory = [round(resident(process.pid)) for process in processes]
    print(f"\npeers: {peers:.1f} ms of CPU each; MB resident: {memory[0]}, {memory[1]}, {memory[2:]}")
    for line in [*root.heard("told"), *inner.heard("told")][:10]:
        print("told:", line["text"])


def show(name: str, lines: Sequence[Line], s: float, seconds: float, hubs: int) -> None:
    """Print the row of a level. An inner hub also sends a packet up, and fetches one."""
    many = len(lines)
    packets, up, down = (sum(line[key] for line in lines) / many for key in ("packets", "up", "down"))
    own = 0.0 if hubs == 1 else s
    gigabytes = 2 * (packets * s + own) / 1000
    least, most = (1000 * rate * gigabytes + SUM * packets * s for rate in TRANSPORT)
    print(f"| {name} | {packets:.1f} | {up / 1e6 + own:.2f} | {down / 1e6 + own:.2f} ", end="")
    print(f"| {packets * s + own:.2f} | {1000 * seconds / hubs:.0f} | {least:.0f} to {most:.0f} |")


def main() -> None:
    asked, usual = parser(__doc__), Load()
    asked.add_argument("--peers", type=int, default=usual.peers)
    asked.add_argument("--hubs", type=int, default=usual.hubs, help="inner hubs")
    asked.add_argument("--megabytes", type=float, default=usual.megabytes, help="of a packet, about")
    asked.add_argument("--rounds", type=int, default=usual.rounds, help="measured ones")
    asked.add_argument("--processes", type=int, default=usual.processes, help="that the peers are in")
    measure(Load(**vars(asked.parse_args())))


if __name__ == "__main__":
    keep_freed_memory()  # as `cocktail launch` does
    run_role({"root": run_root, "inner": run_inner, "peers": run_peers}, main)
