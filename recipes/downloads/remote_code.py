"""Options of `from_pretrained` for models that come with their own code.

A recipe says `trust_remote_code`; the CLI has settled before whether it may say so on this machine.
"""

from __future__ import annotations

from pathlib import Path

from recipes.errors import ModelError
from recipes.foreign_json import parse_json, read_object

CODE_FILES = "[!_.]*.py"  # in a folder; transformers makes an __init__.py of its own
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError)


def from_pretrained_options(folder: Path, code: bool) -> dict[str, bool]:
    """Options for loading from `folder`: no network, and the folder's own code only if `code`.

    Errors: ModelError where such code is needed and not allowed, or lies in another repository: a file
    outside the folder has no hash that peers could compare.
    """
    classes: dict[str, str] = {}
    for name in ("config.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            classes |= _auto_map(folder / name)
    elsewhere = sorted({each.partition("--")[0] for each in classes.values() if "--" in each})
    if code and elsewhere:
        hint = "(hint: copy its .py files beside config.json, and take the name out of `auto_map`)"
        raise ModelError(f"{folder}: its code lies in another repository, {elsewhere[0]} {hint}")
    if not code and (own := classes.get("AutoConfig")) is not None and not _known(folder):
        hint = "(hint: model.trust_remote_code=true, and --trust-remote-code on each machine that trusts it)"
        raise ModelError(
            f"{folder}: transformers has no such model; it comes with code of its own, {own} {hint}"
        )
    return {"local_files_only": True, "trust_remote_code": code}


def _auto_map(file: Path) -> dict[str, str]:
    """Read `auto_map` of a config: Auto class -> file.Class."""
    try:
        found = parse_json(file.read_bytes())["auto_map"].items()
    except UNREADABLE:  # there is none, or transformers will report the error
        return {}
    named = ((key, value) for key, each in found for value in (each if isinstance(each, list) else [each]))
    return {str(key): value for key, value in named if isinstance(value, str)}


def _known(folder: Path) -> bool:
    """True where transformers itself has a class for this type of model."""
    from transformers import CONFIG_MAPPING

    return read_object(folder / "config.json").get("model_type") in CONFIG_MAPPING
