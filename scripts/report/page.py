"""scripts/RESULTS.md, and the README's tables, from the rows in scripts/measured.

    scripts/results                write it again from the rows that are there
    scripts/results --measure      measure everything first: some hours of a machine that does nothing else
    scripts/results --commands     what that would run

A figure that was not measured is an empty cell, never a guess.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts import ROOT
from scripts.report import cost_tables as costs
from scripts.report import rival_tables as tables
from scripts.report.rows import FOLDER
from scripts.swarms.lab import parser

PAGE = ROOT / "scripts" / "RESULTS.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- by scripts/results -->", "<!-- to here -->"
COMMANDS = {
    "links": ["scripts/rivals links"],
    "faults": ["scripts/rivals faults"],
    "loss": [
        "scripts/bench_quality --results recipes/quality.jsonl --workers 2",
        "scripts/bench_quality --results recipes/quality.jsonl --steps 3200 --rates 4e-3 --seeds 1 2 3 "
        "--cell peers=0",
        "scripts/bench_quality --results recipes/quality.jsonl --steps 3200 --rates 8e-3 --seeds 1 2 3 "
        "--cell sample=0.129,bits=1,staleness=0,local_steps=8,outer_rate=0,error_decay=0.8,beta1=0.5",
        "scripts/bench_quality --results scripts/measured/quality.jsonl --rates 1e-3 2e-3 4e-3 8e-3 "
        "--cell sample=1,keep=1,bits=16,staleness=0,local_steps=50,outer_rate=0.7,momentum=0.9",
        "scripts/rivals powersgd",
        "scripts/bench_quality --results scripts/measured/quality.jsonl --rates 2e-3 --seeds 2 3 "
        "--cell sample=1,keep=1,bits=16,staleness=0,local_steps=50,outer_rate=0.7,momentum=0.9",
        "scripts/rivals powersgd --ranks 1 --rates 2e-3 --seeds 2 3",
        "scripts/rivals powersgd --ranks 4 --rates 4e-3 --seeds 2 3",
    ],
    "growth": ["scripts/rivals growth"],
    "join": ["scripts/rivals join"],
    "packet": ["scripts/rivals packet"],
}
SECTIONS: Sequence[tuple[str, str, Callable[[Path], str]]] = (
    ("links", "Wall clock over shaped lines", tables.links),
    ("loss", "Loss, bytes and time", tables.loss),
    ("faults", "Faults", tables.faults),
    ("growth", "How costs grow", costs.growth),
    ("join", "Time to join", costs.join),
    ("packet", "The packet, beside the reference's", costs.packet),
)
GPU = """## On a GPU

Not measured: no GPU has been lent for it. The command is `cocktail bench compress --params 6.05e9 --device
cuda`.
"""


def machine() -> str:
    """Describe this machine in a line."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = names[0].split(":", 1)[1].strip() if names else platform.processor()
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores ({cpu}), {gigabytes:.0f} GB, {system}"


def page(folder: Path) -> str:
    """Write the whole page."""
    head = [
        "# Results: side by side with what one would take instead",
        "",
        f"Written by `scripts/results` on {time.strftime('%Y-%m-%d')} from `scripts/measured/`.",
        f"Machine: {machine()}.",
        "Each section begins with the command that measures it again, and has the dates of its measurements.",
        "",
    ]
    parts = [section(name, title, make(folder)) for name, title, make in SECTIONS]
    return "\n".join([*head, *parts, GPU])


def section(name: str, title: str, body: str) -> str:
    commands = "\n".join(f"    {command}" for command in COMMANDS[name])
    return f"## {title}\n\n{commands}\n\n{body}"


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--measure", action="store_true")
    asked.add_argument("--commands", action="store_true")
    asked.add_argument("--only", nargs="+", default=list(COMMANDS), choices=list(COMMANDS))
    asked.add_argument("--page", type=Path, default=PAGE)
    args = asked.parse_args()
    commands = [command for name in args.only for command in COMMANDS[name]]
    if args.commands:
        print("\n".join(commands))
        return
    for command in commands if args.measure else []:
        subprocess.run(shlex.split(command), cwd=ROOT, check=True)
    args.page.write_text(page(FOLDER))
    readme = README.read_text()
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{tables.newcomer(FOLDER)}{END}{after}")
    print(f"wrote {args.page} and the tables of {README}")


if __name__ == "__main__":
    main()
