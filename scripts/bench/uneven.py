"""Measure how long unequal peers wait for each other where samples have unequal lengths.

    scripts/start scripts.bench.uneven --speeds 1 1 2 4 --rounds 30

A real run of real processes. Texts have lognormal lengths (sigma 1), one a sample, without packing. Each peer
may use its share of the processors and no more (a cgroup with a quota; exit 77 and the reason where none can
be made). It prints for how much of a round's longest gradient the peers were idle, on average, without the
first rounds, in which no speed is known yet.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pydoc_data import topics
from statistics import mean, median

from scripts.swarms.processes import Line, Process

CPU = Path("/sys/fs/cgroup/cpu")
PERIOD = 100_000  # microseconds of a quota
LEARNT = 5  # rounds: of the first nobody knows how fast who is


@contextmanager
def quota(name: str, cores: float) -> Iterator[None]:
    """Make a cgroup that gets so many cores at most."""
    group = CPU / name
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text(str(PERIOD))
        (group / "cpu.cfs_quota_us").write_text(str(int(PERIOD * cores)))
    except OSError as error:
        print(f"no cgroup with a quota can be made here: {error}", file=sys.stderr)
        raise SystemExit(77) from error
    try:
        yield
    finally:
        group.rmdir()


def write_texts(path: Path, count: int, median_words: int) -> None:
    """Write texts with lognormal numbers of words."""
    words, generator = " ".join(topics.topics.values()).split(), random.Random(1)
    with path.open("w") as file:
        for _ in range(count):
            length = max(2, round(median_words * generator.lognormvariate(0, 1)))
            start = generator.randrange(len(words) - length)
            file.write(json.dumps({"text": " ".join(words[start : start + length])}) + "\n")


def idle(step: Line) -> float:
    """Compute the share of a round's longest gradient that its peers did not compute."""
    seconds = step["compute_s"].values()
    return 1 - mean(seconds) / max(seconds)


def measure(folder: Path, args: argparse.Namespace) -> list[Line]:
    """Run the swarm; return its `step` events once speeds are known."""
    write_texts(folder / "texts.jsonl", 2000, args.words)
    home = {"COCKTAIL_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "cocktail_cli"]
    recipe = [f"datasets=[{{path: {folder / 'texts.jsonl'}, type: text}}]", "data.packing=false"]
    recipe += ["data.max_length=512", "checkpoint.eval_steps=null", "training.max_steps=5000"]
    recipe += [f"training.global_batch_size={args.batch}", f"swarm.min_peers={len(args.speeds)}"]
    options = ["--json", "--peers", "0", "--port", "0", "-o", str(folder / "out")]
    launch = Process([*command, "launch", "smoke", *options, *recipe], **home)
    peers = list[Process]()
    try:
        url = launch.until("run_started")["url"]
        for i, speed in enumerate(args.speeds):
            with_quota = ["sh", "-c", f'echo $$ > {CPU}/uneven-{i}/cgroup.procs; exec "$@"', "sh"]
            join = [*command, "join", url, "-y", "--json", "--name", f"speed-{speed:g}-{i}"]
            peers.append(Process([*with_quota, *join], **home))
        launch.until("step", args.rounds + LEARNT, 1200)
        return launch.heard("step")[LEARNT : args.rounds + LEARNT]
    finally:
        for process in (launch, *peers):
            process.stop(signal.SIGINT, 60)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--speeds", type=float, nargs="+", default=[1.0, 1.0, 2.0, 4.0])
    asked.add_argument("--cores", type=float, default=1.6, help="all peers together")
    asked.add_argument("--rounds", type=int, default=30)
    asked.add_argument("--batch", type=int, default=32, help="samples of a round")
    asked.add_argument("--words", type=int, default=30, help="median of a text")
    args = asked.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as groups:
        for i, speed in enumerate(args.speeds):
            groups.enter_context(quota(f"uneven-{i}", args.cores * speed / sum(args.speeds)))
        steps = measure(Path(folder), args)
    print(f"idle {mean(map(idle, steps)):.1%}, median {median(map(idle, steps)):.1%} of {len(steps)} rounds")
    for name in sorted(steps[-1]["compute_s"]):
        print(f"{name}: {mean(step['compute_s'].get(name, 0.0) for step in steps):.2f} s a gradient")
    print(f"a round {mean(s['step_s'] for s in steps):.2f} s")


if __name__ == "__main__":
    main()
