"""Generated histories of the protocol: those of tests/transport in large numbers, on all cores."""

from __future__ import annotations

import os
import time
import traceback
from multiprocessing import get_context

from scripts import reach_tests

SEEDS_APART = 10_000_000  # so that another --seed has other histories
TELL = 5.0  # seconds between two lines


def play_one(seed: int) -> str:
    """Play one; the traceback where it broke a law."""
    reach_tests()
    from test_hub_state import seeded_history

    try:
        seeded_history(seed)
    except Exception:  # whatever it is, it is the finding
        return traceback.format_exc()
    return ""


def play_histories(count: int, seed: int) -> int:
    """Play so many; exit status 0 where no history broke a law."""
    first, told, broken = SEEDS_APART * seed, time.monotonic(), list[int]()
    print(f"{count:,} histories from seed {first} on {os.cpu_count()} cores", flush=True)
    with get_context("spawn").Pool() as pool:
        for done, trace in enumerate(pool.imap(play_one, range(first, first + count), 250)):
            if trace:
                broken.append(first + done)
                print(f"NOT SO history {first + done}:\n{trace}", flush=True)
            if time.monotonic() - told > TELL:
                told = time.monotonic()
                print(f"{done:>9,} played, {len(broken)} broken", flush=True)
    print(f"failed: seeds {broken[:20]}" if broken else f"ok     {count:,} histories kept every law")
    return 1 if broken else 0
