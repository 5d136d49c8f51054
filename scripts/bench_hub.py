"""What one hub carries, and where its time goes, beside raw ZeroMQ with CURVE that moves the same bytes.

    python scripts/bench_hub.py --peers 64 --rounds 100           on two cores, three minutes
    python scripts/bench_hub.py --peers 256 --megabytes 0.25
    python scripts/bench_hub.py --only relay --rounds 1000        does its memory grow?

Three rows, each hub and peers in the same processes on this machine:

raw      a ROUTER and a DEALER for each peer: a packet up in pieces of 256 KiB, the same down, nothing else
relay    the hub, its ledger and the whole protocol; its owner takes the first packet for the aggregate
owner    the hub with the owner of a real run: decodes, adds and encodes, keeps its books

`of raw` compares MB/s, and CPU-s a GB, with the raw row above it; where other programs run beside it, MB/s
say little. Rows can be had several times: --only raw,relay,raw,relay. CPU is read from /proc, by thread
for the hub; so it runs on Linux only. What a real peer computes beside the protocol (its packet, the hash of
what it fetched) is not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from transport import RunKeys

SWARM = Path(__file__).resolve().with_name("hub_swarm.py")
WARM = 3  # rounds before the clock starts: connections, a compiler, files
TICKS = os.sysconf("SC_CLK_TCK")
PARTS = {  # of the hub's threads, by the beginning of their names
    "cocktail-hub": "I/O",
    "cocktail-opener": "open",
    "cocktail-commit": "commit",
    "cocktail-reader": "read",
    "ZMQbg": "ZeroMQ",
}


class Process:
    """One of hub_swarm.py's, and what it said."""

    def __init__(self, role: str, asked: dict[str, Any]) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(SWARM), role, json.dumps(asked)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.pid = self._process.pid
        self.said: list[dict[str, Any]] = []
        self.changed = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self.changed:
                self.said.append(json.loads(line))
                self.changed.notify_all()
        self._process.wait()  # so that whoever is told now finds it ended
        with self.changed:
            self.changed.notify_all()

    def until(self, kind: str, count: int = 1, timeout: float = 600.0) -> dict[str, Any]:
        """The `count`-th line of this kind, waited for."""

        def there() -> bool:
            return (
                len([s for s in self.said if s["kind"] == kind]) >= count or self._process.poll() is not None
            )

        with self.changed:
            self.changed.wait_for(there, timeout)
            found = [s for s in self.said if s["kind"] == kind]
        if len(found) < count:
            raise SystemExit(f"waited for {kind} {count}; the last it said: {self.said[-1:]}")
        return found[count - 1]

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(15.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# ---- what the kernel knows ---------------------------------------------------------------------------------


def cpu(stat: Path) -> float:
    """Seconds of CPU of a process or a thread so far; 0 where it is gone."""
    try:
        fields = stat.read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def threads(pid: int, names: dict[str, str]) -> Counter[str]:
    """Seconds of CPU so far by what the threads are for."""
    spent: Counter[str] = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name = names.get(task.name) or (task / "comm").read_text()
        except OSError:
            continue
        part = next((part for start, part in PARTS.items() if name.startswith(start)), "other")
        spent[part] += cpu(task / "stat")
    return spent


def memory(pid: int) -> dict[str, float]:
    """MB resident now and at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return {"now": int(values["VmRSS"]) / 1024, "peak": int(values["VmHWM"]) / 1024}


# ---- a row -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Of the measured rounds."""

    rounds_s: float
    mb_s: float  # payload, both directions
    hub_cpu: float  # CPU-s a GB of payload
    all_cpu: float
    parts: dict[str, float]  # ms of CPU a round of the hub's threads, and of the peers
    peak: float  # MB
    grown: dict[int, float]  # MB resident after so many rounds
    packets: float  # that a round had


def measure(kind: str, args: argparse.Namespace) -> Row:
    size, keys = round(args.megabytes * 1e6), asdict(RunKeys.generate())
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        asked = {"keys": keys, "peers": args.peers, "size": size, "folder": folder, "work": kind}
        hub = Process("raw" if kind == "raw" else "hub", asked)
        started = [hub]
        try:
            port = hub.until("listening")["port"]
            for part in range(args.processes):
                first, last = (args.peers * n // args.processes for n in (part, part + 1))
                mine = asked | {"port": port, "first": first, "count": last - first}
                started.append(Process("raws" if kind == "raw" else "peers", mine))
            return watch(started, args)
        finally:
            for process in started:
                process.end()


def watch(started: Sequence[Process], args: argparse.Namespace) -> Row:
    """The rounds after the first few."""
    hub = started[0]
    names, grown = hub.until("threads")["names"], {}
    first = hub.until("round", WARM)
    before, parts = [cpu(Path(f"/proc/{p.pid}/stat")) for p in started], threads(hub.pid, names)
    for at in [n for n in (10, 100, 1000) if n < args.rounds] + [args.rounds]:
        last = hub.until("round", WARM + at)
        grown[at] = memory(hub.pid)["now"]
    used = [cpu(Path(f"/proc/{p.pid}/stat")) - b for p, b in zip(started, before, strict=True)]
    spent = threads(hub.pid, names)
    spent.subtract(parts)
    spent["rest"] = used[0] - sum(spent.values())  # threads that live for one sum; what ticks round off
    rounds = [s for s in hub.said if s["kind"] == "round"][WARM : WARM + args.rounds]
    seconds, gigabytes = last["t"] - first["t"], sum(r["up"] + r["down"] for r in rounds) / 1e9
    split = {part: 1000 * s / len(rounds) for part, s in spent.items()}
    split["peers"] = 1000 * sum(used[1:]) / len(rounds)
    return Row(
        len(rounds) / seconds,
        1000 * gigabytes / seconds,
        used[0] / gigabytes,
        sum(used) / gigabytes,
        split,
        memory(hub.pid)["peak"],
        grown,
        sum(r["packets"] for r in rounds) / len(rounds),
    )


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--peers", type=int, default=64)
    asked.add_argument("--megabytes", type=float, default=1.0, help="of a packet, about")
    asked.add_argument("--rounds", type=int, default=100, help="measured ones")
    asked.add_argument("--processes", type=int, default=2, help="that the peers are in")
    asked.add_argument("--only", default="raw,relay,owner", help="rows, by name")
    asked.add_argument("--folder", help="where the ledgers are; the system's folder for temporary files")
    args = asked.parse_args()
    print(f"{args.peers} peers in {args.processes} processes, packets of {args.megabytes:g} MB, ", end="")
    print(f"{args.rounds} rounds, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before\n")
    print("| | rounds/s | MB/s | CPU-s/GB: hub | all | of raw: MB/s | CPU | peak MB | MB after rounds |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    raw: Row | None = None
    rows: list[tuple[str, Row]] = []
    for kind in args.only.split(","):
        row = measure(kind, args)
        rows.append((kind, row))
        raw = row if kind == "raw" else raw
        share = f"{row.mb_s / raw.mb_s:.0%} | {raw.all_cpu / row.all_cpu:.0%}" if raw else "|"
        grown = ", ".join(f"{mb:.0f} ({n})" for n, mb in row.grown.items())
        costs = f"{row.hub_cpu:.2f} | {row.all_cpu:.2f} | {share}"
        rates = f"{row.rounds_s:.2f} | {row.mb_s:.0f}"
        print(f"| {kind} | {rates} | {costs} | {row.peak:.0f} | {grown} |", flush=True)
    print("\nms of CPU a round:")
    for kind, row in rows:
        parts = ", ".join(f"{part} {ms:.0f}" for part, ms in sorted(row.parts.items()) if ms >= 0.5)
        print(f"  {kind}: {parts}; a round of {row.packets:g} packets took {1000 / row.rounds_s:.0f} ms")


if __name__ == "__main__":
    begun = time.monotonic()
    main()
    print(f"\n{time.monotonic() - begun:.0f} s")
