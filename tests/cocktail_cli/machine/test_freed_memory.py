"""A hub's process keeps the memory of one round for the next."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ROUNDS = """
import resource
from concurrent.futures import ThreadPoolExecutor
from cocktail_cli.machine import keep_freed_memory

openers = ThreadPoolExecutor(2)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    packets = list(openers.map(lambda _: b"x" * (1 << 20), range(50)))
    del packets
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(keep_freed_memory(), faults(), faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that is told")
def test_memory_freed_by_a_round_is_reused_by_the_next() -> None:
    said = subprocess.run(
        [sys.executable, "-c", ROUNDS], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )

    told, first, second = said.stdout.split()
    assert told == "True"
    assert int(second) < int(first) / 10
