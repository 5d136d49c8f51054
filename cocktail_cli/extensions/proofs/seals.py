"""Seals the folders that a run writes, and says in a model's card how to verify it.

A run that began without a signing key signs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cocktail_cli.host import CARD, CommittedModel, sha256_of
from cocktail_cli.host import run_folder as in_folder
from cocktail_cli.machine import read_run
from recipes.weight_files import weights_file_in
from transport import Ledger
from transport.ledger import merge_wal

from .sealed_folder import read_seal, write_seal
from .signed_documents import signer_of


def seal_model(model: CommittedModel, folder: Path, rounds: int, merged: bool) -> None:
    """Name ledger and weights in the model's card, and sign the hashes of all its files."""
    statement, secret = statement_of(model, rounds)
    if secret:
        weights = weights_file_in(folder)
        sha256 = sha256_of(weights)
        lines = verification_lines(statement, f"- `{weights.name}`: sha256 `{sha256}`", signer_of(secret))
        (folder / CARD).write_text(model.card(rounds, merged, [*lines]), encoding="utf-8")
        write_seal(folder, statement, secret, {weights.name: sha256})


def seal_run(model: CommittedModel, rounds: int) -> None:
    """Sign the hashes of all files of the run's folder. Raises LedgerError where a reader of the ledger is in
    the way."""
    statement, secret = statement_of(model, rounds)
    if secret:
        merge_wal(model.folder / in_folder.LEDGER)
        seal = read_seal(model.folder)  # `seal_model` has hashed its files
        write_seal(model.folder, statement, secret, seal.statement["files"] if seal else {})


def statement_of(model: CommittedModel, rounds: int) -> tuple[dict[str, Any], str]:
    """Describe the model after so many rounds for a seal; return the key to sign it with, or ""."""
    record = read_run(model.folder)
    with Ledger(model.folder / in_folder.LEDGER, write=False) as ledger:
        origin = {name: ledger.origin.get(name, "") for name in ("recipe", "base")}
        statement = {"run": ledger.run, "rounds": rounds, "head": ledger.head(rounds), **origin}
        secret = record.keys.get("signing", "") if record and ledger.origin.get("signer") else ""
        return statement, secret


def verification_lines(statement: dict[str, Any], weights: str, signer: str) -> Iterator[str]:
    """Name the hashes of ledger and weights, and the command that checks them."""
    yield from ("## Verification", "")
    yield f"- ledger of {statement['run']} after {statement['rounds']:,} rounds: head `{statement['head']}`"
    yield weights
    yield f"- signed by the run's key `{signer}` in `seal.json`, with every file here"
    yield "- `cocktail verify FOLDER` checks this folder; with `--run RUN` it replays the run"
    yield ""
