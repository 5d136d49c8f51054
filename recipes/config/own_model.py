"""The neutral recipe, `finetune`, with a model and data of the user's own: its name and description."""

from __future__ import annotations

import re
from pathlib import Path

NEUTRAL = "finetune"
LONGEST_NAME = 64  # letters of a recipe's name


def is_repository_id(path: str) -> bool:
    """Match owner/name, unless such a file or folder exists here."""
    return bool(re.fullmatch(r"[\w][\w.-]*/[\w.-]+", path)) and not Path(path).exists()


def public_name(path: str) -> str:
    """Return a hub id unchanged, and the last part of a local path."""
    if is_repository_id(path) or path.startswith(("builtin:", "https://")):
        return path
    return Path(path).name or Path(path).expanduser().resolve().name or path


def run_name(model: str, data: str) -> str:
    """Make a recipe's name of a model and data: `qwen3-0.6b-my` of Qwen/Qwen3-0.6B and my.jsonl."""
    words = [re.split("[/:]", public_name(path))[-1] for path in (model, data)]
    words[1] = re.sub(r"\.(jsonl|json|csv|tsv|parquet|txt)(\.gz)?$", "", words[1])
    slug = re.sub(r"[^a-z0-9.]+", "-", "-".join(words).lower()).strip(".-")
    return slug[:LONGEST_NAME].rstrip(".-") or NEUTRAL


def describe(model: str, data: str) -> str:
    """Describe a run by its model and data, without local paths."""
    return f"{public_name(model)} fine-tuned on {public_name(data)}."
