"""Damage to a run's folder: each file removed, emptied, halved, and one bit flipped at many places.

    scripts/start scripts.fault_injection.damage                    55 rounds, 200 flips of each file: hours
    scripts/start scripts.fault_injection.damage --flips 5 --only ledger/ledger.db run.json

Three real runs of the smoke model are made: a hub that was killed with -9 (its data are streamed), one that
was paused (with its error feedback saved), and one that is over. For each damage a copy is resumed, up to
the point where its hub knows its round, and another copy is verified. Allowed is

    resume    whole: with each committed round, packet for packet; or refused, with the file named
    verify    finds it; or no row, weight or word that anybody reads is another one

A file that only people read (events, metrics, logs) must not be in the way of either. Linux only: each case
is a fork of a process that has imported torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.swarms import lab

COCKTAIL = (sys.executable, "-m", "cocktail_cli")
PEOPLE = ("events.jsonl", "metrics.jsonl", "cocktail.log", "peers/", "tracking/")  # files for people alone
STARTS, HANGS = 300.0, 120  # seconds for a run to be made; for a case
Found = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One damage to one file of one run."""

    variant: str
    name: str  # of the file, below the run's folder
    how: str  # "removed", "emptied", "halved", or "flipped"
    bit: int = 0  # that is flipped

    def do(self, folder: Path) -> None:
        path = folder / self.name
        data = path.read_bytes()
        if self.how == "removed":
            path.unlink()
        elif self.how == "flipped":
            at, bit = divmod(self.bit, 8)
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        else:
            path.write_bytes(data[: len(data) // 2] if self.how == "halved" else b"")


# ---- the runs ----------------------------------------------------------------------------------------------


class Made:
    """A run that was made, and what is right about it."""

    def __init__(self, variant: str, folder: Path) -> None:
        from transport import Ledger

        self.variant, self.folder = variant, folder
        copy = Path(shutil.copytree(folder, folder.with_name(f"{variant}-facts")))
        with Ledger(copy / "ledger", write=False) as ledger:
            run = ledger.run
        self.facts = {facts(copy)}
        with Ledger(copy / "ledger", run=run, samples=None) as ledger:
            self.rounds = len(ledger.rounds())
        self.packets = (copy / "ledger" / "packets.log").read_bytes()
        # A change that a kill left in the journal alone was told to nobody: it may be gone with the journal.
        self.facts.add(facts(copy))
        shutil.rmtree(copy)

    def cases(self, flips: int, only: Sequence[str]) -> Iterator[Case]:
        dice = random.Random(f"{self.variant} {flips}")
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if not path.is_file() or (only and name not in only):
                continue
            yield Case(self.variant, name, "removed")
            if size := path.stat().st_size:
                yield from (Case(self.variant, name, how) for how in ("emptied", "halved"))
                bits = 8 * size
                places = range(bits) if bits <= flips else sorted(dice.sample(range(bits), flips))
                yield from (Case(self.variant, name, "flipped", bit) for bit in places)


def facts(folder: Path) -> str:
    """Hash what a ledger says, but for its term: every row that is read."""
    import sqlite3

    digest = hashlib.sha256()
    with closing(sqlite3.connect(folder / "ledger" / "ledger.db")) as db:
        for table in ("rounds", "counted", "evaluations", "chain", "leased", "sessions", "peers"):
            digest.update(repr(db.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall()).encode())
        digest.update(
            repr(db.execute("SELECT * FROM meta WHERE key != 'term' ORDER BY 1").fetchall()).encode()
        )
    return digest.hexdigest()


def make(work: Path, rounds: int) -> list[Made]:
    """Make the three runs in a folder."""
    rows = work / "rows.jsonl"
    texts = (f"row {i} of many, with {i * i} in it" for i in range(400))
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    small = ["data.max_length=32", "global_batch_size=4", "warmup_steps=0", "eval_steps=20", "save_steps=20"]
    runs = {
        "killed": [f"max_steps={rounds + 1000}", "data.streaming=true", "val_set_size=8"],
        "paused": [f"max_steps={rounds + 1000}", "val_set_size=0.05"],
        "finished": [f"max_steps={rounds}", "val_set_size=0.05"],
    }
    for variant, more in runs.items():
        if (work / variant).exists():
            continue
        part = work / f"{variant}-part"
        shutil.rmtree(part, ignore_errors=True)
        command = ["launch", "smoke", "--data", str(rows), *small, *more, "--peers", "1", "--port", "0"]
        launch(command, part, variant, rounds)
        placed(part, work / variant)
        shutil.rmtree(part)
    save_error_feedback(work / "paused")
    return [Made(variant, work / variant) for variant in runs]


def launch(command: Sequence[str], folder: Path, variant: str, rounds: int) -> None:
    """Launch a run, and end it as the variant says after so many rounds."""
    errors = folder.with_suffix(".err").open("w")
    process = subprocess.Popen(
        [*COCKTAIL, *command, "-o", str(folder), "--bind", "127.0.0.1", "--json"],
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert process.stdout is not None
    asked = False
    for line in process.stdout:
        told = json.loads(line)
        if told.get("event") == "step" and told["round"] + 1 >= rounds and not asked:
            asked = True
            if variant == "killed":
                os.killpg(process.pid, signal.SIGKILL)
            if variant == "paused":
                subprocess.run([*COCKTAIL, "stop", str(folder), "--pause"], check=True, stdout=errors)
    process.wait(STARTS)
    errors.close()


def placed(folder: Path, to: Path, alone: str = "") -> None:
    """Copy a run's folder to a place where it lies as if it had been made there. Weights are linked: nobody
    writes into them. `alone`: a file that is to be altered."""
    from cocktail_cli.machine import read_run, save_run

    def copy(one: str, other: str) -> None:
        linked = one.endswith(".safetensors") and not one.endswith(f"/{alone}") and "/ledger/" not in one
        (os.link if linked and alone else shutil.copyfile)(one, other)

    shutil.copytree(folder, to, copy_function=copy)
    record = read_run(folder)
    assert record is not None, folder
    save_run(replace(record, output_dir=str(to), base=str(to / "base")))


def save_error_feedback(folder: Path) -> None:
    """Save the aggregator's error feedback, as a longer run would have done by now."""
    with closing(Resumed(folder)) as resumed:
        work, ledger = resumed.session.prepare(), resumed.ledger
        work.recover(ledger)
        work.durable.save(ledger.next_round)
        work.close()


# ---- one case ----------------------------------------------------------------------------------------------


class Heard:
    """A view that keeps the warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def show(self, event: Any) -> None:
        if type(event).__name__ == "Warning":
            self.warnings.append(event.message)


class Resumed:
    """The session of a resumed run and its ledger, as `cocktail resume` opens them, to be closed."""

    def __init__(self, folder: Path) -> None:
        from cocktail_cli.host import HostSession, hosted_before
        from cocktail_cli.host.host_session import check_unfinished, recipe_to_resume
        from cocktail_cli.machine import load_run

        record = load_run(str(folder))
        hosted_before(record)
        recipe, mended = recipe_to_resume(record)
        self.heard = Heard()
        self.heard.warnings += filter(None, [mended])
        check_unfinished(record)
        self.session = HostSession(recipe, Path(record.output_dir).resolve(), [self.heard], record)
        self.ledger = self.session.reopen()

    def close(self) -> None:
        self.ledger.close()


class Bench:
    """Tries damages at one place.

    What is made of recipe, data, tokenizer and base alone is made once a run, where none of them is damaged.
    """

    def __init__(self, place: Path, made: dict[str, Made]) -> None:
        self.folder, self.made = place / "run", made
        self.prepared: dict[str, Any] = {}

    def put(self, variant: str, alone: str) -> None:
        """Put a whole run there."""
        shutil.rmtree(self.folder, ignore_errors=True)
        placed(self.made[variant].folder, self.folder, alone)

    def prepare(self, variant: str) -> None:
        """Make what `cocktail resume` makes of the files of a run that are not of its ledger."""
        if variant not in self.prepared:
            self.put(variant, "none")
            with closing(Resumed(self.folder)) as resumed:
                self.prepared[variant] = resumed.session.prepare()
                work = self.prepared[variant]
                _ = work.memory, work.prepared, work.data_digest  # computed once

    def damage(self, case: Case) -> None:
        """Put a run there that is whole but for a damage."""
        self.put(case.variant, case.name)
        case.do(self.folder)

    def resumed(self, case: Case) -> Found:
        """Return what `resume` makes of a damage."""
        known = case.name.startswith(("ledger/", "snapshots/", *PEOPLE)) and case.variant != "finished"
        if known:
            self.prepare(case.variant)
        return self.done(case, partial(resume, prepared=self.prepared[case.variant] if known else None))

    def verified(self, case: Case) -> Found:
        """Return what `verify` makes of it."""
        return self.done(case, partial(verify, replayed=not case.name.startswith(PEOPLE)))

    def done(self, case: Case, work: Callable[[Path], Found]) -> Found:
        """Do some work on a damaged run, in a fork of this process."""
        self.damage(case)
        return forked(work, self.folder, self.made[case.variant])


def resume(folder: Path, prepared: Any = None) -> Found:
    """Resume a run as `cocktail resume` does, up to the point where its hub would be opened."""
    from cocktail_cli.host import run_folder
    from cocktail_cli.host.snapshot_thread import SnapshotThread

    with closing(Resumed(folder)) as resumed:
        session, ledger, said = resumed.session, resumed.ledger, resumed.heard.warnings
        run_folder.Recorder(folder, said.append).close()
        work = prepared or session.prepare()
        said += work.recover(ledger)
        said += work.mend_fingerprints(ledger, failed=False)
        snapshots = SnapshotThread(work.model, 20, 1000, lambda offers: None)
        snapshots._drop_damaged()
        while not snapshots.news.empty():
            resumed.heard.show(snapshots.news.get())
        ledger.recover()
        found = {"round": ledger.next_round, "packets": (ledger.folder / "packets.log").read_bytes()}
    return {"exit": 0, "said": said, "facts": facts(folder), **found}


def verify(folder: Path, replayed: bool = True) -> Found:
    """Verify a run as `cocktail verify` does."""
    from cocktail_cli.extensions.proofs.run_verification import RunVerification

    checked = RunVerification(folder)
    checked.check_hashes()
    if replayed:
        checked.replay(False, lambda done, total: None)
    return {"exit": 0, "said": [], "round": checked.found["rounds"]}


def forked(work: Callable[[Path], Found], folder: Path, made: Made) -> Found:
    """Carry this out in a fork of this process, which may hang or die."""
    import torch

    come, go = os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.close(come)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(HANGS)
            torch.set_num_threads(1)  # those of the parent are not here
            null = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(null, number)
            with os.fdopen(go, "w") as answer:
                json.dump(judged(work, folder, made), answer)
            status = 0
        finally:
            os._exit(status)
    os.close(go)
    with os.fdopen(come) as answer:
        text = answer.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(text) if text else {"exit": -1, "said": [f"the process died: {status}"]}


def judged(work: Callable[[Path], Found], folder: Path, made: Made) -> Found:
    """Carry this out; explain its error as the user reads it."""
    from cocktail_cli.errors import explain

    try:
        found = work(folder)
    except Exception as error:
        failure = explain(error)
        return {"exit": failure.exit, "code": failure.code, "said": [failure.message, *failure.hints]}
    packets = found.pop("packets", made.packets)
    whole = found.get("round") == made.rounds and packets[: len(made.packets)] == made.packets
    said = found.pop("facts", None)
    return found | {"whole": whole and (said is None or said in made.facts)}


def word_of(case: Case, found: Found) -> str:
    """Judge one answer."""
    if found["exit"]:
        known, told, name = found.get("code") not in ("unexpected", None), found["said"], Path(case.name).name
        named = any(name.removesuffix(end) in " ".join(told) for end in ("", "-wal", "-shm"))
        over = case.variant == "finished" and "is over" in told[0]
        return "over" if over else "refused" if known and named else f"BAD: {told[0]}"
    if not found["whole"]:
        return f"LOST: round {found['round']}"
    return "mended" if found["said"] else "whole"


# ---- all of them -------------------------------------------------------------------------------------------


def main() -> None:
    parser = lab.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=55)
    parser.add_argument("--flips", type=int, default=200, help="places at which each file is flipped")
    parser.add_argument("--only", nargs="*", default=(), help="these files only")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/cocktail-damage"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="file that each case is written to, as JSON")
    asked = parser.parse_args()
    os.environ |= {"COCKTAIL_HOME": str(asked.work / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    asked.work.mkdir(parents=True, exist_ok=True)
    imports()
    made = {one.variant: one for one in make(asked.work, asked.rounds)}
    cases = [case for one in made.values() for case in one.cases(asked.flips, asked.only)]
    random.Random(0).shuffle(cases)  # so that the jobs end together
    began, workers = time.monotonic(), []
    for number in range(asked.jobs):
        path = asked.work / f"found-{number}.jsonl"
        if not (pid := os.fork()):
            with path.open("w") as out:
                bench = Bench(asked.work / f"job-{number}", made)
                for case in cases[number :: asked.jobs]:
                    both = bench.resumed(case), bench.verified(case)
                    about = [case.variant, case.name, case.how, case.bit, *(word_of(case, it) for it in both)]
                    out.write(json.dumps([*about, [line for it in both for line in it["said"]]]) + "\n")
                    out.flush()
            os._exit(0)
        workers.append((pid, path))
    for pid, _ in workers:
        os.waitpid(pid, 0)
    found = [json.loads(line) for _, path in workers for line in path.read_text().splitlines()]
    if asked.out:
        asked.out.write_text("".join(json.dumps(line) + "\n" for line in sorted(found)))
    print(table(found))
    print(f"{len(found):,} of {len(cases):,} cases in {time.monotonic() - began:.0f} s")
    sys.exit(len(found) != len(cases) or any(bad(line) for line in found))


def bad(line: Sequence[Any]) -> bool:
    return any(word.startswith(("BAD", "LOST")) for word in line[4:6])


def table(found: Sequence[Sequence[Any]]) -> str:
    """Print the cases of each file: what `resume` and `verify` made of them."""
    by_file: dict[tuple[str, str], list[Sequence[Any]]] = defaultdict(list)
    for line in found:
        by_file[line[0], line[1]].append(line)
    rows = [f"{'run':9} {'file':42} {'cases':>5}  resume / verify"]
    for (variant, name), lines in sorted(by_file.items()):
        words = [Counter(line[at].split(":")[0] for line in lines) for at in (4, 5)]
        told = " / ".join(
            ", ".join(f"{count} {word}" for word, count in sorted(one.items())) for one in words
        )
        rows.append(
            f"{variant:9} {name:42} {len(lines):5}  {told}{'  (for people)' * name.startswith(PEOPLE)}"
        )
    worst = [f"{line[:4]} resume: {line[4]} verify: {line[5]}" for line in found if bad(line)]
    return "\n".join([*rows, *worst[:40]])


def imports() -> None:
    """Import what a case needs, before the forks."""
    import torch

    from scripts.swarms.forked import MODULES

    torch.set_num_threads(1)
    for name in (
        *MODULES,
        "cocktail_cli.extensions.proofs.run_verification",
        "recipes.snapshots",
        "recipes.training",
    ):
        with suppress(ImportError):
            __import__(name)


if __name__ == "__main__":
    main()
