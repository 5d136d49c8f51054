"""`cocktail verify`: check that a run, a model or a receipt is what was committed, written or signed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cocktail_cli.machine import load_run
from cocktail_cli.options import Json, ProgressOption, Quiet, TrustCode, argument, run_names, value
from cocktail_cli.ui import Display, ProgressMeter, counted, open_view, say, say_json

SHOWN = 6  # names of files that are not covered
DETAILS = ("head", "fingerprint", "base", "recipe", "signer", "hub", "peer", "not_covered")


def verify(
    target: Annotated[
        str, argument("RUN|MODEL|RECEIPT", "A run, a model's folder, or a receipt's file.", run_names)
    ],
    run: Annotated[
        str | None, value("--run", "RUN", "Compare a model or a receipt with this run, and replay it.")
    ] = None,
    trust_remote_code: TrustCode = False,
    as_json: Json = False,
    quiet: Quiet = False,
    progress: ProgressOption = "auto",
) -> None:
    """Check a run, a model or a receipt; exit 9 where anything differs.

    A run is replayed from its base model, round by round, and every sealed file is hashed.

    Examples: cocktail verify RUN
    cocktail verify my-model --run RUN
    cocktail verify ~/.local/state/cocktail/receipts/amber-otter-42-0123abcd.json
    """
    from .run_verification import RunVerification

    path = Path(target)
    with open_view(Display(quiet=quiet or as_json, progress=progress)) as view:
        meter = ProgressMeter(view.show, "replaying the run", "rounds")
        if path.is_file():
            found = check_receipt(path, run)
        elif path.is_dir() and not (path / "ledger").is_dir():
            found = check_model(path, run, trust_remote_code, meter)
        else:
            checked = RunVerification(folder_of(target))
            checked.check_hashes()
            checked.replay(trust_remote_code, meter)
            found = {"kind": "run", **checked.found}
    if as_json:
        say_json({"verified": True, **found})
        return
    say(f"verified: {summary(found)}")
    for name in DETAILS if not quiet else ():
        if value := found.get(name):
            text = value if isinstance(value, str) else shortened(value)
            say(f"  {name.replace('_', ' '):12} {text}")


def summary(found: dict[str, Any]) -> str:
    """Say in a sentence what was verified."""
    run, rounds, samples = found["run"], counted(found["rounds"], "round"), found.get("samples")
    if found["kind"] == "receipt":
        where = "as its ledger says" if found["in_ledger"] else "by its signature (--run RUN asks its ledger)"
        return f"{run} has counted {samples} samples of this peer in {rounds}, {where}"
    files = counted(found["files"], "sealed file")
    if found["kind"] == "run":
        return f"{run}, {rounds} replayed from the base model to the head below, {samples} samples; {files}"
    told = "its run was replayed; merged adapters cannot be" if found["in_ledger"] else "--run RUN replays it"
    told = "the weights are those of the replayed run" if found["replayed"] else told
    return f"{files} of {run} after {rounds}; {told}"


def shortened(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def folder_of(run: str) -> Path:
    """Find a run's folder by its name or path; it may have been moved, and its run.json may be gone."""
    return Path(run) if (Path(run) / "ledger").is_dir() else Path(load_run(run).output_dir)


def check_model(folder: Path, run: str | None, trust: bool, meter: ProgressMeter) -> dict[str, Any]:
    """Verify a model's folder by its seal; with a run, by a replay too."""
    from .run_verification import RunVerification
    from .seals import check_sealed_model, uncovered

    seal = check_sealed_model(folder)
    said = seal.statement
    found = {name: value for name, value in said.items() if name != "files"} | {"replayed": False}
    if run is not None:
        checked = RunVerification(folder_of(run))
        checked.check_hashes(seal)
        checked.replay(trust, meter, (folder, said["rounds"]))
        found["replayed"] = folder in checked.compared
    files = {"files": len(said["files"]), "not_covered": uncovered(folder, seal)}
    return {"kind": "model", **found, "in_ledger": run is not None, **files}


def check_receipt(path: Path, run: str | None) -> dict[str, Any]:
    """Verify a receipt by its signature; with a run, by its ledger too."""
    from .receipts import open_receipt
    from .run_verification import RunVerification

    receipt = open_receipt(path)
    if run is not None:
        RunVerification(folder_of(run)).check_receipt(receipt)
    return {"kind": "receipt", **receipt.statement, "in_ledger": run is not None}
