"""scripts/RESULTS.md, and the README's tables, from the rows in scripts/measured.

    scripts/results                write it again from the rows that are there
    scripts/results --measure      measure everything first: some hours of a machine that does nothing else
    scripts/results --commands     what that would run

A figure that was not measured is an empty cell, never a guess.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

from scripts import ROOT
from scripts.report import cost_tables as costs
from scripts.report import rival_tables as tables
from scripts.report.markdown import SECTIONS, commands
from scripts.report.rows import FOLDER
from scripts.swarms.lab import parser

PAGE = ROOT / "scripts" / "RESULTS.md"
README = ROOT / "README.md"
MOST = 3  # commands that a section shows
BEGIN, END = "<!-- by scripts/results -->", "<!-- to here -->"
MAKERS: dict[str, Callable[[Path], str]] = {
    "links": tables.links,
    "loss": tables.loss,
    "faults": tables.faults,
    "growth": costs.growth,
    "join": costs.join,
    "packet": costs.packet,
    "ddp": costs.ddp,
    "gpu": costs.gpu,
}


def machine() -> str:
    """Describe this machine in a line."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = names[0].split(":", 1)[1].strip() if names else platform.processor()
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores ({cpu}), {gigabytes:.0f} GB, {system}"


def page(folder: Path, measured_on: str) -> str:
    """Write the whole page."""
    head = f"""# Results: side by side with what one would take instead

Written by `scripts/results` from `scripts/measured/`. Each section begins with its command.
Measured on {measured_on}.
"""
    parts = [head]
    for name, make in MAKERS.items():
        again = commands(name)
        if len(again) > MOST:
            again = [f"scripts/results --commands --only {name}   # lists {len(again)} commands"]
        parts += [f"## {SECTIONS[name][0]}\n", "".join(f"    {one}\n" for one in again), make(folder)]
    return "\n".join(part for part in parts if part)


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--measure", action="store_true")
    asked.add_argument("--commands", action="store_true")
    asked.add_argument("--only", nargs="+", default=list(MAKERS), choices=list(MAKERS))
    asked.add_argument("--page", type=Path, default=PAGE)
    args = asked.parse_args()
    wanted = [command for name in args.only for command in commands(name)]
    if args.commands:
        print("\n".join(wanted))
        return
    for command in wanted if args.measure else []:
        subprocess.run(shlex.split(command), cwd=ROOT, check=True)
    earlier = re.search(r"^Measured on (.*)\.$", PAGE.read_text(), re.MULTILINE)
    args.page.write_text(page(FOLDER, earlier[1] if earlier and not args.measure else machine()))
    readme = README.read_text()
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{tables.newcomer(FOLDER)}{END}{after}")
    print(f"wrote {args.page} and the tables of {README}")


if __name__ == "__main__":
    main()
