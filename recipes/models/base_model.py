"""The model a run starts from, as a folder on this disk: config, weights, tokenizer.

However it was named (a local folder, a hub id, `builtin:`), it becomes such a folder, whose files peers know
by hash. Code that comes with a model is among these files, and is run, only where the recipe says
`trust_remote_code`; whether it may say so here is asked before this room is entered (cocktail_cli/trust.py).
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from recipes.config import Model, Recipe, looks_like_path
from recipes.downloads import CODE_FILES, Progress, fetch_model_files, from_pretrained_options
from recipes.errors import ModelError
from recipes.weight_files import atomic_folder, check_model_folder, quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUILTIN = Path(__file__).parent.parent / "builtin"
BUILTIN_MODELS = {"builtin:tiny-gpt-neox": BUILTIN / "tiny-gpt-neox"}

WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
BINS = ("pytorch_model*.bin", "pytorch_model.bin.index.json")  # written anew as the former
TEXT = (
    "tokenizer*.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
BESIDE_WEIGHTS = ("config.json", "generation_config.json", *TEXT)
# model types whose attention does not ask where documents begin (transformers 5.23); recipes.apart tries any
UNISOLATED_MODEL_TYPES = frozenset({"bloom", "falcon", "mpt", "opt"})
HASH_BLOCK = 1 << 20  # bytes under one hash (transport.chunks has the same)


@dataclass(frozen=True)
class BaseFile:
    """One file of the base, as peers know it."""

    name: str  # no directories
    size: int
    sha256: str
    blocks: bytes = b""  # SHA-256 of each MiB, one after the other: by them a damaged file is mended


@dataclass(frozen=True)
class Base:
    """The model a run starts from, on this disk."""

    folder: Path
    files: tuple[BaseFile, ...]  # by name

    @property
    def digest(self) -> str:
        """sha256, hex, of the names and hashes of its files."""
        return manifest_digest(self.files)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


def prepare_base(recipe: Recipe, folder: Path, told: Progress = lambda done, total: None) -> Base:
    """The base of `recipe` as a local folder: a local folder is used as it is, a hub id is fetched into the
    hub's cache (`told`: how far). In `folder` a builtin model is made from the recipe's seed, and one whose
    weights are `.bin` written anew.

    Errors: ModelError where something is missing, HubUnreachable where the hub does not answer.
    """
    name, code = recipe.model.model_name_or_path, recipe.model.trust_remote_code
    if name.startswith("builtin:"):
        made = _make_builtin(name, recipe.training.seed, Path(folder))
        return Base(made, base_manifest(made))
    found = Path(name).expanduser()
    if found.is_dir():
        check_model_folder(found)
    else:
        found = fetch_model(name, recipe.model.model_revision, code, told)
    if not any(next(found.glob(pattern), None) for pattern in WEIGHTS):
        from .bin_conversion import convert_bin_folder

        found = convert_bin_folder(found, Path(folder), code)
    return Base(found, base_manifest(found, code))


def fetch_model(
    name: str, revision: str | None, code: bool = False, told: Progress = lambda done, total: None
) -> Path:
    """Hub model `name` as a folder of the hub's cache. Errors: as prepare_base."""
    if looks_like_path(name):
        raise ModelError(f"no such model folder: {name}")
    fetched = fetch_model_files(name, revision, [*WEIGHTS, *companion_patterns(code)], BINS, told)
    check_model_folder(fetched, name)
    return fetched


def cached_commit(folder: Path) -> str | None:
    """The commit that a folder of the hub's cache is a copy of; None: it is no such folder."""
    inside = folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")
    return folder.name if inside and re.fullmatch("[0-9a-f]{40}", folder.name) else None


def config_folder(model: Model) -> Path:
    """A folder with the config and the tokenizer of `model`: what is known of it without its weights.

    Errors: ModelError where there is none, HubUnreachable.
    """
    name = model.model_name_or_path
    if name in BUILTIN_MODELS:
        return BUILTIN_MODELS[name]
    if name.startswith("builtin:"):
        raise ModelError(f"no builtin model `{name}`; there is {', '.join(sorted(BUILTIN_MODELS))}")
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if looks_like_path(name):
            raise ModelError(f"no such model folder: {name}")
        folder = fetch_model_files(name, model.model_revision, companion_patterns(model.trust_remote_code))
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name}: no config.json, so this is no model saved by save_pretrained")
    return folder


def companion_patterns(code: bool) -> tuple[str, ...]:
    """What of a model is fetched beside its weights."""
    return (*BESIDE_WEIGHTS, CODE_FILES) if code else BESIDE_WEIGHTS


def base_manifest(folder: Path, code: bool = False) -> tuple[BaseFile, ...]:
    """The files a peer needs to hold this base, with their hashes."""
    names = {path.name for pattern in (*WEIGHTS, *companion_patterns(code)) for path in folder.glob(pattern)}
    return tuple(hash_file(folder / name) for name in sorted(names))


def hash_file(path: Path) -> BaseFile:
    """Both kinds of hashes in one pass over the file: a disk is slower than SHA-256."""
    digest, size, blocks = hashlib.sha256(), 0, list[bytes]()
    with path.open("rb") as file:
        while (block := file.read(HASH_BLOCK)) or not blocks:
            digest.update(block)
            blocks.append(hashlib.sha256(block).digest())
            size += len(block)
    return BaseFile(path.name, size, digest.hexdigest(), b"".join(blocks))


class HashedFile(Protocol):
    """A file of a base, as the owner or a peer has it."""

    @property
    def name(self) -> str: ...
    @property
    def sha256(self) -> str: ...


def manifest_digest(files: Iterable[HashedFile]) -> str:
    """sha256, hex, of the names and hashes of files, which are in order."""
    listed = "\n".join(f"{file.sha256} {file.name}" for file in files)
    return hashlib.sha256(listed.encode()).hexdigest()


def base_digests(files: Sequence[HashedFile]) -> dict[str, str]:
    """What of a base is compared at a join: "tokenizer", and "base" (config and weights) where weights are
    among the files."""
    about_text = [f for f in files if any(fnmatch(f.name, pattern) for pattern in TEXT)]
    others = [f for f in files if f not in about_text]
    found = {"tokenizer": manifest_digest(about_text)}
    if any(fnmatch(f.name, pattern) for f in others for pattern in WEIGHTS):
        found["base"] = manifest_digest(others)
    return found


def load_tokenizer(model: Model, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a base in `folder`, or that of `tokenizer_name_or_path`; with a pad token.

    Errors: ModelError where there is none, HubUnreachable.
    """
    source, code = model.tokenizer_name_or_path, model.trust_remote_code
    if source in BUILTIN_MODELS:
        folder = BUILTIN_MODELS[source]
    elif source is not None:
        local = Path(source).expanduser()
        if not local.is_dir() and looks_like_path(source):
            raise ModelError(f"no such tokenizer folder: {source}")
        folder = local if local.is_dir() else fetch_model_files(source, None, companion_patterns(code))
    return open_tokenizer(folder, model.pad_token, code)


def open_tokenizer(folder: Path, pad_token: str | None = None, code: bool = False) -> PreTrainedTokenizerBase:
    """A tokenizer with a pad token: the one asked for, the tokenizer's own, or else its eos token (labels of
    padding are masked, so that no token is lost by it). Errors: ModelError."""
    from transformers import AutoTokenizer

    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        hint = "(hint: model.tokenizer_name_or_path=FOLDER or hub id)"
        raise ModelError(f"{folder}: no tokenizer in this folder {hint}")
    told = from_pretrained_options(folder, code)
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(folder, **told)
    except Exception as error:  # any kind, from KeyError to ImportError: all mean "not this folder"
        raise ModelError(f"{folder}: transformers cannot load this tokenizer: {error}") from error
    if pad_token is not None:
        if tokenizer.convert_tokens_to_ids(pad_token) in (None, tokenizer.unk_token_id):
            raise ModelError(f"model.pad_token `{pad_token}` is not a token of {folder}")
        tokenizer.pad_token = pad_token
    elif tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ModelError(
                f"{folder}: the tokenizer has neither a pad nor an eos token (hint: model.pad_token=...)"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_fit(recipe: Recipe, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """The tokenizer's ids must lie in the embedding, a sample in the context, packed documents be kept apart
    where they are to be, and weights be numbers that can be trained. Reads the config only.

    Errors: ModelError with what was met and what was expected.
    """
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method", "quantized") if isinstance(quantized, dict) else "quantized"
        raise ModelError(
            f"the model's weights are {method} codes, not numbers in float32, float16 or bfloat16 "
            "(hint: the model that it was made from; model.load_in_4bit=true holds that in 4 bits)"
        )
    rows, context = config.get("vocab_size"), None
    for key in ("max_position_embeddings", "n_positions", "n_ctx"):
        context = context or config.get(key)
    if rows is not None and len(tokenizer) > rows:
        raise ModelError(f"the tokenizer has {len(tokenizer)} tokens, the model's embedding only {rows}")
    if recipe.data.apart and config.get("model_type") in UNISOLATED_MODEL_TYPES:
        raise ModelError(
            f"models of type {config['model_type']} let packed documents see each other "
            "(hint: data.packing_strategy=wrapped, where they are meant to, or data.packing=false)"
        )
    if context is not None and recipe.data.max_length > context:
        raise ModelError(
            f"data.max_length is {recipe.data.max_length}, the model's context only {context} "
            f"(hint: data.max_length={context})"
        )


def _make_builtin(name: str, seed: int, folder: Path) -> Path:
    """A builtin model with weights drawn from `seed`, unless `folder` already holds it."""
    if name not in BUILTIN_MODELS:
        raise ModelError(f"no builtin model `{name}`; there is {', '.join(sorted(BUILTIN_MODELS))}")
    if (folder / "model.safetensors").exists():
        return folder
    from transformers import AutoConfig, AutoModelForCausalLM

    source = BUILTIN_MODELS[name]
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    with atomic_folder(folder) as part, quiet_transformers():
        for file in source.glob("tokenizer*.json"):
            shutil.copyfile(file, part / file.name)
        model.save_pretrained(part)
    return folder
