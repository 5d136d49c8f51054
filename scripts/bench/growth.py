"""Bytes, CPU-seconds and memory of a round, at a peer and at the hub, against model size and number of peers.

    scripts/rivals growth                       all points, about ten minutes and 10 GB of memory
    scripts/rivals growth --largest 1e8         none beyond
    scripts/rivals growth --only peers          points of one kind: peer, hub, peers
    scripts/rivals growth --show                fits and what they say of larger swarms

peer     what a peer does in a round beside its gradient: encode, apply, fingerprint. Its vectors are real and
         its updates heavy-tailed, as those of a run; there is no model. Memory: x_i, x', what a round needs
hub      the hub of hub.py with the owner of a real run and four peers that speak the protocol, by size
peers    the same hub by number of peers, at 15 M parameters

Each quantity is a straight line in what it must grow with (FITS), fitted by least squares of relative errors
to the small points (up to FITTED parameters and peers; a hub's memory to 1e8) and compared with those
beyond. A point is a line of JSON in --out, and replaces the older one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scripts.bench import hub
from scripts.report import rows
from scripts.report.rows import Row as Point
from scripts.swarms.lab import parser
from scripts.swarms.processes import status_bytes

SIZES = (1e6, 3e6, 1e7, 3e7, 1e8, 3e8, 1e9)
PEERS = (2, 4, 8, 16, 32, 64)
AT, WITH = 15e6, 4  # parameters of the points by peers; peers of the points by size
FITTED = 3e7, 16  # points up to here make the fit
ROUNDS = 3
FULL = 3e7  # parameters
HUB_ROUNDS = 6  # at each size as many: some are kept for those who catch up


# ---- a peer ------------------------------------------------------------------------------------------------


def measure_peer(parameters: int) -> Point:
    """Measure it, in a process of its own."""
    import torch

    from compress import Cocktail
    from recipes.algorithm import GlobalModel, Worker, warm_up_codec

    torch.set_num_threads(1)
    warm_up_codec(Cocktail(), parameters)
    before = status_bytes("VmRSS")
    x, generator = torch.zeros(parameters), torch.Generator().manual_seed(1)
    for start in range(0, parameters, 1 << 20):  # in pieces, for the memory
        piece = x[start : start + (1 << 20)]
        piece.normal_(generator=generator).mul_(1e-4)
        piece.div_(torch.rand(len(piece), generator=generator).add_(0.05))
    worker = Worker(x, GlobalModel(torch.zeros(parameters), Cocktail(), seed=1))
    sizes, spent = list[int](), list[float]()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    for _ in range(1 + ROUNDS):
        began = time.process_time()
        sent = worker.start()
        worker.finish(sent.packet, sent)
        spent.append(time.process_time() - began)
        sizes.append(len(sent.packet))
    memory = status_bytes("VmHWM") - before
    return {"up": sum(sizes[1:]) / ROUNDS, "cpu_s": sum(spent[1:]) / ROUNDS, "memory": memory}


# ---- the hub -----------------------------------------------------------------------------------------------


def measure_hub(parameters: int, peers: int, folder: str | None) -> Point:
    load = hub.Load(peers, parameters * hub.BITS / 8e6, rounds=HUB_ROUNDS, processes=1, folder=folder)
    row = hub.measure("owner", load)
    gigabytes = row.mb_s / row.rounds_s / 1e3
    return {"bytes": 1e9 * gigabytes, "cpu_s": row.hub_cpu * gigabytes, "memory": 1024**2 * row.peak}


# ---- what it grows with ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """A sum of these terms, each times a constant that is not negative."""

    what: str
    where: tuple[str, ...]  # kinds of points
    terms: tuple[str, ...]
    up_to: float = FITTED[0]  # parameters of the points that make it

    def row(self, point: Point) -> list[float]:
        p, n = float(point["parameters"]), float(point["peers"])
        known = {"1": 1.0, "P": p, "N": n, "N P": n * p, f"min(P, {FULL:.0e})": min(p, FULL)}
        return [known[term] for term in self.terms]

    def constants(self, points: list[Point]) -> list[float]:
        rows = np.array([self.row(point) for point in points])
        values = np.array([float(point[self.what]) for point in points])
        terms = list(range(len(self.terms)))
        while True:  # a term whose constant would be negative is none
            solved = np.linalg.lstsq(rows[:, terms] / values[:, None], np.ones(len(values)), rcond=None)[0]
            if (solved >= 0).all():
                found = dict(zip(terms, solved, strict=True))
                return [float(found.get(i, 0.0)) for i in range(len(self.terms))]
            terms.remove(terms[int(solved.argmin())])

    def at(self, constants: list[float], point: Point) -> float:
        return float(np.dot(constants, self.row(point)))


FITS = {
    "peer, bytes up": Fit("up", ("peer",), ("1", "P")),
    "peer, CPU-s": Fit("cpu_s", ("peer",), ("1", "P")),
    "peer, memory": Fit("memory", ("peer",), ("1", "P")),
    "hub, bytes": Fit("bytes", ("hub", "peers"), ("N", "N P")),
    # A packet's cost is laid to its bytes alone: points by peers are of one size, which tells no fixed part.
    "hub, CPU-s": Fit("cpu_s", ("hub", "peers"), ("1", "P", "N P")),
    # What a hub keeps beside e has a bound, which is reached at about FULL parameters.
    "hub, memory": Fit("memory", ("hub", "peers"), ("1", "P", f"min(P, {FULL:.0e})", "N"), 1e8),
}
LARGE: dict[str, Point] = {
    "20.6 B parameters, 8 peers": {"parameters": 20.6e9, "peers": 8},
    "20.6 B parameters, 64 peers": {"parameters": 20.6e9, "peers": 64},
    "15 M parameters, 1,000 peers": {"parameters": 15e6, "peers": 1000},
    "20.6 B parameters, 1,000 peers": {"parameters": 20.6e9, "peers": 1000},
}


def small(point: Point, up_to: float = FITTED[0]) -> bool:
    return bool(point["parameters"] <= up_to and point["peers"] <= FITTED[1])


def fitted(points: list[Point]) -> list[Point]:
    """Fit each quantity: its constants, its errors inside and beyond its points, its word on large swarms."""
    found = []
    for name, fit in FITS.items():
        mine = [p for p in points if p["kind"] in fit.where]
        if len(inner := [p for p in mine if small(p, fit.up_to)]) <= len(fit.terms):
            continue
        constants = fit.constants(inner)
        beyond = [(p, fit.at(constants, p) / p[fit.what] - 1) for p in mine if not small(p, fit.up_to)]
        found.append(
            {
                "name": name,
                "terms": dict(zip(fit.terms, constants, strict=True)),
                "inside": max(abs(fit.at(constants, p) / p[fit.what] - 1) for p in inner),
                "beyond": [[p["parameters"], p["peers"], off] for p, off in beyond],
                "says": {large: fit.at(constants, p) for large, p in LARGE.items()},
            }
        )
    return found


# ---- points ------------------------------------------------------------------------------------------------


def points_of(largest: float) -> list[tuple[str, int, int]]:
    sizes = [int(size) for size in SIZES if size <= largest]
    by_size = [(kind, size, 1 if kind == "peer" else WITH) for kind in ("peer", "hub") for size in sizes]
    return [*by_size, *(("peers", int(AT), peers) for peers in PEERS)]


def main() -> None:
    kinds = ["peer", "hub", "peers"]
    asked = parser(__doc__)
    asked.add_argument("--largest", type=float, default=SIZES[-1])
    asked.add_argument("--only", nargs="+", default=kinds, choices=kinds)
    asked.add_argument("--folder", help="where ledgers are; the system's folder for temporary files")
    asked.add_argument("--out", type=Path, default=rows.FOLDER / "growth.jsonl")
    asked.add_argument("--show", action="store_true")
    asked.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)
    args = asked.parse_args()
    if args.inside:
        kind, parameters, peers = args.inside[0], int(args.inside[1]), int(args.inside[2])
        found = measure_peer(parameters) if kind == "peer" else measure_hub(parameters, peers, args.folder)
        print(json.dumps(found))
        return
    for kind, parameters, peers in [] if args.show else points_of(args.largest):
        key = {"kind": kind, "parameters": parameters, "peers": peers}
        if kind not in args.only:
            continue
        own = [sys.executable, "-m", "scripts.bench.growth", "--inside", kind, str(parameters), str(peers)]
        own += ["--folder", args.folder] if args.folder else []
        done = subprocess.run(own, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{key}: {done.stderr}")
        found = key | json.loads(done.stdout.splitlines()[-1]) | {"date": time.strftime("%Y-%m-%d")}
        rows.keep(args.out, found, tuple(key))
        print(json.dumps(found), flush=True)
    for fit in fitted(rows.read(args.out)):
        print(json.dumps(fit))


if __name__ == "__main__":
    main()
