"""The recipe as types: every key, its default, its unit and its limits. Version 1.

A recipe is what all peers must share (the science). What one machine may choose (device, micro-batch,
bandwidth) is a flag of the command, never a key. Names follow transformers 5 and TRL where they have one.

Defaults are written here and nowhere else. What one might expect and does not find here has its words in
`names.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator

from .presets import PRESETS

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B)")
_BYTES = {f"{unit}{i}B": (1024 if i else 1000) ** n for n, unit in enumerate("KMGT", 1) for i in ("", "i")}


def parse_number(value: Any) -> Any:
    """`1e-5` is text to PyYAML (YAML 1.1 wants `1.0e-5`): take it for the number that was meant."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        return float(value)
    return value


def parse_duration(value: Any) -> Any:
    """`45s`, `10m`, `2h`, or a number of seconds -> seconds."""
    if isinstance(value, str):
        match = _DURATION.fullmatch(value.strip())
        if not match:
            raise ValueError(f"{value!r} is not a duration; write 45s, 10m or 2h")
        return float(match[1]) * _SECONDS[match[2]]
    return value


def parse_size(value: Any) -> Any:
    """`24GiB`, `80GB`, or a number of bytes -> bytes."""
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if not match:
            raise ValueError(f"{value!r} is not a size; write 24GiB or 80GB")
        return int(float(match[1]) * _BYTES[match[2]])
    return value


def steps_or_ratio(value: float) -> float:
    """Below 1 a share, from 1 on a whole number (transformers 5)."""
    if value >= 1 and value != int(value):
        raise ValueError(f"{value} is neither a whole number nor a share below 1")
    return value


def checkpointing(value: dict[str, int | bool]) -> dict[str, int | bool]:
    every, offload = value.get("every_n_layers", 1), value.get("offload", False)
    if isinstance(every, bool) or every < 1:
        raise ValueError(f"every_n_layers must be a whole number from 1 on, not {every}")
    if not isinstance(offload, bool):
        raise ValueError(f"offload must be true or false, not {offload}")
    return value


def power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError(f"must be a power of two, not {value}")
    return value


Real = Annotated[float, BeforeValidator(parse_number), Field(allow_inf_nan=False)]
Ratio = Annotated[Real, Field(gt=0, le=1)]
Seconds = Annotated[
    float,
    BeforeValidator(parse_duration),
    Field(gt=0, allow_inf_nan=False, description="45s, 10m, 2h, or seconds"),
]
Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0, description="24GiB, 80GB, or bytes")]
StepsOrRatio = Annotated[Real, Field(ge=0), AfterValidator(steps_or_ratio)]
Whole = Annotated[int, Field(ge=1)]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Strict(False)]


class Section(BaseModel):
    """Frozen, strict (a boolean is no number, text is no boolean), and nothing unknown goes through."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class Model(Section):
    model_name_or_path: Annotated[str, Field(min_length=1)]  # hub id, local folder, or builtin:tiny-gpt-neox
    model_revision: str | None = None  # of a hub id; null: its default branch
    tokenizer_name_or_path: str | None = None  # null: the model's own
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = (
        "auto"  # auto: float32; under `lora:` as stored
    )
    attn_implementation: Literal[
        "auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"
    ] = "auto"  # auto: transformers chooses
    trust_remote_code: bool = False  # run code that comes with the model; each machine must allow it
    pad_token: str | None = None  # null: the tokenizer's, else its eos token
    load_in_8bit: bool = False  # the frozen base; needs `lora:` and bitsandbytes
    load_in_4bit: bool = False
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"

    @property
    def quantized(self) -> bool:
        return self.load_in_8bit or self.load_in_4bit


class Lora(Section):
    """Adapters beside a frozen base (Hu et al., 2021): they alone are trained and exchanged."""

    lora_r: Whole = 16  # rank
    lora_alpha: Whole = 32  # an adapter is weighted by alpha / r, or alpha / sqrt(r)
    lora_dropout: Annotated[Real, Field(ge=0, lt=1)] = 0.05
    lora_target_modules: Names | Literal["all-linear"] = "all-linear"  # all-linear: all but the output
    lora_modules_to_save: Names = ()  # trained as a whole, beside the adapters
    use_rslora: bool = False


class Dataset(Section):
    path: Annotated[str, Field(min_length=1)]  # file, folder, glob, https, hub id, or builtin:python-docs
    name: str | None = None  # configuration of a hub data set
    data_files: Annotated[tuple[str, ...], Strict(False)] | str | None = None
    split: str = "train"
    revision: str | None = None  # of a hub data set
    type: Literal["auto", "text", "prompt_completion", "alpaca", "chat", "tokenized"] = "auto"
    weight: Annotated[Real, Field(gt=0)] | None = None  # of the run, in proportion; null: rows of all, mixed
    column_map: dict[str, str] = {}  # our name -> theirs: {messages: conversations}
    dataset_text_field: str = "text"  # the column of type text
    max_samples: Whole | None = None  # the first so many rows


class Data(Section):
    chat_template: str = "auto"  # auto: the tokenizer's, else plain; a bundled name; a .jinja file
    max_length: Annotated[int, Field(ge=8)] = 1024  # tokens of a sample
    packing: bool = False
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = "bfd"  # wrapped: documents see each other
    completion_only_loss: bool | None = None  # null: on for prompt_completion and alpaca
    assistant_only_loss: bool | None = None  # null: on for chat
    shuffle_dataset: bool = True
    val_set_size: StepsOrRatio = 0.0  # held out: below 1 a share of the rows, from 1 on rows
    streaming: bool = False  # rows are read as they are needed
    dataset_num_proc: Whole | None = None  # processes that tokenize; null: one

    @property
    def isolates_documents(self) -> bool:
        """Whether a sample may hold several documents, which do not see each other."""
        return self.packing and self.packing_strategy != "wrapped"

    @property
    def truncates(self) -> bool:
        """Whether what is longer than max_length is cut off."""
        return not self.packing or self.packing_strategy == "bfd"


class Training(Section):
    global_batch_size: Whole = 64  # samples a step, over all peers
    per_device_train_batch_size: Whole | Literal["auto"] = "auto"  # at most; a machine may choose less
    num_train_epochs: Annotated[Real, Field(gt=0)] = 1.0
    max_steps: int = -1  # above 0 it wins over the epochs
    learning_rate: Annotated[Real, Field(gt=0, lt=1)] = 2e-5
    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr", "warmup_stable_decay"
    ] = "cosine"
    lr_scheduler_kwargs: dict[str, Real] = {}
    warmup_steps: StepsOrRatio = 0.03  # steps, or a share of them below 1
    optim: Literal[
        "adamw_torch_fused",
        "adamw_torch",
        "adamw_8bit",  # bitsandbytes, as the next
        "paged_adamw_8bit",
        "adamw_torch_8bit",  # torchao
        "adafactor",
        "sgd",
    ] = "adamw_torch_fused"
    weight_decay: Annotated[Real, Field(ge=0)] = 0.0
    adam_beta1: Annotated[Real, Field(ge=0, lt=1)] = 0.5  # of the swarm (relax.py); presets may have another
    adam_beta2: Annotated[Real, Field(ge=0, lt=1)] = 0.999
    adam_epsilon: Annotated[Real, Field(gt=0)] = 1e-8
    max_grad_norm: Annotated[Real, Field(ge=0)] = 1.0  # 0: no clipping
    bf16: Literal["auto"] | bool = "auto"  # compute in bfloat16; auto: where weights or a GPU are made for it
    fp16: bool = False  # compute in float16, with a loss scale
    fp32_master_weights: bool = True  # of a model in half precision; false: stochastic rounding
    activation_checkpointing: bool = True  # compute activations twice instead of keeping them
    activation_checkpointing_kwargs: Annotated[
        dict[Literal["every_n_layers", "offload"], int | bool], AfterValidator(checkpointing)
    ] = {}
    torch_compile: bool = False
    use_liger_kernel: bool = False  # on CUDA; elsewhere the model computes as it is
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42

    def total_samples(self, rows: int) -> int:
        """How many samples the run counts, of a training set of `rows` samples."""
        if self.max_steps > 0:
            return self.max_steps * self.global_batch_size
        return math.ceil(rows * self.num_train_epochs)

    def total_steps(self, rows: int) -> int:
        return math.ceil(self.total_samples(rows) / self.global_batch_size)

    def warmup(self, steps: int) -> int:
        """Warm-up steps of a run of `steps` steps."""
        return whole_steps(self.warmup_steps, steps)


class Compression(Section):
    preset: Literal[
        "cocktail",
        "cocktail-paper",
        "cocktail-wide",
        "allreduce",
        "local-sgd",
        "diloco",
        "streaming-diloco",
        "sparseloco",
        "onebit",
        "lora-cocktail",
    ] = "cocktail"  # what stands in for the keys below where they are not written (relax.py)
    random_ratio: Annotated[Ratio, Field(ge=1e-6)] = 0.113  # p: share of the coordinates that a round visits
    topk_ratio: Ratio = 0.2  # K: share of those that is kept
    auto: bool = True  # K and bits follow line and compute, within these; where staleness is 1 and K below 1
    topk_ratio_min: Ratio | None = None  # null: an eighth of topk_ratio
    topk_ratio_max: Ratio | None = None  # null: topk_ratio
    topk_chunk: Annotated[int, Field(ge=0, le=2**20)] = 0  # of each so many neighbours; 0: of all of them
    quant_bits: Literal[1, 2, 3, 4, 8, 16, 32] = 2
    quant_bucket_size: Annotated[int, Field(ge=8, le=65536, multiple_of=8)] = 128  # values that share a scale
    stochastic_rounding: bool = False
    sample_kind: Literal["block", "element", "fragment"] = (
        "block"  # blocks from all over, single coordinates, or one range of layers after the other
    )
    block_size: Annotated[int, Field(ge=1, le=2**20), AfterValidator(power_of_two)] = 256  # of a block
    shards: Annotated[int, Field(ge=1, le=1024)] = 1  # ranges of the vector, each with a packet of its own
    staleness: Literal[0, 1] = 1  # 1: the exchange hides behind the next steps' compute
    local_steps: Whole = 1  # H: optimizer steps between two exchanges
    outer_learning_rate: Annotated[Real, Field(gt=0)] | Literal["packets"] = (
        "packets"  # the owner's step along the mean; packets: their number, up to 8: their sum
    )
    outer_momentum: Annotated[Real, Field(ge=0, lt=1)] = 0.0  # Nesterov's, at the owner
    error_decay: Annotated[Real, Field(ge=0, le=1)] = 1.0  # what a round leaves at a peer is multiplied by
    owner_error_decay: Annotated[Real, Field(ge=0, le=1)] = 1.0  # and at the owner
    uncompressed_steps: Annotated[int, Field(ge=0)] = 0  # the first so many are sent whole, in 16 bits
    weighting: Literal["tokens", "uniform"] = "tokens"  # of the peers in the mean
    aggregation: Literal["mean", "trimmed_mean", "median", "centered_clip"] = "mean"  # of a round's packets
    trim_ratio: Annotated[Real, Field(gt=0, lt=0.5)] = 0.2  # trimmed_mean: cut off at either end
    clip_radius: Annotated[Real, Field(gt=0)] = 1.0  # centered_clip: x the median distance from the centre
    state_device: Literal["auto", "accelerator", "cpu"] = "auto"  # where x' lies; auto: cpu where it is short

    @model_validator(mode="before")
    @classmethod
    def _of_the_preset(cls, given: Any) -> Any:
        preset = PRESETS.get(str(given.get("preset", ""))) if isinstance(given, dict) else None
        return {**preset.keys, **given} if preset else given

    @model_validator(mode="after")
    def _between_its_bounds(self) -> Compression:
        low, high = self.topk_ratio_min or self.topk_ratio, self.topk_ratio_max or self.topk_ratio
        if not low <= self.topk_ratio <= high:
            raise ValueError(f"topk_ratio {self.topk_ratio:g} is not from topk_ratio_min to topk_ratio_max")
        return self


class Requires(Section):
    """What a machine must have to take part; looked at before it fetches anything."""

    vram: Size | None = None  # memory of the device that trains
    disk: Size | None = None  # free where models are fetched to
    bandwidth_mbps: Annotated[Real, Field(gt=0)] | None = None  # the lower of up and down, as far as known


class Swarm(Section):
    join: Literal["token", "approve"] = "token"  # approve: the owner says yes to each newcomer as well
    min_peers: Whole = 1  # no step starts with fewer
    max_peers: Whole | None = None  # more are refused
    owners: Literal["hub", "peers"] = "hub"  # peers: those that can be reached own the shards
    start_timeout: Seconds = 1800.0  # waiting for min_peers
    step_timeout: Seconds = 600.0  # the longest a step waits; as a rule measured paces end it earlier
    peer_timeout: Seconds = 30.0  # a silent peer is dropped
    probe_batch_size: Annotated[int, Field(ge=0)] = 0  # samples on which the hub measures packets; 0: none
    requires: Requires | None = None  # null: nothing

    @model_validator(mode="after")
    def _probe_sees_the_packets(self) -> Swarm:
        if self.probe_batch_size and self.owners == "peers":
            raise ValueError("a probe (probe_batch_size) needs the packets at the hub: owners: hub")
        return self


class Checkpoint(Section):
    output_dir: Annotated[str, Field(min_length=1)] = "outputs/{name}"
    save_steps: Annotated[StepsOrRatio, Field(gt=0)] | None = 100  # between two snapshots; null: none
    save_total_limit: Whole = 2  # older ones are removed
    eval_steps: StepsOrRatio | None = None  # steps, or a share of them below 1; null: no evaluation
    push_to_hub: bool = False  # with the token of this machine: HF_TOKEN or `hf auth login`
    hub_model_id: str | None = None  # me/my-model
    hub_private_repo: bool | None = None  # null: as the account has it
    hub_strategy: Literal["end", "every_save", "checkpoint"] = "end"  # checkpoint: each into last-checkpoint/

    def save_every(self, steps: int) -> int:
        """Steps between two snapshots in a run of `steps` steps; 0: none."""
        return max(1, whole_steps(self.save_steps, steps)) if self.save_steps else 0

    def eval_every(self, steps: int) -> int:
        """Steps between two evaluations in a run of `steps` steps; 0: none."""
        return max(1, whole_steps(self.eval_steps, steps)) if self.eval_steps else 0


def listed(value: Any) -> Any:
    """`wandb` -> [wandb]; `none` and null -> []: as transformers takes it."""
    if value in (None, "none"):
        return ()
    return (value,) if isinstance(value, str) else value


class Logging(Section):
    logging_steps: Whole = 1
    # trackers that the owner's machine reports to, beside metrics.jsonl
    report_to: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio"], ...], Strict(False), BeforeValidator(listed)
    ] = ()
    project: Annotated[str, Field(min_length=1)] = "cocktail"
    run_name: str | None = None  # null: the run's own
    trackio_space_id: str | None = None  # null: on the owner's disk
    loss_watchdog_threshold: Annotated[Real, Field(gt=0)] | None = (
        None  # a run whose loss stays above it ends
    )
    loss_watchdog_patience: Whole = 3  # rounds in a row


class Recipe(Section):
    version: Literal[1]
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,63}$")]
    description: str = ""
    model: Model
    lora: Lora | None = None  # null: full fine-tuning
    datasets: Annotated[tuple[Dataset, ...], Strict(False), Field(min_length=1)]
    eval_datasets: Annotated[tuple[Dataset, ...], Strict(False)] = ()  # held out; keys as in datasets
    data: Data = Data()
    training: Training = Training()
    compression: Compression = Compression()
    swarm: Swarm = Swarm()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()

    @model_validator(mode="before")
    @classmethod
    def _betas_of_the_preset(cls, given: Any) -> Any:
        compression, training = (
            given.get(name, {}) if isinstance(given, dict) else None for name in ("compression", "training")
        )
        if not isinstance(compression, dict) or not isinstance(training, dict):
            return given
        preset = PRESETS.get(str(compression.get("preset", "")))
        return {**given, "training": {**preset.training, **training}} if preset else given

    @property
    def output_dir(self) -> str:
        """Relative to the working directory; `{name}` is the only thing that is filled in."""
        return self.checkpoint.output_dir.replace("{name}", self.name)

    @property
    def has_eval(self) -> bool:
        return bool(self.data.val_set_size or self.eval_datasets)

    def to_json(self) -> str:
        """Canonical: all keys, sorted, no spaces. `recipe_from_json` reads it; `recipe_hash` is its
        sha256."""
        return json.dumps(
            self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False
        )

    @property
    def recipe_hash(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def whole_steps(value: float, steps: int) -> int:
    """A share below 1 of `steps`, rounded up; from 1 on the value itself."""
    return math.ceil(value * steps) if value < 1 else int(value)
