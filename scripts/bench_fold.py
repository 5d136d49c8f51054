"""How long a snapshot takes and how much memory: a model of the given size, folded as a hub would do it.

    python scripts/bench_fold.py --params 1.5e9 --rounds 50 --folder DIR

Writes a base of one large tensor in BF16 and a packet of the default compression that serves every round
(each visits other coordinates), then folds them in a process of its own and prints its peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

UNIT = 1 << 20  # elements written at a time


def make(folder: Path, size: int) -> int:
    """The base and one packet that fits every round; bytes of the packet."""
    from compress import Cocktail
    from compress.codec_bench import student

    mix = Cocktail(sample=0.125)  # 1/8 of a multiple of 2048: each round's sample has the same length
    m = mix.walk(size, 7, 0).m
    assert {mix.walk(size, 7, round).m for round in range(100)} == {m}
    noise = np.random.default_rng(0).integers(0, 2**16, UNIT, np.uint16) & np.uint16(0xBFFF)
    with (folder / "base").open("wb") as file:
        for _ in range(0, size, UNIT):
            file.write(noise.tobytes())
    packet = mix.encode(student(m).x * 1e-3)
    (folder / "packet").write_bytes(packet)
    return len(packet)


def fold(folder: Path, size: int, rounds: int) -> dict[str, float]:
    """In this process, which has done nothing else; its figures."""
    from compress import Cocktail
    from compress.packet.section_streams import InFile
    from recipes.weight_files.parameter_layout import Layout
    from recipes.weight_files.snapshot_fold import Fold, write_hashes
    from recipes.weight_files.stored_weights import Stored, StoredVector

    kib = resident()
    before, began, used = kib("VmRSS"), time.perf_counter(), time.process_time()
    with open(folder / "base", "rb", buffering=0) as base, open(folder / "packet", "rb", buffering=0) as log:
        part = Stored("BF16", (size,), InFile(base, 0, 2 * size))
        source = StoredVector(Layout(("w",), ((size,),)), ("w",), (part,), {})
        packet = InFile(log, 0, (folder / "packet").stat().st_size)
        job = Fold("bench", Cocktail(sample=0.125), 7, source, 0, [packet] * rounds)
        job.write(folder)
    folded, used = time.perf_counter() - began, time.process_time() - used
    write_hashes(folder, lambda: False)
    hashed = time.perf_counter() - began - folded
    memory = {"before_mib": before / 1024, "peak_mib": kib("VmHWM") / 1024}
    return memory | {"fold_s": folded, "processor_s": used, "hashes_s": hashed}


def resident() -> Callable[[str], int]:
    def kib(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field))

    return kib


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=float, default=1.5e9, help="length of the vector")
    parser.add_argument("--rounds", type=int, default=50, help="packets that are folded")
    parser.add_argument("--folder", type=Path, required=True, help="scratch: 6 bytes a parameter")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    size = int(asked.params) // UNIT * UNIT
    if asked.part:
        print(json.dumps(fold(asked.folder, size, asked.rounds)))
        return
    asked.folder.mkdir(parents=True, exist_ok=True)
    packet = make(asked.folder, size)
    again = [*sys.argv, "--part"]
    ran = subprocess.run(
        [sys.executable, *again], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if ran.returncode:
        sys.exit(ran.stderr)
    told = json.loads(ran.stdout)
    print(f"{size / 1e9:.2f} B parameters, {asked.rounds} packets of {packet / 1e6:.1f} MB")
    print(f"fold {told['fold_s']:.0f} s, {told['processor_s']:.0f} s of processor")
    print(f"hashes {told['hashes_s']:.0f} s")
    print(
        f"resident: {told['before_mib']:.0f} MiB with everything imported, {told['peak_mib']:.0f} MiB at most"
    )


if __name__ == "__main__":
    main()
