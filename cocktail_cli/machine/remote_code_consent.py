"""Consent to run code that comes with a model: `--trust-remote-code` on this machine.

A recipe may ask for it (`model.trust_remote_code`), and a host may serve it; neither is enough.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from typing import TYPE_CHECKING

from cocktail_cli.errors import Failure

if TYPE_CHECKING:
    from recipes.config import Recipe

FLAG = "--trust-remote-code"


def check_trust(recipe: Recipe, trusted: bool, code: str = "usage") -> None:
    """Raise Failure where the recipe's model brings code that may not run here."""
    if recipe.model.trust_remote_code and not trusted:
        raise Failure(
            code,
            f"{recipe.model.model_name_or_path} comes with Python code, which this recipe wants to run here",
            hints=(f"{FLAG}, if you trust whoever wrote it with this machine",),
        )


def isolate_model_code(trusted: bool) -> None:
    """Have transformers copy such code to a temporary folder of this process, before transformers is
    imported.

    In its shared folder, processes that start together read files that another has half written.
    """
    if trusted:
        place = tempfile.mkdtemp(prefix="cocktail-code-")
        os.environ["HF_MODULES_CACHE"] = place
        atexit.register(shutil.rmtree, place, ignore_errors=True)
