"""Check a recipe's model and data before anything large is fetched: config, tokenizer, first rows.

Each check yields its findings at once; a failed check skips only those that depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from recipes.config import Dataset, Recipe, is_hub_id
from recipes.data import count_rows, detect_row_type, few_rows, make_row_tokenizer, no_rows, read_rows
from recipes.errors import DataError, Finding, HubUnreachable, InputError
from recipes.models import (
    BUILTIN_MODELS,
    bin_tensors,
    check_fit,
    check_trainable,
    config_folder,
    context_of,
    load_tokenizer,
    meta_trained_model,
    vocabulary_of,
)
from recipes.weight_files import check_model_folder, check_weights, layout_of, meta_model

from .memory_plan import count_text

LOCAL_ROWS = 1000  # of local data that are read
HUB_ROWS = 100  # of data on the hub
REPORTED = 5  # broken rows that are reported one by one
TOLERATED = 0.01  # share of the rows, truncated or left out, above which it is a warning
STEP = 64  # max_length is suggested in multiples of it
HIGH_RATES = {"adapters": 1e-3, "a whole model": 2e-4}  # for adaptive optimizers: few runs use more


def examine(recipe: Recipe, offline: bool = False) -> Iterator[Finding]:
    """Check the model, then the data. `offline`: do not ask the hub; what its cache lacks is not checked."""
    tokenizer, context, vocabulary = None, None, None
    yield from unusual_settings(recipe)
    try:
        folder = config_folder(recipe.model)
        if not recipe.datasets:
            yield Finding("ok", "model", "is built by its peers' own programs")
            return
        check_fit(recipe, folder)
        yield from model_of(recipe, folder)
        tokenizer = load_tokenizer(recipe.model, folder)
        context, vocabulary = context_of(folder), vocabulary_of(folder)
    except (InputError, HubUnreachable) as error:
        yield failed("model", error, offline)
    for dataset in (*recipe.datasets, *recipe.eval_datasets):
        try:
            yield from data_of(recipe, dataset, tokenizer, offline, context, vocabulary)
        except (InputError, HubUnreachable) as error:
            yield failed("data", error, offline)


def unusual_settings(recipe: Recipe) -> Iterator[Finding]:
    """Warn of settings that are allowed but rarely intended."""
    rate, what = recipe.training.learning_rate, "adapters" if recipe.lora else "a whole model"
    toy = recipe.model.model_name_or_path in BUILTIN_MODELS  # starts from random weights
    if rate > HIGH_RATES[what] and recipe.training.optim != "sgd" and not toy:
        usual = f"above {HIGH_RATES[what]:g} many runs diverge"
        said = f"training.learning_rate {rate:g} is high for {what}: {usual}"
        yield Finding("warn", "recipe", said, f"learning_rate={HIGH_RATES[what] / 10:g} is a usual one")
    steps = known_steps(recipe)
    if steps > 0 and (warmup := recipe.training.warmup(steps)) >= steps:
        said = f"training.warmup_steps is {warmup}, of {steps} steps in all: the rate is never reached"
        yield Finding("warn", "recipe", said, "warmup_steps=0.03 is a share of the steps")


def known_steps(recipe: Recipe) -> int:
    """Count the steps of a run: those typed, or those of its epochs over files here, at most; 0: unknown."""
    training, counted = recipe.training, not (recipe.data.packing or recipe.data.streaming)
    if training.max_steps > 0 or training.warmup_steps < 1 or not counted:
        return max(0, training.max_steps)
    if any(is_hub_id(dataset.path) or "://" in dataset.path for dataset in recipe.datasets):
        return 0
    try:
        return training.total_steps(sum(count_rows(dataset) or 0 for dataset in recipe.datasets))
    except DataError:  # `data_of` says what is wrong
        return 0


def failed(about: str, error: Exception, offline: bool = False) -> Finding:
    """Turn an error into a finding; a warning where the hub was not asked."""
    if offline and isinstance(error, HubUnreachable):
        return Finding("warn", about, f"not checked: {error}", "without --offline the hub is asked")
    hint = getattr(error, "hint", "") or "; ".join(getattr(error, "hints", ()))
    return Finding("fail", about, str(error), hint, error=error)


def model_of(recipe: Recipe, folder: Path) -> Iterator[Finding]:
    """Check that transformers supports the model, and count its parameters. Errors: ModelError."""
    if Path(recipe.model.model_name_or_path).expanduser().is_dir():
        check_model_folder(folder)
        for warning in check_weights(folder, recipe.model.trust_remote_code, bin_tensors(folder)):
            yield Finding("warn", "model", warning)
    check_trainable(recipe, folder)
    drawn = meta_model(folder, code=recipe.model.trust_remote_code)
    trained = layout_of(meta_trained_model(recipe, folder)).size
    size = sum(parameter.numel() for parameter in drawn.parameters())
    name, revision = recipe.model.model_name_or_path, recipe.model.model_revision
    called = f"{name} @ {revision}" if revision else name
    adapters = f", trains {trained / 1e6:.1f} M beside them" if recipe.lora else ""
    yield Finding("ok", "model", f"{called}: {type(drawn).__name__}, {count_text(size)} parameters{adapters}")


@dataclass
class Tally:
    """Counts over the rows that were read."""

    rows: int = 0
    bad: list[DataError] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # tokens of each that is not bad
    untrained: int = 0  # of these, those without a trained token after truncation


def data_of(
    recipe: Recipe,
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase | None,
    offline: bool,
    context: int | None = None,
    vocabulary: int | None = None,
) -> Iterator[Finding]:
    """Check that a data set exists, detect its type, and tokenize its first rows. `context`: tokens that
    the model can read; `vocabulary`: those it knows; None where it is unknown.

    Errors: DataError, HubUnreachable.
    """
    hub = is_hub_id(dataset.path)
    source = read_rows(dataset, streaming=hub and not offline)
    first = next(source, None)
    if first is None:
        raise no_rows(dataset.path)
    if tokenizer is None:
        kind = recipe.objective.row_type or detect_row_type(dataset, first)
        yield Finding("ok", "data", f"{dataset.path}: {kind}; its rows are not read, for want of a tokenizer")
        return
    options = recipe.data, dataset, first, recipe.objective, vocabulary
    encoder = make_row_tokenizer(tokenizer, *options)
    tally = Tally()
    limit = HUB_ROWS if hub else LOCAL_ROWS
    longest = None if recipe.data.packing else recipe.data.max_length
    for row in islice(chain([first], source), limit):
        tally.rows += 1
        try:
            document = encoder.tokenize([row])[0]
        except DataError as error:
            tally.bad.append(error)
        else:
            tally.lengths.append(document.longest)
            tally.untrained += not document.cut(longest or document.longest).teaches
    yield from (failed("data", error) for error in tally.bad[:REPORTED])
    yield from (Finding("warn", "data", f"{dataset.path}: {warning}") for warning in encoder.warnings)
    read = f"first {limit:,} rows" if tally.rows == limit else f"{tally.rows:,} rows"
    guess = "detected " if dataset.type == "auto" else ""
    said = (
        f"{dataset.path}: {read}, {guess}{encoder.row_type}{encoder.unused_columns}, {len(tally.bad):,} bad"
    )
    yield Finding("fail" if tally.bad else "ok", "data", said)
    yield from truncation(dataset.path, longest, tally, context)
    if dataset in recipe.datasets:
        yield from (Finding("warn", "data", text) for text in few_rows(dataset.path, tally.rows))


def truncation(path: str, longest: int | None, tally: Tally, context: int | None) -> Iterator[Finding]:
    """Report rows that are truncated, and rows without a trained token."""
    count = len(tally.lengths)
    cut = sum(longest is not None and length > longest for length in tally.lengths)
    if cut > TOLERATED * count:
        enough = -(-sorted(tally.lengths)[int(0.995 * (count - 1))] // STEP) * STEP
        left = sum(length > enough for length in tally.lengths)
        said = f"{path}: {share_of(cut, count)} are longer than max_length {longest} and will be cut"
        keeps = f"keeps all but {left:,}" if left else "keeps all"
        hint = f"data.max_length={enough} {keeps}"
        if context is not None and enough > context:
            hint = f"the model reads {context} tokens at most: split these rows, or train another model"
        yield Finding("warn", "data", said, hint)
    if count and tally.untrained == count:
        said = f"{path}: not one of {count:,} rows has a token to train on"
        yield Finding("fail", "data", said, "is everything masked, or cut away by data.max_length?")
    elif tally.untrained > TOLERATED * count:
        said = f"{path}: {share_of(tally.untrained, count)} have no token to train on and will be left out"
        yield Finding("warn", "data", said)


def share_of(part: int, whole: int) -> str:
    return f"{part:,} rows ({100 * part / whole:.1f} %)"
