"""Look up this machine's access to the Hugging Face hub, and the licence of a model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from yaml import YAMLError


@dataclass(frozen=True)
class HubAnswer:
    """Result of a request to the hub."""

    endpoint: str
    error: str = ""  # why it did not answer
    token: bool = False  # this machine has a token
    user: str = ""  # the token's user; empty without a token, or where it is refused
    skew: float | None = None  # seconds that this machine's clock is behind


OFFLINE = HubAnswer("")


def ask_hub(timeout: float) -> HubAnswer:
    """Ask the hub for the token's user and the time. OFFLINE where HF_HUB_OFFLINE forbids it."""
    from huggingface_hub import HfApi, constants, get_session, get_token

    if constants.HF_HUB_OFFLINE:
        return OFFLINE
    endpoint, token = constants.ENDPOINT, get_token()
    try:
        answer = get_session().head(endpoint, timeout=timeout)
    except Exception as error:  # HTTP library, transports and system each raise their own
        return HubAnswer(endpoint, error=f"{type(error).__name__}: {error}", token=token is not None)
    date, user = answer.headers.get("date"), ""
    skew = parsedate_to_datetime(date).timestamp() - time.time() if date else None
    if token:
        with suppress(Exception):  # refused, for whatever reason: `user` stays empty
            user = str(HfApi().whoami(token).get("name", ""))
    return HubAnswer(endpoint, token=token is not None, user=user, skew=skew)


@dataclass(frozen=True)
class Licence:
    """The licence of a model, as its card states it, and whether its repository is gated."""

    name: str = ""  # as the hub spells it: apache-2.0, llama3.1, other; empty: not stated
    title: str = ""  # of `other`
    link: str = ""  # of `other`
    gated: bool | None = False  # each reader has to accept the licence there; None: the hub did not say

    def __str__(self) -> str:
        return self.title or self.name or "not stated"


def licence_of(model: str, revision: str | None) -> Licence:
    """Look up the licence of a model: on the hub by its id, or in the card of a local folder."""
    from huggingface_hub import HfApi, metadata_load

    if (folder := Path(model).expanduser()).is_dir():
        card = folder / "README.md"
        try:
            return _stated(metadata_load(card) or {}) if card.is_file() else Licence()
        except (OSError, ValueError, YAMLError):  # a card that is no card
            return Licence()
    try:
        info = HfApi().model_info(model, revision=revision)
    except Exception:  # any of the hub's errors: a fetch tells it, or the cache has the model
        return Licence(gated=None)
    stated: dict[str, Any] = vars(info.card_data) if info.card_data else {}
    return _stated(stated, bool(info.gated))


def _stated(card: Mapping[str, Any], gated: bool = False) -> Licence:
    names = ("license", "license_name", "license_link")
    name, title, link = (str(card.get(key) or "") for key in names)
    return Licence(name, title, link, gated)


def hub_cache() -> str:
    """Folder of the hub's cache."""
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE


def gated_models(models: Sequence[str]) -> Iterator[str]:
    """Yield the hub models whose licence has not been accepted for this machine's token."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError

    for name in models:
        try:
            HfApi().auth_check(name)
        except GatedRepoError:
            yield name
        except Exception:  # missing, renamed, no answer: a launch reports it
            continue
