"""Verify a run's folder: the ledger's chain, its packets replayed from the base, and every file's hash.

All aggregates of a run stay in its ledger, so x' of every round follows from the base model again. Each must
have the fingerprint that the run's peers agreed on; the model and the snapshots must be x' to the bit. The
replay takes 4 bytes of memory a parameter.

A run that goes on has no seal. Each file that it uses again is compared with what the ledger says of it, or
with its own checksums. Logs and figures for people have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocktail_cli.assembly import files_in_use
from cocktail_cli.errors import Failure, damaged
from cocktail_cli.host import (
    WEIGHTS,
    CommittedModel,
    ProgressHook,
    altered_base_files,
    begun_files,
    check_begun_files,
    replayed,
    rungs_of,
)
from cocktail_cli.host import run_folder as in_folder
from cocktail_cli.machine import FILE, check_record, check_trust, read_run
from transport import Ledger
from transport.ledger import DATABASE, JOURNAL, PACKETS
from transport.protocol import LedgerError

from .seals import SEAL, altered, check_files, read_seal, uncovered
from .signed_documents import SignedDocument

if TYPE_CHECKING:
    from torch import Tensor

    from recipes.algorithm import GlobalModel
    from recipes.config import Recipe
    from recipes.weight_files import StoredVector

BOOKS = (*(DATABASE + end for end in ("", "-wal", "-shm", ".sha256")), JOURNAL, PACKETS)
COVERED = (*(f"{in_folder.LEDGER}/{name}" for name in BOOKS), in_folder.RESOLVED, FILE)


@contextmanager
def altered_if_damaged(what: str) -> Iterator[None]:
    """Turn what the rooms say of damaged files into Failure (altered)."""
    from compress import PacketError
    from recipes.errors import ModelError

    try:
        yield
    except (LedgerError, ModelError, PacketError) as error:
        raise altered(f"{what} was altered: {error}") from error


@contextmanager
def open_ledger(folder: Path) -> Iterator[Ledger]:
    """Open the ledger of a run's folder to read. Raises Failure (altered) for all that is wrong with it."""
    path = folder / in_folder.LEDGER
    with altered_if_damaged(f"the ledger in {folder}"), Ledger(path, write=False) as ledger:
        yield ledger


def expect(what: str, met: object, expected: object) -> None:
    """Raise Failure (altered) where the two differ."""
    if met != expected:
        raise altered(f"{what} is {met}, expected {expected}")


@dataclass
class RunVerification:
    """Verifies one run: `check_hashes`, then `replay`. Raises Failure (altered) with the file or the round.

    Args:
        folder: the run's output folder, wherever it lies now.
    """

    folder: Path
    found: dict[str, Any] = field(default_factory=dict)  # what was verified
    origin: dict[str, str] = field(default_factory=dict)  # what the run began with, from `check_hashes` on
    seal: SignedDocument | None = None  # likewise; None: the run goes on
    in_use: dict[Path, bool] = field(default_factory=dict)  # of extensions, likewise: they are whole
    compared: list[Path] = field(default_factory=list)  # folders whose weights are x', to the bit

    def check_hashes(self, model: SignedDocument | None = None) -> None:
        """Verify the ledger, and the files that the run has sealed or uses again.

        Args:
            model: the seal of a model's folder, which is to be of this run.
        """
        check_record(self.folder)
        with open_ledger(self.folder) as ledger:
            audit, self.origin = ledger.verify(), ledger.origin
            if audit.lacking and not in_folder.is_locked(self.folder):
                in_folder.raise_lacking(self.folder, audit.lacking)
            self.in_use = files_in_use(ledger)
            for path in (path for path, whole in self.in_use.items() if not whole):
                raise damaged(path, "it is not what the ledger has the hash of")
            self.seal = read_seal(self.folder)
            signer = self.origin.get("signer", "")
            self.found |= {"run": ledger.run, "rounds": audit.rounds, "samples": audit.counted}
            head = ledger.head(audit.rounds)
            for document in (self.seal, model):
                if document is not None:
                    self.check_document(document, ledger)
        if self.seal is None and signer and any((self.folder / name).is_file() for name in WEIGHTS):
            raise altered(f"{self.folder / SEAL} is missing: it was written with the model")
        files = self.seal.statement["files"] if self.seal is not None else {}
        check_files(self.folder, files)
        self.found |= {"head": head, "signer": signer, "files": len(files)}
        recipe = in_folder.recipe_in(self.folder, self.origin["recipe"])
        check_begun_files(self.folder, self.origin)
        covered = {*COVERED, *begun_files(self.origin), *self._check_snapshots(recipe)}
        if self.seal is None:
            covered |= self._check_in_use(audit.rounds)
        left = (name for name in uncovered(self.folder, self.seal) if name not in covered)
        self.found["not_covered"] = [name for name in left if not name.startswith(f"{in_folder.BASE}/")]

    def _check_snapshots(self, recipe: Recipe) -> set[str]:
        """Compare the files of every snapshot with their hashes; return their names."""
        from recipes.snapshots import altered_file, broken_files, list_snapshots

        for path in broken_files(self.folder / in_folder.SNAPSHOTS):
            raise damaged(path, "it is gone or not to be read")
        names = set[str]()
        for one in list_snapshots(self.folder / in_folder.SNAPSHOTS, self.found["run"]):
            try:
                name = altered_file(one)
            except FileNotFoundError as error:
                name = Path(error.filename).name
            if not one.folder.exists():  # a hub that goes on has removed it meanwhile
                continue
            if name:
                raise damaged(one.folder / name, "it has another hash than when it was written")
            names |= {path.relative_to(self.folder).as_posix() for path in one.folder.iterdir()}
        return names

    def _check_in_use(self, rounds: int) -> set[str]:
        """Check the files by which a run goes on: what restores the error feedback, the position in a stream.
        Returns their names."""
        from recipes.data import read_index
        from transport.ledger import ERROR_FEEDBACK, UPDATES

        ledger, stream = self.folder / in_folder.LEDGER, self.folder / in_folder.STREAM
        record, saved, updates = read_run(self.folder), ledger / ERROR_FEEDBACK, ledger / UPDATES
        if saved.exists() or updates.exists() or (record is not None and not record.over):
            self._check_error_feedback(saved, updates, rounds)
        if stream.exists() and (number := read_index(stream)[1]):
            raise damaged(stream, f"line {number} is not what was written")
        own = {in_folder.STREAM, *(f"{in_folder.LEDGER}/{name}" for name in (UPDATES, ERROR_FEEDBACK))}
        return own | {path.relative_to(self.folder).as_posix() for path in self.in_use}

    def _check_error_feedback(self, saved: Path, updates: Path, rounds: int) -> None:
        """Check what restores the error feedback before round `rounds`: the saved one, and the updates since.
        A hub that goes on may save it and clear the log meanwhile."""
        from transport.ledger import read_rounds

        try:
            start = verify_saved(saved) if saved.exists() else 0
            if start > rounds and in_folder.is_locked(self.folder):
                return
            try:
                for _ in read_rounds(updates, start, rounds):
                    pass
            except LedgerError:
                if not saved.exists() or verify_saved(saved) == start:
                    raise
                self._check_error_feedback(saved, updates, rounds)
        except (LedgerError, ValueError) as error:
            raise Failure("altered", str(error)) from error

    def check_document(self, document: SignedDocument, ledger: Ledger) -> None:
        """Compare a seal or a receipt with the ledger: the same run, signer and head."""
        said, what = document.statement, f"of the {document.kind}"
        rounds = said["rounds" if document.kind == "seal" else "committed"]
        expect(f"the run {what}", said["run"], ledger.run)
        for name in {"signer", "hub", "base", "recipe"} & said.keys():
            expect(f"the {name} {what}", said[name], ledger.origin.get(name))
        expect(f"the head after {rounds} rounds {what}", said["head"], ledger.head(rounds))

    def check_receipt(self, receipt: SignedDocument) -> None:
        """Compare a receipt with the ledger."""
        said = receipt.statement
        with open_ledger(self.folder) as ledger:
            ledger.verify()
            self.check_document(receipt, ledger)
            known = ledger.contributions(said["committed"]).get(said["peer"], (0, 0))
            expect("what the receipt has of samples and rounds", (said["samples"], said["rounds"]), known)

    def replay(self, trust: bool, progress: ProgressHook, model: tuple[Path, int] | None = None) -> None:
        """Replay every round from the base model; compare x' with fingerprints and with what was written.

        Args:
            model: one more folder with a model of this run, and after how many rounds.
        """
        from recipes.weight_files import weights_file_in

        recipe = in_folder.recipe_in(self.folder)
        check_trust(recipe, trust)
        base = self._base(recipe)
        with open_ledger(self.folder) as ledger:
            rows = ledger.rounds()
        models = [*self._snapshots(), *([model] if model is not None else [])]
        if weights_file_in(self.folder).is_file():
            models.append((self.folder, self.seal.statement["rounds"] if self.seal else len(rows)))
        fold = CommittedModel(recipe, base, self.folder).fold(len(rows), snapshots=False)
        with altered_if_damaged(f"the ledger in {self.folder}"), fold as packets:
            for x in replayed(packets):
                if x.round < len(rows) and rows[x.round].fingerprint:
                    expected = f"{rows[x.round].fingerprint:016x}"
                    expect(f"x' before round {x.round}", f"{x.fingerprint:016x}", expected)
                for folder, after in models:
                    if after == x.round and not is_merged(folder, recipe):
                        compare_weights(folder, recipe, base, x)
                        self.compared.append(folder)
                progress(x.round, len(rows))
        with open_ledger(self.folder) as ledger, altered_if_damaged(f"the ledger in {self.folder}"):
            check_rungs(recipe, ledger, x)
        self.found |= {"fingerprint": f"{x.fingerprint:016x}", "models": len(self.compared)}

    def _base(self, recipe: Recipe) -> Path:
        """Find the base model, here or where the recipe names it, and compare its hash."""
        from recipes.config import is_repository_id
        from recipes.models import base_manifest, fetch_model

        record, model = read_run(self.folder), recipe.model
        name, code = model.model_name_or_path, model.trust_remote_code
        places = [self.folder / in_folder.BASE, *([Path(record.base)] if record else []), Path(name)]
        folder = next((place for place in places if place.is_dir()), None)
        if folder is None and is_repository_id(name):
            folder = fetch_model(name, model.model_revision, code)
        if folder is None:
            hints = ("run.json of the run's folder says where it was; without it nothing can be replayed",)
            raise Failure("model_invalid", f"the base model {name} is not on this machine", hints=hints)
        for other in altered_base_files(self.origin, base_manifest(folder, code)):
            raise damaged(folder / other, "the run began with another one")
        return folder

    def _snapshots(self) -> list[tuple[Path, int]]:
        """List snapshots and their rounds."""
        from recipes.snapshots import list_snapshots

        place = self.folder / in_folder.SNAPSHOTS
        known = {one.folder: one.round for one in list_snapshots(place, self.found["run"])}
        for folder in place.iterdir() if place.is_dir() else ():
            if folder.name.isdecimal() and folder not in known and any(folder.glob("*.safetensors")):
                said = f"{folder} was altered: its weights are no snapshot of this run"
                raise Failure("altered", said, hints=("remove it: the ledger has all that is in it",))
        return sorted(known.items())


def check_rungs(recipe: Recipe, ledger: Ledger, x: GlobalModel) -> None:
    """Follow the run's ladder again by what its rounds measured. Raises Failure (altered) where a round was
    on another rung, or its aggregate is of another one's sample."""
    from compress import sampled, split
    from recipes.algorithm import adaptive_rate_of
    from transport.scheduling import Ladder

    ladder, richest = Ladder.of(rungs_of(recipe)), adaptive_rate_of(recipe.compression).richest
    if len(ladder.rungs) == 1:
        return
    rows = {row.round: row for row in ledger.rungs()}
    for round, packet in ledger.packets():
        row, mix = rows.get(round), richest[ladder.at]
        expect(f"the rung of round {round}", row and row.rung, ladder.at)
        for shard, part in zip(x.shards, split(packet, len(x.shards)), strict=True):
            if part:
                m = mix.schedule(shard.size, shard.seed, round).m
                expect(f"the length of the sample of round {round}", sampled(part), m)
        ladder = ladder.committed(round, row.need, row.members) if row is not None else ladder


def is_merged(folder: Path, recipe: Recipe) -> bool:
    """Tell whether a folder has adapters merged into their base: sums that machines may round differently."""
    from recipes.weight_files import ADAPTER_FILE

    return recipe.lora is not None and not (folder / ADAPTER_FILE).is_file()


def differing_parameter(stored: StoredVector, vector: Tensor) -> str | None:
    """Name the first parameter that is not the one of `vector` (P,), rounded to its dtype; None: none."""
    from recipes.weight_files import COPIED_AT_ONCE, STORED_DTYPES

    for name, part, view in zip(stored.names, stored.parts, stored.layout.views(vector), strict=True):
        flat, dtype = view.reshape(-1), STORED_DTYPES[part.dtype]
        for at in range(0, len(flat), COPIED_AT_ONCE):
            wanted = flat[at : at + COPIED_AT_ONCE].to(dtype).float().numpy()
            if part.floats(at, at + len(wanted)).tobytes() != wanted.tobytes():
                return name
    return None


def verify_saved(path: Path) -> int:
    """Compare an aggregator's file with its sums; return the round that it is before. Raises ValueError
    where it is damaged."""
    from safetensors import SafetensorError, safe_open

    from recipes.weight_files import damaged_part

    try:
        with safe_open(path, "pt") as file:
            said = file.metadata()
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                if damaged := damaged_part(said, {name: file.get_tensor(name)}):
                    raise ValueError(f"{damaged} is not what was written")
            return int(said["round"])
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as problem:
        raise ValueError(f"{path} is damaged: {problem}") from problem


def compare_weights(folder: Path, recipe: Recipe, base: Path, x: GlobalModel) -> None:
    """Raise Failure (altered) where the weights in a folder are not x'."""
    from recipes.models import open_trained

    with altered_if_damaged(str(folder)), closing(open_trained(recipe, base, folder)) as stored:
        if (name := differing_parameter(stored, x.vector)) is not None:
            raise altered(f"{name} in {folder} is not that of x' after {x.round} rounds")
