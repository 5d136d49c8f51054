"""Measures what is to be known of a GPU, stage by stage, and goes on where it stopped.

    scripts/gpu                          all stages that have no figures yet, for 8 minutes at most
    scripts/gpu --only parity leaving    some of them, also again
    scripts/gpu --only study --minutes 9 cells of the quality study that README's rows lack
    scripts/gpu --list                   the stages, their commands and what is expected of them
    scripts/gpu --device cpu --tiny      the same programs without a GPU, with next to no sizes

Without network or installation, from an unpacked archive: PYTHONPATH=. python -m scripts.first_gpu.measure

A stage is one command of 90 seconds at most. Its output goes to FOLDER/NAME.txt as it comes. Its figures
become a row of scripts/measured/gpu.jsonl, with date, device and command, from which `scripts/results` makes
the section of RESULTS.md. A stage that fails or reaches its limit is told and has no figures; the next stage
goes on. Exit 1 where one failed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from scripts import ROOT
from scripts.first_gpu.stages import TINY, Figures, Scale, Stage, stages
from scripts.report import rows
from scripts.swarms.lab import parser

FILE = rows.FOLDER / "gpu.jsonl"
LATE = 124  # exit status of a command that reached its limit
LEAST = 10.0  # seconds for which no stage is begun


def device_name(device: str) -> str:
    """Name the device that is measured."""
    import torch

    if device == "cpu":
        return "CPU"
    if not torch.cuda.is_available():
        raise SystemExit(
            "this machine has no CUDA device; scripts/gpu --device cpu --tiny tries the programs"
        )
    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"


def run(stage: Stage, limit: float, output: Path) -> tuple[int, float]:
    """Run a stage's command, its output into a file; its exit status and seconds."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"} | stage.environment
    started, status = time.monotonic(), LATE
    with output.open("w") as file:
        file.write(f"$ {shlex.join(stage.command)}\n")
        file.flush()
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        with suppress(subprocess.TimeoutExpired):
            done = subprocess.run(stage.command, cwd=ROOT, env=environment, timeout=limit, **streams)
            status = done.returncode
    return status, time.monotonic() - started


def figures(stage: Stage, output: Path) -> Figures:
    """Read a stage's figures; {} where its output does not have them."""
    try:
        return stage.figures(output.read_text(errors="replace"))
    except (KeyError, IndexError, ValueError) as error:
        print(f"  its output has no figures ({error!r}): {output}")
        return {}


def measure(every: Sequence[Stage], device: str, folder: Path, out: Path, minutes: float) -> list[str]:
    """Run the stages for some minutes, and write a row for each that has figures; the names of those that
    failed."""
    until, failed = time.monotonic() + 60 * minutes, []
    for stage in every:
        limit = min(stage.seconds, until - time.monotonic())
        if limit < LEAST:
            print(f"{minutes:g} minutes are over; the same command goes on with {stage.name}")
            break
        print(f"{stage.name} ...", flush=True)
        output = folder / f"{re.sub('[^a-z0-9.]+', '-', stage.name.lower())}.txt"
        status, seconds = run(stage, limit, output)
        late = status == LATE
        if status and not (late and stage.resumes):
            failed.append(stage.name)
            print(
                f"  {'reached its limit' if late else f'failed ({status})'} after {seconds:.0f} s: {output}"
            )
            continue
        found = figures(stage, output)
        print("  " + ", ".join(f"{key} {value}" for key, value in found.items()) + f"   {seconds:.0f} s")
        if found and not late:
            command = shlex.join(stage.command).replace(sys.executable, "python")
            row = {"stage": stage.name, "device": device, "estimate": stage.estimate, "figures": found}
            row |= {"seconds": round(seconds), "date": time.strftime("%Y-%m-%d"), "command": command}
            rows.keep(out, row, ("stage", "device"))
    return failed


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--device", default="cuda")
    asked.add_argument("--only", nargs="+", metavar="STAGE", help="these stages, also again")
    asked.add_argument("--minutes", type=float, default=8.0)
    asked.add_argument("--folder", type=Path, default=Path("outputs/gpu"))
    asked.add_argument("--out", type=Path, default=FILE)
    asked.add_argument("--tiny", action="store_true")
    asked.add_argument("--list", action="store_true")
    args = asked.parse_args()
    folder = args.folder.resolve()
    every = stages(args.device, folder, TINY if args.tiny else Scale(), args.minutes)
    if unknown := set(args.only or []) - {stage.name for stage in every}:
        raise SystemExit(f"no stage {', '.join(sorted(unknown))}; scripts/gpu --list names them")
    if args.list:
        for stage in every:
            print(f"{stage.name:16} {stage.seconds:g} s  {stage.estimate}\n    {shlex.join(stage.command)}")
        return
    device = device_name(args.device)
    done = [row["stage"] for row in rows.read(args.out) if row["device"] == device]
    wanted = [s for s in every if (s.name in args.only if args.only else s.name not in done)]
    folder.mkdir(parents=True, exist_ok=True)
    if failed := measure(wanted, device, folder, args.out, args.minutes):
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
