"""The tables and plots of RESULTS.md, and the three of the README, from rows of measurements."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

import bench_growth
import quality_cells
import quality_plan
import quality_report
import rivals_work as work
from measured import Row, read
from quality_train import Setting, Size
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
NOTHING = "Not measured yet.\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def prose(*words: str) -> str:
    """A paragraph, or (the first begins with "- ") one point of a list each."""
    if words[0].startswith("- "):
        return "\n".join(textwrap.fill(word, 110, subsequent_indent="  ") for word in words) + "\n"
    return textwrap.fill(" ".join(words), 110) + "\n"


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
        return NOTHING
    ideal = work.GPTJ_TOKENS / work.GPTJ_S
    speeds = [speed for speed in SPEEDS if any(speed in by for by in steps.values())]
    tokens = [
        [name, *(f"{ideal / by[s]:,.0f}" if s in by else "" for s in speeds)] for name, by in steps.items()
    ]
    plotted = {
        name: [(float(s), 1 / by[s]) for s in ("20", "100", "500", "1000") if s in by]
        for name, by in steps.items()
    }
    title = "Share of the time that devices compute"
    (folder / "links.svg").write_text(svg(title, "Mbit/s, each way", plotted, Axis(0, 1, log=False), True))
    return "\n".join(
        [
            prose(
                f"Four peers, {dates(rows)}. A step's compute is fixed (slept), so that compute : FP16",
                "bytes : line is",
                f"that of GPT-J-6B on 8 A100 ({work.GPTJ_S} s and 24 GB a step and machine): a line of",
                "100 Mbit/s there",
                f"is one of {100 * work.MBIT:.3f} Mbit/s here, with {work.RTT:g} ms of round trip. Tokens",
                "a second are",
                f"GPT-J's: 262,144 over a step's time in those units ({ideal:,.0f} where nothing is",
                "waited for).",
            ),
            table(["tokens/s at Mbit/s", *speeds], tokens),
            "Share of the same system's unthrottled speed:\n",
            table(["share at Mbit/s", *speeds], shares(steps, speeds)),
            "Bytes that a peer sends in a step, in those of one FP16 gradient (2 bytes a parameter):\n",
            table(["sent", *speeds], sent(rows, speeds)),
            "How busy this machine's cores were, other programs on it included:\n",
            table(["busy", *speeds], busy(rows, speeds)),
            NOTES,
            "![share of the time that devices compute](measured/links.svg)\n",
        ]
    )


NOTES = prose(
    "- *cocktail* is `cocktail launch` and `cocktail join` with the defaults: packets fill the time "
    "there is, so at 100 and 20 Mbit/s they are smaller (the bytes above); what that costs in loss "
    "is the next section's matter. Its hub has no limit in the first row, as a server has; in the "
    "second its own line is as slow as a peer's.",
    "- *DDP* exchanges while the last of 8 backward passes of a step runs, and is taken to have all "
    "gradients when that one begins: the best it could have.",
    "- *PowerSGD* has rank 1 on matrices 1,024 wide: about the share of the FP16 bytes that rank 5 "
    "has on GPT-J's.",
    "- *DiLoCo*: local steps and one exchange were measured; a row of H steps is H local steps and "
    "one exchange.",
    "- *hivemind* averages gradients while the next step computes; its groups are as it made them.",
    "- Systems that send whole gradients run a smaller model at the same ratios, so that their steps "
    "are waited for.",
)


def shares(steps: dict[str, dict[str, float]], speeds: Sequence[str]) -> list[list[str]]:
    """Of each one's own unthrottled speed."""
    rows = []
    for name, by in steps.items():
        free = by.get("unthrottled")
        rows.append([name, *(shown(free / by[s]) if free and s in by else "" for s in speeds)])
    return rows


def shown(share: float) -> str:
    """Small ones with their digits."""
    return f"{share:.1%}" if share >= 0.01 else f"{share:.2%}"


def sent(rows: Sequence[Row], speeds: Sequence[str]) -> list[list[str]]:
    found = {
        (row["system"], row["speed"]): f"{row['sent'] / (2 * row['parameters']):.4f}"
        for row in rows
        if row["sent"]
    }
    return by_system(found, speeds)


def busy(rows: Sequence[Row], speeds: Sequence[str]) -> list[list[str]]:
    return by_system({(row["system"], row["speed"]): f"{row['busy']:.0%}" for row in rows}, speeds)


def by_system(found: dict[tuple[str, str], str], speeds: Sequence[str]) -> list[list[str]]:
    there = [name for name in SYSTEMS if any(system == name for system, _ in found)]
    return [[name, *(found.get((name, s), "") for s in speeds)] for name in there]


# ---- loss --------------------------------------------------------------------------------------------------

DILOCO = Setting(sample=1.0, keep=1.0, bits=16, staleness=0, local_steps=50, outer_rate=0.7, momentum=0.9)
TIMED = (  # ways of the quality study whose steps were timed, and as which system
    ("all-reduce, FP16 on the wire", quality_plan.REFERENCE.setting, "torch DDP FP16"),
    ("cocktail, K=.2 in 4 bits", quality_plan.COCKTAIL, "cocktail"),
    ("DiLoCo, every 50 steps, FP16", DILOCO, "DiLoCo FP16, H=50"),
)


def loss(folder: Path) -> str:
    found = quality(folder)
    parts = [quality_report.markdown(found, one) for one in quality_plan.TABLES]
    return "\n".join(
        [
            prose(
                "The cells of the quality study (`recipes/quality.jsonl`): held-out loss in nats a byte",
                "at equal tokens,",
                "against bytes. `over all-reduce` is the mean over the seeds that are there.",
            ),
            *(part for part in parts if part),
            *rivals_loss(folder, found),
            prose(
                "**Against wall clock**: 400 steps of it, each as long as a step of the table above, in",
                "hours of GPT-J's steps; at speeds at which cocktail's packets are those of the cell.",
                "hivemind is not in the study; in FP16 it is all-reduce. PowerSGD's ranks are other ones",
                "here than in the table above, so its rows have no hours.",
            ),
            table(["way", "held-out loss", "h at 1000 Mbit/s", "h at 500 Mbit/s"], timed(folder, found)),
        ]
    )


def rivals_loss(folder: Path, found: quality_plan.Found) -> list[str]:
    """The same for ways that the study has no rows of, each at the best rate that was tried."""
    reference, rows = quality_plan.losses(found, quality_plan.REFERENCE.setting), list[list[str]]()
    powersgd = [r for r in read(folder / "powersgd.jsonl") if r["size"] == Size().name and r["seed"] == 1]
    for rank in sorted({row["rank"] for row in powersgd}):
        best = min((row for row in powersgd if row["rank"] == rank), key=lambda row: float(row["loss"]))
        rows.append([f"PowerSGD, rank {rank}", f"{best['ratio']:.0f}x", f"{best['rate']:g}", best["loss"]])
    if tried := quality_plan.losses(found, DILOCO):
        rate = min(tried, key=tried.__getitem__)
        rows.append(["DiLoCo, every 50 steps, FP16", "50x", f"{rate:g}", tried[rate]])
    if not rows or not reference:
        return []
    best_dense = min(reference.values())
    body = [[*words, f"{loss:.4f}", f"{loss / best_dense - 1:+.2%}"] for *words, loss in rows]
    head = ["rival, one seed", "less than FP16", "learning rate", "held-out loss", "over all-reduce"]
    return ["**rivals**\n", table(head, body)]


def quality(folder: Path) -> dict[quality_cells.Cell, quality_plan.Found]:
    """All cells, those of rivals too."""
    return quality_cells.read(QUALITY, Size()) | quality_cells.read(folder / "quality.jsonl", Size())


def timed(folder: Path, found: quality_plan.Found) -> list[list[str]]:
    steps, rows = steps_of(folder), list[list[str]]()
    for name, setting, system in TIMED:
        tried = quality_plan.losses(found, setting)
        if not tried or system not in steps:
            continue
        hours = [
            steps[system].get(s, float("nan")) * work.GPTJ_S * Size().steps / 3600 for s in ("1000", "500")
        ]
        rows.append([name, f"{min(tried.values()):.4f}", *(f"{h:.1f}" if h == h else "" for h in hours)])
    return rows


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
        return NOTHING
    order = list(FAULTS)
    body = [
        [FAULTS[r["fault"]], r["system"], stalled(r), peers_apart(r), lost(r), noted(r)]
        for r in sorted(rows, key=lambda r: (order.index(r["fault"]), SYSTEMS.index(r["system"])))
    ]
    head = ["fault of one peer of four", "system", "seconds lost", "peers apart", "samples lost", ""]
    return "\n".join(
        [
            prose(
                f"{dates(rows)}. Lines of 8 Mbit/s, 1 s of compute a step; rivals have timeouts of 30 s",
                "(hivemind: 5 s a",
                "chunk), as their own defaults would have them wait for half an hour, or for ever.",
            ),
            table(head, body),
            prose(
                "Seconds: the longest time between two steps of the first peer, less an ordinary one.",
                "Apart: further",
                "from the first peer's model than 1 % of what that has moved. Samples of cocktail are",
                "read from its",
                "ledger after the run; of a run that ends for all, the step under way is counted and",
                "nothing before it.",
            ),
        ]
    )


def stalled(row: Row) -> str:
    return "the run ends for all" if row["over"] else f"{row['stalled']:.1f}"


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

KINDS = {
    "peer": "a peer, by parameters",
    "hub": "a hub with 4 peers, by parameters",
    "peers": "a hub, by peers",
}
ASSUMED = prose(
    f"P is parameters, N peers. Fitted to the points up to {bench_growth.FITTED[0]:.0e} parameters and",
    f"{bench_growth.FITTED[1]} peers, by least squares of relative errors, no constant",
    "negative; compared with all points",
    "beyond. Assumed beyond what was measured: one hub owns everything (with shards at peers",
    "its CPU, memory and bytes",
    "are spread over them), packets of the defaults (0.134 bit a parameter), one core of",
    "this machine, memory and disk",
    "as fast as at the sizes measured, no local steps. A hub holds e, 4 bytes a parameter,",
    "and a round's packets up to",
    "a bound; a peer x_i and x'.",
)


def growth(folder: Path) -> str:
    points = read(folder / "growth.jsonl")
    if not points:
        return NOTHING
    parts = [f"A round, {dates(points)}; CPU is of one core, without the gradient.\n"]
    for kind, title in KINDS.items():
        mine = sorted((p for p in points if p["kind"] == kind), key=lambda p: (p["parameters"], p["peers"]))
        if mine:
            parts += [f"**{title}**\n", table(*point_rows(kind, mine))]
    fits = bench_growth.fitted(points)
    parts += ["**What they fit, and what that says of larger swarms**\n", table(*fit_rows(fits)), ASSUMED]
    for kind in ("peer", "hub", "peers"):
        if curves := curves_of(kind, points):
            by = "peers" if kind == "peers" else "parameters"
            (folder / f"growth-{kind}.svg").write_text(svg(f"{KINDS[kind]}: a round", by, curves))
            parts.append(f"![{KINDS[kind]}](measured/growth-{kind}.svg)\n")
    return "\n".join(parts)


def curves_of(kind: str, points: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    by, mine = "peers" if kind == "peers" else "parameters", [p for p in points if p["kind"] == kind]
    names = {"cpu_s": ("CPU-s", 1.0), "memory": ("memory, GB", 1e-9), "up": ("sent, GB", 1e-9)}
    names["bytes"] = "both ways, GB", 1e-9
    curves = {
        name: sorted((float(p[by]), p[what] * scale) for p in mine if what in p)
        for what, (name, scale) in names.items()
    }
    return {name: curve for name, curve in curves.items() if curve}


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
    head = ["quantity", "fit", "off at its points", "off beyond them (parameters, peers)", *large]
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


# ---- joining, packets --------------------------------------------------------------------------------------


def join(folder: Path) -> str:
    rows = sorted(read(folder / "join.jsonl"), key=lambda r: (r["mbit"], r["bytes"]))
    if not rows:
        return NOTHING
    head = ["Mbit/s", "MB fetched", "floor: bytes / line, s", "x' here, s", "of the floor"]
    head += ["first counted round, s", "of it starting Python, s"]
    return "\n".join(
        [
            prose(
                f"`cocktail join` to its first counted round, {dates(rows)}; 40 ms of round trip. The",
                "other peer is",
                "stopped until x' is here, as two machines would not share a processor. Seconds are from",
                "the command",
                "on; those of `x' here` from the welcome.",
            ),
            table(head, [joining(row) for row in rows]),
        ]
    )


def joining(row: Row) -> list[str]:
    floor = row["bytes"] * 8 / (row["mbit"] * 1e6)
    return [
        f"{row['mbit']:g}",
        f"{row['bytes'] / 1e6:.1f}",
        f"{floor:.1f}",
        f"{row['here_s']:.1f}",
        f"{row['here_s'] / floor:.2f}",
        f"{row['counted_s']:.1f}",
        f"{row['start_s']:.1f}",
    ]


def packet(folder: Path) -> str:
    path = folder / "packet.json"
    if not path.exists():
        return NOTHING
    found = json.loads(path.read_text())
    head = [
        "data; p, K, bits",
        "bit/parameter",
        "less than FP16",
        "reference: bit/parameter",
        "less than FP16",
    ]
    head += ["encode, ms", "reference, ms", "energy lost", "reference"]
    body = []
    for r in found["rows"]:
        theirs = r["p"] * (
            1 + r["K"] * (r["bits"] + 16 / 128)
        )  # a bit for each that is visited, scales in FP16
        sizes = [
            f"{r['bits_per_param']:.4f}",
            f"{r['ratio_fp16']:.0f}x",
            f"{theirs:.4f}",
            f"{16 / theirs:.0f}x",
        ]
        times = [f"{r['encode_ms']:.1f}", f"{r['reference_encode_ms']:.1f}"]
        errors = [f"{r['error']:.4f}", f"{r['reference_error']:.4f}"]
        body.append([f"{r['data']}; {r['p']:g}, {r['K']:g}, {r['bits']}", *sizes, *times, *errors])
    return f"{found['date']}, 40 M parameters, one thread.\n\n{table(head, body)}"


# ---- the README's ------------------------------------------------------------------------------------------


def newcomer(folder: Path) -> str:
    """How fast on my line, what if somebody drops out, what does the model lose."""
    steps, fault_rows = steps_of(folder), read(folder / "faults.jsonl")
    speeds = ("1000", "500", "100", "20")
    found = quality(folder)
    ruined = [
        [name, *(in_short(fault_rows, name, fault) for fault in ("kill", "dark", "stop", "late"))]
        for name in SYSTEMS
        if any(row["system"] == name for row in fault_rows)
    ]
    return "\n".join(
        [
            "**How much of my speed is left on such a line?** (`scripts/rivals links`; Mbit/s each",
            "way, as GPT-J-6B's)\n",
            table(["", *speeds], shares(steps, speeds)),
            "**What if one of four drops out?** (`scripts/rivals faults`; seconds lost, peers that",
            "differ afterwards)\n",
            table(["", *(FAULTS[fault] for fault in ("kill", "dark", "stop", "late"))], ruined),
            "**What does the model lose?** (`scripts/bench_quality`; begun: few seeds, a small model)\n",
            quality_report.markdown(found, quality_plan.TABLES[0]).split("\n\n", 1)[-1],
        ]
    )


def in_short(rows: Sequence[Row], system: str, fault: str) -> str:
    for row in rows:
        if row["system"] == system and row["fault"] == fault:
            if fault == "late":
                joined = row.get("joined")
                return "never in" if joined is None else f"in after {joined:.0f} s"
            if row["over"]:
                return "the run ends"
            return f"{row['stalled']:.1f} s, {row['apart'] if row['apart'] is not None else '?'} apart"
    return ""
