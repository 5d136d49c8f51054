"""Hostile bytes against everything that arrives from somebody else.

    scripts/fuzz --cases 1000000 --seed 1
    scripts/fuzz --only messages --seed 1
    scripts/fuzz --replay outputs/fuzz/hub-1-17.hex

A case is what our own encoder wrote, damaged, or values that only a stranger would write. The law: it is
taken and the result is well formed, or it is refused by the error of its target; no other exception, no more
than a bounded memory and a second of the processor. A case follows from the seed and its number alone. A
finding is saved as a file to replay. Exit 0 only if there was none.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback
import tracemalloc
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from random import Random

from scripts import ROOT, reach_tests
from scripts.fuzzing.mutate import Target
from scripts.swarms.lab import parser

FOLDER = ROOT / "outputs" / "fuzz"
GROUPS = ("messages", "bulk", "packets", "legacy", "files", "ways")
FIRST = 100  # cases, among which are some that are taken
MEASURED = 50  # of so many cases one has its memory measured
SECONDS = 1.0  # of the processor, for one case
ENDLESS = 20.0  # likewise, after which it is interrupted
SPACE = 8 << 30  # bytes of addresses: beyond, an allocation fails rather than this machine
TELL = 10.0  # seconds between two lines
ENOUGH = 20  # findings after which it stops


@dataclass
class Tally:
    """The outcome of the cases of one target."""

    cases: int = 0
    taken: int = 0
    peak: int = 0  # bytes, of those that were measured
    slowest: float = 0.0  # seconds of the processor


@dataclass
class Outcome:
    """The outcome of all cases."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)


class TooMuch(Exception):
    """A case took more memory or time than it may."""


def targets(only: Sequence[str] = GROUPS) -> list[Target]:
    """List the targets of these groups: tests/fuzzing has them, with their laws, and tests of extensions."""
    places = sorted((ROOT / "tests").glob("extensions/*/*_targets.py"))
    reach_tests()
    names = ("transport_targets", *(path.stem for path in places), "packet_targets")
    return [t for name in names for t in import_module(name).TARGETS if t.group in only]


def turns(chosen: Sequence[Target], cases: int) -> Iterator[tuple[Target, int]]:
    """Deal each target its share of the cases, in blocks: (target, number of the case)."""
    total, done = sum(t.share for t in chosen), dict.fromkeys((t.name for t in chosen), 0)
    blocks = max(1, cases // (20 * total))
    for block in range(blocks):
        for target in chosen:
            until = cases * target.share * (block + 1) // (total * blocks)
            for number in range(done[target.name], until):
                yield target, number
            done[target.name] = until


def warm(target: Target, cases: Iterable[bytes]) -> None:
    """Run the first cases unmeasured: what they import and compile is not their own cost."""
    with suppress(Exception):
        for case in cases:
            target.check(case)


def try_case(target: Target, case: bytes, tally: Tally, *, measure: bool) -> None:
    """Check one case against its law and its limits."""
    if measure:
        tracemalloc.start()
    began = time.thread_time()
    try:
        tally.taken += target.check(case)
        took = time.thread_time() - began
        peak = tracemalloc.get_traced_memory()[1] if measure else 0
    finally:
        if measure:
            tracemalloc.stop()
    tally.cases += 1
    tally.peak, tally.slowest = max(tally.peak, peak), max(tally.slowest, took)
    if peak > target.most + 64 * len(case):
        raise TooMuch(f"{peak:,} bytes for a case of {len(case):,}, at most {target.most:,} and 64 for each")
    if took > SECONDS:  # once more: imports, compiling and measuring memory are not the case's own cost
        began = time.thread_time()
        target.check(case)
        took = time.thread_time() - began
    if took > SECONDS:
        raise TooMuch(f"{took:.1f} s for a case of {len(case):,} bytes")


def case_of(target: Target, seed: int, number: int) -> bytes:
    return target.make(Random(f"{seed}.{target.name}.{number}"))


def fuzz(chosen: Sequence[Target], cases: int, seed: int, folder: Path, tell: bool = False) -> Outcome:
    """Try them all; save findings in `folder`."""
    out = Outcome({t.name: Tally() for t in chosen})
    told = time.monotonic()
    for target in chosen:
        interrupt_after(ENDLESS)
        warm(target, (case_of(target, seed, number) for number in range(FIRST)))
    for target, number in turns(chosen, cases):
        tally = out.tallies[target.name]
        case = case_of(target, seed, number)
        try:
            interrupt_after(ENDLESS)
            try_case(target, case, tally, measure=number % MEASURED == 0)
        except Exception:  # whatever it is, it is the finding
            where = f"case {number} of seed {seed}: {keep(folder, target, seed, number, case)}"
            out.findings.append(f"{target.name} {where}\n{traceback.format_exc()}")
            if tell:
                print(f"NOT SO {out.findings[-1]}", flush=True)
            if len(out.findings) >= ENOUGH:
                break
        if tell and time.monotonic() - told > TELL:
            told = time.monotonic()
            done = sum(t.cases for t in out.tallies.values())
            print(f"{done:>11,} of {cases:,}, {len(out.findings)} findings", flush=True)
    interrupt_after(0.0)
    return out


def interrupt_after(seconds: float) -> None:
    """Make a case that does not end a finding; 0: no more."""
    if not hasattr(signal, "setitimer"):  # on Windows it is seen by who waits for it
        return

    def endless(*_: object) -> None:
        raise TooMuch(f"no end after {ENDLESS:.0f} s of the processor")

    signal.signal(signal.SIGVTALRM, endless)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)


def keep(folder: Path, target: Target, seed: int, number: int, case: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{target.name}-{seed}-{number}.hex"
    path.write_text(f"{target.name}\n{case.hex()}\n", encoding="ascii")
    return path


def replay(path: Path) -> None:
    """Check one saved case again; raises what it found."""
    name, case = path.read_text(encoding="ascii").split()
    target, tally = next(t for t in targets() if t.name == name), Tally()
    warm(target, [bytes.fromhex(case)])
    try_case(target, bytes.fromhex(case), tally, measure=True)
    word = "taken" if tally.taken else "refused"
    print(f"ok     {name}: {word}, {tally.peak:,} bytes, {tally.slowest:.3f} s")


def limit_space() -> None:
    """Make an allocation without bound fail."""
    with suppress(ImportError):  # on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (SPACE, resource.getrlimit(resource.RLIMIT_AS)[1]))


def arguments() -> argparse.Namespace:
    asked = parser(__doc__)
    asked.add_argument("--cases", type=int, default=1_000_000)
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument("--only", default=",".join(GROUPS), help=f"some of {', '.join(GROUPS)}")
    asked.add_argument("--replay", type=Path, metavar="FILE", help="one saved case again")
    asked.add_argument("--folder", type=Path, default=FOLDER, help="where findings are saved")
    given = asked.parse_args()
    given.only = given.only.split(",")
    if unknown := set(given.only) - set(GROUPS):
        asked.error(f"--only {', '.join(sorted(unknown))}: known are {', '.join(GROUPS)}")
    return given


def main() -> int:
    given = arguments()
    warnings.simplefilter("error")  # a NumPy that overflows says so only in this way
    limit_space()
    if given.replay:
        replay(given.replay)
        return 0
    began = time.monotonic()
    out = fuzz(targets(given.only), given.cases, given.seed, given.folder, tell=True)
    for name, tally in out.tallies.items():
        share = tally.taken / max(1, tally.cases)
        cost = f"at most {tally.peak:>12,} bytes, {tally.slowest:.3f} s"
        print(f"{name:<10} {tally.cases:>11,} cases, {share:>4.0%} taken, {cost}")
    done, took = sum(t.cases for t in out.tallies.values()), time.monotonic() - began
    word = "failed" if out.findings else "ok    "
    print(f"{word} {done:,} cases in {took:.0f} s, {len(out.findings)} findings")
    return 1 if out.findings else 0


if __name__ == "__main__":
    sys.exit(main())
