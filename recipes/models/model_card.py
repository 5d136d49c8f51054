"""Render the model card: base, data, contributors, recipe, versions. No local paths, no keys, no tokens."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import yaml

from recipes.config import Recipe, is_repository_id, method_of, public_name, published_recipe
from recipes.downloads import Licence

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

PAPER = "https://proceedings.mlr.press/v202/wang23t.html"
PACKAGES = ("cocktail-sgd", "torch", "transformers", "peft", "datasets")  # with their versions
MAX_CONTRIBUTORS = 100  # listed by name


@dataclass(frozen=True)
class RunSummary:
    """Results of a run that the card reports."""

    run: str
    rounds: int
    revision: str | None  # commit of the base; None: a local one
    samples: Mapping[str, int]  # committed, by peer
    loss: float | None = None  # on held-out data
    merged: bool = False  # adapters are merged into the base
    licence: Licence = field(default_factory=Licence)  # of the base
    more: Sequence[str] = ()  # lines of an extension


def render_card(recipe: Recipe, made: RunSummary) -> str:
    """Render README.md of a model folder."""
    from huggingface_hub import ModelCardData

    base = public_name(recipe.model.model_name_or_path)
    data = [public_name(dataset.path) for dataset in recipe.datasets]
    objective = recipe.objective
    objectives = [name for name, section in recipe.extensions.items() if section is objective]
    about = ModelCardData(
        license=made.licence.name or None,
        license_name=made.licence.title or None,
        license_link=made.licence.link or None,
        model_name=made.run,
        eval_results=evaluations(recipe, made) or None,
        base_model=base if is_repository_id(recipe.model.model_name_or_path) else None,
        library_name="transformers" if recipe.lora is None or made.merged else "peft",
        pipeline_tag="text-generation",
        datasets=[
            name
            for dataset, name in zip(recipe.datasets, data, strict=True)
            if is_repository_id(dataset.path)
        ]
        or None,
        tags=["cocktail-sgd", "full" if recipe.lora is None else "lora", *objectives],
    )
    published = published_recipe(recipe)
    published.pop("description", None)  # of the recipe that the run began from
    what = ", ".join(f"`{name}`" for name in data)
    done = sum(made.samples.values())
    steps = math.ceil(done / recipe.training.global_batch_size)
    revision = f" at `{made.revision}`" if made.revision else ""
    peers = "one peer" if len(made.samples) == 1 else f"{len(made.samples)} peers"
    loss = "" if made.loss is None else f" Loss on held-out data: {made.loss:.4f}."
    return "\n".join(
        [
            "---",
            about.to_yaml(),
            "---",
            "",
            f"# {base} fine-tuned on {', '.join(data)}",
            "",
            f"{trained_how(recipe, made)} of `{base}`{revision} on {what}, by {peers} over the internet with "
            f"[CocktailSGD]({PAPER}): run {made.run}, {steps:,} steps, {made.rounds:,} rounds.{loss}",
            "",
            "## Training",
            "",
            *(f"- {line}" for line in training_lines(recipe, done)),
            "",
            "## Data",
            "",
            *(f"- `{name}`" for name in data),
            "",
            "## Contributors",
            "",
            "| peer | samples |",
            "|---|---|",
            *(f"| {plain(name)} | {count:,} |" for name, count in ranked(made.samples)),
            "",
            *made.more,
            "## Recipe",
            "",
            "```yaml",
            yaml.safe_dump(published, sort_keys=False, allow_unicode=True).rstrip(),
            "```",
            "",
            f"sha256 of the recipe in full: `{recipe.recipe_hash}`",
            "",
            "## Versions",
            "",
            *(f"- {name} {found}" for name, found in package_versions().items()),
            "",
        ]
    )


def evaluations(recipe: Recipe, made: RunSummary) -> list[EvalResult]:
    """Describe the loss on held-out data, and the perplexity, for the card's model-index."""
    from huggingface_hub import EvalResult

    if made.loss is None or not math.isfinite(made.loss):
        return []
    held_out = recipe.eval_datasets or recipe.datasets
    one = held_out[0].path if len(held_out) == 1 and is_repository_id(held_out[0].path) else None
    names = ", ".join(public_name(dataset.path) for dataset in held_out)
    split = "" if recipe.eval_datasets else ", rows held out of training"
    values = {"loss": made.loss}
    if recipe.objective.term == "token":  # any other loss says nothing of a text
        values["perplexity"] = math.exp(min(made.loss, 700.0))
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=one or "held-out",
            dataset_name=names + split,
            metric_type=metric,
            metric_value=round(value, 4),
        )
        for metric, value in values.items()
    ]


def trained_how(recipe: Recipe, made: RunSummary) -> str:
    """Name the method, and whether adapters are merged."""
    return method_of(recipe) + (", merged into their base," if made.merged else "")


def training_lines(recipe: Recipe, samples: int) -> Iterator[str]:
    """Describe how the run trained, a line each."""
    training, data = recipe.training, recipe.data
    lora, model = recipe.lora, recipe.model
    if lora is not None:
        bits = (
            ", on a base in 4 bits"
            if model.load_in_4bit
            else ", on a base in 8 bits"
            if model.load_in_8bit
            else ""
        )
        dropout = lora.lora_dropout if recipe.objective.dropout else 0.0
        kind = "DoRA" if lora.use_dora else "LoRA"
        yield f"{kind}: rank {lora.lora_r}, alpha {lora.lora_alpha}, dropout {dropout:g}{bits}"
    yield from recipe.objective.described()
    packed = ", packed" if data.packing else ""
    batch = training.global_batch_size
    yield f"{samples:,} samples of at most {data.max_length:,} tokens{packed}, {batch:,} a step"
    schedule = training.lr_scheduler_type.replace("_", " ")
    yield f"learning rate {training.learning_rate:g}, {schedule}; {training.optim}"
    yield f"updates exchanged with the preset `{recipe.compression.preset}`"


def ranked(samples: Mapping[str, int]) -> list[tuple[str, int]]:
    ranks = sorted(samples.items(), key=lambda one: (-one[1], one[0]))
    rest = ranks[MAX_CONTRIBUTORS:]
    return ranks[:MAX_CONTRIBUTORS] + (
        [(f"and {len(rest)} more", sum(count for _, count in rest))] if rest else []
    )


def plain(name: str) -> str:
    """Remove markup from a name: peers choose their own, and the card is the host's."""
    kept = (c if c in " .-_" or unicodedata.category(c)[0] in "LMN" else "?" for c in name[:64])
    return "".join(kept)


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that matter to a model."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a checkout, or not installed for this run
            continue
    return found
