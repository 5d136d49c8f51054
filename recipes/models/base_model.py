"""Bring the model a run starts from to this disk, as a folder with config, weights and tokenizer.

A local folder, a hub id or `builtin:` becomes such a folder, whose files peers know by hash. Hub revisions
are pinned to commits, so that all peers and every resumption use the same files. Code that comes with a model
is fetched and run only where the recipe says `trust_remote_code`; the CLI has asked before whether it may say
so on this machine.

`.bin` weights are converted to safetensors once, by the host, for all peers. A `.bin` is a pickle. It is
opened with `weights_only`, which gives tensors or refuses, and mapped into memory, so that at most one of its
tensors is resident at a time. Peers fetch plain bytes behind a header.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from recipes.config import Dataset, Model, Recipe, is_hub_id, looks_like_path
from recipes.data import END_OF_TURN, decoded
from recipes.downloads import (
    CODE_FILES,
    COMPANIONS,
    TOKENIZER,
    Licence,
    Progress,
    dataset_commit,
    fetch_model_files,
    from_pretrained_options,
    https_file,
    licence_of,
)
from recipes.errors import ModelError
from recipes.file_hashes import HASH_BLOCK, BaseFile, hash_file
from recipes.foreign_json import check_json_file, parse_json, parse_object, read_object
from recipes.weight_files import (
    FLOATS,
    OF_GGUF,
    TENSOR_DTYPES,
    WEIGHTS_FILE,
    StoredTensor,
    atomic_folder,
    check_config,
    check_model_folder,
    check_no_pointers,
    meta_model,
    model_of_config,
    not_loadable,
    quiet_transformers,
    safetensors_writer,
    stored_from_tensor,
    tied_names,
)

WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
BINS = ("pytorch_model*.bin", "pytorch_model.bin.index.json")  # converted to safetensors
FILES_AT_ONCE = 4  # that are hashed: a whole file takes one thread


@dataclass(frozen=True)
class Base:
    """The model a run starts from, on this disk."""

    folder: Path
    files: tuple[BaseFile, ...]  # by name
    licence: Licence = field(default_factory=Licence)

    @property
    def digest(self) -> str:
        """sha256, hex, of the names and hashes of its files."""
        return manifest_digest(self.files)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


def companion_patterns(code: bool) -> tuple[str, ...]:
    """Patterns of the files fetched beside the weights; `code`: those with code as well."""
    return (*COMPANIONS, CODE_FILES) if code else COMPANIONS


def cached_commit(folder: Path) -> str | None:
    """The commit that a folder of the Hugging Face cache holds; None for any other folder."""
    inside = folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")
    return folder.name if inside and re.fullmatch("[0-9a-f]{40}", folder.name) else None


def base_manifest(folder: Path, code: bool = False, memory: Path | None = None) -> tuple[BaseFile, ...]:
    """List and hash the files that a peer needs to hold this base. Errors: ModelError where a peer would not
    take one of them. `memory`: as in `hash_file`."""
    names = {path.name for pattern in (*WEIGHTS, *companion_patterns(code)) for path in folder.glob(pattern)}
    for path in sorted(folder / name for name in names if name.endswith(".json")):
        try:
            check_json_file(path)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be used: {error}") from error
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        return tuple(pool.map(partial(hash_file, memory=memory), [folder / name for name in sorted(names)]))


class HashedFile(Protocol):
    """A file of a base, as the host or a peer describes it."""

    @property
    def name(self) -> str: ...
    @property
    def sha256(self) -> str: ...


def manifest_digest(files: Iterable[HashedFile]) -> str:
    """sha256, hex, of the names and hashes of files, in the given order."""
    listed = "\n".join(f"{file.sha256} {file.name}" for file in files)
    return hashlib.sha256(listed.encode()).hexdigest()


def base_digests(files: Sequence[HashedFile]) -> dict[str, str]:
    """Digests compared at a join: "tokenizer", and "base" (config and weights) where `files` have weights."""
    tokenizer = [f for f in files if any(fnmatch(f.name, pattern) for pattern in TOKENIZER)]
    others = [f for f in files if f not in tokenizer]
    found = {"tokenizer": manifest_digest(tokenizer)}
    if any(fnmatch(f.name, pattern) for f in others for pattern in WEIGHTS):
        found["base"] = manifest_digest(others)
    return found


# ---- `.bin` weights ----------------------------------------------------------------------------------------

SINGLE_FILE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def convert_bin_folder(folder: Path, place: Path, code: bool = False) -> Path:
    """Convert the model in `folder` to a folder below `place` with one safetensors file.

    The path of a hub model's conversion names its commit (`cached_commit`), and it is made once. Errors:
    ModelError; OSError where the disk is full.
    """
    if cached_commit(folder):
        place = place / folder.parent.parent.name / "snapshots" / folder.name
        if (place / WEIGHTS_FILE).exists():
            return place
    else:  # a name per source: never the conversion of another model, left by a launch that failed
        place /= hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    tied, tensors = tied_names(meta_model(folder, code=code)), dict(_tensors_in(folder))
    for name, first in tied.items():  # only where the file has one storage for both: else they may differ
        if name in tensors and first in tensors and tensors[name].data_ptr() == tensors[first].data_ptr():
            del tensors[name]
    with atomic_folder(place) as part:
        for name in {path.name for pattern in companion_patterns(code) for path in folder.glob(pattern)}:
            shutil.copyfile(folder / name, part / name)
        _write(part / WEIGHTS_FILE, tensors)
    return place


def bin_tensors(folder: Path) -> dict[str, StoredTensor] | None:
    """Open the tensors of a folder of `.bin` files; None where it has safetensors. Errors: ModelError."""
    if any(next(folder.glob(pattern), None) for pattern in WEIGHTS):
        return None
    return {name: stored_from_tensor(tensor) for name, tensor in _tensors_in(folder)}


def _tensors_in(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of all `.bin` files, in their order. Errors: ModelError."""
    for name in _bin_files(folder):
        try:
            loaded = load_bin(folder / name)
        except Exception as error:  # any kind: a pickle holds whatever its author put there
            check_only_tensors(folder, error)
            raise ModelError(
                f"{folder / name} cannot be read: {error}", "download or save it again"
            ) from error
        if not isinstance(loaded, Mapping):
            raise ModelError(f"{folder / name} holds no weights by name")
        for key, tensor in loaded.items():
            dtype = getattr(tensor, "dtype", type(tensor).__name__)
            if not isinstance(key, str) or dtype not in TENSOR_DTYPES:
                raise ModelError(f"{folder / name}: {key} is stored as {dtype}, expected {FLOATS}")
            yield key, tensor


def check_only_tensors(folder: Path, error: Exception) -> None:
    """Raise ModelError where torch has refused a `.bin` file in a folder for what is in it."""
    if "weights_only" in str(error):  # torch's own text goes on to say how to run it all the same
        said = f"{folder}: a .bin file with more than tensors in it, which could be code"
        raise ModelError(said, "the same model as safetensors, from somebody you trust") from error


def _bin_files(folder: Path) -> list[str]:
    """List the files that transformers would load. Errors: ModelError."""
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    try:
        index = parse_json((folder / INDEX).read_bytes())
        return sorted({Path(name).name for name in index["weight_map"].values()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder}: its weights cannot be read: {error}") from error


def load_bin(path: Path) -> object:
    """Load a `.bin` file, memory-mapped where its format allows."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        return torch.load(path, map_location="cpu", weights_only=True)  # the format before 2020: no archive


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write wide dtypes first, so that each tensor is aligned. Two that share memory are both written."""
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    specs = {name: stored_from_tensor(tensors[name]).spec for name in order}
    with safetensors_writer(path, {"format": "pt"}, specs) as file:
        for name in order:
            data = stored_from_tensor(tensors[name]).data
            for start in range(0, len(data), HASH_BLOCK):
                file.write(bytes(data[start : start + HASH_BLOCK]))


# ---- the base and its tokenizer ----------------------------------------------------------------------------

BUILTIN = Path(__file__).parent.parent / "builtin"
BUILTIN_MODELS = {"builtin:tiny-gpt-neox": BUILTIN / "tiny-gpt-neox"}
CONFIGS = ("config.json", "generation_config.json")
TEXT = ("text_config", "decoder", "llm_config")  # sections of a config of several parts
MORE = ("max_seq_len", "max_seq_length", "max_sequence_length", "context_length", "max_target_positions")


def prepare_base(
    recipe: Recipe, folder: Path, progress: Progress = lambda done, total: None, memory: Path | None = None
) -> Base:
    """Make the base of `recipe` a local folder.

    A local folder is used in place; a hub id is fetched into the cache. `folder` receives a builtin model,
    made from the recipe's seed, and the conversion of one whose weights are `.bin`. `memory`: as in
    `hash_file`.

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
        found = fetch_model(name, recipe.model.model_revision, code, progress)
    if not any(next(found.glob(pattern), None) for pattern in WEIGHTS):
        found = convert_bin_folder(found, Path(folder), code)
    return Base(found, base_manifest(found, code, memory), licence_of(name, recipe.model.model_revision))


def fetch_model(
    name: str, revision: str | None, code: bool = False, progress: Progress = lambda done, total: None
) -> Path:
    """Fetch hub model `name` into the cache; returns its folder. Errors: as `prepare_base`."""
    if looks_like_path(name):
        raise ModelError(f"no such model folder: {name}")
    wanted = [*WEIGHTS, *companion_patterns(code)]
    fetched = fetch_model_files(name, revision, wanted, BINS, progress)
    check_model_folder(fetched, name)
    return fetched


def config_folder(model: Model) -> Path:
    """A folder with the config and the tokenizer of `model`, perhaps without its weights.

    Errors: ModelError where there is none, HubUnreachable.
    """
    name = model.model_name_or_path
    if name.startswith("builtin:"):
        return _builtin(name)
    folder = Path(name).expanduser()
    if folder.is_file():
        hint = OF_GGUF if folder.suffix == ".gguf" else "the folder with config.json"
        raise ModelError(f"{name} is a file, expected a model's folder (hint: {hint})")
    if not folder.is_dir():
        if looks_like_path(name):
            raise ModelError(f"no such model folder: {name}")
        folder = fetch_model_files(name, model.model_revision, companion_patterns(model.trust_remote_code))
    check_config(folder, name)
    return folder


def load_tokenizer(model: Model, folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a base in `folder`, or that of `tokenizer_name_or_path`; it has a pad token, and
    the eos token that `model` wants.

    Errors: ModelError where there is none, HubUnreachable.
    """
    source, code = model.tokenizer_name_or_path, model.trust_remote_code
    if source is not None:
        folder = _tokenizer_folder(source, code)
    return open_tokenizer(folder, model.pad_token, code, model.eos_token)


def _tokenizer_folder(source: str, code: bool) -> Path:
    """The folder of a tokenizer that is builtin, local or on the hub. Errors: ModelError, HubUnreachable."""
    if source in BUILTIN_MODELS:
        return BUILTIN_MODELS[source]
    local = Path(source).expanduser()
    if not local.is_dir() and looks_like_path(source):
        raise ModelError(f"no such tokenizer folder: {source}")
    if local.is_dir():
        check_no_pointers(local)
    return local if local.is_dir() else fetch_model_files(source, None, companion_patterns(code))


def open_tokenizer(
    folder: Path, pad_token: str | None = None, code: bool = False, eos_token: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `folder`. Its pad token is `pad_token`, its own, or else its eos token (the
    labels of padding are masked, so no token is lost by that). Errors: ModelError."""
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        hint = "(hint: model.tokenizer_name_or_path=FOLDER or hub id)"
        raise ModelError(f"{folder}: no tokenizer in this folder {hint}")
    for file in folder.glob("*.jinja"):
        decoded(file.read_bytes(), str(file))  # transformers names no file
    options = from_pretrained_options(folder, code)
    try:
        with quiet_transformers():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:  # any kind, from KeyError to ImportError: all mean "not this folder"
        raise not_loadable(folder, "tokenizer", error) from error
    if isinstance(own := tokenizer.chat_template, str):
        tokenizer.chat_template = own.removeprefix("\ufeff")  # a byte order mark, of an editor
    for key, token in (("pad_token", pad_token), ("eos_token", eos_token)):
        if token is not None and token not in tokenizer.get_vocab():
            raise ModelError(f"model.{key} `{token}` is not a token of {folder}")
    if eos_token is not None:
        tokenizer.eos_token = eos_token
    if pad_token is not None:
        tokenizer.pad_token = pad_token
    elif tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ModelError(
                f"{folder}: the tokenizer has neither a pad nor an eos token (hint: model.pad_token=...)"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stops_of(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of the tokens that end its texts, and the turns of its conversations."""
    ends = (tokenizer.eos_token, tokenizer.init_kwargs.get(END_OF_TURN))
    ids: Any = tokenizer.convert_tokens_to_ids([token for token in ends if token is not None])
    return {*ids} - {None}


def configs_with_eos(texts: Mapping[str, str], model: Model, tokenizer: Path) -> dict[str, str]:
    """Have configs of a model, name -> text, end with what the tokenizer in a folder ends texts and turns
    with, besides their own eos tokens, as in TRL. An eos token that the recipe chose comes first, and is the
    model's. Errors: ModelError."""
    if "config.json" not in texts or not any(tokenizer.iterdir()):
        return dict(texts)
    found = open_tokenizer(tokenizer, code=model.trust_remote_code)
    config, generation = (parse_object(texts.get(name, "{}"), name) for name in CONFIGS)
    spoken = config.get("text_config", config)  # of a model with several parts, that of its text
    known = generation.get("eos_token_id", spoken.get("eos_token_id"))
    known = [one for one in (known if isinstance(known, list) else [known]) if one is not None]
    ends = stops_of(found)
    if model.eos_token is not None:
        spoken["eos_token_id"] = found.eos_token_id
        known = [found.eos_token_id, *known]
    elif ends <= set(known):
        return dict(texts)
    if CONFIGS[1] not in texts:  # it takes the place of what the model's config says
        generation = {key: spoken[key] for key in ("bos_token_id", "pad_token_id") if key in spoken}
    generation["eos_token_id"] = [*dict.fromkeys([*known, *sorted(ends)])]
    changed = {CONFIGS[0]: config} if model.eos_token is not None else {}
    changed |= {CONFIGS[1]: generation}
    return {**texts, **{name: json.dumps(values, indent=2) + "\n" for name, values in changed.items()}}


def context_of(folder: Path) -> int | None:
    """Read the longest context of the model in `folder`, tokens; None: its config does not say."""
    return min(_from_config(folder, ("max_position_embeddings", "n_positions", "n_ctx", *MORE)), default=None)


def width_of(folder: Path) -> int | None:
    """Read the hidden size of the model in `folder`; None: its config does not say."""
    return next(iter(_from_config(folder, ("hidden_size", "n_embd", "d_model"))), None)


def vocabulary_of(folder: Path) -> int | None:
    """Read the number of tokens that the model in `folder` knows; None: its config does not say."""
    return next(iter(_from_config(folder, ("vocab_size",))), None)


def layers_of(folder: Path) -> int | None:
    """Read the number of layers of the model in `folder`; None: its config does not say."""
    keys = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    return max(_from_config(folder, keys), default=None)


def _from_config(folder: Path, keys: tuple[str, ...]) -> list[int]:
    """Read what a config says by any of these names; of a model with several parts, also that of its text."""
    config = read_object(Path(folder) / "config.json")
    parts = [config, *(config[name] for name in TEXT if isinstance(config.get(name), dict))]
    return [part[key] for part in parts for key in keys if isinstance(part.get(key), int) and part[key] > 0]


def _builtin(name: str) -> Path:
    if name not in BUILTIN_MODELS:
        raise ModelError(f"no builtin model `{name}`; there is {', '.join(sorted(BUILTIN_MODELS))}")
    return BUILTIN_MODELS[name]


def _make_builtin(name: str, seed: int, folder: Path) -> Path:
    """Write a builtin model with weights drawn from `seed`, unless `folder` already has it."""
    source = _builtin(name)
    if (folder / "model.safetensors").exists():
        return folder
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_of_config(source)
    with atomic_folder(folder) as part, quiet_transformers():
        for file in source.glob("tokenizer*.json"):
            shutil.copyfile(file, part / file.name)
        model.save_pretrained(part)
    return folder


# ---- revisions ---------------------------------------------------------------------------------------------


def pin_revisions(recipe: Recipe, base: Path) -> Recipe:
    """Pin the model, whose folder is `base`, and the data sets. Local ones have no revision and stay
    unchanged.

    Errors: DataError.
    """
    model = recipe.model
    local = Path(model.model_name_or_path).expanduser().is_dir()
    if not local and (commit := cached_commit(base)) is not None:
        model = model.model_copy(update={"model_revision": commit})
    found = {
        "model": model,
        "datasets": tuple(map(_pin_dataset, recipe.datasets)),
        "eval_datasets": tuple(map(_pin_dataset, recipe.eval_datasets)),
    }
    return recipe.model_copy(update=found)


def _pin_dataset(dataset: Dataset) -> Dataset:
    if dataset.path.startswith("https://"):
        file = https_file(dataset.path, dataset.revision)
        file.fetch()
        return dataset.model_copy(update={"revision": file.sha256})
    if not is_hub_id(dataset.path) or (commit := dataset_commit(dataset.path, dataset.revision)) is None:
        return dataset
    return dataset.model_copy(update={"revision": commit})
