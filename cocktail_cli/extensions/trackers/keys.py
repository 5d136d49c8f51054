"""Recipe keys of trackers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Strict

from recipes.config import ExtensionSection, key

NAMED = "there is no such key: trackers show the name of the run"


def tracker_names(value: Any) -> Any:
    """Convert `wandb` to [wandb], and `none` or null to [], as transformers does."""
    if value in (None, "none"):
        return ()
    return (value,) if isinstance(value, str) else value


class Keys(ExtensionSection):
    foreign_names: ClassVar[Mapping[str, str]] = {
        "trackers.project": "wandb_project trackio_project",
        "trackers.report_to": "use_wandb",
    }
    gone_keys: ClassVar[Mapping[str, str]] = {
        "run_name": NAMED,
        "wandb_name": NAMED,
        "trackio_space_id": "there is no such key: trackio writes to the host's disk",
    }

    report_to: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio"], ...], Strict(False), BeforeValidator(tracker_names)
    ] = key((), "trackers that the host reports to, beside metrics.jsonl")
    project: Annotated[str, Field(min_length=1)] = key("cocktail", "project name at the trackers")
