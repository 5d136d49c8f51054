"""Choose how a model of the user's own is trained: method, rate, epochs, length and batch.

The host chooses once, by the size of the model, the first rows of the data and the memory of its machine.
What the user typed is never changed. The choice lands in the resolved recipe, so all peers share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from recipes.config import Recipe, Resolved, data_suffix, public_name
from recipes.data import no_rows
from recipes.models import config_folder, context_of, load_tokenizer
from recipes.weight_files import meta_model

from .memory_plan import Machine, count_text, plan_memory
from .step_cost import DataSurvey, survey_data

Load = Callable[[Mapping[str, Any]], Resolved]  # dotted key -> value: the recipe with these values

WHOLE_BELOW = 1_000_000_000  # parameters: larger models get adapters
LARGE_FROM = 13_000_000_000  # parameters from which QLoRA (Dettmers et al., 2023) halves the rate
RATES = {"full": 2e-5, "lora": 2e-4, "qlora": 2e-4}  # TRL's for whole models, QLoRA's for adapters
ADAPTERS = {"lora.lora_r": 16, "lora.lora_alpha": 32, "compression.preset": "lora-cocktail"}
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": ADAPTERS,
    "qlora": ADAPTERS | {"model.load_in_4bit": True},
}
NAMES = {"full": "all of them are trained", "lora": "LoRA adapters", "qlora": "LoRA on a 4-bit base (QLoRA)"}
EPOCHS = ((10_000, 3), (50_000, 2))  # below so many rows, so many epochs; else one
ENOUGH_STEPS = 100  # the batch is the largest that leaves so many steps
SMALLEST_BATCH, LARGEST_BATCH = 8, 64
JOINED = 1024  # tokens of a sample of a running text
LONGEST = 2048  # tokens of a sample, unless the user types more
STEP = 64  # max_length is a multiple of it
HELD_FROM = 100  # rows from which some are held out
HELD_SHARE, HELD_MOST = 0.05, 100  # of the rows; how many at most
KEPT = 0.995  # share of the rows that max_length does not cut
GIB = 1 << 30


@dataclass
class MethodChoice:
    """Values by dotted key, and the three lines that explain them."""

    keys: dict[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fit:
    """A method and the memory that it needs."""

    method: str
    need: int  # bytes of a peer with a micro-batch of one; 0: not computed
    why: str


def choose_method(load: Load, machine: Machine | None) -> MethodChoice:
    """Choose the keys of a recipe that its user did not type.

    Args:
        load: loads the recipe with more keys.
        machine: where a peer trains; None: elsewhere, and method follows from the size alone.

    Errors: ModelError, DataError, HubUnreachable, as preparing the run would.
    """
    asked = load({})
    folder = config_folder(asked.recipe.model)
    survey = survey_data(asked.recipe, load_tokenizer(asked.recipe.model, folder))
    if survey.rows == 0:
        raise no_rows(asked.recipe.datasets[0].path)
    chosen = Untyped(asked)
    running = all(data_suffix(Path(dataset.path)) == ".txt" for dataset in asked.recipe.datasets)
    chosen.set({"swarm.requires": None, **length_keys(survey, context_of(folder), running)})
    drawn = meta_model(folder, code=asked.recipe.model.trust_remote_code)
    size = sum(parameter.numel() for parameter in drawn.parameters())
    if not drawn.supports_gradient_checkpointing:
        chosen.set({"training.activation_checkpointing": False})
    fit = method_of(chosen, load, folder, size, machine)
    rate = RATES[fit.method] / (2 if fit.method != "full" and size >= LARGE_FROM else 1)
    rate = asked.recipe.objective.adapters_rate or rate
    chosen.set({**METHODS[fit.method], "training.learning_rate": rate})
    chosen.set({"training.num_train_epochs": epochs_of(survey.rows)})
    if not asked.recipe.has_eval and not asked.recipe.data.streaming:
        chosen.set(held_out_keys(survey.rows))
    chosen.set({"training.global_batch_size": batch_of(load(chosen.keys).recipe, survey)})
    recipe = load(chosen.keys).recipe
    return MethodChoice(chosen.keys, tuple(explain(recipe, survey, fit, size)))


@dataclass
class Untyped:
    """Collects the chosen keys; those that the user typed stay as they are."""

    asked: Resolved
    keys: dict[str, Any] = field(default_factory=dict)

    def typed(self, key: str) -> bool:
        parts = tuple(key.split("."))
        given = self.asked.document.overridden
        return any(parts[:depth] in given for depth in range(1, len(parts) + 1))

    def set(self, keys: Mapping[str, Any]) -> None:
        self.keys.update({key: value for key, value in keys.items() if not self.typed(key)})


def length_keys(survey: DataSurvey, context: int | None, running: bool) -> dict[str, Any]:
    """Choose max_length so that few rows are cut; long texts, and those of a `running` text, a .txt, are
    joined and split instead."""
    most = min(LONGEST, context or LONGEST)
    if not survey.lengths:
        return {"data.max_length": min(1024, most)}
    longest = sorted(survey.lengths)[math.ceil(KEPT * len(survey.lengths)) - 1]
    joined = longest > most or running
    if joined and set(survey.kinds) == {"text"}:
        length = min(most, JOINED) if longest <= most else most
        return {"data.max_length": length, "data.packing": True, "data.packing_strategy": "wrapped"}
    return {"data.max_length": min(most, max(1, -(-longest // STEP)) * STEP)}


def method_of(chosen: Untyped, load: Load, folder: Path, size: int, machine: Machine | None) -> Fit:
    """Choose the method: as typed, else by size, else the first that fits the memory."""
    recipe = chosen.asked.recipe
    if recipe.lora is not None:
        return Fit("qlora" if recipe.model.quantized else "lora", 0, "as typed")
    if chosen.typed("lora"):
        return Fit("full", 0, "as typed")
    small = size < WHOLE_BELOW
    about = "below 1 B" if small else "1 B or more"
    methods = ["full", "lora"] if small else ["lora"]
    if machine is None:
        return Fit(methods[0], 0, f"{about}; no peer here whose memory would count")
    if machine.gpu and find_spec("bitsandbytes") is not None:
        methods.append("qlora")  # on a CPU 4-bit weights are far slower
    refused, have = "", f"{machine.bytes / GIB:.1f} GiB"
    for method in methods:
        with_it = load({**chosen.keys, **METHODS[method]}).recipe
        need = plan_memory(with_it, folder, 1, machine).bytes
        needs = f"{max(need / GIB, 0.1):.1f} of {have}"
        if need <= machine.bytes:
            return Fit(method, need, refused + needs if refused else f"{about}, {needs}")
        refused = f"more needs {needs}; this "
    return Fit(method, need, f"needs {needs}, which does not fit: `cocktail plan` says what would")


def held_out_keys(rows: int | None) -> dict[str, Any]:
    """Choose how many rows are held out, which the base and the model are evaluated on."""
    enough = rows is not None and rows >= HELD_FROM
    return {"data.val_set_size": min(HELD_MOST, round(HELD_SHARE * rows))} if rows and enough else {}


def epochs_of(rows: int | None) -> float:
    """Choose the epochs: few rows are seen more often."""
    return float(next((epochs for below, epochs in EPOCHS if rows is not None and rows < below), 1))


def batch_of(recipe: Recipe, survey: DataSurvey) -> int:
    """Choose the largest batch, a power of two, that leaves enough steps of the epochs: max_steps, which ends
    a run sooner, leaves it as it is."""
    rows, epochs = survey.samples(recipe), recipe.training.num_train_epochs
    samples = LARGEST_BATCH * ENOUGH_STEPS if rows is None else math.ceil(rows * epochs)
    batch = SMALLEST_BATCH
    while 2 * batch <= LARGEST_BATCH and samples >= 2 * batch * ENOUGH_STEPS:
        batch *= 2
    return max(batch, recipe.swarm.min_peers)


def explain(recipe: Recipe, survey: DataSurvey, fit: Fit, size: int) -> list[str]:
    """Write the three lines: model and method, data and length, the run."""
    training, longest = recipe.training, recipe.data.max_length
    model = public_name(recipe.model.model_name_or_path)
    paths = ", ".join(public_name(dataset.path) for dataset in recipe.datasets)
    rows = "rows not counted" if survey.rows is None else f"{survey.rows:,} rows"
    kinds = f", {' and '.join(dict.fromkeys(survey.kinds))}" if survey.kinds else ""
    cut = sum(length > longest for length in survey.lengths)
    apart = f", {recipe.data.val_set_size:g} held out" if recipe.data.val_set_size else ""
    held = f"{cut or 'none'} of the first {len(survey.lengths)} {'is' if cut == 1 else 'are'} longer"
    if recipe.data.packing or not survey.lengths:
        held = "texts are joined and split" if recipe.data.packing else "no row is read yet"
    long = f"{training.max_steps:,} steps"
    if training.max_steps <= 0:
        long = f"{training.num_train_epochs:g} epochs"
        if samples := survey.samples(recipe):
            long += f" = {training.total_steps(samples):,} steps"
    return [
        f"model   {model}: {count_text(size)} parameters, {NAMES[fit.method]} ({fit.why})",
        f"data    {paths}: {rows}{apart}{kinds}; samples of {longest:,} tokens at most, {held}",
        f"run     {long} of {training.global_batch_size} samples, learning rate {training.learning_rate:g} "
        "(change any: learning_rate=1e-4)",
    ]
