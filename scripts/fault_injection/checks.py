"""The promises after a run under faults, each with its figure."""

from __future__ import annotations

import json
import signal
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median

from cocktail_cli.assembly import recipe_type
from cocktail_cli.errors import EXIT
from recipes.algorithm import GlobalModel, compressor_of
from recipes.config.loader import recipe_from_json
from recipes.models.causal_lm import load_model
from recipes.training import FlatParameters
from scripts.fault_injection.faults import LEAVES, RECONNECTS, Record
from scripts.fault_injection.schedule import JOINER, KINDS
from scripts.swarms.commands import HUB, RELAY, Child, Swarm
from scripts.swarms.processes import Line
from transport import Ledger

LOSS_WITHIN = 0.02  # of the held-out loss of the run without faults
TAKES_OVER = 15.0  # seconds without a commit after the hub's machine was destroyed
SLACK = 10.0  # seconds a round may take beyond its cap on a busy machine
WARM_UP = 45.0  # seconds of work in which a process's memory may grow
LONG_LIVED = 90.0  # seconds of life after that, to say anything about memory
GROWTH = 16e6, 0.05  # bytes, and share, that memory may grow from the first to the last quarter of a life
FILES = 16  # descriptors more: a peer may open three more bulk connections, of four each
RELAYED_FILES = 6  # of a relay, for each peer behind it: three connections more, of two each
TUNNEL_FILES = 9  # of a hub, for the same: three each, as its tunnel dials its port
DOOR_FILES = 15  # for each other aggregator that was away: 13 of a link to it, two of its own at the door
TOLD_WITHIN = 60.0  # seconds from the fault's end until its peer is named
TELLS = ("kill", "leave", "leave-early", "clock", "twice")  # kinds in which a peer goes: always to be told
SIGNS = ("Traceback", "Fatal Python error", "Assertion failed")


@dataclass(frozen=True)
class Check:
    """One promise."""

    promise: str
    kept: bool
    figure: str


def found(promise: str, wrong: Sequence[str], figure: str) -> Check:
    """A promise that is kept where nothing is wrong."""
    return Check(promise, not wrong, "; ".join(wrong) or figure)


def checks(
    swarm: Swarm, records: Sequence[Record], reference: float | None, step_timeout: float
) -> Iterator[Check]:
    """Check all of them, in the order in which one wants to read them."""
    yield finished(swarm)
    yield from books(swarm)
    yield verified(swarm)
    if reference is not None:
        yield as_good(swarm, reference)
    yield rounds_in_time(swarm, records, step_timeout)
    yield everybody_came_back(records)
    yield hub_back_soon(records)
    yield from hub_lost(records, swarm.lost)
    yield reported(swarm, records)
    yield exits(swarm)
    yield sentences(swarm)
    yield memory_flat(swarm)


def finished(swarm: Swarm) -> Check:
    end = swarm.finished
    figure = f"{end['steps']:,} steps, {end['reason']}" if end else "no run_finished was told"
    return Check("the run came to its end", bool(end and end["reason"] == "all steps are done"), figure)


# ---- the books ---------------------------------------------------------------------------------------------


def books(swarm: Swarm) -> Iterator[Check]:
    """Check the ledger, every fingerprint that a peer told, and the exported model."""
    what = "every sample is counted exactly once, the ledger verifies"
    try:
        with Ledger(swarm.out / "ledger", write=False) as ledger:
            audit, rows, samples = ledger.verify(complete=True), ledger.rounds(), ledger.samples
            packets = [packet for _, packet in ledger.packets()]
    except Exception as error:  # whatever it is, it is the finding
        yield Check(what, False, f"{type(error).__name__}: {error}")
        return
    figure = f"{audit.counted:,} of {samples:,} samples in {audit.rounds:,} rounds"
    yield Check(what, audit.counted == samples, figure)
    recipe = recipe_from_json((swarm.out / "recipe.json").read_text(), recipe_type)
    base = FlatParameters(load_model(swarm.out / "base")).vector
    common = GlobalModel(base, compressor_of(recipe.compression), recipe.training.seed)
    truth: dict[int, str] = {}  # round -> fingerprint of the global model after it
    wrong = []
    for row, packet in zip(rows, packets, strict=True):
        if row.fingerprint not in (0, common.fingerprint):  # 0: nobody has reported it
            wrong.append(f"the reports of round {row.round} say {row.fingerprint:016x}, its packets another")
        common.apply(packet)
        truth[row.round] = f"{common.fingerprint:016x}"
    told = [(child, step) for child in swarm.children if child.name != HUB for step in child.heard("step")]
    void = sum(swarm.is_void(step["round"], step["came"]) for _, step in told)
    told = [(child, step) for child, step in told if not swarm.is_void(step["round"], step["came"])]
    for child, step in told:
        if truth.get(step["round"]) != step["fingerprint"]:
            wrong.append(f"{child.name} held another global model after round {step['round']} ({child.log})")
    exported, path = None, swarm.out / "model.safetensors"
    if path.is_file():
        exported = FlatParameters(load_model(swarm.out)).vector
    if exported is None or not bool((exported == common.vector).all()):
        wrong.append("the exported model is not the fold of the ledger")
    agreed = f"{len(told):,} told by the peers, {len(rows):,} agreed on, {void} of lost rounds"
    figure = f"{agreed}; the export folds to {common.fingerprint:016x}"
    yield found("fingerprints are equal: there is no fork", wrong[:3], figure)
    rounds = [r for step in swarm.steps() if not swarm.is_void(r := step.event["round"], step.at)]
    figure = f"{len(rounds):,} told of {len(rows):,}; what was committed at a kill may be untold"
    yield Check("no round is told twice", len(set(rounds)) == len(rounds), figure)


def verified(swarm: Swarm) -> Check:
    """Check the run's seal, its replay, and the newest receipt of each peer, as `cocktail verify` does."""
    promise = "`cocktail verify` replays the run, and no receipt contradicts it"
    if find_spec("cocktail_cli.extensions.proofs") is None:
        return Check(promise, True, "there is no such command")
    from cocktail_cli.extensions.proofs.receipts import open_receipt
    from cocktail_cli.extensions.proofs.run_verification import RunVerification

    run, held = RunVerification(swarm.out), sorted(swarm.folder.glob("homes/*/receipts/*.json"))
    try:
        run.check_hashes()
        run.replay(False, lambda done, total: None)
        for path in held:
            run.check_receipt(open_receipt(path))
    except Exception as error:  # whatever it is, it is the finding
        return Check(promise, False, f"{type(error).__name__}: {error}")
    figure = f"{run.found['rounds']:,} rounds, {run.found['files']} sealed files, {len(held)} receipts"
    return Check(promise, bool(run.found["files"] and held), figure)


def as_good(swarm: Swarm, reference: float) -> Check:
    promise, end = f"held-out loss within {LOSS_WITHIN:.0%} of the run without faults", swarm.finished
    loss = end["eval_loss"] if end else None
    if loss is None:
        return Check(promise, False, "no loss was told")
    told = swarm.first(lambda event: event.get("event") == "eval")
    first = told.event["loss"] if told else loss
    figure = f"{first:.4f} -> {loss:.4f}, without faults {reference:.4f} ({loss / reference - 1:+.2%})"
    return Check(promise, loss <= reference * (1 + LOSS_WITHIN), figure)


# ---- time --------------------------------------------------------------------------------------------------


def rounds_in_time(swarm: Swarm, records: Sequence[Record], step_timeout: float) -> Check:
    """Check the time from commit to commit, less the time without a hub."""
    promise, steps = "no round takes longer than its cap", swarm.steps()
    if len(steps) < 2:
        return Check(promise, False, "no rounds")
    spans = [(b.at - a.at - swarm.without_hub(a.at, b.at), b.event["round"]) for a, b in pairwise(steps)]
    longest, round = max(spans)
    usual = median(seconds for seconds, _ in spans)
    next_commit = longest_by_kind((r.fault.kind, r.commit_s) for r in records)
    figure = f"longest {longest:.1f} s (round {round}), usual {usual:.2f} s, cap {step_timeout:.0f} s"
    if next_commit:
        figure += f"; from a fault to the next commit, while there is a hub: {next_commit}"
    return Check(promise, longest <= step_timeout + SLACK, figure)


def longest_by_kind(times: Iterable[tuple[str, float | None]]) -> str:
    """Format the longest time of each kind: `kill 2.1 s, stop 5.1 s`."""
    known: dict[str, float] = {}
    for kind, seconds in times:
        if seconds is not None:
            known[kind] = max(known.get(kind, 0.0), seconds)
    return ", ".join(f"{kind} {known[kind]:.1f} s" for kind in KINDS if kind in known)


def everybody_came_back(records: Sequence[Record]) -> Check:
    harmed = [r for r in records if r.problem]
    broken = [f"{r.fault.kind} of {r.fault.target} at {r.fault.at:.0f} s: {r.problem}" for r in harmed]
    times = longest_by_kind((r.fault.kind, r.back_s) for r in records if r.fault.target != HUB)
    figure = f"from the fault's end (kill, leave: the new start) to a packet in a round at most: {times}"
    return found("everybody comes back by themselves", broken, figure)


def hub_back_soon(records: Sequence[Record]) -> Check:
    promise = f"peers are back within {RECONNECTS:.0f} s of the hub's listening again"
    times = sorted(r.back_s for r in records if r.fault.target == HUB and r.back_s is not None)
    if not times:
        return Check(promise, True, "it was not killed")
    ninth = times[int(0.9 * (len(times) - 1))]
    spread = f"median {median(times):.1f} s, 90 % {ninth:.1f} s, at most {times[-1]:.1f} s"
    return Check(promise, times[-1] <= RECONNECTS, f"{len(times)} times: {spread}")


def hub_lost(records: Sequence[Record], rounds: Collection[int] = ()) -> Iterator[Check]:
    """Check what it cost where the hub's machine was destroyed. `rounds`: all that were lost with hubs, those
    included whose standby took over as they were away for too long."""
    if gaps := sorted(r.gap_s for r in records if r.gap_s is not None):
        figure = f"{len(gaps)} times: median {median(gaps):.1f} s, at most {gaps[-1]:.1f} s"
        yield Check(f"a standby goes on within {TAKES_OVER:.0f} s", gaps[-1] <= TAKES_OVER, figure)
        most, lost = max(r.may_lose for r in records), [r.lost for r in records if r.gap_s is not None]
        promise = (
            "asynchronous: one committed round is lost at most" if most else "no committed round is lost"
        )
        figure = f"{sum(lost)} in {len(lost)} times, {max(lost)} at most"
        yield Check(promise, max(lost) <= most and (bool(most) or not rounds), figure)


# ---- what was told, and how it ended -----------------------------------------------------------------------


def reported(swarm: Swarm, records: Sequence[Record]) -> Check:
    """Check that a fault that cost the run a peer, or its packet in a round, is told with the peer's name."""
    untold, many = [], 0
    for r in (r for r in records if r.fault.target not in (HUB, RELAY, JOINER) and not r.problem):
        peer, until = r.fault.target, r.ended + TOLD_WITHIN
        until += swarm.without_hub(r.began, until)
        starts = (t.at for t in swarm.told if t.event["event"] == "run_started" and t.at <= r.began)
        since = max(starts, default=r.began)  # a hub warns of a peer once, and says later how often
        said = any(
            (since if t.event["event"] == "warning" else r.began) <= t.at <= until
            and (is_about(t.event, peer) or (peer in swarm.lent and t.event["event"] == "stages"))
            for t in swarm.told
        )
        said = said or is_away(swarm, peer, r.began)  # the fault before is told
        steps = [s for s in swarm.steps() if r.began + 1 < s.at < r.ended]
        missed = sum(not any(name.startswith(peer) for name in s.event["accepted"]) for s in steps)
        missed = 0 if peer in swarm.lent else missed  # who of them is the peer, and who waits, changes
        many += said
        if not said and (missed or r.fault.kind in TELLS):
            untold.append(f"{r.fault.kind} of {peer} at {r.fault.at:.0f} s (missed {missed} rounds)")
    figure = f"{many} of {len(records)} faults; the others cost no peer and no packet"
    return found("faults are told with the peer's name and the reason", untold, figure)


def is_away(swarm: Swarm, peer: str, at: float) -> bool:
    """True where the newest word on the peer before this time is that it has left."""
    kinds = [t.event["event"] for t in swarm.told if t.at < at and str(t.event.get("peer")) == peer]
    known = [kind for kind in kinds if kind in ("peer_left", "peer_ready")]
    return known[-1:] == ["peer_left"]


def is_about(event: Line, peer: str) -> bool:
    """True where this event names the peer as gone, or as late."""
    if event.get("event") == "peer_left":
        return bool(event["peer"].startswith(peer))
    return event.get("event") == "warning" and peer in event["message"]


def exits(swarm: Swarm) -> Check:
    """Check that every process has ended, with a status that is right for what was done to it."""
    wrong = []
    for child in swarm.children:
        if child.exit is None:
            wrong.append(f"{child.name} had not ended ({child.log})")
        elif child.exit not in child.expects and not came_too_late(child):
            want, why = " or ".join(map(str, sorted(child.expects))), child.why or "the run was over"
            wrong.append(f"{child.name} ended with exit {child.exit}, expected {want} as {why} ({child.log})")
    figure = f"{len(swarm.children)} processes; who was asked to leave had {LEAVES:.0f} s"
    return found("every process ends, with the right exit status", wrong, figure)


def came_too_late(child: Child) -> bool:
    """Tell whether a peer found the run over, as one may that was started when it ended."""
    return child.exit == EXIT["no_result"] and child.name not in (HUB, RELAY) and not child.heard("joined")


def sentences(swarm: Swarm) -> Check:
    """Check for tracebacks. Where a C library may abort the process, faulthandler's words are no error of
    ours."""
    bad = []
    for child in swarm.children:
        text, aborted = child.log.read_text(errors="replace"), child.exit == -signal.SIGABRT
        if any(sign in text for sign in SIGNS) and not (aborted and child.exit in child.expects):
            bad.append(str(child.log))
    return found("errors are sentences, not tracebacks", bad, f"{len(swarm.children)} stderrs")


# ---- memory ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Growth:
    """A process's memory, from the first to the last quarter of its life after warming up."""

    rss: float  # bytes, in the first
    more: float  # bytes
    files: int  # more descriptors
    seconds: float

    def flat(self, files: int = FILES) -> bool:
        return self.more <= GROWTH[0] + GROWTH[1] * self.rss and self.files <= files


def growth_of(child: Child) -> Growth | None:
    """Measure it; None where the process did not live long enough."""
    seen = [look for look in child.memory if child.works is not None and look.at > child.works + WARM_UP]
    if not seen or seen[-1].at - seen[0].at < LONG_LIVED:
        return None
    quarter = max(1, len(seen) // 4)
    first, last = seen[:quarter], seen[-quarter:]
    rss, files = median(look.rss for look in first), median(look.files for look in first)
    more, opened = median(look.rss for look in last) - rss, median(look.files for look in last) - files
    return Growth(rss, more, round(opened), seen[-1].at - seen[0].at)


def memory_flat(swarm: Swarm) -> Check:
    """Check the hub's memory and each peer's, of the process that lived longest."""
    told, grown = [], []
    files = FILES + (DOOR_FILES * (len(swarm.links) - 1) if swarm.owners else 0)
    more_files = {RELAY: RELAYED_FILES * len(swarm.relayed), HUB: TUNNEL_FILES * len(swarm.relayed)}
    for name in sorted({child.name for child in swarm.children}):
        growth = growth_of(max((c for c in swarm.children if c.name == name), key=lambda c: len(c.memory)))
        if growth is None:
            continue
        told.append(f"{name} {growth.rss / 1e6:.0f} {growth.more / 1e6:+.1f} MB in {growth.seconds:.0f} s")
        if not growth.flat(files + more_files.get(name, 0)):
            grown.append(f"{name} ({growth.files:+d} descriptors)")
    figure = "; ".join(told) or "no process lived long enough to say"
    return Check("memory is flat", not grown, (f"grown: {', '.join(grown)}; " if grown else "") + figure)


def save_told(swarm: Swarm, path: Path) -> None:
    """Write all that the hubs told, and when: for a person who looks for the reason of a failure."""
    with path.open("w", encoding="utf-8") as file:
        for told in swarm.told:
            file.write(json.dumps({"at": round(told.at, 3)} | told.event) + "\n")
