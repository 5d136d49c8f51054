"""The schema of a recipe, version 1: every key with its type, limits, default and meaning.

A recipe holds what all peers must share (the science). What one machine may choose (device, micro-batch,
bandwidth) is a flag of the command, never a key. Names follow transformers 5 and TRL where they have one.
Defaults are written here and nowhere else; `loader.py` has the names that other tools use.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator

from .presets import CHOSEN, DEFAULT, PRESETS, RUNGS, STEPS, Rung, with_preset

T = TypeVar("T")

if TYPE_CHECKING:
    PresetName = str
else:
    PresetName = Literal[tuple(PRESETS)]

ROW_TYPES = ("auto", "text", "prompt_completion", "alpaca", "chat", "tokenized")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B)")
_BYTES = {f"{unit}{i}B": (1024 if i else 1000) ** n for n, unit in enumerate("KMGT", 1) for i in ("", "i")}


def parse_number(value: Any) -> Any:
    """Convert `1e-5`, which is text to PyYAML (YAML 1.1 wants `1.0e-5`), to a number."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        return float(value)
    return value


def parse_duration(value: Any) -> Any:
    """Convert `45s`, `10m`, `2h` to seconds; numbers pass."""
    if isinstance(value, str):
        match = _DURATION.fullmatch(value.strip())
        if not match:
            raise ValueError(f"{value!r} is not a duration; write 45s, 10m or 2h")
        return float(match[1]) * _SECONDS[match[2]]
    return value


def parse_size(value: Any) -> Any:
    """Convert `24GiB`, `80GB` to bytes; numbers pass."""
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if not match:
            raise ValueError(f"{value!r} is not a size; write 24GiB or 80GB")
        return int(float(match[1]) * _BYTES[match[2]])
    return value


def steps_or_ratio(value: float) -> float:
    """Check a number of steps: below 1 a share, from 1 on a whole number (transformers 5)."""
    if value >= 1 and value != int(value):
        raise ValueError(f"{value} is neither a whole number nor a share below 1")
    return value


def checkpointing_options(value: dict[str, int | bool]) -> dict[str, int | bool]:
    every, offload = value.get("every_n_layers", 1), value.get("offload", False)
    if isinstance(every, bool) or every < 1:
        raise ValueError(f"every_n_layers must be a whole number from 1 on, not {every}")
    if not isinstance(offload, bool):
        raise ValueError(f"offload must be true or false, not {offload}")
    return value


def rising(value: tuple[int, ...]) -> tuple[int, ...]:
    if not all(start < end for start, end in pairwise((0, *value))):
        raise ValueError("must be numbers that rise, where each shard ends")
    return value


Real = Annotated[float, BeforeValidator(parse_number), Field(allow_inf_nan=False)]
Ratio = Annotated[Real, Field(gt=0, le=1)]
Seconds = Annotated[
    float,
    BeforeValidator(parse_duration),
    Field(gt=0, allow_inf_nan=False, json_schema_extra={"format": "45s, 10m, 2h, or seconds"}),
]
Size = Annotated[
    int, BeforeValidator(parse_size), Field(gt=0, json_schema_extra={"format": "24GiB, 80GB, or bytes"})
]
StepsOrRatio = Annotated[Real, Field(ge=0), AfterValidator(steps_or_ratio)]
Whole = Annotated[int, Field(ge=1)]
Ends = Annotated[tuple[Whole, ...], Strict(False), Field(min_length=1), AfterValidator(rising)]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Strict(False)]


def key(default: T, meaning: str) -> T:
    """Declare the default of a key and its meaning, which `cocktail recipes schema` prints."""
    return Field(default, description=meaning)


class Section(BaseModel):
    """A frozen, strict section: unknown keys are errors, a boolean is no number, text is no boolean."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


@dataclass(frozen=True)
class Conflict:
    """A key whose value contradicts other keys."""

    key: str  # dotted
    message: str
    hint: str = ""


class ExtensionSection(Section):
    """The section of an extension: a run that has it uses the extension."""

    one_machine: ClassVar[bool] = False  # a sample's passes through the model must be on one machine
    gone_keys: ClassVar[Mapping[str, str]] = {}  # as `loader.GONE_KEYS`
    value_hints: ClassVar[Mapping[tuple[str, str], str]] = {}  # as `loader.VALUE_HINTS`
    foreign_names: ClassVar[Mapping[str, str]] = {}  # our key -> names of it elsewhere
    row_type: ClassVar[str] = ""  # of data sets, beside ROW_TYPES; empty: it reads no other rows
    row_columns: ClassVar[Set[str]] = frozenset()  # without which there are no such rows

    @property
    def hub_sums(self) -> bool:
        """True where updates come whole to the hub, which sums them."""
        return True

    def conflicts(self, recipe: Recipe) -> Iterator[Conflict]:
        """Yield contradictions between its keys and others."""
        yield from ()


class ObjectiveSection(ExtensionSection):
    """The section of an extension that says what a run minimizes. Without one it is the loss of the next
    token, as all that is here says."""

    sequences: ClassVar[tuple[str, ...]] = ("",)  # names of a sample's sequences, for people
    forwards: ClassVar[int] = 0  # passes forward, beside that of the gradient
    dropout: ClassVar[bool] = True  # False: the model trains without
    term: ClassVar[str] = "token"  # what the loss is a mean over; anything else: a sample is one
    adapters_rate: ClassVar[float | None] = None  # usual learning rate of adapters; None: that of texts
    method: ClassVar[str] = ""  # in words, for people

    @property
    def invitation(self) -> str:
        """Say how a machine takes part with a model, data and a loop of its own; empty: with the run's."""
        return ""

    def described(self) -> Iterator[str]:
        """Yield lines of a model card that say how it trained."""
        yield from ()

    def named(self, figures: Sequence[float]) -> dict[str, dict[str, float]]:
        """Name the mean figures of the objective, as users see them: `group/name`, by group."""
        return {}

    def objective(self) -> Any:
        """Make the `recipes.objectives.Objective`; None: it is the loss of the next token."""

    def row_reader(self) -> Any:
        """Make the `recipes.data.RowReader` of its `row_type`; None: it has none."""

    def corpus(self, recipe: Recipe) -> Any:
        """Make the `recipes.data.Corpus` of a run without data sets; None: it is read from them."""

    def open_trained(self, folder: Path) -> Any:
        """Open the `recipes.weight_files.StoredVector` in a model's folder; None: as the model's class and
        the recipe say."""


class Model(Section):
    model_name_or_path: Annotated[
        str, Field(min_length=1, description="hub id, local folder, or builtin:tiny-gpt-neox")
    ]
    model_revision: str | None = key(None, "branch, tag or commit of a hub id; null: its default branch")
    tokenizer_name_or_path: str | None = key(None, "hub id or folder; null: the model's own tokenizer")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = key(
        "auto", "dtype of the weights; auto: float32, or as stored for the frozen base under `lora:`"
    )
    attn_implementation: Literal[
        "auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"
    ] = key("auto", "attention kernel; auto: transformers chooses")
    trust_remote_code: bool = key(False, "run the code that comes with the model; each machine must allow it")
    pad_token: str | None = key(None, "null: the tokenizer's pad token, else its eos token")
    eos_token: str | None = key(
        None, "token that ends an answer, also in the exported config; null: the tokenizer's"
    )
    load_in_8bit: bool = key(False, "quantize the frozen base to 8 bits; needs `lora:` and bitsandbytes")
    load_in_4bit: bool = key(
        False, "quantize the frozen base to 4 bits (nf4); needs `lora:` and bitsandbytes"
    )
    bnb_4bit_use_double_quant: bool = key(
        False, "quantize the scales of 4-bit weights too: 0.05 bytes a weight less"
    )

    @property
    def quantized(self) -> bool:
        return self.load_in_8bit or self.load_in_4bit


class Lora(Section):
    """Adapters beside a frozen base (Hu et al., 2021): only they are trained and exchanged."""

    lora_r: Whole = key(16, "rank of the adapters")
    lora_alpha: Whole = key(32, "an adapter is scaled by alpha / r")
    lora_dropout: Annotated[Real, Field(ge=0, lt=1)] = key(0.05, "dropout before each adapter")
    lora_target_modules: Names | Literal["all-linear"] = key(
        "all-linear", "modules that get adapters; all-linear: all but the output layer"
    )
    lora_modules_to_save: Names = key((), "modules trained in full, beside the adapters")
    use_dora: bool = key(False, "train the length of each output's weights apart from their direction")
    target_parameters: Names = key(
        (), "parameters outside of linear layers that get adapters, such as experts"
    )


class Dataset(Section):
    path: Annotated[
        str, Field(min_length=1, description="file, folder, https, hub id, or builtin:python-docs")
    ]
    name: str | None = key(None, "configuration of a hub data set")
    data_files: Annotated[tuple[str, ...], Strict(False)] | str | None = key(
        None, "files of a hub data set or folder, or patterns; null: all"
    )
    split: str = key("train", "split of the data set, or parts as load_dataset takes them: train[:90%]")
    revision: str | None = key(None, "branch, tag or commit of a hub data set; sha256 of a file at https")
    type: Annotated[str, Field(json_schema_extra={"enum": list(ROW_TYPES)})] = key(
        "auto", "format of the rows; auto: detected from the columns"
    )
    weight: Annotated[Real, Field(gt=0)] | None = key(
        None, "share of the run, relative to the other weights; null: rows of all data sets are mixed"
    )
    column_map: dict[str, str] = key(
        {}, "our name of a column, message key or role -> theirs: {text: content}; -: drop it"
    )
    max_samples: Whole | None = key(None, "read only the first so many rows")
    _place: str = "datasets.0"  # in its recipe

    def key_path(self, name: str) -> str:
        """Dotted path of this data set's key `name`, for hints."""
        return f"{self._place}.{name}"

    def column(self, name: str, default: str | None = None) -> str:
        """Name of the data set's column for our column `name`; `default` where column_map has none."""
        return self.column_map.get(name) or default or name


class Data(Section):
    chat_template: str = key("auto", "bundled name or .jinja file; auto: the tokenizer's, else plain")
    max_length: Annotated[int, Field(ge=8)] = key(1024, "tokens of a sample, at most")
    packing: bool = key(False, "put several documents into one sample")
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = key(
        "bfd", "as in TRL; under wrapped, documents of one sample attend to each other"
    )
    completion_only_loss: bool | None = key(None, "null: on for prompt_completion and alpaca")
    assistant_only_loss: bool | None = key(None, "null: on for chat")
    shuffle_dataset: bool = key(True, "shuffle the samples in each epoch")
    val_set_size: StepsOrRatio = key(0.0, "rows held out for evaluation: below 1 a share, from 1 on a number")
    streaming: bool = key(False, "read and tokenize rows while the run needs them")
    dataset_num_proc: Whole | None = key(None, "processes that tokenize; null: one")

    @property
    def isolates_documents(self) -> bool:
        """True where a sample may hold several documents that do not attend to each other."""
        return self.packing and self.packing_strategy != "wrapped"

    @property
    def truncates(self) -> bool:
        """True where documents longer than max_length lose their rest."""
        return not self.packing or self.packing_strategy == "bfd"


class Training(Section):
    global_batch_size: Whole = key(64, "samples a step, over all peers")
    per_device_train_batch_size: Whole | Literal["auto"] = key(
        "auto", "samples of a micro-batch, at most; a machine may choose less"
    )
    num_train_epochs: Annotated[Real, Field(gt=0)] = key(1.0, "passes over the training set")
    max_steps: int = key(-1, "optimizer steps of the run; overrides the epochs when above 0")
    learning_rate: Annotated[Real, Field(gt=0, lt=1)] = key(2e-5, "peak learning rate of the swarm")
    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr", "warmup_stable_decay"
    ] = key("cosine", "learning rate schedule of transformers")
    lr_scheduler_kwargs: dict[str, Real] = key({}, "arguments of the schedule")
    warmup_steps: StepsOrRatio = key(0.03, "number of steps, or a share of them below 1")
    optim: Literal[
        "adamw_torch_fused",
        "adamw_torch",
        "adamw_8bit",
        "paged_adamw_8bit",
        "adamw_torch_8bit",
        "adafactor",
        "sgd",
        "muon",
        "soap",
    ] = key(
        "adamw_torch_fused",
        "*adamw_8bit need bitsandbytes, adamw_torch_8bit torchao; muon and soap take the hidden matrices",
    )
    momentum: Annotated[Real, Field(ge=0, lt=1)] = key(
        0.95, "of muon, on the matrices it takes; of each peer, undivided"
    )
    weight_decay: Annotated[Real, Field(ge=0)] = key(0.0, "decoupled weight decay")
    adam_beta1: Annotated[Real, Field(ge=0, lt=1)] = key(
        0.9, "decay of the first moment; each peer takes its part where updates are added up"
    )
    adam_beta2: Annotated[Real, Field(ge=0, lt=1)] = key(0.999, "decay of the second moment")
    adam_epsilon: Annotated[Real, Field(gt=0)] = key(1e-8, "epsilon of Adam")
    max_grad_norm: Annotated[Real, Field(ge=0)] = key(1.0, "clip the gradient's norm; 0: no clipping")
    bf16: Literal["auto"] | bool = key(
        "auto", "autocast to bfloat16; auto: where weights or GPU support it, float16 where it is emulated"
    )
    fp16: bool = key(False, "autocast to float16, with loss scaling")
    fp32_master_weights: bool = key(
        True, "keep float32 copies of half-precision weights; false: stochastic rounding"
    )
    activation_checkpointing: bool = key(True, "recompute activations instead of keeping them")
    activation_checkpointing_kwargs: Annotated[
        dict[Literal["every_n_layers", "offload"], int | bool], AfterValidator(checkpointing_options)
    ] = key({}, "every_n_layers: a number; offload: true keeps activations in host memory")
    torch_compile: bool = key(False, "compile the model with torch.compile")
    use_liger_kernel: Literal["auto"] | bool = key(
        "auto", "fused kernels of liger-kernel, on CUDA only; auto: if installed, and losses stay the same"
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = key(42, "seed of shuffling, sampling and initialization")

    def total_samples(self, rows: int) -> int:
        """Samples of the whole run, given a training set of `rows` samples."""
        if self.max_steps > 0:
            return self.max_steps * self.global_batch_size
        return math.ceil(rows * self.num_train_epochs)

    def total_steps(self, rows: int) -> int:
        return math.ceil(self.total_samples(rows) / self.global_batch_size)

    def warmup(self, steps: int) -> int:
        """Warm-up steps of a run of `steps` steps; a share leaves one, as a warm-up begins at a rate of 0."""
        warmup = whole_steps(self.warmup_steps, steps)
        return warmup if self.warmup_steps >= 1 else min(warmup, max(0, steps - 1))


class Compression(Section):
    preset: PresetName = key(DEFAULT, "named defaults for the keys below (presets.py); a written key wins")
    random_ratio: Annotated[Ratio, Field(ge=1e-6)] = key(0.113, "p: share of the coordinates sampled a round")
    topk_ratio: Ratio = key(0.2, "K: share of the sampled values that is sent")
    auto: Annotated[tuple[Literal[*CHOSEN], ...], Strict(False)] = key(  # type: ignore[valid-type]
        CHOSEN, "keys that the run chooses by its lines and peers; true: those written nowhere; false: none"
    )
    topk_chunk: Annotated[int, Field(ge=0, le=2**20)] = key(
        0, "top-k within chunks of this many values; 0 selects over the whole sample"
    )
    quant_bits: Literal[1, 2, 3, 4, 8, 16, 32] = key(2, "q: bits of a sent value")
    sample_kind: Literal["block", "element", "fragment"] = key(
        "block", "sample blocks of 256 neighbours, single coordinates, or one range of layers after the other"
    )
    shards: Annotated[int, Field(ge=1, le=1024)] | Ends = key(
        1, "ranges of the vector, each with its own packet and aggregator; or where each ends"
    )
    staleness: Literal[0, 1, 2, 3, 4] = key(
        1, "rounds of compute that an exchange overlaps with, from 2 on with other rounds' too; 0: none"
    )
    local_steps: Whole = key(1, "H: optimizer steps between two exchanges")
    outer_learning_rate: Annotated[Real, Field(gt=0)] | Literal["packets"] = key(
        "packets",
        "rate of the aggregator's step along the mean; packets: their number, up to 8 (a sum); a number: the "
        "peers' optimizers are as published, without regard to each other, unless all is sent in each step",
    )
    outer_momentum: Annotated[Real, Field(ge=0, lt=1)] = key(0.0, "Nesterov momentum of the aggregator")
    error_decay: Annotated[Real, Field(ge=0, le=1)] = key(1.0, "factor on a peer's residual after each round")
    momentum_masking: bool = key(
        False, "set AdamW's first moment to zero at the coordinates of each accepted update"
    )
    uncompressed_steps: Annotated[int, Field(ge=0)] = key(0, "first steps that send everything in 16 bits")
    aggregation: Literal["mean", "median"] = key(
        "mean", "how a round's updates are combined; median tolerates bad peers, coordinate by coordinate"
    )
    state_device: Literal["auto", "accelerator", "cpu"] = key(
        "auto", "where the global model is kept; auto: in host memory where the device is short of memory"
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, given: Any) -> Any:
        return with_preset(given, False) if isinstance(given, dict) else given

    @property
    def ladder(self) -> tuple[Rung, ...]:
        """Return what `auto` chooses from, from the most bytes a step to the fewest."""
        once = self.outer_momentum or self.error_decay < 1 or self.uncompressed_steps or self.momentum_masking
        if "local_steps" not in self.auto or once or not self.staleness:
            return (Rung({}, 1.0),)  # keys that act once a round, or nothing that hides an exchange
        measured = (self.outer_learning_rate, self.sample_kind, self.topk_chunk) == ("packets", "block", 0)
        return RUNGS if measured and set(CHOSEN) <= set(self.auto) else STEPS

    @property
    def rungs(self) -> tuple[Compression, ...]:
        """Return the settings that a round may have: this one, or those of the ladder."""
        return tuple(self.model_copy(update={**rung.keys}) for rung in self.ladder)

    @property
    def words(self) -> str:
        """Say what of this setting `auto` chooses."""
        steps = f", {self.local_steps} local steps" if self.local_steps > 1 else ""
        flights = f", {self.staleness} rounds in flight" if self.staleness > 1 else ""
        bits = f"{self.quant_bits} bit{'s' if self.quant_bits > 1 else ''}"
        return f"p {self.random_ratio:g}, K {self.topk_ratio:g}, {bits}{flights}{steps}"

    @property
    def first_rung(self) -> int:
        """Return the place of the rung that a run begins with: the first for any number of peers."""
        return next(place for place, rung in enumerate(self.ladder) if rung.peers == 1)

    @property
    def shard_count(self) -> int:
        """Count the shards."""
        return self.shards if isinstance(self.shards, int) else len(self.shards)


class Requires(Section):
    """Requirements that a machine checks before it fetches anything."""

    vram: Size | None = key(None, "memory of the device that trains")
    disk: Size | None = key(None, "free disk space in the model cache")
    bandwidth_mbps: Annotated[Real, Field(gt=0)] | None = key(
        None, "bandwidth: the lower of up and down, as far as known"
    )


class Swarm(Section):
    join: Literal["token", "approve"] = key("token", "approve: the host also approves each newcomer")
    min_peers: Whole = key(1, "no step starts with fewer")
    max_peers: Whole | None = key(None, "more are refused; null: no limit")
    start_timeout: Seconds = key(1800.0, "longest wait for min_peers")
    step_timeout: Seconds = key(600.0, "upper bound of the straggler deadline")
    peer_timeout: Seconds = key(30.0, "a silent peer is dropped after this time")
    requires: Requires | None = key(None, "what a machine needs to take part; null: nothing")


class Checkpoint(Section):
    output_dir: Annotated[str, Field(min_length=1)] = key("outputs/{name}", "folder of the run")
    save_steps: Annotated[StepsOrRatio, Field(gt=0)] | None = key(
        100, "steps between two snapshots, or a share of the run below 1; null: none"
    )
    save_total_limit: Whole = key(2, "snapshots that are kept; older ones are removed")
    eval_steps: StepsOrRatio | None = key(
        None, "steps between two evaluations, or a share of the run below 1; null: no evaluation"
    )

    def save_every(self, steps: int) -> int:
        """Steps between two snapshots in a run of `steps` steps; 0: none."""
        return max(1, whole_steps(self.save_steps, steps)) if self.save_steps else 0

    def eval_every(self, steps: int) -> int:
        """Steps between two evaluations in a run of `steps` steps; 0: none."""
        return max(1, whole_steps(self.eval_steps, steps)) if self.eval_steps else 0


class Logging(Section):
    logging_steps: Whole = key(1, "steps between two lines of metrics")
    loss_watchdog_threshold: Annotated[Real, Field(gt=0)] | None = key(
        None, "end the run when its loss is above this in three consecutive rounds"
    )


class Recipe(Section):
    version: Literal[1]
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,63}$")]
    description: str = ""
    model: Model
    lora: Lora | None = key(None, "null: full fine-tuning")
    datasets: Annotated[tuple[Dataset, ...], Strict(False)] = ()
    eval_datasets: Annotated[tuple[Dataset, ...], Strict(False)] = key((), "held out; keys as in datasets")
    data: Data = Data()
    training: Training = Training()
    compression: Compression = Compression()
    swarm: Swarm = Swarm()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()

    @model_validator(mode="before")
    @classmethod
    def _apply_preset_of_adapters(cls, given: Any) -> Any:
        written = given.get("compression", {}) if isinstance(given, dict) else None
        if not isinstance(written, dict) or given.get("lora") is None:
            return given
        return {**given, "compression": with_preset(written, True)}

    def model_post_init(self, context: object) -> None:
        """Tell each data set its place, which its hints name."""
        for name in ("datasets", "eval_datasets"):
            for number, dataset in enumerate(getattr(self, name)):
                dataset._place = f"{name}.{number}"

    @property
    def extensions(self) -> dict[str, ExtensionSection]:
        """The sections of the extensions that the run uses, by name."""
        sections = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: one for name, one in sections.items() if isinstance(one, ExtensionSection)}

    @property
    def objective(self) -> ObjectiveSection:
        """The section that says what the run minimizes."""
        found = (one for one in self.extensions.values() if isinstance(one, ObjectiveSection))
        return next(found, ObjectiveSection())

    @property
    def hub_sums(self) -> bool:
        """True where updates come whole to the hub, which sums them."""
        return all(one.hub_sums for one in self.extensions.values())

    @property
    def output_dir(self) -> str:
        """Output folder relative to the working directory; only `{name}` is substituted."""
        return self.checkpoint.output_dir.replace("{name}", self.name)

    @property
    def has_eval(self) -> bool:
        return bool(self.data.val_set_size or self.eval_datasets or not self.datasets)

    def to_json(self) -> str:
        """Serialize canonically: keys sorted, no spaces. `recipe_hash` is the sha256 of this text."""
        values = self.model_dump(mode="json")
        return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    @property
    def recipe_hash(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def whole_steps(value: float, steps: int) -> int:
    """Convert a share below 1 to steps, rounded up; from 1 on it is the number of steps."""
    return math.ceil(value * steps) if value < 1 else int(value)
