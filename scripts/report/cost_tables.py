"""The tables and plots of RESULTS.md on cocktail alone: growth of costs, joining, packets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from scripts.bench import growth as costs
from scripts.report.markdown import NOTHING, dates, section, table
from scripts.report.plot import svg
from scripts.report.rows import Row, read

# ---- growth ------------------------------------------------------------------------------------------------

KINDS = {
    "peer": "a peer, by parameters",
    "hub": "a hub with 4 peers, by parameters",
    "peers": "a hub, by peers",
}


def growth(folder: Path) -> str:
    points = read(folder / "growth.jsonl")
    if not points:
        return NOTHING
    plots = list[str]()
    for kind, title in KINDS.items():
        mine = sorted((p for p in points if p["kind"] == kind), key=lambda p: (p["parameters"], p["peers"]))
        if curves := curves_of(kind, mine):
            by = "peers" if kind == "peers" else "parameters"
            (folder / f"growth-{kind}.svg").write_text(svg(f"{title}: a round", by, curves))
            plots.append(f"![{title}](measured/growth-{kind}.svg)\n")
    return section(
        "growth",
        dates=dates(points), plots="\n".join(plots),
        fits=table(*fit_rows(costs.fitted(points))), parameters=costs.FITTED[0], peers=costs.FITTED[1],
    )  # fmt: skip


def curves_of(kind: str, points: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    by = "peers" if kind == "peers" else "parameters"
    names = {"cpu_s": ("CPU-s", 1.0), "memory": ("memory, GB", 1e-9), "up": ("sent, GB", 1e-9)}
    names["bytes"] = "both ways, GB", 1e-9
    curves = {
        name: sorted((float(p[by]), p[what] * scale) for p in points if what in p)
        for what, (name, scale) in names.items()
    }
    return {name: curve for name, curve in curves.items() if curve}


def fit_rows(fits: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    large = list(costs.LARGE)
    head = ["quantity", "fit", "off at its points", "off beyond them (parameters, peers)", *large]
    body = []
    for fit in fits:
        terms = [f"{v:.3g} {term}".removesuffix(" 1") for term, v in fit["terms"].items() if v]
        beyond = ", ".join(f"{off:+.0%} ({float(p):.0e}, {n})" for p, n, off in fit["beyond"])
        said = [amount(fit["name"], fit["says"][one]) for one in large]
        body.append([fit["name"], " + ".join(terms), f"{fit['inside']:.0%}", beyond, *said])
    return head, body


def amount(name: str, value: float) -> str:
    if name.endswith("CPU-s"):
        return f"{value:,.1f} s"
    return f"{value / 1e9:,.1f} GB" if value >= 1e9 else f"{value / 1e6:,.1f} MB"


# ---- joining, packets --------------------------------------------------------------------------------------


def join(folder: Path) -> str:
    rows = sorted(read(folder / "join.jsonl"), key=lambda r: (r["mbit"], r["bytes"]))
    if not rows:
        return NOTHING
    head = ["Mbit/s", "MB fetched", "floor: bytes / line, s", "x' here, s", "of the floor"]
    head += ["first counted round, s", "of it starting Python, s"]
    return section("join", dates=dates(rows), table=table(head, [joining(row) for row in rows]))


def joining(row: Row) -> list[str]:
    floor = row["bytes"] * 8 / (row["mbit"] * 1e6)
    sizes = [f"{row['mbit']:g}", f"{row['bytes'] / 1e6:.1f}", f"{floor:.1f}"]
    seconds = [f"{row[key]:.1f}" for key in ("here_s", "counted_s", "start_s")]
    return [*sizes, seconds[0], f"{row['here_s'] / floor:.2f}", *seconds[1:]]


def packet(folder: Path) -> str:
    path = folder / "packet.json"
    if not path.exists():
        return NOTHING
    found = json.loads(path.read_text())
    head = ["data; p, K, bits", "bit/parameter", "less than FP16"]
    head += ["reference: bit/parameter", "less than FP16"]
    head += ["encode, ms", "reference, ms", "energy lost", "reference"]
    body = []
    for r in found["rows"]:
        theirs = r["p"] * (1 + r["K"] * (r["bits"] + 16 / 128))  # a bit for each visited, scales in FP16
        ours = r["bits_per_param"], r["ratio_fp16"]
        sizes = [
            cell for bits, less in (ours, (theirs, 16 / theirs)) for cell in (f"{bits:.4f}", f"{less:.0f}x")
        ]
        times = [f"{r['encode_ms']:.1f}", f"{r['reference_encode_ms']:.1f}"]
        errors = [f"{r['error']:.4f}", f"{r['reference_error']:.4f}"]
        body.append([f"{r['data']}; {r['p']:g}, {r['K']:g}, {r['bits']}", *sizes, *times, *errors])
    return section("packet", date=found["date"], table=table(head, body))


# ---- hooks of DDP ------------------------------------------------------------------------------------------


def ddp(folder: Path) -> str:
    rows = read(folder / "ddp_hooks.jsonl")
    head = ["hook", "held-out loss", "kB a rank and step", "ms a step"]
    body = [
        [r["hook"], f"{r['loss']:.4f}", f"{r['bytes'] / 1e3:,.1f}", f"{1e3 * r['step_s']:.0f}"] for r in rows
    ]
    return section("ddp", dates=dates(rows), table=table(head, body)) if rows else NOTHING


# ---- a GPU -------------------------------------------------------------------------------------------------


def gpu(folder: Path) -> str:
    rows = read(folder / "gpu.jsonl")
    if not rows:
        return "Not measured: no GPU has been lent for it yet.\n"
    head = ["stage", "expected", "measured", "seconds", "device"]
    return section("gpu", dates=dates(rows), table=table(head, [gpu_row(row) for row in rows]))


def gpu_row(row: Row) -> list[str]:
    found = ", ".join(f"{key} {value}" for key, value in row["figures"].items())
    return [row["stage"], row["estimate"], found, str(row["seconds"]), row["device"]]
