"""Seals: the SHA-256 of every file of a model's or a run's folder, signed by the run's key.

    DIR/seal.json   a SignedDocument: run, rounds, head of the ledger's chain, base, recipe, files

A seal is written last. Files that carry no truth, and files that were added later, are not under it.
A run that began without a signing key signs nothing. A model's card says how to verify it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from cocktail_cli.assembly import EXTENSIONS
from cocktail_cli.errors import Failure
from cocktail_cli.host import CARD, COPY_AGAIN, CommittedModel, sha256_of
from cocktail_cli.host import run_folder as in_folder
from cocktail_cli.machine import read_run
from recipes.weight_files import weights_file_in
from transport import Ledger
from transport.ledger import DATABASE
from transport.protocol import LedgerError

from .signed_documents import NotGenuine, SignedDocument, signer_of

SEAL = "seal.json"
SNAPSHOTS = "snapshots/"  # which its host may delete
# Of a run's folder: keys and this machine's record, logs, figures, what local peers say, locks.
UNSEALED = (
    *("run.json", "cocktail.log", "events.jsonl", "metrics.jsonl", "peers"),
    *("ledger/ledger.lock", "ledger/ledger.lock-journal", "ledger/ledger.db-wal", "ledger/ledger.db-shm"),
    *(name for row in EXTENSIONS for name in row.leaves),
)


def files_in(folder: Path) -> list[str]:
    """List the files of a folder but its seal, by name."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != SEAL)


def to_seal(name: str) -> bool:
    """Tell whether a seal covers a file of this name."""
    return not any(name == one or name.startswith(one + "/") for one in UNSEALED)


def uncovered(folder: Path, seal: SignedDocument | None) -> list[str]:
    """List the files of a folder that its seal does not cover."""
    files = seal.statement["files"] if seal is not None else {}
    return [name for name in files_in(folder) if name not in files]


def write_seal(folder: Path, statement: dict[str, Any], secret: str, known: dict[str, str]) -> None:
    """Seal every file of the folder with RunKeys.signing; some SHA-256 are `known`, by name."""
    names = filter(to_seal, files_in(folder))
    files = {name: known.get(name) or sha256_of(folder / name) for name in names}
    document = SignedDocument.sign("seal", statement | {"files": files}, secret)
    (folder / SEAL).write_text(document.text(), encoding="utf-8", newline="\n")


def read_seal(folder: Path) -> SignedDocument | None:
    """Read and check the folder's seal; None where it has none. Raises NotGenuine, OSError."""
    path = folder / SEAL
    if not path.exists():
        return None
    try:
        seal = SignedDocument.parse(path.read_bytes().decode(), "seal")
        said = seal.statement
        texts = (said["run"], said["head"], *said["files"], *said["files"].values())
        if not isinstance(said["rounds"], int) or any(not isinstance(one, str) for one in texts):
            raise TypeError("it lacks a run, its rounds, or the hash of a file")
    except (NotGenuine, UnicodeDecodeError, LookupError, TypeError, AttributeError) as error:
        raise NotGenuine.of(path, error) from None
    return seal


def altered(said: str) -> Failure:
    """Make the error of what is not as it was written."""
    return Failure("altered", said, hints=(COPY_AGAIN,))


def check_files(folder: Path, files: dict[str, str]) -> None:
    """Raise Failure (altered) for the first file that is not as it was sealed, or is missing."""
    for name, expected in files.items():
        path = folder / name
        if not path.is_file() and name.startswith(SNAPSHOTS):
            continue
        if not path.is_file():
            raise altered(f"{path} is missing: it was sealed with sha256 {expected}")
        if (found := sha256_of(path)) != expected:
            raise altered(f"{path} was altered: its sha256 is {found}, sealed was {expected}")


def check_sealed_model(folder: Path) -> SignedDocument:
    """Verify a model's folder by itself: its seal, its files, and the hashes in its card.

    Raises Failure (altered; model_invalid where it has no seal).
    """
    if (seal := read_seal(folder)) is None:
        said = f"{folder} has no {SEAL}: there is nothing to check it by"
        hint = "the folder of a run, or what `cocktail export` of this version has written"
        raise Failure("model_invalid", said, hints=(hint,))
    files = seal.statement["files"]
    check_files(folder, files)
    card = (folder / CARD).read_text(encoding="utf-8") if CARD in files else ""
    for name in (seal.statement["head"], *(files[one] for one in files if one.endswith(".safetensors"))):
        if name not in card:
            raise altered(f"{folder / CARD} does not name {name}, which {SEAL} does")
    return seal


def seal_model(model: CommittedModel, folder: Path, rounds: int, merged: bool) -> None:
    """Name ledger and weights in the model's card, and sign the hashes of all its files."""
    statement, secret = statement_of(model, rounds)
    if secret:
        weights = weights_file_in(folder)
        sha256 = sha256_of(weights)
        lines = verification_lines(statement, f"- `{weights.name}`: sha256 `{sha256}`", signer_of(secret))
        (folder / CARD).write_text(model.card(folder, rounds, merged, [*lines]), encoding="utf-8")
        write_seal(folder, statement, secret, {weights.name: sha256})


def merge_wal(folder: Path) -> None:
    """Merge SQLite's write-ahead log into ledger.db, so that reading does not change that file any more.

    Raises LedgerError where a reader is in the way for five seconds.
    """
    with closing(sqlite3.connect(folder / DATABASE, timeout=5.0)) as db:
        busy, *_ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if busy:
        raise LedgerError(f"another program reads {folder / 'ledger.db'}")


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
