"""The tables and plots of RESULTS.md, from rows of measurements."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import bench_growth
import quality_cells
import quality_plan
import quality_report
import rivals_work as work
from measured import Row, read
from quality_train import Size
from results_plot import Axis, svg

QUALITY = Path(__file__).resolve().parent.parent / "recipes" / "quality.jsonl"
SPEEDS = ("unthrottled", "1000", "500", "100", "20", "100 down, 20 up")
SYSTEMS = (
    "cocktail",
    "cocktail, the hub on such a line",
    "torch DDP FP32",
    "torch DDP FP16",
    "torch DDP PowerSGD",
    "DiLoCo FP16",
    "hivemind FP16",
    "hivemind 8-bit",
)
LOCAL = (50, 500)  # steps between DiLoCo's exchanges, a row each


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def dates(rows: Sequence[Row]) -> str:
    return ", ".join(sorted({row["date"] for row in rows if "date" in row})) or "never"


# ---- wall clock --------------------------------------------------------------------------------------------


def steps_of(folder: Path) -> dict[str, dict[str, float]]:
    """system -> speed -> how many times its compute a step takes. DiLoCo's: both of its times, by steps."""
    found: dict[str, dict[str, float]] = {}
    for row in read(folder / "links.jsonl"):
        if "exchange_s" not in row:
            found.setdefault(row["system"], {})[row["speed"]] = row["step_s"] / row["compute_s"]
            continue
        for local in LOCAL:
            mean = (row["step_s"] + row["exchange_s"] / local) / row["compute_s"]
            found.setdefault(f"{row['system']}, H={local}", {})[row["speed"]] = mean
    order = [name for system in SYSTEMS for name in (system, *(f"{system}, H={n}" for n in LOCAL))]
    return {name: found[name] for name in order if name in found}


def links(folder: Path) -> str:
    steps, rows = steps_of(folder), read(folder / "links.jsonl")
    if not steps:
        return "Not measured yet.\n"
    ideal = work.GPTJ_TOKENS / work.GPTJ_S
    speeds = [speed for speed in SPEEDS if any(speed in by for by in steps.values())]
    tokens = [
        [name, *(f"{ideal / by[s]:,.0f}" if s in by else "" for s in speeds)] for name, by in steps.items()
    ]
    shares = [
        [
            name,
            *(
                f"{shown(by['unthrottled'] / by[s])}" if s in by and "unthrottled" in by else ""
                for s in speeds
            ),
        ]
        for name, by in steps.items()
    ]
    plotted = {
        name: [(float(s), 1 / by[s]) for s in ("20", "100", "500", "1000") if s in by]
        for name, by in steps.items()
    }
    plot = folder / "links.svg"
    plot.write_text(
        svg(
            "Share of the time that devices compute", "Mbit/s, each way", plotted, Axis(0, 1, log=False), True
        )
    )
    return "\n".join(
        [
            f"Four peers, {dates(rows)}. A step's compute is fixed (slept), so that compute : FP16 bytes :",
            f"line is that of GPT-J-6B on 8 A100 ({work.GPTJ_S} s and 24 GB a step and machine); a",
            "line of 100",
            f"Mbit/s there is one of {100 * work.MBIT:.3f} Mbit/s here. Tokens a second are GPT-J's:",
            "262,144 over",
            f"a step's time in those units ({ideal:,.0f} where nothing is waited for).",
            "",
            table(["tokens/s at Mbit/s", *speeds], tokens),
            "Share of the same system's unthrottled speed:",
            "",
            table(["share at Mbit/s", *speeds], shares),
            "Bytes that a peer sends in a step, in those of one FP16 gradient (2 bytes a parameter):",
            "",
            sent_table(rows, speeds),
            NOTES,
            "![share of the time that devices compute](measured/links.svg)",
            "",
        ]
    )


NOTES = """- *cocktail* is `cocktail launch` and `cocktail join` with the defaults: packets fill the
time there is, so at
  100 and 20 Mbit/s they are smaller (the bytes above); what that costs in loss is the next section's
  matter. Its
  hub has no limit in the first row, as a server has; in the second its own line is as slow as a peer's.
- *DDP* exchanges while the last of 8 backward passes of a step runs, and is taken to have all
  gradients when that
  one begins.
- *PowerSGD* has rank 1 on matrices 1,024 wide: about the share of the FP16 bytes that rank 5 has on GPT-J's.
- *DiLoCo*: local steps and one exchange were measured; rows of H steps are H local steps and one exchange.
- *hivemind* averages gradients while the next step computes.
- Systems that send whole gradients run a smaller model at the same ratios, so that their steps are
  waited for.
"""


def shown(share: float) -> str:
    """Small ones with their digits."""
    return f"{share:.1%}" if share >= 0.01 else f"{share:.2%}"


def sent_table(rows: Sequence[Row], speeds: Sequence[str]) -> str:
    found = {(row["system"], row["speed"]): row["sent"] / (2 * row["parameters"]) for row in rows}
    body = [
        [
            name,
            *(f"{found[name, s]:.4f}" if (name, s) in found and s != "unthrottled" else "" for s in speeds),
        ]
        for name in SYSTEMS
        if any(system == name for system, _ in found)
    ]
    return table(["sent", *speeds], body)


# ---- loss --------------------------------------------------------------------------------------------------

TIMED = {  # rows of the quality study that are a system of the wall clock's
    "all-reduce": ("torch DDP FP16", "all-reduce, FP16 on the wire"),
    "cocktail": ("cocktail", "cocktail, p=.1 K=.2, 4 bits"),
}


def loss(folder: Path) -> str:
    found = quality_cells.read(QUALITY, Size())
    parts = [quality_report.markdown(found, one) for one in quality_plan.TABLES]
    return "\n".join(
        [
            "The cells of the quality study (`recipes/quality.jsonl`): held-out loss in nats a byte",
            "at equal tokens,",
            "against bytes. `over all-reduce` is the mean over the seeds that are there.",
            "",
            *(part for part in parts if part),
        ]
    )


# ---- faults ------------------------------------------------------------------------------------------------


FAULTS = {
    "none": "nothing",
    "kill": "killed in a round",
    "dark": "its line dark for 5 s",
    "stop": "stopped for 60 s",
    "late": "a fifth comes",
}


def faults(folder: Path) -> str:
    rows = read(folder / "faults.jsonl")
    if not rows:
        return "Not measured yet.\n"
    order = list(FAULTS)
    body = [
        [FAULTS[r["fault"]], r["system"], stalled(r), peers_apart(r), lost(r), noted(r)]
        for r in sorted(rows, key=lambda r: (order.index(r["fault"]), SYSTEMS.index(r["system"])))
    ]
    head = ["fault of one peer of four", "system", "seconds lost", "peers apart", "samples lost", ""]
    return "\n".join(
        [
            f"{dates(rows)}. Lines of 8 Mbit/s, 1 s of compute a step; rivals have timeouts of 30 s",
            "(hivemind: 5 s",
            "a chunk).",
            "",
            table(head, body),
            "Seconds: the longest time between two steps of the first peer, less an ordinary one.",
            "Apart: further from",
            "the first peer's model than 1 % of what that has moved. Of cocktail samples are read",
            "from its ledger after",
            "the run.",
            "",
        ]
    )


def stalled(row: Row) -> str:
    if row["over"]:
        return "the run ends for all"
    return f"{row['stalled']:.1f}" if row["stalled"] is not None else ""


def peers_apart(row: Row) -> str:
    if row["apart"] is None:
        return ""
    return f"{row['apart']}" + (
        f" (by up to {row['furthest']:.0%})" if row["apart"] and row["furthest"] else ""
    )


def lost(row: Row) -> str:
    return "not told" if row["lost"] is None else str(row["lost"])


def noted(row: Row) -> str:
    words = [f"an ordinary step takes {row['usual']:.1f} s"]
    if row["fault"] == "late":
        joined = row.get("joined")
        words.append("it is never let in" if joined is None else f"it is in a step after {joined:.1f} s")
    if row.get("back") is not None:
        words.append(f"it is in a round again {row['back']:.1f} s after the end")
    words += [f"`{error}`" for error in row["errors"][:1]]
    return "; ".join(words).replace("|", "\\|")


# ---- growth ------------------------------------------------------------------------------------------------


def growth(folder: Path) -> str:
    points = read(folder / "growth.jsonl")
    if not points:
        return "Not measured yet.\n"
    fits = bench_growth.fitted(points)
    kinds = {
        "peer": "a peer, by parameters",
        "hub": "a hub with 4 peers, by parameters",
        "peers": "a hub, by peers",
    }
    parts = [f"A round, {dates(points)}; CPU is of one core, without the gradient.", ""]
    for kind, title in kinds.items():
        mine = sorted((p for p in points if p["kind"] == kind), key=lambda p: (p["parameters"], p["peers"]))
        if mine:
            parts += [f"**{title}**", "", table(*point_rows(kind, mine))]
    parts += ["**What they fit, and what that says of larger swarms**", "", table(*fit_rows(fits)), ASSUMED]
    for kind in ("peer", "hub"):
        curves = {}
        for what, name in (
            ("cpu_s", "CPU-s"),
            ("memory", "memory, GB"),
            ("up", "sent, GB"),
            ("bytes", "both ways, GB"),
        ):
            scale = 1.0 if what == "cpu_s" else 1e-9
            curves[name] = [
                (p["parameters"], p[what] * scale)
                for p in sorted(points, key=lambda p: float(p["parameters"]))
                if p["kind"] == kind and what in p
            ]
        if any(curves.values()):
            plot = folder / f"growth-{kind}.svg"
            plot.write_text(svg(f"{kind}: a round", "parameters", curves))
            parts += [f"![{kind}: a round](measured/{plot.name})", ""]
    return "\n".join(parts)


def point_rows(kind: str, points: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    by = "peers" if kind == "peers" else "parameters"
    moved = "up" if kind == "peer" else "bytes"
    head = [by, "MB up" if kind == "peer" else "MB up and down", "CPU-s", "memory, MB"]
    return head, [
        [f"{p[by]:,.0f}", f"{p[moved] / 1e6:,.2f}", f"{p['cpu_s']:.3f}", f"{p['memory'] / 1e6:,.0f}"]
        for p in points
    ]


def fit_rows(fits: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    large = list(bench_growth.LARGE)
    head = ["quantity", "fit", "off at its points", "off beyond them", *large]
    body = []
    for fit in fits:
        terms = " + ".join(
            f"{value:.3g} {term}".removesuffix(" 1") for term, value in fit["terms"].items() if value
        )
        beyond = ", ".join(f"{off:+.0%} ({float(p):.0e}, {n})" for p, n, off in fit["beyond"])
        said = [amount(fit["name"], fit["says"][one]) for one in large]
        body.append([fit["name"], terms, f"{fit['inside']:.0%}", beyond, *said])
    return head, body


def amount(name: str, value: float) -> str:
    return f"{value:,.1f} s" if name.endswith("CPU-s") else f"{value / 1e9:,.2f} GB"


ASSUMED = f"""P is parameters, N peers. Fitted to the points up to {bench_growth.FITTED[0]:.0e} parameters and
{bench_growth.FITTED[1]} peers, by least squares of relative errors, no constant negative; compared
with all points
beyond. Assumed beyond what was measured: one hub owns everything (with shards at peers its CPU, memory
and bytes are
spread over them), packets of the defaults (0.134 bit a parameter), one core of this machine, memory
and disk that
are as fast as at the sizes measured, and no local steps. A hub's memory holds the round's packets up
to a bound, and
e, 4 bytes a parameter.
"""


# ---- joining, packets --------------------------------------------------------------------------------------


def joining(row: Row) -> list[str]:
    floor = row["bytes"] * 8 / (row["mbit"] * 1e6)
    return [
        f"{row['mbit']:g}",
        f"{row['bytes'] / 1e6:.1f}",
        f"{floor:.1f}",
        f"{row['here_s']:.1f}",
        f"{row['here_s'] / floor:.2f}",
        f"{row['counted_s']:.1f}" if row.get("counted_s") else "",
        f"{row['start_s']:.1f}",
    ]


def join(folder: Path) -> str:
    rows = sorted(read(folder / "join.jsonl"), key=lambda r: (r["mbit"], r["bytes"]))
    if not rows:
        return "Not measured yet.\n"
    head = ["Mbit/s", "MB fetched", "floor: bytes / line, s", "x' here, s", "of the floor"]
    head += ["first counted round, s", "of it starting Python, s"]
    return "\n".join(
        [
            f"`cocktail join` to its first counted round, {dates(rows)}; 40 ms of round trip; the",
            "other peer is",
            "stopped until x' is here, as two machines would not share a processor. From the command",
            "on; `x' here` is",
            "from the welcome.",
            "",
            table(head, [joining(row) for row in rows]),
        ]
    )


def packet(folder: Path) -> str:
    path = folder / "packet.json"
    if not path.exists():
        return "Not measured yet.\n"
    found = json.loads(path.read_text())
    head = [
        "data, p, K, bits",
        "bit/parameter",
        "less than FP16",
        "the reference's: bit/parameter",
        "less than FP16",
    ]
    head += ["encode, ms", "reference's, ms", "energy lost", "reference's"]
    body = []
    for r in found["rows"]:
        reference = r["p"] * (
            1 + r["K"] * (r["bits"] + 16 / 128)
        )  # a bit for each that is visited, scales in FP16
        body.append(
            [
                f"{r['data']}, {r['p']:g}, {r['K']:g}, {r['bits']}",
                f"{r['bits_per_param']:.4f}",
                f"{r['ratio_fp16']:.0f}x",
                f"{reference:.4f}",
                f"{16 / reference:.0f}x",
                f"{r['encode_ms']:.1f}",
                f"{r['reference_encode_ms']:.1f}",
                f"{r['error']:.4f}",
                f"{r['reference_error']:.4f}",
            ]
        )
    return f"{found['date']}, 40 M parameters, one thread.\n\n{table(head, body)}"
