"""A resumed run: its options and address, and the checks that it is the same run, unfinished, with its data.

Keys, name, address and port are those of run.json, so the URL that volunteers hold stays valid and their
links reconnect by themselves; options of this machine are those of its launch. Corpus and base model are
compared by hash with what they were: samples are known by number alone, and a number must mean the same row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocktail_cli import __version__
from cocktail_cli.assembly import NONE_GIVEN, Given, for_peers
from cocktail_cli.errors import Failure
from cocktail_cli.machine import FORMAT, RunRecord, check_record

from . import run_folder as in_folder
from .local_peers import LocalSettings
from .run_folder import altered_base_files, check_begun_files

if TYPE_CHECKING:
    from recipes.config import Recipe
    from recipes.data import Corpus, StreamedCorpus
    from recipes.models import Base
    from transport import Ledger

REMEMBERED = (  # fields of LocalSettings
    "device",
    "micro_batch_size",
    "max_up",
    "max_down",
    "vram_limit",
    "trust_remote_code",
)


def check_unfinished(record: RunRecord) -> None:
    """Raise Failure (output_in_use, altered) where a run cannot go on."""
    folder = Path(record.output_dir)
    check_record(folder)
    check_goes_on(record)
    in_folder.check_unlocked(folder, record)


def check_goes_on(record: RunRecord) -> None:
    """Raise Failure (output_in_use) where a run is over, or is in the format of another version."""
    if record.over:
        hint = f"its model: {record.output_dir}, or cocktail export {record.run} -o DIR"
        raise Failure("output_in_use", f"the run {record.run} in {record.output_dir} is over", hints=(hint,))
    check_format(record)


def check_format(record: RunRecord) -> None:
    """Raise Failure (output_in_use) where a run's folder is in the format of another version."""
    if record.format == FORMAT:
        return
    version = record.version or "of a version that it does not name"
    raise Failure(
        "output_in_use",
        f"the run {record.run} in {record.output_dir} was written by cocktail {version}, in format "
        f"{record.format}: cocktail {__version__} goes on with runs of format {FORMAT}",
        hints=(
            "resume it with the version that wrote it",
            f"its model so far: cocktail export {record.run} -o DIR",
        ),
    )


def as_begun(record: RunRecord) -> Recipe:
    """Load the run's own recipe, whose revisions are pinned to commits. Raises Failure (altered)."""
    return in_folder.recipe_in(Path(record.output_dir), record.recipe_hash)


def mended_files(record: RunRecord) -> tuple[str, ...]:
    """Make anew what follows from other files of a run's folder; return a sentence for each."""
    said = in_folder.mend_recipe(Path(record.output_dir), record.recipe_hash)
    return (said,) if said else ()


def recipe_to_resume(record: RunRecord) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe of a run that is to go on, and a sentence for each file that was made anew.

    Raises Failure: output_in_use, altered.
    """
    check_goes_on(record)
    mended = mended_files(record)  # the recipe's file may be one of them
    return as_begun(record), mended


def arguments_of(local: LocalSettings, peers: int) -> dict[str, Any]:
    """Return what run.json remembers of how the run is hosted; its address is there already."""
    added = {name: value for options in local.given.values() for name, value in options.items()}
    return {"peers": peers, **{name: getattr(local, name) for name in REMEMBERED}, **added}


def hosted_before(record: RunRecord, given: Given = NONE_GIVEN, **typed: Any) -> tuple[LocalSettings, int]:
    """Return local settings and number of peers as the run was launched, but for what is typed now; of that,
    options of extensions are `given`."""
    known = {name: record.arguments[name] for name in ("peers", *REMEMBERED) if name in record.arguments}
    now = {"peers": 1} | known | {name: value for name, value in typed.items() if value is not None}
    peers = now.pop("peers")
    return LocalSettings(**now, given=for_peers(given, record.arguments)), peers


def url_at(record: RunRecord, port: int) -> str:
    """Return the run's URL, with another port where the hub now listens at another one.

    A URL whose port is not the hub's is that of a router, which forwards it.
    """
    from transport import parse_url

    url = parse_url(record.url)
    return record.url if url.port != record.port else str(replace(url, port=port))


def same_base(record: RunRecord, recipe: Recipe, origin: Mapping[str, str]) -> Base:
    """Find the base model the run began with. Raises Failure (model_invalid) where its files have changed.

    Args:
        origin: what its ledger says that it began with.
    """
    from recipes.downloads import Licence
    from recipes.models import Base, base_manifest, cached_commit, fetch_model

    folder, model = Path(record.base), recipe.model
    if not folder.is_dir() and cached_commit(folder) is not None:  # the cache was cleared since
        folder = fetch_model(model.model_name_or_path, model.model_revision, model.trust_remote_code)
    files = base_manifest(folder, recipe.model.trust_remote_code) if folder.is_dir() else ()
    base = Base(folder, files, Licence(**record.licence))
    if base.digest != origin["base"]:
        altered = folder / altered_base_files(origin, files)[0]
        raise Failure(
            "model_invalid",
            f"the base model in {folder} is not the one {record.run} began with: "
            f"{altered} is altered or gone",
            hints=("bring back its files as they were: the ledger's packets fit that model alone",),
        )
    return base


def checked_recipe(record: RunRecord) -> Recipe:
    """Load the recipe of a run whose model is to be written, once all that it is made of was compared with
    what the run began with and has decided: rows, recipe, tokenizer, base. Raises Failure (altered,
    model_invalid), LedgerError."""
    from transport import Ledger

    folder = Path(record.output_dir)
    with Ledger(folder / in_folder.LEDGER, write=False) as ledger:
        lacking, origin = ledger.check_rows(), ledger.origin
    if lacking and not in_folder.is_locked(folder):
        in_folder.raise_lacking(folder, lacking)
    recipe = in_folder.recipe_in(folder, origin["recipe"])
    check_begun_files(folder, origin)
    same_base(record, recipe, origin)
    return recipe


def reopened_ledger(record: RunRecord, wal: bool) -> Ledger:
    """Open the ledger of a run that goes on, to write. Raises LedgerDamaged, with what is left to begin from,
    and what else Ledger raises."""
    from transport import Ledger
    from transport.protocol import LedgerDamaged

    folder = Path(record.output_dir)
    try:
        return Ledger(folder / in_folder.LEDGER, run=record.run, samples=None, wal=wal)
    except LedgerDamaged as error:
        raise LedgerDamaged(str(error), (*error.hints, *snapshot_hint(folder))) from None


def snapshot_hint(folder: Path) -> tuple[str, ...]:
    """Name the newest snapshot of a run's folder, a model to go on from where its ledger is lost."""
    place = folder / in_folder.SNAPSHOTS
    rounds = [int(path.name) for path in place.iterdir() if path.name.isdecimal()] if place.is_dir() else []
    if not rounds:
        return ()
    newest = place / str(max(rounds))
    return (f"without a copy: a new run can begin from {newest}, the model after {max(rounds)} rounds",)


def check_corpus(record: RunRecord, recipe: Recipe, corpus: Corpus | StreamedCorpus) -> None:
    """Raise Failure (dataset_invalid) where the data are not those the run began with."""
    if corpus.digest() != record.data_sha256:
        names = ", ".join(dataset.path for dataset in (*recipe.datasets, *recipe.eval_datasets))
        raise Failure(
            "dataset_invalid",
            f"the data ({names}) are not those that {record.run} began with",
            hints=("a run counts its samples by number: bring the data back as they were, or begin anew",),
        )
