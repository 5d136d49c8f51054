"""Generated histories of the protocol: those of tests/transport in large numbers, over all cores, without
sockets."""

from __future__ import annotations

import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from scripts import ROOT

AT_ONCE = 250  # histories a process plays before it says so
SEEDS_APART = 10_000_000  # so that another --seed has other histories
TELL = 5.0  # seconds between two lines


def play_some(first: int, count: int) -> list[tuple[int, str]]:
    """Play them; (seed, traceback) of those that broke a law."""
    sys.path.insert(0, str(ROOT / "tests" / "transport"))
    from test_hub_state import seeded_history

    broken = []
    for seed in range(first, first + count):
        try:
            seeded_history(seed)
        except Exception:  # whatever it is, it is the finding
            broken.append((seed, traceback.format_exc()))
    return broken


def play_histories(count: int, seed: int) -> int:
    """Play so many on all cores; exit status 0 where no history broke a law."""
    first, started, told, done = SEEDS_APART * seed, time.monotonic(), time.monotonic(), 0
    broken: list[tuple[int, str]] = []
    cores = os.cpu_count() or 1
    print(f"{count:,} histories from seed {first} on {cores} cores", flush=True)
    with ProcessPoolExecutor(cores, get_context("spawn")) as pool:
        parts = [(at, min(AT_ONCE, count - at)) for at in range(0, count, AT_ONCE)]
        jobs = {pool.submit(play_some, first + at, size): size for at, size in parts}
        for job in as_completed(jobs):
            done += jobs[job]
            for which, trace in job.result():
                broken.append((which, trace))
                print(f"NOT SO history {which}:\n{trace}", flush=True)
            if (now := time.monotonic()) - told > TELL or done == count:
                told, rate = now, done / (now - started)
                print(f"{done:>9,} played, {rate:,.0f} a second, {len(broken)} broken", flush=True)
    seeds = ", ".join(str(which) for which, _ in sorted(broken)[:20])
    print(f"failed: seeds {seeds}" if broken else f"ok     {count:,} histories kept every law", flush=True)
    return 1 if broken else 0
