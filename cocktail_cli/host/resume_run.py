"""A resumed run: its options and address, and the checks that it is the same run, unfinished, with its data.

Keys, name, address and port are those of run.json, so the URL that volunteers hold stays valid and their
links reconnect by themselves; options of this machine are those of its launch. Corpus and base model are
compared by hash with what they were: samples are known by number alone, and a number must mean the same row.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocktail_cli.errors import Failure
from cocktail_cli.machine import ListenAddress, RunRecord, read_run

from . import run_folder as in_folder
from .local_peers import LocalSettings

if TYPE_CHECKING:
    from recipes.config import Recipe
    from recipes.data import Corpus, StreamedCorpus
    from recipes.models import Base

REMEMBERED = (  # fields of LocalSettings
    "device",
    "micro_batch_size",
    "max_up",
    "max_down",
    "gpus",
    "vram_limit",
    "trust_remote_code",
)


def unfinished(folder: Path, recipe: Recipe) -> RunRecord:
    """Read the record of a run to go on with. Raises Failure (run_unknown, output_in_use)."""
    record = read_run(folder)
    if record is None:
        hint = "where it lies: -o DIR; cocktail runs lists them"
        raise Failure("run_unknown", f"{folder} holds no run to go on with", hints=(hint,))
    if record.over:
        hint = f"its model: {folder}, or cocktail export {record.run} -o DIR"
        raise Failure("output_in_use", f"the run {record.run} in {folder} is over", hints=(hint,))
    if not record.is_of(recipe.recipe_hash):
        raise Failure(
            "output_in_use",
            f"the run {record.run} in {folder} is of recipe {record.recipe} "
            f"{(record.asked_hash or record.recipe_hash)[:8]}, "
            f"not {recipe.name} {recipe.recipe_hash[:8]}",
            hints=("give the same overrides, --data and --model as at its launch; its recipe: recipe.yaml",),
        )
    in_folder.check_unlocked(folder, record)
    return record


def as_begun(record: RunRecord) -> Recipe:
    """Load the run's own recipe, whose revisions are pinned to commits."""
    return in_folder.recipe_in(Path(record.output_dir))


def arguments_of(local: LocalSettings, peers: int) -> dict[str, Any]:
    """Return what run.json remembers of how the run is hosted; its address is there already."""
    return {"peers": peers, **{name: getattr(local, name) for name in REMEMBERED}}


def hosted_before(record: RunRecord, **typed: Any) -> tuple[LocalSettings, int]:
    """Return local settings and number of peers as the run was launched, but for what is `typed` now."""
    known = {name: record.arguments[name] for name in ("peers", *REMEMBERED) if name in record.arguments}
    now = {"peers": 1} | known | {name: value for name, value in typed.items() if value is not None}
    peers = now.pop("peers")
    return LocalSettings(**now), peers


def same_address(record: RunRecord, wanted: ListenAddress) -> ListenAddress:
    """Return the run's address of before, but for what differs from the default."""
    default = ListenAddress()
    bind = record.bind if wanted.bind == default.bind else wanted.bind
    port = record.port if wanted.port in (0, default.port) else wanted.port
    return replace(wanted, bind=bind, port=port, typed=True)


def url_at(record: RunRecord, port: int) -> str:
    """Return the run's URL, with another port where the hub now listens at another one.

    A URL whose port is not the hub's is that of a router, which forwards it.
    """
    from transport import parse_url

    url = parse_url(record.url)
    return record.url if url.port != record.port else str(replace(url, port=port))


def same_base(record: RunRecord, recipe: Recipe) -> Base:
    """Find the base model the run began with. Raises Failure (model_invalid) where its files have changed."""
    from recipes.downloads import Licence
    from recipes.models import Base, base_manifest, cached_commit, fetch_model
    from recipes.weight_files import check_model_folder

    folder, model = Path(record.base), recipe.model
    if not folder.is_dir() and cached_commit(folder) is not None:  # the cache was cleared since
        folder = fetch_model(model.model_name_or_path, model.model_revision, model.trust_remote_code)
    check_model_folder(folder)
    licence = Licence(**record.licence)
    base = Base(folder, base_manifest(folder, recipe.model.trust_remote_code), licence)
    if base.digest != record.base_sha256:
        raise Failure("model_invalid", f"the base model in {folder} is not the one {record.run} began with")
    return base


def check_corpus(record: RunRecord, recipe: Recipe, corpus: Corpus | StreamedCorpus) -> None:
    """Raise Failure (dataset_invalid) where the data are not those the run began with."""
    if corpus.digest() != record.data_sha256:
        names = ", ".join(dataset.path for dataset in (*recipe.datasets, *recipe.eval_datasets))
        raise Failure(
            "dataset_invalid",
            f"the data ({names}) are not those that {record.run} began with",
            hints=("a run counts its samples by number: bring the data back as they were, or begin anew",),
        )
