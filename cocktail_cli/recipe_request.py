"""The recipe that a command line asks for: a name, a file, or a model and data of the user's own."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocktail_cli.machine import RUNTIME, memory_of, pick_device

from .assembly import everyone, recipe_type
from .errors import Failure

if TYPE_CHECKING:
    from recipes.config import Recipe, Resolved
    from recipes.planning import Machine

FORMATS = (
    ".jsonl, .json, .csv, .tsv, .parquet, .txt (also .gz), a folder or glob of them, a save_to_disk folder, "
    "an https address, or a hub id; columns: text, prompt and completion, instruction and output (Alpaca), "
    "messages, or conversations (ShareGPT)"
)
BITS = ("load_in_4bit", "load_in_8bit")
WEIGHTS = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".ckpt")  # files that are no model folder yet


@dataclass(frozen=True)
class RecipeRequest:
    """A recipe as it was typed. Where none was, it is the neutral one, and `choose` fills it in."""

    recipe: str  # name, path or https address; "": the neutral recipe
    overrides: tuple[str, ...] = ()
    data: str | None = None
    model: str | None = None
    chosen: Mapping[str, Any] = field(default_factory=dict)  # by dotted key, see recipes.planning

    @classmethod
    def of(
        cls, recipe: str | None, overrides: Sequence[str] | None, data: str | None, model: str | None
    ) -> RecipeRequest:
        """Sort out what was typed: the first word may be a recipe, a model, or KEY=VALUE already.

        Raises Failure (usage) where a model or data are missing.
        """
        from recipes.config import DATA_SUFFIXES, data_suffix

        words = [*([] if recipe is None else [recipe]), *(overrides or [])]
        first = words.pop(0) if words and ("=" not in words[0] or Path(words[0]).exists()) else ""
        if data_suffix(Path(first)) in DATA_SUFFIXES and not first.startswith("https://"):
            raise Failure(
                "usage",
                f"{first} is data, not a recipe",
                hints=(f"cocktail launch --model MODEL --data {first}",),
            )
        if is_model(first):
            if model is not None:
                raise Failure(
                    "usage", f"two models are given: {first} and {model}", hints=("give one of them",)
                )
            first, model = "", first
        asked = cls(first, tuple(words), data, model)
        if not first:
            asked._check_complete()
        return asked

    def _check_complete(self) -> None:
        """Raise Failure (usage) where no recipe is given, and not both a model and data."""
        keys = [text.partition("=")[0].rpartition(".")[2] for text in self.overrides]
        model = self.model is not None
        data = self.data is not None or any(text.startswith("datasets") for text in self.overrides)
        if "model_name_or_path" in keys:
            raise Failure(
                "usage", "model_name_or_path is a key of a recipe", hints=("without RECIPE: --model MODEL",)
            )
        own = "cocktail launch --model MODEL --data FILE"
        if not model and not data:
            hints = (
                f"your own model and data: {own}",
                "what is shipped: cocktail recipes list, or launch smoke",
            )
            raise Failure("usage", "no recipe is given, and no model with data", hints=hints)
        if not data:
            stray = next((text for text in self.overrides if Path(text).exists()), None)
            hint = f"--data: {FORMATS}" if stray is None else f"is it --data {shlex.quote(stray)}?"
            raise Failure("usage", f"which data is {self.model} trained on?", hints=(hint,))
        if not model:
            hint = "--model FOLDER, or a hub id such as Qwen/Qwen3-0.6B"
            raise Failure("usage", f"which model is trained on {self.data or 'the data'}?", hints=(hint,))

    @property
    def is_own(self) -> bool:
        """True where method, rate, epochs, length and batch are chosen for the user's model and data."""
        from recipes.config import NEUTRAL

        return self.recipe in ("", NEUTRAL) and self.model is not None

    def resolve(self, *more: str) -> Resolved:
        """Load the recipe with `more` overrides. Raises RecipeError."""
        from recipes.config import NEUTRAL, load_resolved

        overrides = [*self.overrides, *more]
        if self.is_own and quantizes(overrides):
            overrides.insert(0, "lora.lora_r=16")  # only a base beside adapters is quantized
        return load_resolved(
            self.recipe or NEUTRAL, overrides, self.data, self.model, self.chosen, recipe_type
        )

    def load(self, *more: str) -> Recipe:
        """Load the recipe alone, as `resolve` does."""
        return self.resolve(*more).recipe

    def described(self) -> Recipe:
        """Load the recipe; where its model or data were replaced, its description names the new ones."""
        from recipes.config import describe

        recipe = self.load()
        if self.is_own or (self.model is None and self.data is None):
            return recipe
        data = ", ".join(dataset.path for dataset in recipe.datasets)
        return recipe.model_copy(update={"description": describe(recipe.model.model_name_or_path, data)})

    def choose(self, machine: Machine | None) -> tuple[RecipeRequest, tuple[str, ...]]:
        """Choose what was not typed, where model and data are the user's own.

        Args:
            machine: with the memory of a peer here; None: no peer trains here.

        Returns: the request with what was chosen, and lines that say it: what the command line changed too.

        Raises: the errors of recipes, for a model or data that cannot be used.
        """
        if not self.is_own:
            return self, tuple(self.resolve().document.notes)
        from recipes.planning import choose_method

        found = choose_method(lambda keys: replace(self, chosen=dict(keys)).resolve(), machine)
        more = {name: value for one in everyone() for name, value in one.chosen(found.keys).items()}
        return replace(self, chosen={**found.keys, **more}), found.lines

    def typed(self, **options: Any) -> str:
        """Format the arguments as one types them after a command, quoted for the shell, with further options
        by their names in Python: those of None or False were not typed."""
        given = [*([self.recipe] if self.recipe else []), *self.overrides]
        for name, value in {"model": self.model, "data": self.data, **options}.items():
            if value is not None and value is not False:
                given += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return shlex.join(given)


def room_for(devices: Sequence[str], each: int = 1, limit: int | None = None) -> Machine | None:
    """Measure the memory of a peer on this machine; None: no peer trains here.

    Args:
        devices: of each peer, as --device takes it; peers on the same one share its memory.
        each: devices of a peer.
        limit: bytes of a GPU that a peer may take.
    """
    from recipes.planning import Machine

    if not devices:
        return None
    device = pick_device(devices[0].partition(",")[0])
    have = memory_of(device)
    share = min(have, limit or have) // max(Counter(devices).values())
    return Machine(share - RUNTIME, device != "cpu", each)


def is_model(word: str) -> bool:
    """True for a folder, a builtin model, a file of weights, and a hub id: owner/name, and no other file of
    that name."""
    from recipes.config import is_repository_id, looks_like_path

    path = Path(word).expanduser()
    if path.is_file() and path.suffix in WEIGHTS:
        return True
    if not word or "://" in word or path.suffix in (".yaml", ".yml") or path.is_file():
        return False
    named = looks_like_path(word) and not path.suffix  # a folder that is not there, more likely than a recipe
    return word.startswith("builtin:") or path.is_dir() or named or is_repository_id(word)


def quantizes(overrides: Sequence[str]) -> bool:
    """True where weights in 4 or 8 bits are typed, and nothing of adapters."""
    keys = {name.rpartition(".")[2]: value for name, _, value in (text.partition("=") for text in overrides)}
    adapters = any(name.startswith("lora") for name in keys) or any(t.startswith("lora") for t in overrides)
    return not adapters and any(keys.get(name, "").lower() == "true" for name in BITS)
