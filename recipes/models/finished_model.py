"""Finish a run's model: merge adapters into their base, cast weights, write a card, and let it write text.

    W' = W + s B A     by peft's own layer, in float32, one weight at a time, whatever the size

The card has base, data, contributors, recipe and versions; no local paths, no keys, no tokens.
"""

from __future__ import annotations

import json
import math
import os
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import torch
import yaml
from torch import Tensor, nn

from recipes.config import Recipe, is_repository_id, method_of, public_name, published_recipe
from recipes.downloads import Licence
from recipes.errors import ModelError
from recipes.foreign_json import parse_object
from recipes.weight_files import (
    STORED_DTYPES,
    TENSOR_DTYPES,
    WEIGHTS_FILE,
    WIDTHS,
    TensorSpec,
    open_stored_vector,
    open_tensors,
    quiet_transformers,
    safetensors_writer,
    write_model_files,
)

from .base_model import configs_with_eos, fetch_model, open_tokenizer, stops_of
from .causal_lm import load_model, open_vector
from .trainable import (
    DTYPES,
    adapter_base,
    is_adapter,
    meta_trained_model,
    split_adapters,
)

# ---- weights -----------------------------------------------------------------------------------------------

Dtype = Literal["float32", "bfloat16", "float16"]
WINDOW = 1 << 22  # elements converted at a time


@dataclass(frozen=True)
class WeightDtypes:
    """The dtypes that weights are written in."""

    most: torch.dtype  # of all, those in `own` aside
    own: Mapping[str, torch.dtype] = field(default_factory=dict)  # by name

    def spec(self, name: str, shape: tuple[int, ...]) -> TensorSpec:
        stored = self.own.get(name, self.most)
        return TensorSpec(TENSOR_DTYPES[stored], shape, prod(shape) * stored.itemsize)

    def bytes_of(self, name: str, values: Tensor) -> bytes:
        """Convert values to the dtype of weight `name`. Errors: ModelError where that makes them infinite."""
        stored = self.own.get(name, self.most)
        made = values.to(stored)
        if not made.isfinite().all():
            said = f"{name} has numbers up to {values.abs().max():g}, {stored} ends at"
            raise ModelError(f"{said} {torch.finfo(stored).max:g}", "--dtype bfloat16, or float32")
        return made.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    def __str__(self) -> str:
        return str(self.most).removeprefix("torch.")


FLOAT32 = WeightDtypes(torch.float32)


def weight_dtypes(base: Path, dtype: Dtype | None = None) -> WeightDtypes:
    """Choose `dtype` for every weight, or, without it, each weight's own in the files of its base; the dtype
    of most numbers there for a weight that has another name in them. Errors: ModelError."""
    if dtype is not None:
        return WeightDtypes(DTYPES[dtype])
    own, sizes = dict[str, torch.dtype](), Counter[torch.dtype]()
    with ExitStack() as files:
        for name, tensor in open_tensors(base, files).items():
            if tensor.dtype in WIDTHS:
                own[name] = STORED_DTYPES[tensor.dtype]
                sizes[own[name]] += prod(tensor.shape)
    return WeightDtypes(max(sizes, key=sizes.__getitem__, default=torch.float32), own)


def write_merged(
    folder: Path,
    recipe: Recipe,
    base: Path,
    trained: Mapping[str, Tensor],  # parameters of the adapters, float32
    tokenizer: Path,
    dtypes: WeightDtypes = FLOAT32,
) -> None:
    """Write the base with its adapters merged: a model that needs no peft. A tied weight of which one name
    was trained becomes two. Errors: ModelError, OSError."""
    code = recipe.model.trust_remote_code
    adapters, full = split_adapters(meta_trained_model(recipe, base), trained)
    touched = adapters.keys() | full.keys()
    with closing(open_vector(base, code)) as stored:
        untied = {name: first for name, first in stored.tied.items() if touched & {name, first}}
        shapes = dict(zip(stored.layout.names, stored.layout.shapes, strict=True))
        shapes |= {name: shapes[first] for name, first in untied.items()}
        file_names = dict(zip(stored.layout.names, stored.names, strict=True))
        called = {name: file_names.get(name, name) for name in shapes}
        specs = {called[name]: dtypes.spec(called[name], shape) for name, shape in shapes.items()}
        specs |= {name: tensor.spec for name, tensor in stored.buffers.items()}
        texts = with_dtype(configs_with_eos(stored.config_files, recipe.model, tokenizer), dtypes)
        if untied:
            config = parse_object(texts["config.json"], "config.json") | {"tie_word_embeddings": False}
            texts["config.json"] = json.dumps(config, indent=2) + "\n"
        write_model_files(folder, texts, tokenizer)
        with safetensors_writer(folder / WEIGHTS_FILE, {"format": "pt"}, specs) as file:
            for name in shapes:
                weight = full.get(name)
                if weight is None:
                    part = stored.part(name)
                    weight = torch.tensor(part.floats(0, prod(part.shape))).reshape(part.shape)
                if name in adapters:
                    weight = adapters[name].merged(weight)
                file.write(dtypes.bytes_of(called[name], weight))
            for tensor in stored.buffers.values():
                file.write(bytes(tensor.data[:]))
    if (merged := open_stored_vector(folder, code)) is None:
        said = f"{base}: {next(iter(untied), 'a weight')} has an adapter, and this class of model ties it"
        raise ModelError(f"{said} to another: they cannot be merged", "leave out --merge-lora")
    merged.close()


def with_dtype(texts: Mapping[str, str], dtypes: WeightDtypes) -> dict[str, str]:
    """Set the dtype of the weights in a model's config, name -> text; an adapter has no such config."""
    if "config.json" not in texts:
        return dict(texts)
    config = parse_object(texts["config.json"], "config.json") | {"dtype": str(dtypes)}
    return {**texts, "config.json": json.dumps(config, indent=2) + "\n"}


def convert_file_dtype(path: Path, dtypes: WeightDtypes) -> None:
    """Convert the float32 tensors of a safetensors file, window by window; others are copied.

    Errors: ModelError where a number would become infinite; the file is as it was.
    """
    part = path.with_name(path.name + ".part")
    with ExitStack() as files:
        files.callback(part.unlink, missing_ok=True)
        tensors = open_tensors(path.parent, files)
        specs = {
            name: dtypes.spec(name, tensor.shape) if tensor.dtype == "F32" else tensor.spec
            for name, tensor in tensors.items()
        }
        if all(specs[name] == tensor.spec for name, tensor in tensors.items()):
            return
        with safetensors_writer(part, {"format": "pt"}, specs) as file:
            for name, tensor in tensors.items():
                for at in range(0, len(tensor.data), 4 * WINDOW):
                    window = bytes(tensor.data[at : at + 4 * WINDOW])
                    if tensor.dtype == "F32":
                        values = torch.frombuffer(bytearray(window), dtype=torch.float32)
                        window = dtypes.bytes_of(name, values)
                    file.write(window)
        os.replace(part, path)


# ---- text --------------------------------------------------------------------------------------------------


def load_adapted(folder: Path, code: bool = False) -> nn.Module:
    """Load an adapter's folder: the base that it names, and the adapter. Errors: ModelError."""
    from peft import PeftModel

    name, revision = adapter_base(folder)
    base = Path(name) if Path(name).is_dir() else fetch_model(name, revision, code)
    plain = load_model(base, code=code)
    with quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft calls deprecated functions of transformers
        model: nn.Module = PeftModel.from_pretrained(plain, folder).eval()
    return model


class TextGenerator:
    """A loaded model with its tokenizer.

    Args:
        folder: of the model, or of an adapter.
        code: run the folder's own code.
        tokenizer: folder of another tokenizer than the model's own.
    """

    def __init__(self, folder: Path, code: bool = False, tokenizer: Path | None = None) -> None:
        folder = Path(folder)
        self.tokenizer = open_tokenizer(tokenizer or folder, code=code)
        self.model: Any = load_adapted(folder, code) if is_adapter(folder) else load_model(folder, code=code)

    @property
    def ends(self) -> list[int] | None:
        """Tokens that end a text: the model's, and the tokenizer's, which the base of an adapter may lack."""
        known = self.model.generation_config.eos_token_id
        known = {*(known if isinstance(known, list) else [known])} - {None}
        return sorted(known | stops_of(self.tokenizer)) or None

    @property
    def chats(self) -> bool:
        """True where the tokenizer has a chat template."""
        return self.tokenizer.chat_template is not None

    def generate(
        self,
        prompt: str,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        seed: int | None = None,
        special_tokens: bool = True,  # begin with the tokenizer's special tokens
    ) -> str:
        """Generate the text after `prompt`; temperature 0 takes the likeliest token each time."""
        if seed is not None:
            torch.manual_seed(seed)
        tokenizer = self.tokenizer
        inputs = tokenizer(
            prompt or tokenizer.eos_token,
            return_tensors="pt",
            return_token_type_ids=False,
            add_special_tokens=special_tokens,
        )
        options: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature > 0 else {}
        added = self._added(inputs, max_new_tokens, **options)
        return str(tokenizer.decode(added, skip_special_tokens=True))

    def complete(self, tokens: Sequence[int], max_new_tokens: int, max_seconds: float) -> list[int]:
        """Generate the likeliest tokens after these, within a number of tokens and a time."""
        prompt = torch.tensor([list(tokens)])  # (1, T)
        inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        added: list[int] = self._added(inputs, max_new_tokens, do_sample=False, max_time=max_seconds).tolist()
        return added

    @torch.no_grad()
    def _added(self, inputs: Mapping[str, Tensor], max_new_tokens: int, **options: Any) -> Tensor:
        """Generate tokens after those of one text."""
        options |= {"eos_token_id": self.ends, "pad_token_id": self.tokenizer.pad_token_id}
        made: Tensor = self.model.generate(**inputs, max_new_tokens=max_new_tokens, **options)
        return made[0, inputs["input_ids"].shape[1] :]

    def reply(
        self, messages: Sequence[Mapping[str, str]], max_new_tokens: int, temperature: float, seed: int | None
    ) -> str:
        """Generate the next message of a conversation; without a chat template, continue the last message."""
        if not self.chats:
            return self.generate(messages[-1]["content"], max_new_tokens, temperature, seed)
        apply: Any = self.tokenizer.apply_chat_template
        text = apply(list(messages), tokenize=False, add_generation_prompt=True)
        return self.generate(text, max_new_tokens, temperature, seed, special_tokens=False)


# ---- the model card ----------------------------------------------------------------------------------------

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
    before: float | None = None  # the same of the base
    merged: bool = False  # adapters are merged into the base
    dtype: str = "float32"  # of most weights
    met: str = ""  # where peers elsewhere joined from: the internet, this network; "": none is known
    licence: Licence = field(default_factory=Licence)  # of the base
    more: Sequence[str] = ()  # lines of an extension


def render_card(recipe: Recipe, made: RunSummary) -> str:
    """Render README.md of a model folder."""
    base = public_name(recipe.model.model_name_or_path)
    data = [public_name(dataset.path) for dataset in recipe.datasets]
    objectives = [name for name, section in recipe.extensions.items() if section is recipe.objective]
    about = huggingface_hub.ModelCardData(
        license=made.licence.name or None,
        license_name=made.licence.title or None,
        license_link=made.licence.link or None,
        model_name=made.run,
        eval_results=evaluations(recipe, made) or None,
        base_model=base if is_repository_id(recipe.model.model_name_or_path) else None,
        library_name=None if not data else "transformers" if recipe.lora is None or made.merged else "peft",
        pipeline_tag=None if not data else "text-generation",
        datasets=[one.path for one in recipe.datasets if is_repository_id(one.path)] or None,
        tags=["cocktail-sgd", "full" if recipe.lora is None else "lora", *objectives],
    )
    published = published_recipe(recipe)
    published.pop("description", None)  # of the recipe that the run began from
    what = ", ".join(f"`{name}`" for name in data) or "data of its peers"
    done = sum(made.samples.values())
    steps = math.ceil(done / recipe.training.global_batch_size)
    revision = f" at `{made.revision}`" if made.revision else ""
    peers = "one peer" if len(made.samples) == 1 else f"{len(made.samples)} peers"
    before = "" if made.before is None else f"{made.before:.4f} -> "
    loss = "" if made.loss is None else f" Loss on held-out data: {before}{made.loss:.4f}."
    over = f" over {made.met}" if made.met else ""
    how = method_of(recipe) + (", merged into their base," if made.merged else "")
    by = f"by {peers}{over} with [CocktailSGD]({PAPER})"
    lines = [
        f"---\n{about.to_yaml()}\n---\n",
        f"# {base} fine-tuned on {', '.join(data) or 'data of its peers'}\n",
        f"{how} of `{base}`{revision} on {what}, {by}: run {made.run}, "
        f"{steps:,} steps, {made.rounds:,} rounds.{loss}\n",
        "## Training\n",
        *(f"- {line}" for line in training_lines(recipe, done)),
        f"- weights in {made.dtype}",
        "\n## Data\n",
        *(f"- `{name}`" for name in data),
        "\n## Contributors\n\n| peer | samples |\n|---|---|",
        *(f"| {plain(name)} | {count:,} |" for name, count in ranked(made.samples)),
        "",
        *made.more,
        "## Recipe\n\n```yaml",
        yaml.safe_dump(published, sort_keys=False, allow_unicode=True).rstrip(),
        f"```\n\nsha256 of the recipe in full: `{recipe.recipe_hash}`\n\n## Versions\n",
        *(f"- {name} {found}" for name, found in package_versions().items()),
    ]
    return "\n".join([*lines, ""])


def evaluations(recipe: Recipe, made: RunSummary) -> list[huggingface_hub.EvalResult]:
    """Describe the loss on held-out data, and the perplexity, for the card's model-index."""
    if made.loss is None or not math.isfinite(made.loss):
        return []
    held_out = recipe.eval_datasets or recipe.datasets
    one = held_out[0].path if len(held_out) == 1 and is_repository_id(held_out[0].path) else None
    names = ", ".join(public_name(dataset.path) for dataset in held_out) or "data of its peers"
    split = "" if recipe.eval_datasets else ", rows held out of training"
    values = {"loss": made.loss}
    if recipe.objective.term == "token":  # any other loss says nothing of a text
        values["perplexity"] = math.exp(min(made.loss, 700.0))
    return [
        huggingface_hub.EvalResult(
            task_type="text-generation",
            dataset_type=one or "held-out",
            dataset_name=names + split,
            metric_type=metric,
            metric_value=round(value, 4),
        )
        for metric, value in values.items()
    ]


def training_lines(recipe: Recipe, samples: int) -> Iterator[str]:
    """Describe how the run trained, a line each."""
    training, data = recipe.training, recipe.data
    lora, model = recipe.lora, recipe.model
    if lora is not None:
        bits = f", on a base in {4 if model.load_in_4bit else 8} bits" if model.quantized else ""
        dropout = lora.lora_dropout if recipe.objective.dropout else 0.0
        kind = "DoRA" if lora.use_dora else "LoRA"
        yield f"{kind}: rank {lora.lora_r}, alpha {lora.lora_alpha}, dropout {dropout:g}{bits}"
    yield from recipe.objective.described()
    packed = ", packed" if data.packing else ""
    long = f" of at most {data.max_length:,} tokens{packed}" if recipe.datasets else ""
    yield f"{samples:,} samples{long}, {training.global_batch_size:,} a step"
    schedule = training.lr_scheduler_type.replace("_", " ")
    by = training.optim if recipe.datasets else "the peers' own optimizers"
    yield f"learning rate {training.learning_rate:g}, {schedule}; {by}"
    yield f"updates exchanged with the preset `{recipe.compression.preset}`"


def ranked(samples: Mapping[str, int]) -> list[tuple[str, int]]:
    ranks = sorted(samples.items(), key=lambda one: (-one[1], one[0]))
    first, rest = ranks[:MAX_CONTRIBUTORS], ranks[MAX_CONTRIBUTORS:]
    return [*first, (f"and {len(rest)} more", sum(count for _, count in rest))] if rest else first


def plain(name: str) -> str:
    """Remove markup from a name: peers choose their own, and the card is the host's."""
    kept = (c if c in " .-_" or unicodedata.category(c)[0] in "LMN" else "?" for c in name[:64])
    return "".join(kept)


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that matter to a model."""
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):  # run from a checkout, or not installed for this run
            found[name] = version(name)
    return found
